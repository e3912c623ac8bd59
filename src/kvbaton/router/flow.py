"""One request's life: a pair is chosen, P and D are asked in the order of the mode, and every failure has its outcome.

Laws: another pair is asked only while no byte has gone to the client, a bounded number of times, and always with a new
ticket. When one leg fails, or the client goes, the other leg is closed, which aborts the request in that worker.

    failure                                         outcome
    the request is at fault (4xx of a worker)       passed on as it is
    P refuses, dies, hangs, answers nonsense        another P, at most `prefill_retries` times; then 502, 504, 429, 503
    D likewise before its first byte                another pair, at most `decode_retries` times; then the same
    D says that the handoff failed                  another pair, of two others if there are; then 502 with the reason
    D dies after its first byte                     an error event ends the stream
    P fails after D's first byte                    counted; D's answer goes on, since D has what it needs
    nobody can be paired                            503 with Retry-After
    the deadline passes                             504, or an error event
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.api.bodies import Kind
from kvbaton.api.errors import out_of_time, unavailable
from kvbaton.api.gather import cancel
from kvbaton.api.params import FIELD, LEASE_FOR_PULL, Mode, source_params, target_params
from kvbaton.protocol.ids import PeerId
from kvbaton.router import policy
from kvbaton.router.asking import TicketMinter, decode_body, prefill_body, without_params
from kvbaton.router.directory import Roster
from kvbaton.router.legs import EventStream, Leg, LegError, Legs, decoded
from kvbaton.router.policy import Pair
from kvbaton.router.settings import RouterSettings
from kvbaton.router.stats import RouterStats

log = logging.getLogger(__name__)


class Call(msgspec.Struct, frozen=True):
    """One request to engines: one prompt, one choice."""

    kind: Kind
    fields: Mapping[str, Any]
    headers: Mapping[str, str]
    modes: tuple[Mode, ...]  # the first that some pair can serve is taken
    stream: bool
    deadline: float  # on the event loop's clock
    name: str = ""  # for the log


class Reply:
    """D's answer from its first byte on. Whoever has it calls `aclose`."""

    def __init__(
        self, flow: Flow, pair: Pair, decoding: bytes | EventStream, source: asyncio.Task[Any] | None = None
    ) -> None:
        self.pair = pair
        self._flow = flow
        self._decoding = decoding
        self._source = source  # P's leg, where it may outlast D's first byte

    @property
    def body(self) -> bytes:
        """A whole answer."""
        assert isinstance(self._decoding, bytes), "a stream has no body"
        return self._decoding

    def events(self) -> AsyncGenerator[bytes, None]:
        assert isinstance(self._decoding, EventStream), "a whole answer has no events"
        return self._decoding.events()

    async def aclose(self) -> None:
        ended = True
        if isinstance(self._decoding, EventStream):
            ended = self._decoding.ended
            self._decoding.close()
        if self._source is None:
            return
        if ended:
            self._flow.settle(self._source)
        else:
            await cancel([self._source])


@dataclass(slots=True)
class _Tries:
    """What one call has been through."""

    failed: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    avoid: set[PeerId] = field(default_factory=set)  # not asked again
    shun: set[PeerId] = field(default_factory=set)  # asked only if nobody else is there
    tried: list[Pair] = field(default_factory=list)  # not asked again together
    last: LegError | None = None


