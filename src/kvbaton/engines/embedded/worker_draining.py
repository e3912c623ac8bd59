"""Graceful shutdown of a worker: the router stops choosing it, it finishes its requests, and exits.

Laws: a request that comes while the worker drains is served like any other, since the router chose it before it knew
(in pull, D's part comes a whole prefill later); only in the second half of the time are new ones refused. It exits once
nothing was held for `quiet_s`, so that the last answer has reached its reader; at the latest after `drain_s`. A second
signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvbaton.control.registry.statements import HeldReport
from kvbaton.engines.embedded.http_worker import Finished, RefusedError, Token, TokenBackend
from kvbaton.engines.embedded.server_plan import GenerateRequest, ModelCard

log = logging.getLogger(__name__)

POLL_S = 0.05


class DrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long a drain may take, and what it waits for."""

    drain_s: float = 30.0
    quiet_s: float = 1.0
    confirm_s: float = 2.0  # of a registry that is away
    forget_s: float = 0.0  # serve at least this long: until routers without a goodbye have forgotten this worker


class DrainStep(enum.Enum):
    SERVE = "serve"  # new requests too
    FINISH = "finish"  # new ones are refused
    LEAVE = "leave"


@dataclass(slots=True)
class Drain:
    """One drain so far. Instants are on one clock; `known_at` is when the router was known to follow."""

    begun_at: float
    settings: DrainSettings
    known_at: float = math.inf
    busy_at: float = -math.inf  # when something was last held, or asked for

    def step(self, held: HeldReport, now: float) -> DrainStep:
        """What to do now."""
        settings = self.settings
        if now >= self.begun_at + settings.drain_s:
            return DrainStep.LEAVE
        told_at = min(self.known_at, self.begun_at + settings.confirm_s)
        quiet_at = max(told_at, self.busy_at) + settings.quiet_s
        if held.nothing and now >= max(quiet_at, self.begun_at + settings.forget_s):
            return DrainStep.LEAVE
        return DrainStep.SERVE if now < self.begun_at + settings.drain_s / 2 else DrainStep.FINISH


class DrainingDoor:
    """A backend that can be shut. Implements `server.Backend`; of one event loop."""

    def __init__(self, backend: TokenBackend) -> None:
        self.inside = 0  # requests under way
        self.came = 0  # requests ever
        self.is_draining = False
        self.is_shut = False
        self._backend = backend

    def models(self) -> Sequence[ModelCard]:
        return self._backend.models()

    def ready(self) -> bool:
        """False from the start of a drain: health checks should go to another worker."""
        return not self.is_draining and self._backend.ready()

    def stats(self) -> Mapping[str, Any]:
        return {**self._backend.stats(), "draining": int(self.is_draining)}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token | Finished, None]:
        if self.is_shut:
            raise RefusedError("stopping", "this worker is draining; use another")
        self.inside += 1
        self.came += 1
        try:
            async with contextlib.aclosing(self._backend.generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.inside -= 1


class Listing(Protocol):
    """A worker's place on the registry's list. Never blocks; `RegistryGroup` is one."""

    def drain(self) -> None: ...
    @property
    def is_known_to_drain(self) -> bool: ...
    def tell_held(self, held: str) -> None: ...


class Stopping:
    """How to stop: the first signal begins a drain, unless the registry's order has, and the second ends it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.at_once = asyncio.Event()
        self._signals = 0
        self._loop = asyncio.get_running_loop()

    def ask(self) -> None:
        """A signal. One that comes while an ordered drain is in progress asks for the same, not for haste."""
        self._signals += 1
        self.begun.set()
        if self._signals > 1:
            self.at_once.set()

    def now(self) -> None:
        """Nothing is left to wait for: the engine died, or the parent process is gone."""
        self.at_once.set()
        self.begun.set()

    def ask_from_thread(self) -> None:
        """The registry's order; said again, it is the same order."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
            self._loop.call_soon_threadsafe(self.begun.set)

    def _heard(self, number: signal.Signals, action: Callable[[], None]) -> None:
        log.info("[stopping] %s", number.name)
        action()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain, and a second one ends that; SIGHUP stops at once."""
        actions = {signal.SIGTERM: self.ask, signal.SIGINT: self.ask, signal.SIGHUP: self.now}
        for number, action in actions.items():
            self._loop.add_signal_handler(number, self._heard, number, action)
        try:
            yield
        finally:
            for number in actions:
                self._loop.remove_signal_handler(number)


async def drain(
    door: DrainingDoor,
    listing: Listing,
    held: Callable[[], HeldReport],
    settings: DrainSettings,
    at_once: asyncio.Event,
    on_shut: Callable[[], object] = lambda: None,
) -> HeldReport:
    """Drain until nothing is left to wait for, or `at_once`; returns what is left. New requests are refused then."""
    clock = asyncio.get_running_loop().time
    state = Drain(clock(), settings)
    door.is_draining = True
    listing.drain()
    log.info("[stopping] drains, for %g s at most: %s", settings.drain_s, held())
    came = door.came
    while not at_once.is_set():
        now, left = clock(), held()
        if listing.is_known_to_drain:
            state.known_at = min(state.known_at, now)
        if came != door.came or not left.nothing:
            came, state.busy_at = door.came, now
        listing.tell_held(str(left))
        step = state.step(left, now)
        if step is not DrainStep.SERVE and not door.is_shut:
            door.is_shut = True
            on_shut()
        if step is DrainStep.LEAVE:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(at_once.wait(), POLL_S)
    door.is_shut = True
    left = held()
    if not left.nothing:
        log.warning("[drain-cut] stopped with %s left", left)
    else:
        log.info("[stopping] drained: nothing is left")
    return left
