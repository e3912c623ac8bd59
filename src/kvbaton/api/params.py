"""`kv_transfer_params`: how a router tells a worker what becomes of a prompt's KV. Parsed once, at the door.

Law: no address and no block id is read from them; a ticket is all that can name another worker's memory.

Parameters of other systems are turned into what kvbaton's router would have sent. vllm-router and vLLM's proxies know
nothing of tickets. Where P answers before D is asked (NIXL, MoRI-IO READ, P2pNccl) they carry P's answer to D, ticket
and all. Where both are asked at once (MoRI-IO WRITE) each side makes the same handoff out of the transfer id and of the
two addresses in the request id. A server that embeds the engine and sets the parameters itself (Ray Serve) knows the
two by their names, and no ticket key: it sends the names instead.

Laws: translating raises nothing but `ProtocolError`, whatever a client sent. The addresses in a request id only select
workers that are known already. Names in place of a ticket are read only by an engine that was started for it
(`named_pairs`): whoever can set them can make D wait for P.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import request_ids
from kvbaton.api.api_errors import bad_field
from kvbaton.control.keyring import data_parallel_name, engine_and_rank
from kvbaton.control.registry.registry_messages import DP_SIZE_MAX
from kvbaton.observe.flight.flight_records import parse_trace
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import (
    PROMPTS_PER_TRANSFER_MAX,
    HandoffId,
    TransferId,
    WorkerId,
    handoff_id,
    is_worker_id,
)
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, Ticket, seal

FIELD = "kv_transfer_params"
SGLANG = "sglang"
"""In place of modes, in the registration of a worker whose server is SGLang's."""
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""The fields of a request that tell it, on both legs: where P is, and what the handoff is called."""
CONTROL_AFTER_BOOTSTRAP = 1
"""The control socket of such a P is so many ports after its bootstrap port."""
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


PAIR = "pair"
_PROMPTS_MAX = 256


class ForeignLookup(msgspec.Struct):
    """What is needed to understand parameters that hold no ticket. Only the key may change, when it is rotated."""

    mode: Mode  # of requests that name none
    modes: tuple[Mode, ...]
    me: WorkerId
    ticket_key: bytes
    ttl_s: float
    peer_at: Callable[[str, int], WorkerId | None]  # by the address of its control socket
    named_pairs: bool = False  # P and D by name, in place of a ticket


class RanksOf(msgspec.Struct, frozen=True):
    """The ranks of one side of a handoff, as the other side is told of them."""

    tp_size: int = 1
    dp_size: int = 1
    dp_rank: int = 0  # the one that does it


def moriio_params(unique: str, *, writes: bool, source: RanksOf, target: RanksOf) -> tuple[dict[str, Any], ...]:
    """What MoRI-IO's P and D are told of one transfer. `translated` reads it.

    Where P writes, each is told of the other's ranks; where D reads, P's answer tells D.
    """
    both = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": f"tx-{unique}"}
    p = {"do_remote_decode": True, "do_remote_prefill": False, **both, **_told_of(target, writes)}
    return p, {"do_remote_decode": False, "do_remote_prefill": True, **both, **_told_of(source, writes)}


def _told_of(other: RanksOf, writes: bool) -> dict[str, int]:
    told = {"remote_dp_size": other.dp_size}
    if writes:
        told["remote_tp_size"] = other.tp_size
    if other.dp_size > 1:
        told["remote_dp_size_local"] = other.dp_size
        if writes:
            told["remote_dp_rank"] = other.dp_rank
    return told


def pair_params(mode: Mode, unique: str, prefill: str, decode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What P and D are told of one transfer by who knows their names; `unique` is 32 hexadecimal digits."""
    both = {"mode": str(mode), "transfer_id": f"tx-{unique}", PAIR: [prefill, decode]}
    source = {"do_remote_decode": True, "do_remote_prefill": False, **both}
    return source, {"do_remote_decode": False, "do_remote_prefill": True, **both}


def room_handoff(room: int) -> HandoffId:
    """The handoff of a `bootstrap_room`."""
    return handoff_id(TransferId(f"{room:032x}"))


def translated(request_id: str, raw: Mapping[str, Any], lookup: ForeignLookup, index: int = 0) -> TransferParams | None:
    """The parameters of both legs sent off at once (MoRI-IO WRITE, named pairs); None where `raw` is of neither kind.

    `index` says which of the request's prompts and answers is meant, where the id itself does not.
    """
    if lookup.named_pairs and PAIR in raw and "ticket" not in raw:
        return _named(raw, lookup)
    if "ticket" in raw or lookup.mode is Mode.PULL or not isinstance(raw.get("transfer_id"), str):
        return None
    transfer = request_ids.transfer_hex(raw["transfer_id"])
    if transfer is None:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.transfer_id: not tx- and 32 hexadecimal digits or a UUID")
    try:
        addresses = request_ids.parse(request_id)
    except ValueError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"request id: {error}"[:SHOWN_CHARS]) from None
    if addresses is None:
        return None
    rank = _remote_rank(raw)
    prefill = _rank_of(_peer(lookup, "prefill", addresses.prefill), lookup.me, rank)
    decode = _rank_of(_peer(lookup, "decode", addresses.decode), lookup.me, rank)
    pair = prefill, decode
    handoff = handoff_id(TransferId(transfer), _index(addresses, index))
    return _sealed("request id", raw, lookup, handoff, pair, lookup.mode)