class Flow:
    """Carries calls out. One per router."""

    def __init__(
        self, legs: Legs, roster: Roster, settings: RouterSettings, stats: RouterStats, minter: TicketMinter | None
    ) -> None:
        self._legs = legs
        self._roster = roster
        self._settings = settings
        self._stats = stats
        self._minter = minter  # None: nobody here can sign, so only pull is served
        self._turns: dict[Mode, Iterator[int]] = defaultdict(itertools.count)
        self._settling: set[asyncio.Task[None]] = set()

    async def serve(self, call: Call) -> Reply:
        """D's answer once its first byte is there; `ApiError` if there will be none."""
        try:
            async with asyncio.timeout_at(call.deadline):
                return await self._serve(call)
        except TimeoutError:
            raise out_of_time("the request's deadline passed before the first byte") from None

    async def _serve(self, call: Call) -> Reply:
        tries = _Tries()
        while True:
            mode, pair = self._choose(call, tries)
            self._stats.tries[mode] += 1
            try:
                if mode is Mode.PULL:
                    return await self._one_after_other(call, pair)
                return await self._both_at_once(call, pair, mode)
            except LegError as error:
                self._note(call, pair, tries, error)

    def _choose(self, call: Call, tries: _Tries) -> tuple[Mode, Pair]:
        workers = self._roster.workers(_now())
        wanted = [mode for mode in call.modes if mode is Mode.PULL or self._minter is not None]
        mode = policy.common_mode(workers, wanted) or call.modes[0]
        turn = next(self._turns[mode])
        pair = policy.choose(workers, mode, turn, avoid=tries.avoid, shun=tries.shun, tried=tries.tried)
        if pair is not None and mode in wanted:
            return mode, pair
        if tries.last is not None:
            raise tries.last.fault
        raise unavailable(f"no pair can serve mode {mode}: {policy.explain(workers, mode)}")

    def _note(self, call: Call, pair: Pair, tries: _Tries, error: LegError) -> None:
        """Blame a failed leg, and raise its fault where nobody else may be asked."""
        self._stats.failures[f"{error.side}:{error.fault.code}"] += 1
        if error.lost and self._roster.failed(error.worker, _now()):
            log.warning("%s; it is asked last for a while", error)
        tries.failed[error.side] += 1
        tries.last = error
        if error.is_handoff:  # either may be to blame; with one P or one D the other may still pair anew
            tries.tried.append(pair)
            tries.shun |= {pair.prefill.peer, pair.decode.peer}
        else:
            tries.avoid.add(error.worker.peer)
        allowed = self._settings.prefill_retries if error.side == "prefill" else self._settings.decode_retries
        if error.final or tries.failed[error.side] > allowed:
            raise error.fault
        self._stats.retries[error.side] += 1
        log.info("request %s on %s: %s; trying another pair", call.name, pair, error)

    async def _one_after_other(self, call: Call, pair: Pair) -> Reply:
        leg = self._prefill_leg(call, pair, LEASE_FOR_PULL)
        answer = decoded(leg, await self._legs.whole(leg, self._settings.first_byte_s))
        params = answer.get(FIELD)
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            raise leg.failed(502, f"answered without {FIELD} that D could use", "bad_answer")
        return Reply(self, pair, await self._decode(call, pair, params))

    async def _both_at_once(self, call: Call, pair: Pair, mode: Mode) -> Reply:
        assert self._minter is not None
        ticket = self._minter.mint(pair)
        self._stats.tickets += 1
        leg = self._prefill_leg(call, pair, source_params(mode, ticket))
        source = asyncio.create_task(self._legs.whole(leg, self._settings.first_byte_s))
        target = asyncio.create_task(self._decode(call, pair, target_params(mode, ticket)))
        try:
            await asyncio.wait((source, target), return_when=asyncio.FIRST_COMPLETED)
            if source.done() and not (target.done() and target.exception() is None):
                source.result()  # P's failure is the cause of D's, where both have failed
            return Reply(self, pair, await target, source)
        except BaseException:
            await cancel((source, target))
            if not target.cancelled() and target.exception() is None:
                _close(target.result())
            raise

    async def _decode(self, call: Call, pair: Pair, params: Mapping[str, Any]) -> bytes | EventStream:
        body = decode_body(call.fields, params)
        leg = Leg("decode", pair.decode, call.kind.value, call.headers, body)
        if call.stream:
            return await self._legs.stream(leg, call.deadline)
        answer = await self._legs.whole(leg)
        decoded(leg, answer)
        return without_params(answer)

    def _prefill_leg(self, call: Call, pair: Pair, params: Mapping[str, Any]) -> Leg:
        body = prefill_body(call.fields, params)
        return Leg("prefill", pair.prefill, call.kind.value, call.headers, body)

    def settle(self, source: asyncio.Task[Any]) -> None:
        """D has all it needs: let P finish in its own time, but not for ever."""
        task = asyncio.create_task(self._settle(source))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, source: asyncio.Task[Any]) -> None:
        try:
            await asyncio.wait([source], timeout=self._settings.settle_s)
        finally:
            if not source.done():
                await cancel([source])
        if not source.cancelled() and (error := source.exception()) is not None:
            code = error.fault.code if isinstance(error, LegError) else type(error).__name__
            self._stats.failures[f"prefill:late:{code}"] += 1

    async def close(self) -> None:
        """Nothing that this flow started is left afterwards."""
        await cancel(list(self._settling))


def _close(decoding: bytes | EventStream) -> None:
    if isinstance(decoding, EventStream):
        decoding.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
