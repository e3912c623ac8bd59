"""The two ends of a rank link without sockets or threads: lines that keep frames, loops that turn when a test says."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.protocol.effects import Capabilities
from kvbaton.ranks.rank_messages import RankInvitation

FAKE = Capabilities("fake", one_sided=False, can_write=True, can_fence=True, cancels=True, same_host=False)


class Line:
    """A rank's line to its engine, or an engine's lines to its ranks."""

    endpoint = "tcp://127.0.0.1:5000"
    strangers = 4

    def __init__(self, number: int) -> None:
        self.keys = tuple(f"{number:039d}{last}" for last in "123")
        self.counters: Counter[str] = Counter()
        self.inbox: list[Any] = []
        self.sent: list[Any] = []
        self.wakes = self.closed = 0

    def wake(self) -> None:
        self.wakes += 1

    def wait(self, timeout_s: float | None) -> None: ...

    def send(self, *frame: Any) -> None:
        self.sent.append(frame[0] if len(frame) == 1 else frame)

    def receive(self) -> Sequence[Any]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        self.closed += 1


class Loop:
    def __init__(self, name: str, turn: Callable[[float], float | None], finish: Callable[[], None]) -> None:
        self.name, self.turn, self.finish = name, turn, finish
        self.started = 0
        self.timeouts: list[float] = []
        self.is_stopping = False

    def start(self) -> None:
        self.started += 1

    def stop(self, timeout_s: float) -> bool:
        self.timeouts.append(timeout_s)
        return timeout_s > 1


class Waiting(contextlib.nullcontext[None]):
    """Nobody waits; how long somebody would have is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []
        self.notified = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self.meanwhile()
        return predicate()

    def notify_all(self) -> None:
        self.notified += 1


class StubCarrier:
    """Implements `Carrier`; no two hosts of a test have the same keys."""

    numbers = itertools.count(101)

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.loops: list[Loop] = []
        self.sleepers: list[Any] = []

    def session(self) -> int:
        return next(self.numbers)

    def dial(self, invitations: Sequence[RankInvitation], clock: Any) -> Line:
        return self.listen(0, "", clock)

    def listen(self, rank: int, host: str, clock: Any) -> Line:
        self.lines.append(Line(self.session()))
        return self.lines[-1]

    def loop(self, name: str, sleeper: Any, turn: Any, finish: Any, clock: Any) -> Loop:
        self.sleepers.append(sleeper)
        self.loops.append(Loop(name, turn, finish))
        return self.loops[-1]

    def arrival(self) -> Waiting:
        return Waiting()


class Heard:
    """A transport, a store or a link of which it counts what it was asked, in order; `journal` is shared by several."""

    def __init__(self, name: str = "", journal: list[tuple[Any, ...]] | None = None, **answers: Any) -> None:
        self.name = name
        self.journal: list[tuple[Any, ...]] = [] if journal is None else journal
        self.answers = answers
        self.capabilities = FAKE
        self.throws: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("refused", "refusals", "mapped_bytes", "turned_away"):
            raise AttributeError(name)

        def ask(*about: Any) -> Any:
            self.journal.append((self.name, name, *about) if self.name else (name, *about))
            if name in self.throws:
                raise RuntimeError(f"{name} threw")
            answer = self.answers.get(name)
            return answer() if callable(answer) else answer

        return ask
