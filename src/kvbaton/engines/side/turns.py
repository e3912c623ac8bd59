"""Turns: D keeps what a request ended with, and the P of the conversation's next turn loads it from there.

Laws: those of `node.turn_keeping`. Only KV without windows and states is kept: of a window the engine has dropped what
the next turn's first tokens look at, a state has counted the last token, and a drafter has not seen it. A P takes turns
only where the engine computes what a load did not bring (vLLM: `recompute`), and keeps freed blocks apart from steps in
flight (`kv_both`, rule 32).
"""

from __future__ import annotations

from typing import Any

from kvbaton.api.params import TurnOffer
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.guard import guarded, returns
from kvbaton.engines.side.protocols import NOT_YET, NOTHING, Grouping, PinPool, SideRequests, Tables, real
from kvbaton.node.doorway import Doorway, LoadReport
from kvbaton.node.turn_keeping import TurnKeeper, TurnSettings, TurnTaker
from kvbaton.protocol.content import digest
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import RequestId


class TurnSide:
    """Both halves, in one engine."""

    def __init__(
        self,
        door: Doorway,
        pool: PinPool,
        grouping: Grouping,
        requests: SideRequests,
        decode: DecodeSide,
        settings: TurnSettings,
        *,
        blocks_total: int,
        takes: bool,
    ) -> None:
        self.keeper = TurnKeeper(door, settings, blocks_total)
        self.taker = TurnTaker(door)
        self._door = door
        self._pool = pool
        self._grouping = grouping
        self._requests = requests
        self._decode = decode
        whole = not (grouping.stateful or grouping.slides or grouping.lookahead)
        self._keeps = whole and self.keeper.is_on
        self._takes = whole and takes

    # --- P

    @guarded(returns(None))
    def asked(self, request: Any, turn: TurnOffer | None) -> None:
        """A request came of whose prompt some D has the beginning."""
        if turn is None or not self._takes or self._requests.turn_content(request, 0) is None:
            return
        self.taker.ask(
            RequestId(request.request_id),
            turn.ticket,
            turn.tokens,
            request.num_prompt_tokens,
            lambda upto: self._digest(request, upto),
        )

    def refused(self, request: Any) -> None:
        """P will not compute this prompt: what was to be loaded would not fit what is left of the request."""
        self.taker.give_up(RequestId(request.request_id), Reason.PINS_FULL)

    @guarded(returns(NOTHING))
    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        name = RequestId(request.request_id)
        self._make_room(request)
        if not self.taker.awaits(name):
            return NOTHING
        tokens = self.taker.match(name, local_tokens, max(self._grouping.block_tokens))
        return NOT_YET if tokens is None else (tokens, tokens > 0)

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> bool:
        """The engine has blocks. True: they are for a turn, which is being loaded from here on."""
        name, grouping = RequestId(request.request_id), self._grouping
        if not external_tokens or not self.taker.awaits(name):
            return False
        first_token, upto = self.taker.first_token(name, external_tokens)
        wanted = grouping.cut(tables, grouping.first(first_token), grouping.needed(upto), upto)
        self._decode.begin_load(request.request_id, first_token, wanted, promised=False)
        return True

    def broke(self, request: Any) -> None:
        """Its load ended as it began, by a failure here: no report is to come."""
        self.taker.drop(RequestId(request.request_id))

    @guarded(returns(None))
    def reported(self, duty: LoadReport) -> None:
        """The ledger's word on a load; what the engine is told of it is D's half's."""
        if duty.rank == 0 and self.taker.is_loading(duty.request):
            self.taker.loaded(duty.request, duty.end.reason)

    # --- D

    @guarded(returns(None))
    def finished(self, request: Any, tables: Tables, *, well: bool) -> None:
        """A request is over: its blocks are kept, where somebody may come back for them."""
        self.taker.forget(RequestId(request.request_id))
        ended = self._requests.ended_turn(request) if well and self._keeps else None
        if ended is None or request.num_computed_tokens < ended.tokens:
            return
        upto = ended.tokens
        grouping = self._grouping
        blocks = grouping.cut(tables, (0,) * grouping.count, grouping.needed(upto), upto)
        name = RequestId(request.request_id)
        self._pool.touch(real(blocks))  # before anybody knows of them, so that a failure here costs the turn alone
        taken: tuple[int, ...] = ()
        try:
            taken = self.keeper.keep(ended.ticket, self._digest(request, upto), upto, blocks, name)
        finally:
            if not taken:
                self._pool.unpin(real(blocks))

    @guarded(returns(None))
    def do_duties(self) -> None:
        """At every step: what is late, and what others need."""
        self.taker.give_up_late()
        self.keeper.press(self._pool.free_blocks)

    def _digest(self, request: Any, upto: int) -> bytes:
        content = self._requests.turn_content(request, upto)
        assert content is not None, "asked of a request whose tokens are not known"
        return digest(content)

    def _make_room(self, request: Any) -> None:
        # What the prefix cache has of it saves nothing: a cached block that nobody holds is free until it is hit.
        needed = sum(self._grouping.needed(request.num_tokens))
        self.keeper.press(self._pool.free_blocks, needed)
