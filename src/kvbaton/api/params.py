"""`kv_transfer_params`: how a router tells a worker what becomes of a prompt's KV. Parsed once, at the door.

Law: no address and no block id is read from them; a ticket is all that can name another worker's memory.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from kvbaton.api.api_errors import bad_field
from kvbaton.observe.tracing.trace_spans import parse as parse_trace
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX

FIELD = "kv_transfer_params"
SHOWN_CHARS = 200
HISTORY_TOKENS_MAX = 1 << 20
"""Of one answer that is continued."""


class Mode(enum.StrEnum):
    """How KV goes from P to D."""

    PULL = "pull"  # P, then D, which reads what P keeps
    STREAM = "stream"  # both at once, D reads behind P
    PUSH = "push"  # both at once, P writes into what D reserved


class TurnOffer(msgspec.Struct, frozen=True):
    """A D keeps the KV of this prompt's beginning, from the turn before."""

    ticket: str
    tokens: int  # of that turn's prompt and answer; the last of them has no KV there


class HistoryWay(enum.StrEnum):
    """How a worker can be given the beginning of an answer that another engine generated."""

    NONE = ""  # not at all: it is not asked
    OUTPUT = "output"  # as output: penalties, limits, grammars and seeded sampling go on as if it were its own
    PROMPT = "prompt"  # as more of the prompt: right for greedy sampling without penalties, and for nothing else


class History(msgspec.Struct, frozen=True):
    """What other engines generated of this answer so far, as the router saw it.

    To P: they belong to the prompt that is to be computed, all but the last, whose KV nobody has yet. To D: the answer
    begins with them. D tells it from its first token, as if all of them had just been generated here; the router leaves
    out what the client has.
    """

    tokens: tuple[int, ...]
    proof: str  # the router's word for them, for the worker that is asked; `ticket.seal_history`

    @property
    def kv_tokens(self) -> int:
        """How many of them have their KV at P."""
        return len(self.tokens) - 1


class TransferParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker is to do with the KV of one prompt. Fields of other systems pass unread."""

    do_remote_decode: bool = False  # compute the prompt and let D have its KV
    do_remote_prefill: bool = False  # P has, or will have, the prompt's KV
    mode: Mode = Mode.PULL
    ticket: str | None = None
    traceparent: str | None = None  # W3C: whose trace this belongs to; the router sets it
    empty: bool = False  # P had nothing to hand over: D computes the prompt
    turn: TurnOffer | None = None  # to P: what it need not compute
    keep: str | None = None  # to D: the ticket under which it may keep prompt and answer for the next turn
    history: History | None = None  # to both: what was generated of the answer before this request

    @classmethod
    def parse(cls, value: Any) -> TransferParams | None:
        """The typed form, None where nothing is handed over; `ApiError` naming the field that is wrong."""
        if value is None:
            return None
        try:
            params = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise bad_field(FIELD, str(error)[:SHOWN_CHARS]) from None
        if params.do_remote_decode and params.do_remote_prefill:
            raise bad_field(FIELD, "do_remote_decode and do_remote_prefill exclude each other")
        params._check_turn()
        params._check_history()
        if params.empty or not (params.do_remote_decode or params.do_remote_prefill):
            is_about_answer = params.keep is not None or params.history is not None
            return cls(keep=params.keep, history=params.history) if is_about_answer else None
        params._check_ticket()
        return params

    @property
    def trace(self) -> str:
        """The trace that this belongs to, "" where none was named, or in a way that cannot be read."""
        found = parse_trace(self.traceparent)
        return "" if found is None else str(found)

    @property
    def hands_over(self) -> bool:
        """Whether a prompt's KV goes from P to D; else it is only about the answer."""
        return self.do_remote_decode or self.do_remote_prefill

    def _check_turn(self) -> None:
        told = {"keep": self.keep, "turn.ticket": self.turn.ticket if self.turn is not None else None}
        for name, ticket in told.items():
            if ticket is not None and len(ticket) > TICKET_CHARS_MAX:
                raise bad_field(f"{FIELD}.{name}", f"{len(ticket)} characters, at most {TICKET_CHARS_MAX}")

    def _check_history(self) -> None:
        if self.history is None:
            return
        tokens = self.history.tokens
        if not 0 < len(tokens) <= HISTORY_TOKENS_MAX or not 0 <= min(tokens) <= max(tokens) < 1 << 31:
            said = f"{len(tokens)} tokens, expected 1 to {HISTORY_TOKENS_MAX}, each 0 or more"
            raise bad_field(f"{FIELD}.history.tokens", said)
        if len(self.history.proof) > TICKET_CHARS_MAX:
            count = len(self.history.proof)
            raise bad_field(f"{FIELD}.history.proof", f"{count} characters, at most {TICKET_CHARS_MAX}")

    def _check_ticket(self) -> None:
        needs_ticket = self.do_remote_prefill or self.mode is not Mode.PULL
        if needs_ticket and not self.ticket:
            raise bad_field(f"{FIELD}.ticket", "missing; the router or the prefill worker supplies it")
        if self.ticket is not None and len(self.ticket) > TICKET_CHARS_MAX:
            raise bad_field(f"{FIELD}.ticket", f"{len(self.ticket)} characters, at most {TICKET_CHARS_MAX}")


LEASE_FOR_PULL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "mode": "pull"}
"""Asks P to compute a prompt and to keep its KV for whoever brings the ticket it answers with."""


def source_params(mode: Mode, ticket: str) -> dict[str, Any]:
    """Asks P to let the holder of `ticket` have the KV while it is computed."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "mode": str(mode), "ticket": ticket}


NOTHING_FOR_D: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "mode": "pull", "ticket": None, "empty": True
}  # fmt: skip
"""Tells D that P has computed the prompt and can hand nothing of it over. Routers pass it on like a ticket."""
REFUSED_FOR_D: dict[str, Any] = {**NOTHING_FOR_D, "refused": str(Reason.PINS_FULL)}
"""The same from a P that has no room to keep one more: kvbaton's router asks another P, other routers pass it on."""


def target_params(mode: Mode, ticket: str | None) -> dict[str, Any]:
    """Tells D that P has the prompt's KV, or will have it, and under which ticket."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "mode": str(mode), "ticket": ticket}
