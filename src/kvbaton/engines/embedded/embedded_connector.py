"""The embedded engine's connector: its hooks turned into events of the machines in `engines.side`, by the `Doorway`.

Laws: every hook runs on the engine's thread and none raises because of a client or a peer. A prompt that is to be
handed over is computed only if its blocks may be pinned; until then it waits, and at its deadline it is refused. The
store is used where there is no ticket, and as second source where a handoff failed, before the policy applies; with
`fail` it must then have every whole block before the prompt's last token, or the request fails. A turn that cannot be
taken is computed, under either policy.

The embedded engine's requests, as the machines of `engines.side` read them.

Law: a request's figures are those of now, as far as the connector's hooks have told them: what is computed, and once it
ends also its answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.api.params import TransferParams
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_config import EngineConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, RequestStatus
from kvbaton.engines.embedded.hooks import (
    BlockIds,
    Chunk,
    Connector,
    LoadOrder,
    LoadOutcome,
    Match,
    NoRoom,
    Nothing,
    NotYet,
)
from kvbaton.engines.embedded.memory.block_cache import BlockPool
from kvbaton.engines.embedded.memory.kv_layout import content_of, engine_layout
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry
from kvbaton.engines.side.asks import ParamsSource, Target
from kvbaton.engines.side.decode import DecodeSide, FailedLoads
from kvbaton.engines.side.prefill import PinAdmission, PrefillSide
from kvbaton.engines.side.protocols import NOTHING, Answer, EndedTurn, Grouping, Leaving, LoadVerdict
from kvbaton.engines.side.store import NoStore, StoreSide
from kvbaton.engines.side.turns import TurnSide
from kvbaton.node.doorway import Doorway, DropBlocks, ForgetCached, UnpinBlocks
from kvbaton.node.pin_budget import Room
from kvbaton.node.prompt_account import HANDOFF, PREFILL, PromptAccount
from kvbaton.node.turn_keeping import TurnSettings
from kvbaton.protocol.content import Content
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import LeaseId, RequestId
from kvbaton.ranks.engine_store import EngineStore


@dataclass(slots=True)
class AskedRequest:
    """A request that has not ended."""

    request: EngineRequest
    tokens: Sequence[int] = field(init=False)  # prompt and history, and the whole answer once that is told
    num_computed_tokens: int = 0
    known_tokens: int = 0  # that need not be computed
    era: int | None = None  # of the pool, when it got its first block
    takes_turn: bool = False

    def __post_init__(self) -> None:
        self.tokens = (*self.request.prompt, *self.request.history)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """With the history: all that is known before a token is sampled here."""
        return self.request.given_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def params(self) -> TransferParams | None:
        handoff = self.request.handoff
        return handoff if isinstance(handoff, TransferParams) else None


class EmbeddedRequests:
    """Implements `SideRequests`."""

    def handed_tokens(self, asked: AskedRequest) -> int:
        """Of a history's last token nobody has the KV: it was sampled, and never computed."""
        return asked.num_prompt_tokens - (1 if asked.request.history else 0)

    def content(self, asked: AskedRequest, position: int) -> Content:
        return content_of(asked.request, position, asked.tokens)

    def ended_turn(self, asked: AskedRequest) -> EndedTurn | None:
        """Of what clients were told, all but the last token: they are not told of the end's own token."""
        params = asked.params
        if params is None or params.keep is None:
            return None
        told = asked.num_tokens - (1 if asked.tokens[-1] == tokenizer.EOS else 0)
        return EndedTurn(params.keep, told - 1)

    def turn_content(self, asked: AskedRequest, upto: int) -> Content:
        return content_of(asked.request, upto, asked.tokens)

    def tokens(self, asked: AskedRequest, first: int, last: int) -> Sequence[int]:
        return asked.tokens[first:last]

    def wants_whole_prompt(self, asked: AskedRequest) -> bool:
        """What there is no room for is refused, and not shortened."""
        return True

    def shorten(self, asked: AskedRequest, tokens: int, *, drafts: bool = False) -> None:
        raise NotImplementedError("this engine keeps no states, and refuses what it has no room for")

    def arrived_at(self, asked: AskedRequest) -> float | None:
        return asked.request.arrived_at


