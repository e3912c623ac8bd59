"""The embedded engine's connector where conversations leave turns: D keeps what it ends with, P takes that from D.

Laws: those of `node.turn_keeping`. What a window has left behind cannot be taken by another, so engines with sliding
layers keep nothing. A turn that cannot be taken is computed, under either failure policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector, params_of, without_null
from kvbaton.engines.embedded.embedded_storing import EmbeddedStoring
from kvbaton.engines.embedded.engine_config import EngineConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, RequestStatus
from kvbaton.engines.embedded.hooks import BlockIds, LoadOrder, Match, NotYet
from kvbaton.engines.embedded.kv_layout import content_digest
from kvbaton.node.doorway import Doorway
from kvbaton.node.doorway import LoadReport as RankReport
from kvbaton.node.turn_keeping import TurnKeeper, TurnSettings, TurnTaker
from kvbaton.protocol.ids import RequestId


class TurningConnector(EmbeddedConnector):
    """Hands KV over, keeps turns and takes them."""

    def __init__(
        self,
        doorway: Doorway,
        config: EngineConfig,
        turns: TurnSettings,
        *,
        layerwise: bool = True,
        storing: EmbeddedStoring | None = None,
    ) -> None:
        groups, tokens = config.model.groups, config.cache.block_tokens
        super().__init__(doorway, groups, tokens, config.on_load_failure, layerwise=layerwise, storing=storing)
        self.keeper = TurnKeeper(doorway, turns, config.cache.blocks)
        self.taker = TurnTaker(doorway)
        self._slides = any(group.window_tokens for group in groups)
        self._ended: tuple[RequestId, Sequence[int]] | None = None

    def stats(self) -> Mapping[str, Any]:
        """Figures of both halves, for `/stats`."""
        return {"turn_blocks": self._door.turn_blocks, **self.taker.stats()}

    # --- P

    def on_new_request(self, request: EngineRequest) -> None:
        super().on_new_request(request)
        params = params_of(request)
        if params is None or params.turn is None or params.do_remote_prefill:
            return
        turn = params.turn
        self.taker.ask(
            request.request_id,
            turn.ticket,
            turn.tokens,
            len(request.prompt),
            lambda upto: content_digest(request, upto),
        )

    def _match(self, request: EngineRequest, local_tokens: int) -> Match:
        if self.taker.awaits(request.request_id):
            tokens = self.taker.match(request.request_id, local_tokens, self._block_tokens)
            if tokens is None:
                return NotYet()
            if tokens:
                self._press(request, local_tokens)
                return LoadOrder(tokens)
        self._press(request, local_tokens)
        return super()._match(request, local_tokens)

    def allocated(self, request: EngineRequest, blocks: BlockIds, external_tokens: int) -> None:
        name = request.request_id
        if not external_tokens or not self.taker.awaits(name):
            super().allocated(request, blocks, external_tokens)
            return
        self._got_blocks(name)
        first_token, upto = self.taker.first_token(name, external_tokens)
        first, last = first_token // self._block_tokens, -(-upto // self._block_tokens)
        wanted = tuple(without_null(ids[first:last]) for ids in blocks)
        self.pool.touch(self._door.allocated(name, wanted, first_token))
        self._ranks_told[name] = set()

    def _rank_reported(self, duty: RankReport) -> None:
        if not self.taker.is_loading(duty.request):
            super()._rank_reported(duty)
            return
        told = self._ranks_told[duty.request]
        told.add(duty.rank)
        if len(told) == self._door.config.ranks:
            del self._ranks_told[duty.request]
            self.taker.loaded(duty.request, duty.end.reason)
            self._report(duty.request, duty.end, final=False)

    # --- D

    def step_begin(self) -> None:
        super().step_begin()
        self.keeper.press(self.pool.free_count)

    def ending(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        self._ended = request.request_id, tokens

    def request_finished(
        self, request: EngineRequest, blocks: BlockIds, status: RequestStatus
    ) -> Mapping[str, object] | None:
        is_spoilt = self.is_spoilt(request.request_id)
        answer = super().request_finished(request, blocks, status)
        self.taker.forget(request.request_id)
        ended, self._ended = self._ended, None
        params = params_of(request)
        well = status in (RequestStatus.LENGTH, RequestStatus.STOPPED)
        if params is None or params.keep is None or ended is None or self._slides or is_spoilt:
            return answer
        if well and ended[0] == request.request_id:
            self._keep(request, params.keep, blocks, ended[1])
        return answer

    def _keep(self, request: EngineRequest, ticket: str, blocks: BlockIds, tokens: Sequence[int]) -> None:
        """Of what clients were told, all but the last token: they are not told of the end's own token."""
        upto = len(tokens) - (1 if tokens[-1] == tokenizer.EOS else 0) - 1
        kept = tuple(without_null(ids[: -(-upto // self._block_tokens)]) for ids in blocks)
        digest = content_digest(request, upto, tokens)
        self.pool.touch(self.keeper.keep(ticket, digest, upto, kept, request.request_id))

    def _press(self, request: EngineRequest, local_tokens: int) -> None:
        missing = -(-(len(request.prompt) - local_tokens) // self._block_tokens)
        self.keeper.press(self.pool.free_count, missing * len(self._groups))
