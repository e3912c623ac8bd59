"""Streams that outlive their D: the router owns them, and has another D go on (decision 0025).

    reason     what happened                                   before another is asked
    died       the connection broke, or D says that it ends    D is blamed
    stalled    nothing for `stall_s` while D owes an event     D is blamed; not where nobody else can go on
    left       D left the list of workers                      -
    draining   D drains                                        - ; not where nobody else can go on
    differed   it was asked beside P, whose first token the    - ; the same D may be asked again
               client has, and has sampled another one
    refused    no D would answer behind P's first token        what D says of when to come back

Laws: D's connection is closed before another is asked, so nothing that it says later reaches anybody. A stream moves
`moves_max` times at most, and all of a router `moves_per_s` times in a second: more wait for their turn, and not for
long. What cannot go on ends as it would have without this: with the error of the D that it had.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import BodyKind
from kvbaton.api.gather import cancel
from kvbaton.protocol.ids import PeerId
from kvbaton.router.flow.attempt import ChosenRoute, RoutedCall
from kvbaton.router.flow.continuing import StreamLife
from kvbaton.router.flow.first_token import FirstTokenRule
from kvbaton.router.flow.reply import BegunAnswer, FirstReply, Reply
from kvbaton.router.flow.said_text import HistoryRoom, SeamError
from kvbaton.router.policy import NEVER
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import RouterStats, count
from kvbaton.router.workers.available import AvailableWorkers

log = logging.getLogger(__name__)

TURN_S_MAX = 10.0
"""A stream whose D is gone waits no longer for its turn to move."""
BURST_S = 1.0
"""So much of `moves_per_s` may be used at once."""


def why_not(call: RoutedCall) -> str:
    """Why a stream ends with its D whatever happens, as `NOT_CONTINUED` has it; "" where that is not so."""
    if call.kind not in (BodyKind.COMPLETION, BodyKind.CHAT):
        return "api"
    if call.alone:
        return "one_engine"
    return "hidden_reasoning" if call.fields.get("include_reasoning") is False else ""


def begun(call: RoutedCall, room: HistoryRoom, *, first_token: bool = False) -> RoutedCall:
    """The call with a life of its own, where it may have one. `first_token`: and P's first token, likewise."""
    if why_not(call):
        return call
    if not call.fields.get("return_token_ids", True):  # a field may not stand in a body twice
        fields = {name: value for name, value in call.fields.items() if name != "return_token_ids"}
        call = msgspec.structs.replace(call, fields=fields, data=None, written={})
    rule = FirstTokenRule(call.kind, call.fields) if first_token else None
    life = StreamLife(call.fields, room, None if rule is None or rule.is_off else rule)
    return msgspec.structs.replace(call, life=life)


class MoveTurns:
    """Lets streams move, so many in a second. Pure."""

    def __init__(self, per_s: float) -> None:
        self._gap_s = 1 / per_s
        self._next = -BURST_S

    def wait_s(self, now: float) -> float:
        """How long the next one would wait."""
        return max(self._next - now, 0.0)

    def take(self, now: float) -> float:
        """A turn, after so many seconds."""
        at = max(self._next, now - BURST_S)
        self._next = at + self._gap_s
        return max(at - now, 0.0)


class Answers(Protocol):
    """What has calls answered."""

    async def serve(self, call: RoutedCall) -> Reply: ...
    async def serve_behind(self, call: RoutedCall, left: ChosenRoute, why: str, avoid: frozenset[PeerId]) -> Reply: ...


