"""The carrier of a rank link: the two ends (`rank_link`, `rank_host`) decide, the carrier delivers and wakes.

In production that is `rank_sockets` (ZeroMQ and threads), in the simulator a seeded channel under its clock
(`sim.rank_channel`); the ends are the same code.

Laws: a line may lose frames, but never alters or misattributes one; frames of one connection are delivered in order. No
call waits except `Sleeper.wait` and `Arrival.wait_for`. A loop calls `turn` and `finish` one at a time, `finish` once
and last; an exception of `turn` does not end it.
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
        """Queue a frame; if the queue is full it is lost and counted."""

    def receive(self) -> Sequence[tuple[int, bytes]]:
        """Received frames, each with the rank that sent it."""

    def close(self) -> None: ...


class RankLine(Sleeper, Protocol):
    """One rank's end of the line to its engine."""

    endpoint: str
    keys: tuple[str, str, str]
    """This rank's public key, and the engine's public and secret one: for the invitation."""

    @property
    def strangers(self) -> int:
        """Connections that were not the engine's."""

    def send(self, frame: bytes) -> None:
        """Lost if there is no connection."""

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
    """A lock, and a wait for another thread's result, during which the lock is free."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Carrier(Protocol):
    """The factory of all of these."""

    def session(self) -> int:
        """The number of a new stream: not 0, and unguessable."""

    def dial(self, invitations: Sequence[RankInvitation], clock: Clock) -> Lines: ...

    def listen(self, rank: int, host: str, clock: Clock) -> RankLine:
        """With keys minted for it. ValueError when the engine cannot connect to `host`."""

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> CarrierLoop: ...

    def arrival(self) -> Arrival: ...
