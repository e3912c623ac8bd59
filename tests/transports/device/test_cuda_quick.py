"""A copy that finds the device idle is launched by who submits it; whatever goes wrong there is the copy's failure."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import JobId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction, Spans
from kvbaton.transports.cuda import cuda_client, cuda_transport
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton.transports.cuda.cuda_listener import Exported
from kvbaton.transports.cuda.cuda_runner import SMALL_NUMBERS
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from tests.transports.device.fake_gpu import FakeGpu
from tests.transports.tcp.blocking import D, P

SIZE = 1 << 16
REFUSED = CudaError("cuFake", 2, "CUDA_ERROR_OUT_OF_MEMORY")
STICKY = CudaError("cuFake", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


class Device(FakeGpu):
    """At work until it is let on; says which threads launched, waited and came in."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()
        self.by: list[tuple[str, threading.Thread]] = []
        self.inside = 0

    def _called(self, name: str) -> None:
        self.by.append((name, threading.current_thread()))
        super()._called(name)

    def __enter__(self) -> Device:
        self._called("push")
        self.inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.inside -= 1
        self._called("pop")

    def wait(self, event: int) -> None:
        super().wait(event)
        assert self.go_on.wait(20)

    def who(self, name: str) -> set[bool]:
        """Whether this thread was among those that made such calls, and whether others were."""
        return {thread is threading.current_thread() for called, thread in self.by if called == name}


class Rig:
    def __init__(self) -> None:
        self.gpu = Device()
        self.d, self.p = (CudaTransport(me, CudaConfig(), self.gpu) for me in (D, P))
        self.views = []
        for transport in (self.d, self.p):
            address = self.gpu.allocate(SIZE)
            transport.register(0, DeviceMemory(address, SIZE))
            self.views.append(self.gpu.regions[address].view)
        lend_everything(self.p, D)
        self.views[1][:] = random.Random(1).randbytes(SIZE)
        self.d.connect(P, self.p.endpoint(D))

    def end(self) -> CopyEnded:
        seen: list[CopyEnded] = []
        assert poll(lambda: bool(seen.extend(self.d.drain()) or seen), 20)  # type: ignore[arg-type, func-returns-value]
        assert len(seen) == 1
        return seen[0]

    def warm(self) -> None:
        """Memory is open, a table is there, and the device is idle again."""
        assert self.d.submit(read(1)) and self.end().reason is None
        assert poll(lambda: self.d._launcher._runner._slots.qsize() == 4, 10)
        self.gpu.by.clear()
        self.gpu.calls.clear()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(cuda_client, "EXPORTED", Exported())
    rig = Rig()
    yield rig
    rig.gpu.go_on.set()
    rig.gpu.refusals.clear()
    for transport in (rig.d, rig.p):
        transport.close()
    assert not rig.gpu.opened and not rig.gpu.live and not rig.gpu.inside and not rig.gpu._hosts


def read(job: int, *rows: tuple[int, int, int], weave: Weave | None = None) -> Copy:
    spans: Spans = array("q", [number for row in rows or (((0, 0, 64),) if weave is None else ()) for number in row])
    return Copy(JobId(job), P, Direction.READ, 0, 0, spans, weave=weave)


def test_a_copy_is_launched_by_the_thread_that_submits_it_and_waited_for_by_another(rig: Rig) -> None:
    rig.warm()
    assert rig.d.submit(read(2, (100, 200, 300)))
    assert rig.gpu.who("move_rows") == {True} and not rig.gpu.inside
    assert rig.end().reason is None and rig.gpu.who("wait") == {False}
    assert rig.views[0][100:400] == rig.views[1][200:500]


def test_the_first_copy_opens_memory_and_so_is_launched_by_the_mover(rig: Rig) -> None:
    assert poll(lambda: rig.d._links[P].remote is not None, 10)
    nothing = Copy(JobId(9), P, Direction.READ, 0, 0, array("q"))  # by which a pair tries the plane
    assert rig.d.submit(nothing) and rig.end().reason is None
    assert rig.d.submit(read(1)) and rig.end().reason is None  # and this one has no table yet
    assert [rig.gpu.who(name) for name in ("open", "allocate_pinned", "move_rows")] == [{False}] * 3


def test_what_comes_while_the_device_is_at_work_is_queued(rig: Rig) -> None:
    rig.warm()
    rig.gpu.go_on.clear()
    assert rig.d.submit(read(2)) and rig.d.submit(read(3))
    assert poll(lambda: rig.gpu.calls.count("move_rows") == 2, 10)
    assert [thread is threading.current_thread() for name, thread in rig.gpu.by if name == "move_rows"] == [True, False]