def _named(raw: Mapping[str, Any], lookup: ForeignLookup) -> TransferParams:
    unique = raw.get("transfer_id")
    transfer = request_ids.transfer_hex(unique) if isinstance(unique, str) else None
    if transfer is None:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.transfer_id: not tx- and 32 hexadecimal digits")
    names = raw[PAIR]
    if not (isinstance(names, list) and len(names) == 2 and all(isinstance(n, str) and is_worker_id(n) for n in names)):
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.{PAIR}: not the names of a prefill and of a decode worker")
    if raw.get("mode") not in (Mode.STREAM, Mode.PUSH):
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.mode: a named pair is for stream or push")
    pair = WorkerId(names[0]), WorkerId(names[1])
    return _sealed(f"{FIELD}.{PAIR}", raw, lookup, handoff_id(TransferId(transfer)), pair, Mode(raw["mode"]))


def _sealed(
    field: str,
    raw: Mapping[str, Any],
    lookup: ForeignLookup,
    handoff: HandoffId,
    pair: tuple[WorkerId, WorkerId],
    mode: Mode,
) -> TransferParams:
    """This engine's side of the handoff, with the ticket that the other side makes as well."""
    prefill, decode = pair
    sealed = seal(Ticket(handoff, prefill, time.time() + lookup.ttl_s, target=decode), lookup.ticket_key)
    if raw.get("do_remote_decode") is True and prefill == lookup.me:
        return TransferParams(do_remote_decode=True, mode=mode, ticket=sealed)
    if raw.get("do_remote_prefill") is True and decode == lookup.me:
        return TransferParams(do_remote_prefill=True, mode=mode, ticket=sealed)
    raise ProtocolError(Reason.PEER_UNKNOWN, f"{field}: it is for {prefill} and {decode}, this is {lookup.me}")


TICKETS_MAX = 128
"""Looked at in one refused body; beyond it leases run out."""


def together(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What P answers for several prompts or answers of one request: the first's parameters, and every ticket."""
    params = [each for each in told if each is not None]
    if not params or len(params) < len(told):
        return None
    return {**params[0], "tickets": [each.get("ticket") for each in params]}


def one_of(raw: Mapping[str, Any], index: int, count: int) -> Mapping[str, Any]:
    """The parameters of part `index` of `count`, where P's answer was for all of them."""
    tickets = raw.get("tickets")
    if tickets is None:
        return raw
    if not isinstance(tickets, list) or len(tickets) != count:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.tickets: expected a list of {count}, one for each answer")
    return {**raw, "ticket": tickets[index]}


def tickets_in(raw: object) -> list[str]:
    """The tickets by which a D was asked to read, as far as parameters that were refused can be made out."""
    if not isinstance(raw, Mapping) or raw.get("do_remote_prefill") is not True:
        return []
    several = raw.get("tickets")
    found = [raw.get("ticket"), *(several[:TICKETS_MAX] if isinstance(several, list) else ())]
    return list(dict.fromkeys(each for each in found if isinstance(each, str)))


def _index(addresses: request_ids.Addresses, index: int) -> int:
    """Which of a client request's handoffs this is: one for each prompt and each of n answers."""
    prompt = addresses.prompt_index + addresses.input_index + index
    found = addresses.sample_index * _PROMPTS_MAX + prompt
    if prompt >= _PROMPTS_MAX or found >= PROMPTS_PER_TRANSFER_MAX:
        raise ProtocolError(
            Reason.BAD_MESSAGE, f"request id: prompt {prompt}, answer {addresses.sample_index}: too many"
        )
    return found


def _remote_rank(raw: Mapping[str, Any]) -> int:
    """Which data-parallel rank of the other side was chosen; MoRI-IO takes the first where none is named."""
    rank = raw.get("remote_dp_rank", 0)
    if type(rank) is not int or not 0 <= rank < DP_SIZE_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.remote_dp_rank: expected 0 to {DP_SIZE_MAX - 1}")
    return rank


def _rank_of(found: WorkerId, me: WorkerId, rank: int) -> WorkerId:
    """Whom an address stands for: all data-parallel ranks of an engine share one, that of their first.

    Of this engine it is the rank that was asked, of the other the one that the parameters name.
    """
    ours, theirs = engine_and_rank(me), engine_and_rank(found)
    if theirs is None:
        return found
    return me if ours is not None and ours[0] == theirs[0] else data_parallel_name(theirs[0], rank)


def _peer(lookup: ForeignLookup, side: str, address: request_ids.PeerAddress) -> WorkerId:
    port = address.handshake if isinstance(address, request_ids.MoriioAddress) else address.port
    found = lookup.peer_at(address.host, port)
    if found is None:
        raise ProtocolError(Reason.PEER_UNKNOWN, f"request id: no known peer is at the {side} address {address}")
    return found