class OwnedStreams:
    """Those of one router."""

    def __init__(
        self, flow: Answers, roster: AvailableWorkers, settings: RouterSettings, stats: RouterStats, *, can_sign: bool
    ) -> None:
        """`can_sign`: the router has the key by which workers believe its histories."""
        self.flow = flow
        self.settings = settings
        self.stats = stats
        self.room = HistoryRoom(settings.history_max, settings.histories_max)
        self.turns = MoveTurns(settings.moves_per_s)
        self._roster = roster
        self._at: dict[PeerId, set[OwnedStream]] = defaultdict(set)
        self._is_on = settings.streams_continue and can_sign
        self.now = asyncio.get_running_loop().time

    async def open(self, call: RoutedCall) -> OwnedStream:
        """D's stream once its first event is there, or another D's that goes on with it; as `Flow.serve`."""
        if self._is_on:
            # A first token may need a move: none is told while streams wait for theirs.
            first_token = self.settings.first_token and not self.turns.wait_s(self.now())
            call = begun(call, self.room, first_token=first_token)
        if call.life is None or call.life.first is None:
            return OwnedStream(self, call, await self.flow.serve(call))
        return await self._opened(call, call.life)

    async def _opened(self, call: RoutedCall, life: StreamLife) -> OwnedStream:
        """With P's first token, if that comes before D's first event."""
        opened: asyncio.Future[FirstReply | None] = asyncio.get_running_loop().create_future()

        def tell(first: FirstReply | None) -> None:
            if not opened.done():
                opened.set_result(first)

        life.on_first = tell
        serving = asyncio.create_task(self.flow.serve(call))
        serving.add_done_callback(lambda _: tell(None))
        try:
            first = await opened
        except BaseException:
            life.delivered.close()
            await _close_late(serving)
            raise
        if first is None:
            return OwnedStream(self, call, await serving)
        return OwnedStream(self, call, first, serving)

    def drain(self) -> None:
        """Have streams leave the workers that drain."""
        if not self._at:
            return
        staying = self._roster.view(self.now()).staying
        for peer in [each for each in self._at if each not in staying]:
            if self._roster.lists(peer, self.now()):
                for stream in list(self._at[peer]):
                    stream.leave("draining")

    def lists(self, peer: PeerId) -> bool:
        return self._roster.lists(peer, self.now())

    def others(self, call: RoutedCall, but: PeerId | None) -> bool:
        """Whether some D could go on, `but` apart."""
        assert call.life is not None
        workers = self._roster.view(self.now()).workers
        takes = call.life.takes
        return any(each.decodes and each.state not in NEVER and each.peer != but and takes(each) for each in workers)

    def stands_at(self, stream: OwnedStream, peer: PeerId) -> None:
        self._at[peer].add(stream)

    def goes_from(self, stream: OwnedStream, peer: PeerId) -> None:
        found = self._at.get(peer)
        if found is not None:
            found.discard(stream)
            if not found:
                del self._at[peer]


