"""shm: only sealed memory of this host and user is shared, only to proven peers, and it survives its owner."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import socket
import threading
from array import array
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Log
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import Region, allocate, host_identity
from kvbaton.transports.core.transport import Copy, CopyEnded, DeviceEvent, Direction, Loan
from kvbaton.transports.local import region_listener
from kvbaton.transports.local.region_listener import LENGTH, ShmEndpoint, SocketPlace
from kvbaton.transports.net.connection_handshake import SecretRing, admit, greet
from kvbaton.transports.shm.shm_transport import CAPABILITIES, ShmConfig, ShmTransport
from tests.transports.device.test_device_event_wait import Event
from tests.transports.tcp.blocking import D, P, is_closed, play

from .process_harness import ProcessHarness

SIZE = 1 << 20


class Rig:
    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.transports: list[ShmTransport] = []

    def make(self, me: PeerId, lends: bool = True, **options: object) -> ShmTransport:
        transport = ShmTransport(me, ShmConfig(**options))  # type: ignore[arg-type]
        transport.register(0, self.memory(SIZE).view)
        if lends:
            lend_everything(transport, D, P)
        self.transports.append(transport)
        return transport

    def memory(self, size: int) -> Region:
        self.regions.append(allocate(size))
        self.regions[-1].view[:] = random.Random(len(self.regions)).randbytes(size)
        return self.regions[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for transport in rig.transports:
        transport.close()
    for region in rig.regions:
        region.close()


def read(job: int = 1, size: int = 64, region: int = 0, after: DeviceEvent | None = None) -> Copy:
    return Copy(JobId(job), P, Direction.READ, 0, region, array("q", [0, 0, size]), after)


def end(transport: ShmTransport) -> CopyEnded:
    seen: list[CopyEnded] = []
    assert poll(lambda: bool(seen.extend(transport.drain()) or seen), 20)  # type: ignore[arg-type]
    return seen[0]


# --- what may be shared


def test_only_memory_that_can_be_shared_is_registered(rig: Rig) -> None:
    p = rig.make(P)
    with pytest.raises(ValueError, match=r"only memory that transports\.memory allocated or adopted"):
        p.register(1, memoryview(bytearray(SIZE)))


def test_a_slice_of_a_region_is_shared_as_that_slice(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    backing = rig.memory(SIZE)
    p.register(1, backing.view[5000:6000])
    d.connect(P, p.endpoint(D))
    assert d.submit(read(size=1000, region=1)) and end(d).reason is None
    assert bytes(rig.regions[1].view[:1000]) == bytes(backing.view[5000:6000])
    assert d.submit(read(size=1001, region=1)) and end(d).reason is Reason.BAD_SPAN


def test_many_regions_of_one_allocation_take_one_descriptor(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    backing = rig.memory(255 * 64)
    for region in range(1, 256):
        p.register(region, backing.view[(region - 1) * 64 : region * 64])
    d.connect(P, p.endpoint(D))
    for region in (1, 100, 255):
        assert d.submit(read(region, region=region)) and end(d).reason is None
        assert bytes(rig.regions[1].view[:64]) == bytes(backing.view[(region - 1) * 64 : region * 64])


def test_more_allocations_than_descriptors_can_be_passed_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_listener, "DESCRIPTORS_MAX", 1)
    with pytest.raises(ValueError, match="let regions share one"):
        rig.make(P).register(1, rig.memory(64).view)


def test_registered_memory_cannot_be_mapped_for_writing_any_more(rig: Rig) -> None:
    rig.make(P)
    with pytest.raises(PermissionError):
        mmap.mmap(rig.regions[0].fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_what_was_mapped_cannot_be_written_through(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(read()) and end(d).reason is None
    mapped = d._links[P]._mapped
    assert mapped is not None and mapped[0].readonly


# --- to whom


def test_a_peer_on_another_host_is_refused_by_name(rig: Rig) -> None:
    there = msgspec.msgpack.decode(rig.make(P).endpoint(D), type=ShmEndpoint)
    elsewhere = msgspec.structs.replace(there, host="another-boot/4026531840")
    with pytest.raises(ValueError, match="another host"):
        rig.make(D).connect(P, msgspec.msgpack.encode(elsewhere))


@pytest.mark.parametrize(
    "change", [{"owner": D}, {"owner": PeerId(P.worker, Incarnation(9))}, {"name": ""}, {"secret": b"short"}]
)
def test_an_endpoint_that_cannot_be_right_is_refused(rig: Rig, change: dict[str, object]) -> None:
    there = msgspec.msgpack.decode(rig.make(P).endpoint(D), type=ShmEndpoint)
    with pytest.raises(ValueError):
        rig.make(D).connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, **change)))


def test_without_the_secret_there_is_no_memory(rig: Rig) -> None:
    d = rig.make(D)
    there = msgspec.msgpack.decode(rig.make(P).endpoint(D), type=ShmEndpoint)
    d.connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, secret=bytes(32))))
    assert d.submit(read())
    ended = end(d)
    assert ended.reason is Reason.UNREACHABLE and "pair with it again" in ended.detail


def test_what_a_reader_is_given_cannot_be_written_in_any_way(rig: Rig) -> None:
    there = msgspec.msgpack.decode(rig.make(P).endpoint(D), type=ShmEndpoint)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + there.name)
        play(sock, lambda wire: greet(wire, there.secret, D, P, 0))
        sock.settimeout(20)
        length, (fd, *_), _, _ = socket.recv_fds(sock, LENGTH.size, 8)
    assert length
    before = os.pread(fd, 64, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    for again in (fd, os.open(f"/proc/self/fd/{fd}", os.O_RDWR)):  # who has it can open it anew, and meets the seal
        for change in (
            lambda fd=again: os.pwrite(fd, b"changed", 0),
            lambda fd=again: os.ftruncate(fd, 0),
            lambda fd=again: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            lambda fd=again: _punch(fd),
        ):
            with pytest.raises(OSError):
                change()
        os.close(again)
    assert len(before) == 64


def _punch(fd: int) -> None:
    """Zeros instead of what was there: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "punch")


