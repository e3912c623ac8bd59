"""All handoffs of one SGLang engine: the machines of `engines.side` behind SGLang's senders and receivers.

Laws: only the scheduler's thread is here. SGLang's pages have no reference counts: what a machine touches stays where
it is because SGLang holds it until `poll` says Success or Failed, and what it lets go too early has its epoch raised
(`freed`). A metadata row's epoch is raised before it is written again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvbaton.api.params import Mode, room_handoff
from kvbaton.engines.sglang.metadata_rows import MetadataBuffers, Rows
from kvbaton.engines.sglang.sglang_layout import KV, METADATA, SglangMemory
from kvbaton.engines.sglang.sglang_requests import AskedPrompt, SglangRequests, ticket_of
from kvbaton.engines.side.asks import ParamsSource, Target
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.prefill import PinAdmission, PrefillSide
from kvbaton.engines.side.protocols import Grouping, LoadVerdict
from kvbaton.node.doorway import Doorway, ForgetCached, LoadReport
from kvbaton.node.pin_budget import Room
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import LeaseId, RequestId, WorkerId

HowEnded = Callable[[LeaseId], Reason | None]
"""Of a lease that is over: why; None where it was committed."""


class HeldPages:
    """SGLang's pool, whose pages SGLang itself holds. Implements `PinPool`."""

    free_blocks = 0

    def touch(self, ids: Iterable[int]) -> None: ...

    def unpin(self, ids: Sequence[int]) -> None: ...

    def overwritten(self, ids: Iterable[int]) -> None: ...