@pytest.mark.parametrize("what", ["numbers", "bytes", "spans and a weave"])
def test_what_takes_a_while_to_begin_is_left_to_the_mover(rig: Rig, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.warm()
    rows = [(0, 0, 1)] * (SMALL_NUMBERS // 3 if what == "numbers" else 2)
    weave = Weave(array("q", (0, 0, 64)), array("q", (0, 0))) if what == "spans and a weave" else None
    if what == "bytes":
        monkeypatch.setattr(cuda_transport, "QUICK_BYTES", 1)
    assert rig.d.submit(read(2, *rows, weave=weave)) and rig.end().reason is None
    assert rig.gpu.who("move_rows") == {False}


def test_spans_outside_are_refused_on_whichever_thread(rig: Rig) -> None:
    rig.warm()
    assert rig.d.submit(read(2, (0, SIZE, 1)))
    assert rig.end().reason is Reason.BAD_SPAN and not rig.gpu.calls.count("move_rows")
    assert rig.d.submit(read(3)) and rig.end().reason is None and rig.gpu.who("move_rows") == {True}


@pytest.mark.parametrize("call", ["push", "copy", "move_rows", "record", "pop"])
def test_a_refused_call_is_the_copys_failure_and_the_next_one_works(rig: Rig, call: str) -> None:
    rig.warm()
    rig.gpu.refusals[call] = REFUSED
    assert rig.d.submit(read(2))
    ended = rig.end()
    assert (ended.reason, ended.at_rest) == (Reason.TRANSFER_FAILED, True) and "OUT_OF_MEMORY" in ended.detail
    rig.gpu.refusals.clear()
    assert not rig.d.broken and rig.d.submit(read(3)) and rig.end().reason is None


def test_a_launch_that_failed_in_part_ends_when_the_device_is_done_with_the_rest(rig: Rig) -> None:
    rig.warm()
    rig.gpu.go_on.clear()
    rig.gpu.refusals["pop"] = REFUSED
    assert rig.d.submit(read(2)) and rig.gpu.who("move_rows") == {True}
    assert poll(lambda: "wait" in rig.gpu.calls, 10) and not rig.d.drain()
    rig.gpu.refusals.clear()
    rig.gpu.go_on.set()
    assert rig.end().reason is Reason.TRANSFER_FAILED


def test_an_error_that_stays_breaks_the_plane_and_is_not_raised(rig: Rig) -> None:
    rig.warm()
    rig.gpu.refusals["move_rows"] = STICKY
    assert rig.d.submit(read(2)) and rig.end().reason is Reason.TRANSFER_FAILED
    assert "ILLEGAL_ADDRESS" in rig.d.broken
    rig.gpu.refusals.clear()
    assert rig.d.submit(read(3)) and rig.end().reason is Reason.TRANSFER_FAILED
    assert rig.gpu.calls.count("move_rows") == 1


def test_a_copy_that_is_cancelled_after_its_launch_ends_when_the_device_is_done(rig: Rig) -> None:
    rig.warm()
    rig.gpu.go_on.clear()
    assert rig.d.submit(read(2))
    rig.d.cancel(JobId(2))
    assert not rig.d.drain()
    rig.gpu.go_on.set()
    ended = rig.end()
    assert (ended.reason, ended.at_rest) == (Reason.CANCELLED, True)


def test_memory_is_closed_after_the_launch_that_reads_it_and_not_before(rig: Rig) -> None:
    rig.warm()
    rig.gpu.go_on.clear()
    assert rig.d.submit(read(2)) and rig.gpu.who("move_rows") == {True}
    rig.d.disconnect(P)
    assert poll(rig.d._launcher._runner._due.empty, 10) and rig.gpu.opened and not rig.d.drain()
    rig.gpu.go_on.set()
    ended = rig.end()
    assert (ended.reason, ended.at_rest) == (Reason.PEER_GONE, True)
    assert poll(lambda: not rig.gpu.opened, 10)


def test_whoever_submits_does_not_wait_for_a_thread_that_is_beginning(rig: Rig) -> None:
    rig.warm()
    runner = rig.d._launcher._runner
    with runner._beginning:
        assert rig.d.submit(read(2)) and not rig.gpu.calls.count("move_rows")
    assert rig.end().reason is None and rig.gpu.who("move_rows") == {False}


def test_a_copy_submitted_as_the_plane_closes_ends(rig: Rig) -> None:
    rig.warm()
    rig.gpu.go_on.clear()
    assert rig.d.submit(read(2))
    closing = threading.Thread(target=rig.d.close)
    closing.start()
    assert poll(lambda: rig.d._launcher._runner._closed, 10)
    rig.gpu.go_on.set()
    closing.join(20)
    assert not closing.is_alive() and rig.end().reason is Reason.CANCELLED
    assert not rig.d.submit(read(3))