def test_a_process_of_another_user_is_turned_away_at_the_door(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = rig.make(P), rig.make(D)
    endpoint = p.endpoint(D)
    monkeypatch.setattr(region_listener.os, "geteuid", lambda: 12345)
    there = msgspec.msgpack.decode(endpoint, type=ShmEndpoint)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + there.name)
        assert is_closed(stranger)
    d.connect(P, endpoint)
    assert d.submit(read())
    ended = end(d)
    assert ended.reason is Reason.UNREACHABLE and "belongs to user" in ended.detail


def test_a_disconnected_peer_gets_nothing_new_and_a_new_endpoint_lets_it_in_again(rig: Rig) -> None:
    """Loans stand when a pair is made anew: the lender does not lend the same blocks twice."""
    p, d = rig.make(P), rig.make(D)
    old = p.endpoint(D)
    p.disconnect(D)
    d.connect(P, old)
    assert d.submit(read()) and end(d).reason is Reason.UNREACHABLE
    d.connect(P, p.endpoint(D))
    assert d.submit(read(2)) and end(d).reason is None


# --- peers that lie


class Liar:
    """A door that admits D and passes whatever the test wants."""

    def __init__(self, table: bytes, fds: list[int]) -> None:
        keyring = SecretRing()
        self._listener = socket.socket(socket.AF_UNIX)
        name = f"kvbaton-liar-{os.getpid()}-{id(self)}"
        self._listener.bind("\0" + name)
        self._listener.listen()
        self.endpoint = msgspec.msgpack.encode(ShmEndpoint(P, host_identity(), name, keyring.mint(D)))

        def serve() -> None:
            with contextlib.suppress(OSError):  # until it is shut down
                while True:
                    sock, _ = self._listener.accept()
                    with sock, contextlib.suppress(OSError):
                        sock.settimeout(20)
                        play(sock, lambda wire: admit(wire, keyring, P))
                        socket.send_fds(sock, [LENGTH.pack(len(table)) + table], fds)

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._listener.close()


def sealed(rig: Rig) -> Region:
    region = rig.memory(SIZE)
    region.seal_writes()
    return region


@pytest.mark.parametrize(
    "places",
    [
        [SocketPlace(0, 0, 0, SIZE + 4096)],
        [SocketPlace(0, 0, SIZE, 1)],
        [SocketPlace(0, 0, -1, 10)],
        [SocketPlace(0, 0, 0, -1)],
        [SocketPlace(0, 0, 2**63 - 1, 2**63 - 1)],
        [SocketPlace(0, 0, 0, 10), SocketPlace(1, 1, 0, 10)],
        [SocketPlace(0, -1, 0, 10)],
    ],
)
def test_a_table_that_does_not_fit_its_descriptors_is_refused(rig: Rig, places: list[SocketPlace]) -> None:
    liar = Liar(msgspec.msgpack.encode(places), [sealed(rig).fd])
    d = rig.make(D)
    d.connect(P, liar.endpoint)
    assert d.submit(read())
    ended = end(d)
    assert ended.reason is Reason.UNREACHABLE and "cannot be mapped" in ended.detail
    liar.close()


