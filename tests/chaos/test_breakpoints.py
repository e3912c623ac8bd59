"""Holding a worker at a named moment: the conductor's end, the worker's end, and copies made by half."""

from __future__ import annotations

import array
import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, WorkerId
from kvbaton.protocol.wire.codec import encode
from kvbaton.protocol.wire.messages import Commit
from kvbaton_proof.chaos.breakpoints import BreakpointServer
from kvbaton_proof.chaos.fault_catalogue import Moment
from kvbaton_proof.chaos.worker_main import BreakpointClient, HalvedTransport, half, hold_messages, put_clock_off

WITHIN_S = 20.0


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


def _with_line(tmp_path: Path, act: Callable[[BreakpointServer, BreakpointClient], Any]) -> Any:
    async def go() -> Any:
        breakpoints = BreakpointServer(tmp_path / "breakpoints")
        await breakpoints.listen()
        try:
            held = await asyncio.to_thread(BreakpointClient, "d0", str(breakpoints.path))
            await _until(lambda: breakpoints.step_clock("d0", 0.0))
            return await act(breakpoints, held)
        finally:
            await breakpoints.close()

    return asyncio.run(go())


def test_whoever_is_at_the_moment_waits_until_it_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton_proof.chaos.worker_main.HOLD_S", WITHIN_S)

    async def act(breakpoints: BreakpointServer, held: BreakpointClient) -> None:
        came = threading.Event()

        def work() -> None:
            while not held.looks_for(Moment.MID_COPY, "p1"):
                came.wait(0.001)
            held.reached(Moment.BEFORE_CLAIM, "p1", "another moment")
            held.reached(Moment.MID_COPY, "p0", "another pair")
            held.reached(Moment.MID_COPY, "p1", "the copy")
            came.set()

        thread = threading.Thread(target=work)
        thread.start()
        async with breakpoints.caught(Moment.MID_COPY, "p1", WITHIN_S) as reached:
            assert reached is not None and (reached.name, reached.what) == ("d0", "the copy")
            assert not came.is_set()
        await _until(came.is_set)
        thread.join()
        held.reached(Moment.MID_COPY, "p1", "nobody looks any more")

    _with_line(tmp_path, act)


def test_who_is_hurt_may_be_the_one_who_is_held(tmp_path: Path) -> None:
    async def act(breakpoints: BreakpointServer, held: BreakpointClient) -> None:
        async with asyncio.timeout(WITHIN_S):
            async with breakpoints.caught(Moment.BEFORE_COMMIT, "d0", 0.01) as nobody:
                assert nobody is None
            await _until(lambda: not held.looks_for(Moment.BEFORE_COMMIT, "p7"))

    _with_line(tmp_path, act)


def test_nobody_waits_for_a_conductor_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton_proof.chaos.worker_main.HOLD_S", 0.01)

    async def act(breakpoints: BreakpointServer, held: BreakpointClient) -> None:
        async with breakpoints.caught(Moment.MID_COPY, "d0", 0.0):
            await _until(lambda: held.looks_for(Moment.MID_COPY, "p0"))
            async with asyncio.timeout(WITHIN_S):
                await asyncio.to_thread(held.reached, Moment.MID_COPY, "p0", "a copy")

    _with_line(tmp_path, act)


def test_a_clock_is_put_off_and_right_again(tmp_path: Path) -> None:
    async def act(breakpoints: BreakpointServer, held: BreakpointClient) -> None:
        off = put_clock_off(held)
        before = off()
        assert breakpoints.step_clock("d0", 7200.0)
        await _until(lambda: off() > before + 7000)
        assert breakpoints.step_clock("d0", 0.0)
        await _until(lambda: off() < before + 7000)
        assert not breakpoints.step_clock("d9", 1.0)

    _with_line(tmp_path, act)


# --- messages