class OwnedStream:
    """One of them, or one that is not continued: then it is D's stream, as it comes. Its holder calls `aclose`."""

    __slots__ = (
        "_call", "_first", "_is_noted", "_leaving", "_reply", "_rest", "_serving", "_streams", "_uncounted",
        "more", "served",
    )  # fmt: skip

    def __init__(
        self,
        streams: OwnedStreams,
        call: RoutedCall,
        begun: Reply | FirstReply,
        serving: asyncio.Task[Reply] | None = None,
    ) -> None:
        """`serving`: gets D's reply, where P's first token has come before."""
        self._reply = None if isinstance(begun, FirstReply) else begun
        self._first = begun if isinstance(begun, FirstReply) else None
        self.served: BegunAnswer = begun.served if isinstance(begun, FirstReply) else begun
        self._serving = serving
        self._uncounted = 0  # events of P, while D has not answered
        self._streams = streams
        self._call = call
        self._is_noted = False  # that D has failed
        self._leaving = ""  # why it goes from a D that still answers
        self._rest: bytes | None = None  # what is left to be said when no D is asked any more
        self.more: Callable[[], Awaitable[bytes]] = self._more
        if not isinstance(begun, FirstReply):
            if call.life is not None and call.life.is_asked:
                self._stand()
            else:
                self.more = begun.events.more

    @property
    def reply(self) -> Reply:
        """D's."""
        assert self._reply is not None, "D has not answered yet"
        return self._reply

    def count(self, chunks: int) -> None:
        """So many events that bear a token went on; P's is noted with those of the D that goes on."""
        if self._reply is None:
            self._uncounted += chunks
        else:
            self._reply.chunks += chunks

    def leave(self, why: str) -> None:
        """Have another D go on, if one can, though this one still answers."""
        if not self._leaving and not self._hindrance() and not self._streams.turns.wait_s(self._streams.now()):
            self._leaving = why
            self.reply.events.break_off()

    async def aclose(self) -> None:
        life = self._call.life
        if life is not None:
            life.delivered.close()
        if self._serving is not None:
            await _close_late(self._serving)
        if self._reply is not None:
            if life is not None:
                self._streams.goes_from(self, self._reply.route.decode.peer)
            await self._reply.aclose()

    def _stand(self) -> None:
        events = self.reply.events
        events.expect_within(self._streams.settings.stall_s, self._put_off)
        self._streams.stands_at(self, self.reply.route.decode.peer)

    async def _more(self) -> bytes:
        """Bytes of whole events, as they come; b"" at the end. As `EventStream.more`."""
        life = self._call.life
        assert life is not None
        delivered = life.delivered
        if self._first is not None or self._serving is not None:
            shown = await self._begun()
            if shown:
                return shown
        while self._rest is None:
            if delivered.broken_off:
                self.reply.events.gave_up()
                await self._move("died", None)
                continue
            try:
                data = await self.reply.events.more()
                shown = delivered.told(data) if data else b""
            except SeamError as error:
                fault = self._differs(error)
                if life.is_behind:
                    count(self._streams.stats.waits.moves_failed, "differs")
                    raise fault from None
                await self._move("differed", fault)
                continue
            except ApiError as fault:
                why = self._why()
                if not why:
                    raise
                await self._move(why, fault)
                continue
            if shown or not (data or delivered.broken_off):
                return shown
        rest, self._rest = self._rest, b""
        return rest

    async def _begun(self) -> bytes:
        """P's first token, then b"" as soon as D has answered too."""
        first, self._first = self._first, None
        if first is not None:
            self._rest = b"" if first.is_last else None
            return first.events
        assert self._serving is not None
        self._is_noted = True  # where it was asked
        try:
            self._reply = self.served = await self._serving
        except ApiError as fault:
            hindrance = await self._hindrance_after(fault)
            hindrance = await self._asked_others("refused", frozenset(), hindrance)
            if hindrance:
                self._note_lost("refused", hindrance)
                raise
        else:
            self._is_noted = False
            if self._rest is None:
                self._stand()
        self._serving = None
        self.reply.chunks += self._uncounted
        return b""

    def _why(self) -> str:
        events, peer = self.reply.events, self.reply.route.decode.peer
        if self._leaving or not events.broke:
            return self._leaving
        if not self._streams.lists(peer):
            return "left"
        return "stalled" if events.fault is not None and events.fault.code == "worker_timeout" else "died"

    def _hindrance(self, why: str = "") -> str:
        """Why it cannot move, as `NOT_CONTINUED` has it."""
        streams, life = self._streams, self._call.life
        assert life is not None
        if life.delivered.stuck:
            return life.delivered.stuck
        if life.moves >= streams.settings.moves_max:
            return "moves_max"
        left = None if why == "differed" else self.reply.route.decode.peer
        return "" if streams.others(self._call, left) else "nobody"

    def _put_off(self) -> float:
        """D is silent: until when it may be, 0.0 if another is asked."""
        streams = self._streams
        if streams.now() >= self._call.deadline or not (self._hindrance() or streams.turns.wait_s(streams.now())):
            return 0.0
        return min(streams.now() + streams.settings.stall_s, self._call.deadline)

    async def _move(self, why: str, fault: ApiError | None) -> None:
        """Another D goes on, or it ends here: with `fault`, or with D's own last event."""
        streams, life, old = self._streams, self._call.life, self.reply
        assert life is not None
        delivered = life.delivered
        last = delivered.broken_off
        hindrance, rest = self._hindrance(why), delivered.rest()
        streams.goes_from(self, old.route.decode.peer)
        if why not in ("draining", "differed"):
            self.failed(fault)
        await old.aleave(why)
        if rest:
            self._rest = rest
            return
        avoid = frozenset({old.route.decode.peer}) if why != "differed" else frozenset()
        hindrance = await self._asked_others(why, avoid, hindrance)
        if not hindrance:
            return
        self._note_lost(why, hindrance)
        if fault is not None:
            raise fault
        self._rest = last

    def _note_lost(self, why: str, hindrance: str) -> None:
        count(self._streams.stats.waits.moves_failed, hindrance)
        log.warning(
            "[stream-not-continued] request %s: %s %s, and its stream ends there: %s",
            self._call.name, self.served.route.decode.name, _SAID[why], hindrance, extra={"request": self._call.name},
        )  # fmt: skip

    async def _asked_others(self, why: str, avoid: frozenset[PeerId], hindrance: str) -> str:
        """Until one goes on; else what hindered it."""
        streams = self._streams
        while not hindrance:
            if streams.turns.wait_s(streams.now()) > TURN_S_MAX:  # whoever gives up takes no turn
                return "moves_per_s"
            wait_s = streams.turns.take(streams.now())
            if wait_s:
                await asyncio.sleep(wait_s)
            failed = await self._asked_another(why, avoid)
            if failed is None:
                return ""
            # Whoever was asked may have died too, unnoticed until now, and the D that was left may only have been slow
            avoid = frozenset()
            hindrance = await self._hindrance_after(failed)
        return hindrance

    async def _hindrance_after(self, failed: ApiError) -> str:
        """As `_hindrance_behind`, once those that were full may have room again."""
        hindrance = self._hindrance_behind(failed)
        if not hindrance and failed.retry_after_s:
            left_s = self._call.deadline - self._streams.now()
            await asyncio.sleep(max(min(failed.retry_after_s, left_s), 0.0))
        return hindrance

    def _hindrance_behind(self, failed: ApiError) -> str:
        """Why none is asked after one that failed."""
        streams, life = self._streams, self._call.life
        assert life is not None
        may_again = life.moves < streams.settings.moves_max and streams.now() < self._call.deadline
        may_again = may_again and not failed.is_clients and streams.others(self._call, None)
        return "" if may_again else failed.code or "none"

    async def _asked_another(self, why: str, avoid: frozenset[PeerId]) -> ApiError | None:
        """The fault of those that could not; None: one goes on."""
        streams, life, left = self._streams, self._call.life, self.served.route
        assert life is not None
        life.moves += 1
        life.history = life.delivered.history
        life.delivered.moved()
        self._leaving, self._is_noted = "", False
        try:
            self._reply = self.served = await streams.flow.serve_behind(self._call, left, why, avoid)
        except ApiError as error:
            self._is_noted = True
            return error
        streams.stats.waits.moves[why] += 1
        log.info(
            "[stream-moved] request %s: %s %s; %s goes on behind %d tokens",
            self._call.name, left.decode.name, _SAID[why], self.reply.route.decode.name, len(life.history),
            extra={"request": self._call.name},
        )  # fmt: skip
        self._stand()
        return None

    def failed(self, fault: ApiError | None) -> None:
        """It ended with an error of D's; noted once."""
        if not self._is_noted:
            stats = self._streams.stats
            self._is_noted = True
            count(stats.failures, (fault.code if fault else None) or "none", "mid_stream")
            stats.waits.leg("failed", "decode", self.served.route.decode.name)

    def _differs(self, error: SeamError) -> ApiError:
        worker, events = self.reply.route.decode.name, self.reply.events
        said = f"decode worker {worker} was to go on with an answer: {error}"
        fault = ApiError(502, said, type="worker_error", code="worker_died")
        # Nobody is blamed: either of the two may have lied, and one that lies and dies must not take the other out.
        events.ended, events.fault = False, fault
        return fault


async def _close_late(serving: asyncio.Task[Reply]) -> None:
    """Nobody wants D's reply any more, whether it is there or not."""
    try:
        await cancel([serving])
    finally:  # also where a second cancellation ends the wait
        if serving.done() and not serving.cancelled() and serving.exception() is None:
            await serving.result().aclose()


_SAID = {
    "died": "died", "stalled": "told nothing more", "left": "left the list", "draining": "drains",
    "differed": "sampled another first token than P", "refused": "would not answer behind P's first token",
}  # fmt: skip