def test_memory_that_could_shrink_under_us_is_refused(rig: Rig) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    liar = Liar(msgspec.msgpack.encode([SocketPlace(0, 0, 0, SIZE)]), [fd])
    d = rig.make(D)
    d.connect(P, liar.endpoint)
    assert d.submit(read())
    assert "not sealed" in end(d).detail
    liar.close()
    os.close(fd)


def test_descriptors_that_were_refused_are_not_kept(rig: Rig) -> None:
    region, d = sealed(rig), rig.make(D)
    d.connect(P, rig.make(P).endpoint(D))
    assert d.submit(read(0)) and end(d).reason is None
    before = len(os.listdir("/proc/self/fd"))
    for job in range(1, 6):
        liar = Liar(b"\xc1", [region.fd] * 8)
        d.connect(P, liar.endpoint)
        assert d.submit(read(job)) and end(d).reason is Reason.UNREACHABLE
        liar.close()
    d.disconnect(P)
    assert poll(lambda: len(os.listdir("/proc/self/fd")) <= before, 20)


# --- the life of a mapping


@pytest.mark.slow
def test_a_peer_that_dies_can_still_be_read(shm_processes: ProcessHarness) -> None:
    pair = shm_processes.pair(SIZE, SIZE)
    log = Log(shm_processes, pair.near)
    pair.far.memory[:] = random.Random(5).randbytes(SIZE)
    copy = Copy(JobId(1), pair.far.peer, Direction.READ, 0, 0, array("q", [0, 0, 64]))
    assert pair.near.transport.submit(copy) and log.end(1).reason is None
    shm_processes.kill(pair.far)
    whole = Copy(JobId(2), pair.far.peer, Direction.READ, 0, 0, array("q", [0, 0, SIZE]))
    assert pair.near.transport.submit(whole) and log.end(2).reason is None
    assert bytes(pair.near.memory) == bytes(pair.far.memory)
    shm_processes.reset()


def test_a_peer_is_mapped_before_the_first_copy(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    d.connect(P, p.endpoint(D))
    assert poll(lambda: d._links[P]._mapped is not None, 20)
    p.close()
    assert d.submit(read()) and end(d).reason is None


def test_a_peer_that_is_not_there_fails_the_copy_and_is_tried_again(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    endpoint = p.endpoint(D)
    p.close()
    d.connect(P, endpoint)
    for job in range(3):
        assert d.submit(read(job))
        ended = end(d)
        assert ended.reason is Reason.UNREACHABLE and "cannot map the memory of" in ended.detail


def test_a_peer_that_accepts_and_says_nothing_is_given_up_at_the_deadline(rig: Rig) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"\0kvbaton-mute-{os.getpid()}")
        mute.listen()
        there = ShmEndpoint(P, host_identity(), f"kvbaton-mute-{os.getpid()}", bytes(32))
        d = rig.make(D, dial_deadline_s=0.1)
        d.connect(P, msgspec.msgpack.encode(there))
        assert d.submit(read())
        assert "within 0.1 s" in end(d).detail


def test_a_copy_that_waits_for_a_mapping_is_cancelled_at_once(rig: Rig) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"\0kvbaton-mute-{os.getpid()}")
        mute.listen()
        there = ShmEndpoint(P, host_identity(), f"kvbaton-mute-{os.getpid()}", bytes(32))
        d = rig.make(D, dial_deadline_s=1000.0)
        d.connect(P, msgspec.msgpack.encode(there))
        assert d.submit(read())
        d.cancel(JobId(1))
        assert d.drain() == [CopyEnded(JobId(1), Reason.CANCELLED)]