class _LookingForCommits:
    name = "d0"

    def __init__(self) -> None:
        self.told: list[tuple[Moment, str]] = []

    def looks_for(self, moment: Moment, _peer: str) -> bool:
        return moment is Moment.BEFORE_COMMIT

    def reached(self, moment: Moment, _peer: str, what: str) -> None:
        self.told.append((moment, what))


def test_a_message_is_held_before_it_is_sent_and_what_is_no_message_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    line, sent = _LookingForCommits(), []

    def send(_: object, worker: str, frame: bytes) -> bool:
        sent.append((worker, frame, len(line.told)))
        return True

    monkeypatch.setattr(ZmqControl, "send", send)
    hold_messages(line)  # type: ignore[arg-type]
    commit = encode(PeerId(WorkerId("d0"), Incarnation(1)), Incarnation(2), 3, Commit(LeaseId(4), 5))
    assert ZmqControl.send(None, WorkerId("router"), b"\x92\x01\x02")  # type: ignore[arg-type]
    assert ZmqControl.send(None, WorkerId("p0"), commit)  # type: ignore[arg-type]
    assert sent == [("router", b"\x92\x01\x02", 0), ("p0", commit, 1)]
    assert line.told == [(Moment.BEFORE_COMMIT, "d0: Commit to p0")]


# --- copies by half


class _Looking:
    """In place of a line to the conductor: looks for one copy."""

    name = "d0"

    def __init__(self) -> None:
        self.is_looking = True
        self.told: list[str] = []

    def looks_for(self, moment: Moment, peer: str) -> bool:
        return self.is_looking and moment is Moment.MID_COPY and peer == "p0"

    def reached(self, _moment: Moment, _peer: str, what: str) -> None:
        self.is_looking = False
        self.told.append(what)


class _Plane:
    """A data plane that ends copies when it is told to."""

    def __init__(self, ends: bool) -> None:
        self.taken: list[Copy] = []
        self.cancelled: list[int] = []
        self._ends = ends
        self.news: list[Any] = []

    def submit(self, copy: Copy) -> bool:
        self.taken.append(copy)
        if self._ends:
            self.news.append(CopyEnded(copy.job))
        return True

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)

    def drain(self) -> Sequence[Any]:
        news, self.news = self.news, []
        return news


def _copy(job: int = 5) -> Copy:
    peer = PeerId(WorkerId("p0#0"), Incarnation(1))
    return Copy(JobId(job), peer, Direction.READ, 0, 0, array.array("q", [0, 0, 8, 8, 8, 8]))


def test_half_of_a_copy_is_made_and_then_all_of_it() -> None:
    plane, line = _Plane(ends=True), _Looking()
    halved = HalvedTransport(plane, line)  # type: ignore[arg-type]
    plane.news.append(CopyEnded(JobId(4)))
    assert halved.submit(_copy())
    first, whole = plane.taken
    assert list(first.spans) == [0, 0, 8]
    assert first.job != 5
    assert whole == _copy()
    assert line.told == ["d0: half of a read with p0"]
    assert halved.drain() == [CopyEnded(JobId(4)), CopyEnded(JobId(5))]
    assert halved.submit(_copy(6))
    assert len(plane.taken) == 3


def test_a_half_that_does_not_end_stands_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton_proof.chaos.worker_main.HALF_S", 0.01)
    plane = _Plane(ends=False)
    halved = HalvedTransport(plane, _Looking())  # type: ignore[arg-type]
    assert halved.submit(_copy())
    (first,) = plane.taken
    halved.cancel(5)
    assert plane.cancelled == [first.job]
    plane.news.append(CopyEnded(first.job))
    assert halved.drain() == [CopyEnded(JobId(5), Reason.TRANSFER_FAILED)]


def test_half_of_one_span_is_half_of_its_bytes() -> None:
    assert list(half(array.array("q", [16, 32, 9]))) == [16, 32, 4]
    assert msgspec.json.encode(list(half(array.array("q", [1, 2, 1])))) == b"[1,2,1]"
