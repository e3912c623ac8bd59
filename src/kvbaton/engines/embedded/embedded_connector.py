"""The embedded engine's connector: its hooks on one side, the `Doorway` on the other. A small version of vLLM's
adapter.

Laws: every hook runs on the engine's thread and none raises because of a client or a peer. A request that was matched,
or failed to match, once is never matched again. Blocks are touched in the hook that passes them to the doorway. The
store is used where there is no ticket, and as second source where a handoff failed, before the policy applies; with
`fail` it must then have every whole block before the prompt's last token, or the request fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbaton.api.params import NOTHING_FOR_D, Mode, TransferParams, target_params
from kvbaton.engines.embedded.block_cache import NULL_BLOCK, BlockPool
from kvbaton.engines.embedded.embedded_storing import EmbeddedStoring, Fetched
from kvbaton.engines.embedded.engine_config import FailurePolicy, KvGroup
from kvbaton.engines.embedded.engine_request import EngineRequest, RequestStatus
from kvbaton.engines.embedded.hooks import BlockIds, Chunk, LoadOrder, LoadOutcome, Match, Nothing, NotYet
from kvbaton.engines.embedded.kv_layout import content_digest
from kvbaton.node.doorway import Doorway, DropBlocks, ForgetCached, MatchState, UnpinBlocks
from kvbaton.node.doorway import LoadReport as RankReport
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import NO_BLOCK
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import LeaseId, RequestId

log = logging.getLogger(__name__)

_SAID: Counter[str] = Counter()  # failures logged by this process, by reason


@dataclass(slots=True)
class Outgoing:
    """A prompt that is streamed or pushed while it is computed."""

    lease: LeaseId
    pinned: int = 0  # blocks of the full groups in the lease
    announced: int = 0


@dataclass(slots=True)
class Underway:
    """A request that has not ended."""

    known_tokens: int = 0  # that need not be computed
    era: int | None = None  # of the pool, when it got its first block


class EmbeddedConnector:
    """Hands KV over for one engine, in both roles."""

    def __init__(
        self,
        doorway: Doorway,
        groups: Sequence[KvGroup],
        block_tokens: int,
        policy: FailurePolicy,
        *,
        layerwise: bool = True,
        storing: EmbeddedStoring | None = None,
    ) -> None:
        self.wants_layers = layerwise
        self._door = doorway
        self._groups = groups
        self._block_tokens = block_tokens
        self._policy = policy
        self._pool: BlockPool | None = None
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._begun: set[RequestId] = set()  # a prompt computed anew after preemption is leased no second time
        self._storing = storing
        self._lost: dict[RequestId, End] = {}  # handoffs that failed, until the request has another source or ends
        self._from_store: set[RequestId] = set()  # the last answer was a load from there
        self._known: dict[RequestId, Underway] = {}
        self._ranks_told: dict[RequestId, set[int]] = {}
        self._reports: list[LoadOutcome] = []

    # --- both roles

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool
        pool.watch(self._door.epochs.raise_epoch)

    def on_new_request(self, request: EngineRequest) -> None:
        params = params_of(request)
        self._known[request.request_id] = Underway()
        if params is not None and params.do_remote_prefill:
            assert params.ticket is not None
            digest, tokens = content_digest(request), len(request.prompt)
            push = params.mode is Mode.PUSH
            self._door.want(request.request_id, params.ticket, digest, tokens, push=push, trace=params.trace)

    def step_begin(self) -> None:
        for duty in self._door.duties():
            if isinstance(duty, UnpinBlocks | DropBlocks):
                self.pool.unpin(duty.blocks)
            elif isinstance(duty, ForgetCached):
                self._forget(duty)
            else:
                self._rank_reported(duty)
        if self._storing is not None:
            for fetched in self._storing.take(self.pool):
                self._fetched(fetched)

    def _forget(self, duty: ForgetCached) -> None:
        """What is handed over while it is computed may be computed on what is forgotten: D computes it."""
        blocks = self.pool.forget_found()
        for request in list(self._outgoing):
            self._end_outgoing(request, Reason.SOURCE_ABORTED)
        self._door.cache_forgotten(duty, blocks)

    def is_spoilt(self, request: RequestId) -> bool:
        """Whether it has blocks from before all that was cached then was forgotten: they are handed to nobody."""
        return self._known[request].era not in (None, self.pool.era)

    def has_pending_work(self) -> bool:
        return self._door.busy or (self._storing is not None and self._storing.busy)

    @property
    def pool(self) -> BlockPool:
        assert self._pool is not None, "bind comes first"
        return self._pool

    # --- D

    def match(self, request: EngineRequest, local_tokens: int) -> Match:
        answer = self._match(request, local_tokens)
        known = local_tokens + (answer.tokens if isinstance(answer, LoadOrder) else 0)
        self._known[request.request_id] = Underway(known)  # whatever it had before, it has no block now
        return answer

    def _match(self, request: EngineRequest, local_tokens: int) -> Match:
        name = request.request_id
        found = self._door.match(name)
        missing = len(request.prompt) - local_tokens
        if found.state is MatchState.NOT_YET:
            return NotYet()
        if found.state is MatchState.FOUND and missing > 0:
            return LoadOrder(missing)
        if found.state is MatchState.FAILED:
            assert found.end is not None
            self._lost[name] = found.end
        self._door.not_needed(name)
        strict = name in self._lost and self._policy == "fail"
        if self._storing is not None:
            self._from_store.discard(name)
            tokens = self._storing.look(request, local_tokens)
            if tokens is None:
                return NotYet()
            if tokens and (not strict or local_tokens + tokens == self._storing.most(request)):
                self._from_store.add(name)
                return LoadOrder(tokens)
        return LoadOrder(missing) if strict and missing > 0 else Nothing()

    def failure_of(self, request: RequestId) -> End | None:
        """How its handoff failed, while no other source has been found."""
        return self._lost.get(request)

    def is_from_store(self, request: RequestId) -> bool:
        """Whether the last answer to `match` was a load from the store."""
        return request in self._from_store

    def allocated(self, request: EngineRequest, blocks: BlockIds, external_tokens: int) -> None:
        self._got_blocks(request.request_id)
        if external_tokens == 0:
            self._begin(request)
            return
        if self._storing is not None and request.request_id in self._from_store:
            self._from_store.discard(request.request_id)
            self._storing.fetch(request, blocks[0], external_tokens, self.pool)
            self._door.wake_engine()  # it may have been refused, and this step has taken its reports already
            return
        failed = self._lost.pop(request.request_id, None)
        if failed is not None:
            self._report(request.request_id, failed)
            self._door.wake_engine()  # this step has taken its reports already
            return
        first_token = len(request.prompt) - external_tokens
        first, last = first_token // self._block_tokens, -(-len(request.prompt) // self._block_tokens)
        wanted = tuple(without_null(ids[first:last]) for ids in blocks)
        self.pool.touch(self._door.allocated(request.request_id, wanted, first_token))
        self._ranks_told[request.request_id] = set()

    def _got_blocks(self, request: RequestId) -> None:
        underway = self._known[request]
        underway.era = self.pool.era if underway.era is None else underway.era

    def take_reports(self) -> Sequence[LoadOutcome]:
        reports, self._reports = self._reports, []
        return reports

    def _rank_reported(self, duty: RankReport) -> None:
        told = self._ranks_told[duty.request]
        told.add(duty.rank)
        if len(told) == self._door.config.ranks:
            del self._ranks_told[duty.request]
            again = self._storing is not None and not duty.end.delivered and duty.request in self._known
            if again:
                self._lost[duty.request] = duty.end
            self._say(duty.request, duty.end)
            self._report(duty.request, duty.end, final=not again)

    def _say(self, request: RequestId, end: End) -> None:
        """Log a failure, of each reason the first few and then ever fewer."""
        if end.delivered or end.reason is Reason.ABORTED:
            return
        _SAID[str(end.reason)] += 1
        if worth_saying(_SAID[str(end.reason)]):
            what = "its prompt is computed here" if self._policy == "recompute" else "it fails"
            asked = {"request": request.rpartition("-")[0]}  # the client's id, which the engine's begins with
            log.warning("[no-kv] no KV for request %s (%s: %s); %s", request, end.reason, end.detail, what, extra=asked)

    def _report(self, request: RequestId, end: End, *, final: bool = True) -> None:
        reason = f"{end.reason}: {end.detail}" if end.reason is not None else ""
        good = None if end.delivered else end.good_tokens
        self._reports.append(LoadOutcome(request, end.delivered, good, reason, final))

    def _fetched(self, fetched: Fetched) -> None:
        """The store's part is over. Missing blocks are computed, unless this was the last source of a strict
        handoff."""
        assert self._storing is not None
        lost = self._lost.pop(fetched.request, None)
        if lost is not None and not fetched.is_whole and self._policy == "fail":
            self._report(fetched.request, lost)
            return
        if lost is not None and fetched.blocks:
            self._storing.counters["second_source"] += 1
        good = None if fetched.is_whole else fetched.good_tokens
        self._reports.append(LoadOutcome(fetched.request, fetched.is_whole, good, fetched.reason, final=False))

    # --- P

    def _begin(self, request: EngineRequest) -> None:
        """P starts to compute a prompt. One that is read meanwhile, or pushed, has a lease from here on."""
        self._door.times.scheduled(request.request_id)
        params = params_of(request)
        if (
            params is None
            or not params.do_remote_decode
            or params.mode is Mode.PULL
            or request.request_id in self._begun
        ):
            return
        assert params.ticket is not None
        try:
            ticket = self._door.open_ticket(params.ticket)
        except ProtocolError:
            return  # D's own copy of the ticket fails as well: it computes the prompt itself
        lease = self._door.begin(
            ticket.handoff,
            content_digest(request),
            len(request.prompt),
            target=ticket.target,
            max_readers=ticket.max_readers,
            request=request.request_id,
            trace=params.trace,
        )
        self._begun.add(request.request_id)
        self._outgoing[request.request_id] = Outgoing(lease)

    def refused(self, request: EngineRequest, reason: Reason) -> None:
        """The prompt will not be computed here: a D that waits for it is told so."""
        self._begin(request)
        self._end_outgoing(request.request_id, reason)

    def layer_done(self, layer: int, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            outgoing = self._outgoing.get(chunk.request.request_id)
            if outgoing is None:
                continue
            upto = self._whole_blocks(chunk.request, chunk.end)
            self._pin(outgoing, chunk.request, chunk.blocks, upto)
            progress = tuple(
                GroupProgress() if group.window_tokens else self._ahead(group, layer, outgoing.announced, upto)
                for group in self._groups
            )
            self._door.progressed(outgoing.lease, progress)

    def chunk_done(self, request: EngineRequest, blocks: BlockIds, computed_tokens: int) -> None:
        outgoing = self._outgoing.get(request.request_id)
        final = computed_tokens == len(request.prompt)
        if final and self._storing is not None and not self.is_spoilt(request.request_id):
            known_tokens = self._known[request.request_id].known_tokens
            self._storing.put(request, blocks[0], known_tokens, self.pool)
        if outgoing is None:
            return
        upto = self._whole_blocks(request, computed_tokens)
        self._pin(outgoing, request, blocks, upto)
        outgoing.announced = upto
        counts = [0 if group.window_tokens and not final else upto for group in self._groups]
        self._door.progressed(outgoing.lease, whole(counts))
        if final:
            self._door.completed(outgoing.lease)
            del self._outgoing[request.request_id]

    def ending(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        """What the answer was is of no use to a handoff."""

    def preempted(self, request: EngineRequest) -> None:
        self._end_outgoing(request.request_id, Reason.SOURCE_PREEMPTED)

    def request_finished(
        self, request: EngineRequest, blocks: BlockIds, status: RequestStatus
    ) -> Mapping[str, object] | None:
        self._end_outgoing(request.request_id, Reason.SOURCE_ABORTED)
        self._begun.discard(request.request_id)
        self._lost.pop(request.request_id, None)
        self._from_store.discard(request.request_id)
        is_spoilt = self.is_spoilt(request.request_id)
        del self._known[request.request_id]
        self._door.gave_up(request.request_id)
        if self._storing is not None:
            self._storing.forget(request.request_id)
        params = params_of(request)
        if params is None or not params.do_remote_decode or status not in (RequestStatus.LENGTH, RequestStatus.STOPPED):
            return None
        if params.mode is not Mode.PULL:
            return target_params(params.mode, params.ticket)
        if is_spoilt:
            return dict(NOTHING_FOR_D)
        needed = -(-len(request.prompt) // self._block_tokens)
        leased = tuple(without_null(ids[:needed]) for ids in blocks)
        ticket, pinned = self._door.grant(
            content_digest(request), len(request.prompt), leased, request=request.request_id, trace=params.trace
        )
        self.pool.touch(pinned)
        return {**target_params(Mode.PULL, ticket), "remote_engine_id": str(self._door.config.me.worker)}

    def _whole_blocks(self, request: EngineRequest, tokens: int) -> int:
        """Whole blocks only; the last chunk takes the tail along (rule 10)."""
        if tokens == len(request.prompt):
            return -(-tokens // self._block_tokens)
        return tokens // self._block_tokens

    def _pin(self, outgoing: Outgoing, request: EngineRequest, blocks: BlockIds, upto: int) -> None:
        """Pin what is new. Sliding groups go with the end, when it is known which blocks their window needs."""
        if upto == outgoing.pinned:
            return
        final = upto * self._block_tokens >= len(request.prompt)
        fresh = tuple(
            (without_null(ids[:upto]) if final else ())
            if group.window_tokens
            else without_null(ids[outgoing.pinned : upto])
            for group, ids in zip(self._groups, blocks, strict=True)
        )
        self.pool.touch(self._door.pin(outgoing.lease, fresh))
        outgoing.pinned = upto

    def _ahead(self, group: KvGroup, layer: int, announced: int, upto: int) -> GroupProgress:
        done = sum(1 for each in group.layers if each <= layer)
        return GroupProgress(upto) if done == len(group.layers) else GroupProgress(announced, upto, done)

    def _end_outgoing(self, request: RequestId, reason: Reason) -> None:
        outgoing = self._outgoing.pop(request, None)
        if outgoing is not None:
            self._door.source_ended(outgoing.lease, reason)


def params_of(request: EngineRequest) -> TransferParams | None:
    handoff = request.handoff
    return handoff if isinstance(handoff, TransferParams) else None


def without_null(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(NO_BLOCK if block == NULL_BLOCK else block for block in ids)