def test_a_forgotten_peers_memory_is_unmapped(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(read()) and end(d).reason is None

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return maps.read().count("memfd:kvbaton")

    gc.collect()  # what earlier tests left
    before = mappings()
    d.disconnect(P)
    assert poll(lambda: mappings() <= before - 1, 20)


# --- the rest of the interface


def test_a_copy_waits_for_its_device_event_and_fails_with_it(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    d.connect(P, p.endpoint(D))
    good, bad = Event(), Event(RuntimeError("device lost"))
    assert d.submit(read(1, after=good)) and d.submit(read(2, after=bad)) and d.submit(read(3))
    assert end(d).job == 3
    good.done.set()
    assert end(d) == CopyEnded(JobId(1))
    bad.done.set()
    assert end(d).reason is Reason.TRANSFER_FAILED


def test_writes_are_not_offered(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(msgspec.structs.replace(read(), direction=Direction.WRITE))
    assert end(d).reason is Reason.NO_TRANSPORT
    with pytest.raises(NotImplementedError, match="cannot fence"):
        d.fence(P)
    assert (CAPABILITIES.can_write, CAPABILITIES.can_fence, CAPABILITIES.same_host) == (False, False, True)


def test_an_unknown_local_region_is_refused_before_anything_is_dialled(rig: Rig) -> None:
    d = rig.make(D)
    d.connect(P, rig.make(P).endpoint(D))
    assert d.submit(msgspec.structs.replace(read(), local_region=9))
    assert end(d).reason is Reason.BAD_SPAN


def test_closing_under_load_ends_every_copy_and_leaves_no_thread(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D, lends=False)
    d.connect(P, p.endpoint(D))
    for job in range(200):
        assert d.submit(read(job, SIZE))
    d.close()
    d.close()
    assert len([event for event in d.drain() if isinstance(event, CopyEnded)]) == 200
    assert poll(lambda: not [thread for thread in threading.enumerate() if thread.name.endswith(str(D))], 20)


def test_threads_are_named_and_bounded(rig: Rig) -> None:
    before = set(threading.enumerate())  # of earlier tests, some may be about to end
    p, d = rig.make(P), rig.make(D, threads=3)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(1, SIZE)) and end(d).reason is None
    mine = [thread.name for thread in set(threading.enumerate()) - before if str(D) in thread.name]
    assert len(mine) == 4


def mapped(transport: ShmTransport) -> bool:
    return transport._links[P]._mapped is not None


def test_who_has_only_greeted_gets_no_memory(rig: Rig) -> None:
    """Before, any member that had said Hello could map all KV of a rank, without a ticket."""
    p, d = rig.make(P, lends=False), rig.make(D, lends=False)
    d.connect(P, p.endpoint(D))
    assert d.submit(Copy(JobId(1), P, Direction.READ, 0, 0, array("q")))
    assert end(d).reason is None, "a pair finds out that it can be reached"
    assert d.submit(read(2))
    assert not poll(lambda: bool(d.drain()), 0.3) and not mapped(d)
    p.lend(Loan(JobId(7), PeerId(WorkerId("other"), D.incarnation), Direction.READ, ((0,),)))
    assert not poll(lambda: bool(d.drain()), 0.2) and not mapped(d), "what is lent to another opens nothing"
    p.lend(Loan(JobId(8), D, Direction.READ, ((0,),)))
    assert end(d).reason is None and mapped(d)
    for job in (7, 8):
        p.cancel(JobId(job))
        assert end(p) == CopyEnded(JobId(job), Reason.CANCELLED)


def test_a_new_pairing_needs_a_loan_that_stands(rig: Rig) -> None:
    p, d = rig.make(P, lends=False), rig.make(D)
    p.lend(Loan(JobId(7), D, Direction.READ, ((0,),)))
    d.connect(P, p.endpoint(D))
    assert d.submit(read(1)) and end(d).reason is None
    p.cancel(JobId(7))
    assert end(p).job == 7
    d.disconnect(P)
    p.disconnect(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(2))
    assert not poll(lambda: bool(d.drain()), 0.3)
    p.lend(Loan(JobId(8), D, Direction.READ, ((0,),)))
    assert end(d).reason is None


def test_a_loan_that_outlived_its_pairing_admits_nobody_after_its_end(rig: Rig) -> None:
    p, d = rig.make(P, lends=False), rig.make(D)
    p.lend(Loan(JobId(8), D, Direction.READ, ((0,),)))
    d.connect(P, p.endpoint(D))
    assert d.submit(read(1)) and end(d).reason is None
    p.disconnect(D)  # before the loan is taken back: one that pairs again meanwhile has it still
    p.cancel(JobId(8))
    d.disconnect(P)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(2)) and not poll(lambda: bool(d.drain()), 0.3) and not mapped(d)


def test_lines_that_wait_are_bounded_and_one_for_each_peer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_listener, "WAITING_MAX", 1)
    p, d, other = rig.make(P, lends=False), rig.make(D), rig.make(PeerId(WorkerId("e"), Incarnation(9)))
    for reader, me in ((d, D), (other, PeerId(WorkerId("e"), Incarnation(9)))):
        reader.connect(P, p.endpoint(me))
        assert reader.submit(Copy(JobId(1), P, Direction.READ, 0, 0, array("q")))
        assert (end(reader).reason is None) is (reader is d)
    assert p.refusals["full"] >= 1 and len(p._door._waiting) == 1


def test_a_transport_that_closes_ends_what_it_has_lent(rig: Rig) -> None:
    p = rig.make(P, lends=False)
    p.lend(Loan(JobId(8), D, Direction.READ, ((0,),)))
    p.close()
    assert CopyEnded(JobId(8), Reason.CANCELLED) in p.drain()
