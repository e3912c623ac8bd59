"""Faults between the engines, put in from outside: copies that wait or fail, control frames that are lost.

Law: only the edges are touched (the data planes' `submit`, the control plane's `send`), and a tap that is closed leaves
nothing behind; everything between the edges is what runs in production.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvbaton.control.zmq import ZmqControl
from kvbaton.ranks.rank_messages import ENGINE
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport

_PLANES: tuple[Any, ...] = (TcpTransport, ShmTransport)


class Copies:
    """The hand on the tap: `decide` is asked for each copy and says "go", "wait" or "fail"."""

    def __init__(self) -> None:
        self.decide: Callable[[Any], str] = lambda copy: "go"
        self.seen = 0
        self.begun = 0
        self.waiting = 0
        self.jobs: set[int] = set()  # of copies that were asked for
        self._wakers: list[Callable[[], None]] = []

    def hold(self) -> None:
        self.decide = lambda copy: "wait"

    def fail(self) -> None:
        self.decide = lambda copy: "fail"
        self.wake()

    def release(self) -> None:
        self.decide = lambda copy: "go"
        self.wake()

    def let(self, count: int) -> None:
        """Let `count` more copies through, then hold."""
        upto = self.begun + count
        self.decide = lambda copy: "go" if self.begun < upto else "wait"
        self.wake()

    def wake(self) -> None:
        """Have the nodes offer again what had to wait."""
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def ask(self, plane: Any, copy: Any) -> str:
        self.seen += 1
        self.jobs.add(copy.job)
        verdict = self.decide(copy)
        if verdict == "wait":
            self.waiting += 1
            waker = plane._jobs._waker
            if waker is not None and waker not in self._wakers:
                self._wakers.append(waker)
        elif verdict == "go":
            self.begun += 1
        return verdict


@contextlib.contextmanager
def copies() -> Iterator[Copies]:
    """A tap on every data plane of this process."""
    tap = Copies()
    genuine = {plane: plane.submit for plane in _PLANES}

    def tapped(submit: Callable[..., bool]) -> Callable[..., bool]:
        def ask_first(self: Any, copy: Any) -> bool:
            verdict = tap.ask(self, copy)
            if verdict == "fail":
                raise OSError("the tap let this copy fail")
            return verdict == "go" and submit(self, copy)

        return ask_first

    try:
        for plane, submit in genuine.items():
            plane.submit = tapped(submit)
        yield tap
    finally:
        for plane, submit in genuine.items():
            plane.submit = submit
        tap.release()


class Frames:
    """`loses` is asked for each control frame: (from whose control, to whom)."""

    def __init__(self) -> None:
        self.loses: Callable[[Any, str], bool] = lambda control, worker: False
        self.lost = 0


@contextlib.contextmanager
def frames() -> Iterator[Frames]:
    """A tap on every control plane between engines; what ranks tell their own engine does not leave the machine."""
    tap, genuine = Frames(), ZmqControl.send

    def send(self: Any, worker: Any, frame: bytes) -> bool:
        if worker != ENGINE and tap.loses(self, worker):
            tap.lost += 1
            return True
        return genuine(self, worker, frame)

    try:
        ZmqControl.send = send  # type: ignore[method-assign]
        yield tap
    finally:
        ZmqControl.send = genuine  # type: ignore[method-assign]


@contextlib.contextmanager
def failing_once(owner: Any, name: str, call: int = 1) -> Iterator[list[int]]:
    """The `call`-th call of `owner.name` raises, behind its guard where it has one; the list counts the calls."""
    genuine, calls = owner.__dict__[name], [0]
    plain = genuine.__func__ if isinstance(genuine, staticmethod | classmethod) else genuine
    guarded = getattr(plain, "__wrapped__", None)
    inner = guarded or plain

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError(f"put in by the conformance suite: {name} fails")
        return inner(*args, **kwargs)

    if guarded is not None:
        fails.__name__ = name
        [cell] = [each for each in plain.__closure__ or () if each.cell_contents is guarded]
        put, put_back = partial(setattr, cell, "cell_contents", fails), partial(setattr, cell, "cell_contents", guarded)
    else:
        wrapped: Any = type(genuine)(fails) if plain is not genuine else fails
        put, put_back = partial(setattr, owner, name, wrapped), partial(setattr, owner, name, genuine)
    put()
    try:
        yield calls
    finally:
        put_back()
