"""Around the embedded engine's connector: room to pin for prompts that are computed for others, and an account of those
that are answered here.

Laws: a prompt that is to be handed over is computed only if its blocks may be pinned; until then it waits, and at its
deadline it is refused. Everything else is the connector's: each hook passes on what it was called with, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvbaton.api.params import TransferParams
from kvbaton.engines.embedded.block_cache import BlockPool
from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector
from kvbaton.engines.embedded.engine_config import KvGroup
from kvbaton.engines.embedded.engine_request import EngineRequest, RequestStatus
from kvbaton.engines.embedded.hooks import BlockIds, Chunk, LoadOrder, LoadOutcome, Match, NoRoom, NotYet
from kvbaton.node.pin_budget import ANY_PEER, Holder, PinBudget, Room
from kvbaton.node.prompt_account import HANDOFF, PREFILL, PromptAccount
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import RequestId


class AdmittingConnector:
    """`blocks_of`: how many blocks a prompt of so many tokens takes at most."""

    def __init__(
        self,
        inner: EmbeddedConnector,
        budget: PinBudget,
        blocks_of: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        decodes: bool = True,
        holder_of: Callable[[str | None], Holder] = lambda ticket: ANY_PEER,
    ) -> None:
        self.inner = inner
        self._holder_of = holder_of
        self._holders: dict[RequestId, Holder] = {}  # of requests that have not ended
        self._decodes = decodes  # what is answered here counts; else it is nobody's prompt but P's
        self.prompts = PromptAccount()
        self._budget = budget
        self._blocks_of = blocks_of
        self._clock = clock
        self._known: dict[RequestId, int] = {}  # tokens that need not be computed, of requests not computed yet

    @property
    def wants_layers(self) -> bool:
        return self.inner.wants_layers

    def bind(self, pool: BlockPool) -> None:
        self.inner.bind(pool)

    def on_new_request(self, request: EngineRequest) -> None:
        if self._decodes:
            self.prompts.came(request.request_id, len(request.prompt), _word(request))
        self.inner.on_new_request(request)

    def match(self, request: EngineRequest, local_tokens: int) -> Match:
        if _word(request) == PREFILL:
            blocks, holder = self._blocks_of(len(request.prompt)), self._holder(request)
            room = self._budget.ask(request.request_id, blocks, self._clock(), holder)
            if room is Room.WAITING:
                return NotYet()
            if room is Room.REFUSED:
                said = "no room to pin the KV of one more prompt for handoffs; try again later or elsewhere"
                return NoRoom(f"{Reason.PINS_FULL}: {said}")
        answer = self.inner.match(request, local_tokens)
        name = request.request_id
        failure = self.inner.failure_of(name)
        if failure is not None:
            self.prompts.failed(name, str(failure.reason))
        self.prompts.looked(name, local_tokens, of_store=self.inner.is_from_store(name))
        self._known[name] = local_tokens + (answer.tokens if isinstance(answer, LoadOrder) else 0)
        return answer

    def allocated(self, request: EngineRequest, blocks: BlockIds, external_tokens: int) -> None:
        if external_tokens == 0:
            known = self._known.pop(request.request_id, 0)
            self.prompts.begun(request.request_id, min(known, len(request.prompt) - 1))
        self.inner.allocated(request, blocks, external_tokens)

    def step_begin(self) -> None:
        self.inner.step_begin()

    def layer_done(self, layer: int, chunks: Sequence[Chunk]) -> None:
        self.inner.layer_done(layer, chunks)

    def chunk_done(self, request: EngineRequest, blocks: BlockIds, computed_tokens: int) -> None:
        self.inner.chunk_done(request, blocks, computed_tokens)

    def preempted(self, request: EngineRequest) -> None:
        self.inner.preempted(request)

    def ending(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        self.inner.ending(request, tokens)

    def request_finished(
        self, request: EngineRequest, blocks: BlockIds, status: RequestStatus
    ) -> Mapping[str, object] | None:
        try:
            if status is RequestStatus.REFUSED:
                self.inner.refused(request, Reason.PINS_FULL)
            return self.inner.request_finished(request, blocks, status)
        finally:
            self._known.pop(request.request_id, None)
            self._holders.pop(request.request_id, None)
            self.prompts.left(request.request_id)
            self._budget.left(request.request_id)

    def _holder(self, request: EngineRequest) -> Holder:
        """Whose share of the room it takes; a ticket is opened once, however often the engine asks."""
        name = request.request_id
        if name not in self._holders:
            params = request.handoff
            self._holders[name] = self._holder_of(params.ticket if isinstance(params, TransferParams) else None)
        return self._holders[name]

    def take_reports(self) -> Sequence[LoadOutcome]:
        reports = self.inner.take_reports()
        for report in reports:
            if not report.ok and report.reason:
                self.prompts.failed(report.request_id, report.reason.partition(":")[0])
        return reports

    def has_pending_work(self) -> bool:
        return self.inner.has_pending_work()


def pinned_blocks(groups: Sequence[KvGroup], block_tokens: int, tokens: int) -> int:
    """How many blocks a lease of a prompt of so many tokens pins at most; of a window only those that it can touch."""
    whole = -(-tokens // block_tokens)
    seen = (whole if group.window_tokens is None else group.window_tokens // block_tokens + 2 for group in groups)
    return sum(min(whole, each) for each in seen)


def _word(request: EngineRequest) -> str:
    if not isinstance(request.handoff, TransferParams):
        return request.said
    return PREFILL if request.handoff.do_remote_decode else HANDOFF
