"""What carries a rank link, as its two ends see it: they decide (`rank_link`, `rank_host`), and this brings and wakes.

In production that is `rank_sockets` (ZeroMQ and threads), in the simulator a seeded channel under its clock
(`sim.rank_channel`); the ends are the same code.

Laws: a line may lose frames, but never alters or misattributes one; what it hands over of one connection is in order.
No call waits but `Sleeper.wait` and `Arrival.wait_for`. A loop calls `turn` and `finish` one at a time, `finish` once
and last; whatever `turn` throws does not end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from kvbaton.control.poll_loop import Sleeper

if TYPE_CHECKING:
    from kvbaton.ranks.rank_messages import RankInvitation

Clock = Callable[[], float]


class Lines(Sleeper, Protocol):
    """The engine's ends of the lines to all of its ranks."""

    counters: Counter[str]

    def send(self, rank: int, frame: bytes) -> None:
        """Queue a frame; where the queue is full it is lost and counted."""

    def receive(self) -> Sequence[tuple[int, bytes]]:
        """What has come, each frame with the rank that sent it."""

    def close(self) -> None: ...


class RankLine(Sleeper, Protocol):
    """One rank's end of the line to its engine."""

    endpoint: str
    keys: tuple[str, str, str]
    """This rank's public key, and the engine's public and secret one: for the invitation."""

    @property
    def strangers(self) -> int:
        """Connections that came and were not the engine's."""

    def send(self, frame: bytes) -> None:
        """Lost where there is no connection."""

    def receive(self) -> Sequence[bytes]: ...

    def close(self) -> None: ...


class CarrierLoop(Protocol):
    """Turns of one end."""

    @property
    def is_stopping(self) -> bool: ...

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> bool:
        """After its current turn; False when that took longer."""


class Arrival(Protocol):
    """A lock, and the wait for what another thread brings, during which the lock is free."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Carrier(Protocol):
    """Makes all of these."""

    def session(self) -> int:
        """The number of a new stream: not 0, and nobody guesses it."""

    def dial(self, invitations: Sequence[RankInvitation], clock: Clock) -> Lines: ...

    def listen(self, rank: int, host: str, clock: Clock) -> RankLine:
        """With keys minted for it. ValueError when `host` is nothing that the engine can dial."""

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> CarrierLoop: ...

    def arrival(self) -> Arrival: ...
