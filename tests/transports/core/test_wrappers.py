"""Wrappers of a data plane: one that learns its name later, one that starts every copy late, one that misplaces."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.transport import CopyEnded, Transport, TransportEvent
from kvbaton.transports.core.wrapped import (
    DelayedTransport,
    MisplacingTransport,
    UnnamedTransport,
    WrappedTransport,
    faulty,
    misplaced,
)
from kvbaton.transports.tcp.tcp_transport import TcpTransport

P, D = PeerId(WorkerId("p#0"), Incarnation(1)), PeerId(WorkerId("d#0"), Incarnation(2))


def memory_of(fill: int) -> memoryview:
    return memoryview(bytearray([fill]) * 4096)


def drained(transport: Transport, count: int, within_s: float = 20.0) -> list[TransportEvent]:
    found: list[TransportEvent] = []
    deadline = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < deadline:
        found.extend(transport.drain())
        time.sleep(0.005)
    return found


def read_of(job: int) -> Copy:
    return Copy(JobId(job), P, Direction.READ, 0, 0, array("q", [0, 0, 4096]))


@pytest.fixture
def source() -> Iterator[TcpTransport]:
    transport = TcpTransport(P)
    transport.register(0, memory_of(7))
    lend_everything(transport, D)
    yield transport
    transport.close()


def reader(memory: memoryview) -> TcpTransport:
    transport = TcpTransport(D)
    transport.register(0, memory)
    return transport


class TestUnnamed:
    def test_once_named_it_is_the_real_one(self, source: TcpTransport) -> None:
        into, woken = memory_of(0), []

        def make(me: PeerId) -> Transport:
            assert me == D
            return reader(into)

        late = UnnamedTransport(TcpTransport.capabilities, make)
        late.set_waker(lambda: woken.append(True))
        assert late.drain() == ()
        late.open(D)
        late.connect(P, source.endpoint(D))
        assert late.submit(read_of(1)) and drained(late, 1) == [CopyEnded(JobId(1))]
        assert bytes(into) == bytes([7]) * 4096
        assert poll(lambda: bool(woken), 20), "the waker is called after the news is there"
        late.close()

    def test_before_it_has_a_name_it_does_nothing_and_says_so(self) -> None:
        late = UnnamedTransport(TcpTransport.capabilities, TcpTransport)
        for use in (lambda: late.endpoint(P), lambda: late.connect(P, b""), lambda: late.submit(read_of(1))):
            with pytest.raises(RuntimeError, match="no owner yet"):
                use()
        late.close()

    def test_it_takes_one_name_only(self) -> None:
        late = UnnamedTransport(TcpTransport.capabilities, TcpTransport)
        late.open(D)
        with pytest.raises(RuntimeError, match="has a name already"):
            late.open(P)
        late.close()


class TestDelayed:
    def test_copies_arrive_whole_and_late(self, source: TcpTransport) -> None:
        into = memory_of(0)
        late = DelayedTransport(reader(into), 0.2)
        late.connect(P, source.endpoint(D))
        begun = time.monotonic()
        assert late.submit(read_of(1)) and drained(late, 1) == [CopyEnded(JobId(1))]
        assert time.monotonic() - begun >= 0.2 and into[0] == 7
        late.close()

    def test_what_is_cancelled_while_it_waits_moves_nothing(self, source: TcpTransport) -> None:
        into = memory_of(0)
        late = DelayedTransport(reader(into), 30.0)
        late.connect(P, source.endpoint(D))
        assert late.submit(read_of(1)) and late.submit(read_of(2))
        late.cancel(JobId(1))
        late.disconnect(P)
        ended = drained(late, 2)
        assert ended == [CopyEnded(JobId(1), Reason.CANCELLED), CopyEnded(JobId(2), Reason.PEER_GONE)]
        assert into[0] == 0
        late.close()


class TestMisplacing:
    """The control of the tests that compare answers: bytes land, but not where they belong."""

    def test_every_piece_as_long_as_the_first_brings_what_the_first_should(self) -> None:
        asked = Copy(JobId(1), P, Direction.READ, 0, 0, array("q", [0, 100, 8, 8, 200, 8, 16, 300, 4, 20, 400, 8]))
        assert list(misplaced(asked).spans) == [0, 100, 8, 8, 100, 8, 16, 300, 4, 20, 100, 8]
        written = msgspec.structs.replace(asked, direction=Direction.WRITE)
        assert list(misplaced(written).spans) == [0, 100, 8, 0, 200, 8, 16, 300, 4, 0, 400, 8]

    def test_in_product_form_it_does_in_every_layer(self) -> None:
        woven = Weave(array("q", [0, 100, 8, 8, 200, 8]), array("q", [0, 0, 1000, 1000]))
        asked = Copy(JobId(1), P, Direction.READ, 0, 0, array("q"), None, woven)
        found = misplaced(asked).weave
        assert found is not None and list(found.flat()) == [0, 100, 8, 8, 100, 8, 1000, 1100, 8, 1008, 1100, 8]

    @pytest.mark.parametrize("size", [8, 9])
    def test_of_one_piece_the_second_half_does_and_every_place_is_filled(self, size: int) -> None:
        asked = Copy(JobId(1), P, Direction.READ, 0, 0, array("q", [0, 100, size]))
        spans = misplaced(asked).spans
        assert list(spans) == [0, 100, 4, 4, 100, 4, *([8, 108, 1] if size == 9 else [])]

    def test_a_number_spares_smaller_copies_in_product_form_too(self, tmp_path: Path) -> None:
        """What a device's data plane is given: the row of metadata beside the pages of a layer."""
        taken: list[Copy] = []

        class Taking(WrappedTransport):
            def submit(self, copy: Copy) -> bool:
                taken.append(copy)
                return True

            def close(self) -> None: ...

        flag = tmp_path / "flag"
        flag.write_text("2049")
        transport = MisplacingTransport(Taking(None), 0.0, flag)
        row = Weave(array("q", [0, 0, 2048]), array("q", [0, 0]))
        layer = Weave(array("q", [0, 4096, 1024, 1024, 0, 1024]), array("q", [0, 0, 8192, 8192]))
        for job, weave in enumerate((row, layer)):
            transport.submit(Copy(JobId(job), P, Direction.READ, 0, 0, array("q"), None, weave))
        until = time.monotonic() + 10.0
        while len(taken) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        transport.close()
        first, second = taken
        assert first.weave == row
        assert second.weave == Weave(array("q", [0, 4096, 1024, 1024, 4096, 1024]), layer.shifts)

    def test_a_number_in_the_file_spares_smaller_copies(self, tmp_path: Path) -> None:
        flag = tmp_path / "flag"
        flag.write_text("9")
        source_bytes = bytes(range(16))
        other = TcpTransport(P)
        other.register(0, memoryview(bytearray(source_bytes)))
        lend_everything(other, D)
        memory = memory_of(0)
        transport = faulty(reader(memory), 0.0, str(flag))
        transport.connect(P, other.endpoint(D))
        for job, size in ((1, 8), (2, 10)):
            assert transport.submit(Copy(JobId(job), P, Direction.READ, 0, 0, array("q", [0, 0, size])))
            assert drained(transport, 1) == [CopyEnded(JobId(job))]
            assert (bytes(memory[:size]) == source_bytes[:size]) is (size < 9)
        transport.close()
        other.close()

    def test_only_while_the_file_is_there(self, tmp_path: Path) -> None:
        source_bytes = bytes(range(256)) * 16
        other = TcpTransport(P)
        other.register(0, memoryview(bytearray(source_bytes)))
        lend_everything(other, D)
        flag, memory = tmp_path / "flag", memory_of(0)
        transport = faulty(reader(memory), 0.0, str(flag))
        try:
            transport.connect(P, other.endpoint(D))
            assert transport.submit(read_of(1))
            assert drained(transport, 1) == [CopyEnded(JobId(1), None)]
            assert bytes(memory) == source_bytes
            flag.touch()
            copy = Copy(JobId(2), P, Direction.READ, 0, 0, array("q", [0, 0, 4096 - 16]))
            assert transport.submit(copy)
            assert drained(transport, 1) == [CopyEnded(JobId(2), None)]
            assert bytes(memory) != source_bytes
        finally:
            transport.close()
            other.close()

    def test_without_a_fault_it_is_the_plane_itself(self, source: TcpTransport) -> None:
        assert faulty(source, 0.0, "") is source