WELL = (RequestStatus.LENGTH, RequestStatus.STOPPED)
NO_ROOM = f"{Reason.PINS_FULL}: no room to pin the KV of one more prompt for handoffs; try again later or elsewhere"
STORE_STATS = (
    "store_lookups_total", "store_gets_total", "store_puts_total", "store_hits_blocks_total", "store_errors_total",
    "second_source_total", "store_copied_blocks_total",
)  # fmt: skip


@dataclass(slots=True)
class EmbeddedSides:
    """The machines of one engine, and the pool that they hold blocks of."""

    pool: BlockPool
    prefill: PrefillSide
    pins: PinAdmission
    decode: DecodeSide
    turns: TurnSide
    stored: NoStore


class EmbeddedConnector(Connector):
    """Hands KV over for one engine, in both roles, and keeps the account of its prompts. Alive once it has a pool."""

    def __init__(
        self,
        doorway: Doorway,
        config: EngineConfig,
        *,
        decodes: bool = True,
        layerwise: bool = True,
        turns: TurnSettings = TurnSettings(),  # noqa: B008 - frozen
        shelf: EngineStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decodes`: what is answered here counts; else it is nobody's prompt but P's."""
        self.wants_layers = layerwise
        self.prompts = PromptAccount()
        self._door = doorway
        self._config = config
        self._decodes = decodes
        self._settings = turns
        self._shelf = shelf
        self._clock = clock
        self._asked: dict[str, AskedRequest] = {}
        self._step = 0
        self._leaving: dict[str, Leaving | None] = {}  # what this step adds, of prompts that it computes
        self._reports: list[LoadOutcome] = []

    # --- both roles

    def bind(self, pool: BlockPool) -> None:
        door, config = self._door, self._config
        pool.watch(door.epochs.raise_epoch)
        total = config.cache.blocks
        layout = engine_layout(KvGeometry(config.model, config.cache))
        grouping = Grouping(layout, tuple(range(len(layout.groups))))
        requests = EmbeddedRequests()
        recomputes = config.on_load_failure == "recompute"
        prefill = PrefillSide(door, pool, grouping, requests)
        decode = DecodeSide(
            door, pool, grouping, requests, recomputes, False, has_second_source=self._shelf is not None
        )
        decode.failed = FailedLoads(self.prompts, client_id=_client_id)
        turns = TurnSide(door, pool, grouping, requests, decode, self._settings, blocks_total=total, takes=True)
        stored = NoStore()
        if self._shelf is not None:
            stored = StoreSide(self._shelf, door, pool, grouping, requests, total, self._clock, queues=False)
        pins = PinAdmission(prefill, door.budget, self._clock)
        self.sides = EmbeddedSides(pool, prefill, pins, decode, turns, stored)

    def on_new_request(self, request: EngineRequest) -> None:
        asked = self._asked[request.request_id] = AskedRequest(request)
        params = asked.params
        if self._decodes:
            self.prompts.came(request.request_id, request.given_tokens, _word(request))
        if params is not None and params.do_remote_decode:
            self.sides.prefill.accepted(asked, ParamsSource(params.mode, params.ticket, params.trace, params.turn))
            self.sides.turns.asked(asked, params.turn)
        elif params is not None and params.do_remote_prefill:
            self.sides.stored.promised(request.request_id)
            self.sides.decode.accepted(asked, Target(params.mode, params.ticket or "", params.trace))

    def step_begin(self) -> None:
        self.sides.stored.computed(self._step)
        self._step += 1
        self._leaving.clear()
        for duty in self._door.duties():
            if isinstance(duty, UnpinBlocks | DropBlocks):
                self.sides.pool.unpin(duty.blocks)
            elif isinstance(duty, ForgetCached):
                self._forget(duty)
            else:
                self.sides.turns.reported(duty)
                self.sides.decode.reported(duty)
        self.sides.stored.take()
        self.sides.turns.do_duties()

    def _forget(self, duty: ForgetCached) -> None:
        """What is handed over while it is computed may be computed on what is forgotten: D computes it."""
        blocks = self.sides.pool.forget_found()
        self.sides.prefill.voided({name for name, asked in self._asked.items() if self._is_spoilt(asked)})
        self._door.cache_forgotten(duty, blocks)

    def _is_spoilt(self, asked: AskedRequest) -> bool:
        """Whether it has blocks from before all that was cached then was forgotten: they are handed to nobody."""
        return asked.era not in (None, self.sides.pool.era)

    def has_pending_work(self) -> bool:
        return self._door.busy or self.sides.decode.busy or self.sides.stored.busy

    def request_finished(
        self, request: EngineRequest, blocks: BlockIds, status: RequestStatus
    ) -> Mapping[str, object] | None:
        asked = self._asked.pop(request.request_id)
        well = status in WELL
        if well:
            asked.num_computed_tokens = asked.num_tokens - 1
        is_kept = well and not self._is_spoilt(asked)
        self.sides.stored.finished(asked, blocks, well=is_kept)
        self.sides.turns.finished(asked, blocks, well=is_kept)
        self.sides.decode.finished(asked)
        answer = self.sides.prefill.finished(asked, blocks, well=well)
        self.sides.pins.left(asked)
        self.prompts.left(request.request_id)
        return answer

    def stats(self) -> dict[str, Any]:
        """For `/stats`, of any thread: turns, and the store."""
        store = {**dict.fromkeys(STORE_STATS, 0), **self.sides.stored.figures(), "store_pins": self.store_pins}
        return {**store, "turn_blocks": self._door.turn_blocks, **self.sides.turns.taker.stats()}

    @property
    def store_pins(self) -> int:
        """Blocks that the store reads or writes."""
        return self._door.put_blocks + self.sides.stored.held_blocks

    # --- what need not be computed

    def match(self, request: EngineRequest, local_tokens: int) -> Match:
        name, asked = request.request_id, self._asked[request.request_id]
        room = self.sides.pins.room(asked)
        if room is not Room.ADMITTED:
            return NotYet() if room is Room.WAITING else NoRoom(NO_ROOM)
        tokens, _ = self._match(asked, local_tokens)
        self.prompts.looked(name, local_tokens, of_store=self.sides.stored.offers(name))
        asked.known_tokens, asked.era = local_tokens + (tokens or 0), None  # whatever it had, it has no block now
        return NotYet() if tokens is None else LoadOrder(tokens) if tokens else Nothing()

    def _match(self, asked: AskedRequest, local_tokens: int) -> Answer:
        answer = self.sides.turns.match(asked, local_tokens)
        answer = self.sides.decode.match(asked, local_tokens) if answer == NOTHING else answer
        if answer != NOTHING:
            return answer
        answer = self.sides.stored.match(asked, local_tokens)
        tokens, name = answer[0], asked.request_id
        if tokens is None or self.sides.decode.lost(name) is None:
            return answer
        size = self._config.cache.block_tokens
        if tokens and local_tokens + tokens == (asked.num_prompt_tokens - 1) // size * size:
            return answer
        self.sides.stored.passed_over(name)
        return self.sides.decode.doom(name, asked.num_prompt_tokens - local_tokens)

    def allocated(self, request: EngineRequest, blocks: BlockIds, external_tokens: int) -> None:
        name, asked = request.request_id, self._asked[request.request_id]
        asked.era = self.sides.pool.era if asked.era is None else asked.era
        if external_tokens and self.sides.stored.offers(name):
            self.sides.stored.allocated(asked, blocks, external_tokens)
        elif self.sides.turns.allocated(asked, blocks, external_tokens):
            asked.takes_turn = True
        else:
            self.sides.decode.allocated(asked, blocks, external_tokens)
        if external_tokens:
            self._take_verdicts()
            if self._reports:
                self._door.wake_engine()  # this step has taken its reports already
            return
        asked.num_computed_tokens = min(asked.known_tokens, asked.num_prompt_tokens - 1)
        self.prompts.begun(name, asked.num_computed_tokens)
        self.sides.stored.allocated(asked, blocks, 0)
        self.sides.prefill.begun(asked)

    def take_reports(self) -> Sequence[LoadOutcome]:
        self._take_verdicts()
        reports, self._reports = self._reports, []
        return reports

    def _take_verdicts(self) -> None:
        for verdict in self.sides.decode.take_verdicts():
            self._reports.append(_outcome(verdict, verdict.end, final=verdict.final))
            asked = self._asked.get(verdict.request_id)
            if asked is not None and asked.takes_turn and verdict.is_good:
                self.sides.stored.brought(asked)
        for verdict in self.sides.stored.take_verdicts():
            lost = None if verdict.is_good else self.sides.decode.lost(verdict.request_id)
            if verdict.end.reason is not None:
                self.prompts.failed(verdict.request_id, str(verdict.end.reason))
            # Missing blocks are computed, unless this was the last source of a prompt that was promised.
            self._reports.append(_outcome(verdict, lost or verdict.end, final=lost is not None))

    # --- prompts that are computed

    def layer_done(self, layer: int, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            leaving = self._scheduled(chunk.request.request_id, chunk.blocks, chunk.end)
            if leaving is not None:
                self._door.progressed(LeaseId(leaving.lease), self._ahead(leaving, layer))

    def chunk_done(self, request: EngineRequest, blocks: BlockIds, computed_tokens: int) -> None:
        self._scheduled(request.request_id, blocks, computed_tokens)
        self._asked[request.request_id].num_computed_tokens = computed_tokens
        self.sides.prefill.computed(self._step)
        self.sides.stored.computed(self._step)

    def block_done(self, request: EngineRequest, blocks: BlockIds, tokens: Sequence[int]) -> None:
        asked = self._asked[request.request_id]
        asked.tokens, asked.num_computed_tokens = tokens, len(tokens)
        if not self._is_spoilt(asked):
            self.sides.stored.ends_prompts(self._step, {request.request_id: 0}, lambda _: blocks)

    def _scheduled(self, name: RequestId, blocks: BlockIds, upto: int) -> Leaving | None:
        """What this step adds; told to the machines once, at the first that is heard of the chunk."""
        if name not in self._leaving:
            asked = self._asked[name]
            tokens = upto - asked.num_computed_tokens
            self._leaving[name] = self.sides.prefill.scheduled(self._step, name, tokens, blocks)
            if not self._is_spoilt(asked):
                self.sides.stored.ends_prompts(self._step, {name: tokens}, lambda _: blocks)
        return self._leaving[name]

    def _ahead(self, leaving: Leaving, layer: int) -> Progress:
        """Layers up to this one have what the step adds, the others what was there before it."""
        groups = [group.layers for group in self._config.model.groups]
        return leaving.progress([sum(each <= layer for each in layers) for layers in groups], list(map(len, groups)))

    def preempted(self, request: EngineRequest) -> None:
        self.sides.prefill.preempted(request.request_id)
        self.sides.stored.preempted(request.request_id)

    def ending(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        self._asked[request.request_id].tokens = tokens


def _outcome(verdict: LoadVerdict, end: End, *, final: bool) -> LoadOutcome:
    """With `final`, only what this very load brought is good."""
    reason = "" if end.reason is None else f"{end.reason}: {end.detail}"
    good = None if verdict.is_good else verdict.end.good_tokens
    return LoadOutcome(RequestId(verdict.request_id), verdict.is_good, good, reason, final)


def _client_id(request_id: str) -> str:
    """The client's id, which the engine's begins with."""
    return request_id.rpartition("-")[0]


def _word(request: EngineRequest) -> str:
    if not isinstance(request.handoff, TransferParams) or not request.handoff.hands_over:
        return request.said
    return PREFILL if request.handoff.do_remote_decode else HANDOFF
