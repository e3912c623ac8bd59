"""SGLang's requests, as the machines of `engines.side` read them, and the ticket that both sides make of a room.

Laws: a handoff is the room that the router drew; it is claimed with the digest of all that shapes the prompt's KV, so
that a room which was drawn twice, or guessed, leads to no other prompt's pages. What this digest does not know of is
refused with its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.api.params import room_handoff
from kvbaton.engines.side.protocols import EndedTurn
from kvbaton.node.doorway import DoorwayConfig
from kvbaton.protocol.content import Content
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import Ticket, seal

ROOM_MAX = (1 << 64) - 1
_PARTS = {
    "multimodal_inputs": "images, audio and video",
    "input_embeds": "embeddings in place of tokens",
    "token_type_ids": "token types",
    "lora_id": "a LoRA adapter",
    "session": "a session",
}


@dataclass(slots=True)
class AskedPrompt:
    """A request of SGLang's whose KV is handed over here, or taken over."""

    room: int
    tokens: Sequence[int]
    salt: str = ""
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)  # in the order of its tokens
    row: int = 0  # its metadata row's block
    kv_transfer_params: None = None

    @property
    def request_id(self) -> str:
        return f"room-{self.room:x}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def tables(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.pages, (self.row,)


def asked(req: Any, room: object) -> AskedPrompt:
    """`ProtocolError` names what of the request cannot be handed over."""
    if not isinstance(room, int) or isinstance(room, bool) or not 0 < room <= ROOM_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"bootstrap_room: got {room!r}, expected 1 to {ROOM_MAX}")
    for name, what in _PARTS.items():
        if getattr(req, name, None):
            raise ProtocolError(Reason.BAD_MESSAGE, f"{name}: {what} cannot be handed over")
    if getattr(req, "pd_rebootstrap_in_progress", False):
        raise ProtocolError(Reason.BAD_MESSAGE, "a request that was retracted cannot be handed over again")
    tokens = tuple(req.origin_input_ids)
    if not tokens:
        raise ProtocolError(Reason.BAD_MESSAGE, "origin_input_ids: an empty prompt")
    salts = [str(salt) for name in ("extra_key", "cache_salt") if (salt := getattr(req, name, None))]
    return AskedPrompt(room, tokens, "\0".join(salts))


def ticket_of(room: int, source: WorkerId, config: DoorwayConfig) -> str:
    """What entitles any decode worker of this cluster to ask for the room's prompt; both sides make it alike."""
    expires_unix_s = config.wall() + config.ticket_ttl_s
    return seal(Ticket(room_handoff(room), source, expires_unix_s), config.ticket_keys[0])


class SglangRequests:
    """Implements `SideRequests`."""

    def handed_tokens(self, asked: AskedPrompt) -> int:
        """All: P samples the first token, and its row goes along."""
        return len(asked.tokens)

    def content(self, asked: AskedPrompt, position: int) -> Content:
        return Content(asked.tokens, position, salt=asked.salt)

    def ended_turn(self, asked: AskedPrompt) -> EndedTurn | None:
        return None

    def turn_content(self, asked: AskedPrompt, upto: int) -> Content | None:
        return None

    def tokens(self, asked: AskedPrompt, first: int, last: int) -> Sequence[int]:
        return asked.tokens[first:last]

    def wants_whole_prompt(self, asked: AskedPrompt) -> bool:
        return False

    def shorten(self, asked: AskedPrompt, tokens: int, *, drafts: bool = False) -> None:
        """The metadata row looks like a layer's state, which counts tokens; it counts none."""

    def arrived_at(self, asked: AskedPrompt) -> float | None:
        return None