class Handoffs:
    """Of one engine, in one of its roles."""

    def __init__(
        self,
        door: Doorway,
        memory: SglangMemory,
        rows: Rows,
        metadata: MetadataBuffers,
        how_ended: HowEnded,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.door = door
        self.memory = memory
        self.page_tokens = memory.layout.groups[KV].block_tokens
        self.how_ended = how_ended
        self._rows = rows
        self._metadata = metadata
        pool, requests = HeldPages(), SglangRequests()
        grouping = Grouping(memory.layout, (KV, METADATA))
        self._prefill = PrefillSide(door, pool, grouping, requests)
        self._pins = PinAdmission(self._prefill, door.budget, clock)
        self._decode = DecodeSide(door, pool, grouping, requests, recomputes=False, keeps_prefix=False)
        self._verdicts: dict[str, LoadVerdict] = {}
        self._rooms: set[int] = set()
        self._leaving: list[AskedPrompt] = []  # SGLang knows of them no more, and bytes may still land
        self._steps = 0

    def do_duties(self) -> None:
        """At every `poll`: what the node has for this engine. SGLang drops its own pages, so reports are all."""
        for duty in self.door.duties():
            if isinstance(duty, LoadReport):
                self._decode.reported(duty)
            elif isinstance(duty, ForgetCached):
                self.door.cache_forgotten(duty, 0)  # a D has no radix cache here, and a P computes what it caches
        for verdict in self._decode.take_verdicts():
            self._verdicts[verdict.request_id] = verdict
        for asked in self._leaving[:]:
            if not self.holds(asked):
                self._leaving.remove(asked)
                self._forget(asked)

    def came(self, asked: AskedPrompt) -> None:
        """`DUPLICATE` while another request of this engine has the room: the client, or its router, drew it."""
        if asked.room in self._rooms:
            raise ProtocolError(Reason.DUPLICATE, f"bootstrap_room: another request here has {asked.room}")
        self._rooms.add(asked.room)

    def freed(self, pages: Iterable[int]) -> None:
        """SGLang gives these pages back: from now on somebody else may be given them."""
        for page in pages:
            self.door.epochs.raise_epoch(page)

    # --- P

    def accepted(self, asked: AskedPrompt) -> None:
        ticket = ticket_of(asked.room, self.door.config.me.worker, self.door.config)
        self._prefill.accepted(asked, ParamsSource(Mode.STREAM, ticket))

    def room_for(self, asked: AskedPrompt) -> Room:
        return self._pins.room(asked)

    def begun(self, asked: AskedPrompt, slot: int) -> LeaseId | None:
        """Its lease; None where there is none, and so nothing to be handed over."""
        asked.row = self.memory.pages + slot
        self._prefill.begun(asked)
        prompt = self._prefill.prompts.get(asked.request_id)
        return None if prompt is None else prompt.lease

    def filled(self, asked: AskedPrompt, slot: int) -> bytes:
        """What SGLang says of the prompt, now that all of it is computed. ProtocolError: it does not fit."""
        return self._metadata.pack(asked.room, slot)

    def computed(self, asked: AskedPrompt, pages: Sequence[int], row: bytes | None) -> None:
        """The device has these further pages; with the `row` of metadata they are the last."""
        asked.pages += pages
        upto = asked.num_prompt_tokens if row is not None else len(asked.pages) * self.page_tokens
        if row is not None:
            self.door.epochs.raise_epoch(asked.row)
            self._rows.write(asked.row, row)
        self._steps += 1
        self._prefill.scheduled(self._steps, asked.request_id, upto - asked.num_computed_tokens, asked.tables)
        asked.num_computed_tokens = upto
        self._prefill.computed(self._steps)

    def gave_up_prompt(self, asked: AskedPrompt, reason: Reason) -> None:
        """It will not be computed, or not be handed over; a D that waits for it is told."""
        prompt = self._prefill.prompts.get(asked.request_id)
        if prompt is not None and prompt.lease is None and not prompt.spoilt:
            self._prefill.tell_reader(prompt, reason)
        elif prompt is not None and prompt.lease is None:
            self.door.let_go(room_handoff(asked.room))  # all of it is there, and goes with whoever reads it now
        self._prefill.finished(asked, (), well=False)

    def left_prompt(self, asked: AskedPrompt) -> None:
        self._prefill.finished(asked, (), well=False)
        self._pins.left(asked)
        self._rooms.discard(asked.room)

    # --- D

    def wanted(self, asked: AskedPrompt, source: WorkerId) -> None:
        self._decode.accepted(asked, Target(Mode.STREAM, ticket_of(asked.room, source, self.door.config)))

    def found(self, asked: AskedPrompt) -> bool | End:
        """Whether P has begun, and pages may be given; or how it ended before that."""
        tokens, _ = self._decode.match(asked, 0)
        lost = self._decode.lost(asked.request_id)
        if lost is not None:
            return lost
        return End(Reason.ABORTED, "nobody promised this prompt") if tokens == 0 else tokens is not None

    def allocated(self, asked: AskedPrompt, pages: Sequence[int], slot: int) -> None:
        """D's pages for the whole prompt. From here on a verdict is owed, and the pages are held until then."""
        asked.pages, asked.row = list(pages), self.memory.pages + slot
        self._decode.allocated(asked, asked.tables, asked.num_prompt_tokens)

    def holds(self, asked: AskedPrompt) -> bool:
        """Whether bytes may still land in its pages."""
        return self.door.holds(RequestId(asked.request_id))

    def verdict(self, asked: AskedPrompt) -> LoadVerdict | None:
        return self._verdicts.get(asked.request_id)

    def fill(self, asked: AskedPrompt, slot: int) -> None:
        """What P said of the prompt, for SGLang. ProtocolError where it is of another prompt."""
        self._metadata.unpack(asked.room, slot, self._rows.read(asked.row))

    def gave_up(self, asked: AskedPrompt) -> None:
        """Its request is over; a load under way goes on until nothing of it can land."""
        self._decode.finished(asked)

    def left(self, asked: AskedPrompt) -> None:
        self.gave_up(asked)
        if self.holds(asked):
            self._leaving.append(asked)
        else:
            self._forget(asked)

    def _forget(self, asked: AskedPrompt) -> None:
        self._verdicts.pop(asked.request_id, None)
        self._rooms.discard(asked.room)


def told(end: End) -> str:
    """Why there is no KV, for the client's error."""
    return f"{end.reason}: {end.detail}" if end.detail else str(end.reason)


def is_ready(event: Any) -> bool:
    """Whether what a CUDA event stands behind is over; without waiting."""
    return event is None or bool(event.query())
