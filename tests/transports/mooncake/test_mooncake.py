"""mooncake keeps the contract of `Transport`, over the real engine, within one process and across two."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Case, InProcessHarness, Log, Pair, check_transport
from kvbaton.testing.transport_case import LARGE_BYTES, READ, SMALL_BYTES, WRITE, copy, fill, noise, offered
from kvbaton.testing.transport_harness import DEADLINE_S, poll
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested
from kvbaton.transports.mooncake import mooncake_engine, mooncake_link
from kvbaton.transports.mooncake.mooncake_engine import (
    MooncakeEndpoint,
    MooncakeEngine,
    MooncakeMissing,
    MooncakePlace,
    SliceState,
    address_of,
    parse,
)
from kvbaton.transports.mooncake.mooncake_transport import CAPABILITIES, MooncakeConfig, MooncakeTransport
from tests.transports.process_harness import ProcessHarness, allocated_in

pytestmark = pytest.mark.library("mooncake")

OFFERED = offered(ProcessHarness("mooncake"))
HERE = [case for case in check_transport.cases if case.needs <= OFFERED - {"kill", "pause"}]
APART = [case for case in check_transport.cases if case.needs & {"kill", "pause"} and case.needs <= OFFERED]
FAR = PeerId(WorkerId("far"), Incarnation(1))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessHarness]:
    harness = ProcessHarness("mooncake")
    yield harness
    harness.close()


@pytest.fixture
def hasty() -> Iterator[ProcessHarness]:
    """Deadlines that run out in a test's time."""
    config = MooncakeConfig(dial_deadline_s=1.0, stall_s=0.5, copies_max=8)
    harness = ProcessHarness("mooncake", lambda me: MooncakeTransport(me, config))
    yield harness
    harness.close()


def arrives(log: Log, pair: Pair, jobs: Iterator[int], size: int = 64) -> None:
    """A read arrives, however often a busy machine was too slow for hasty deadlines."""

    def once() -> bool:
        job = next(jobs)
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, size)]))
        return log.rest(job).reason is None

    assert poll(once, DEADLINE_S), log.events


def in_process(regions: list[Region]) -> InProcessHarness:
    return InProcessHarness(MooncakeTransport, allocated_in(regions), CAPABILITIES)


@pytest.mark.parametrize("case", HERE, ids=str)
def test_within_one_process_the_contract_is_kept(case: Case, regions: list[Region]) -> None:
    case(in_process(regions))


@pytest.mark.slow
@pytest.mark.parametrize("case", APART, ids=str)
def test_a_peer_in_another_process_keeps_the_contract(case: Case, processes: ProcessHarness) -> None:
    case(processes)


# --- rest


@pytest.mark.slow
def test_the_engine_alone_lets_data_land_late(hasty: ProcessHarness) -> None:
    """What the transport must prevent is real: the same reads, on an engine that is not closed."""
    pair = hasty.pair(LARGE_BYTES, LARGE_BYTES)
    fill(pair.far.memory, 2)
    there = parse(pair.far.peer, pair.far.transport.endpoint(pair.near.peer))
    target, source = address_of(pair.near.memory), there.regions[0].address
    engine = MooncakeEngine("127.0.0.1")
    first = engine.start_read(there.session, target, source, 64)
    assert poll(lambda: engine.state(first) is SliceState.ARRIVED, DEADLINE_S)
    hasty.pause(pair.far)
    step = 64 << 10
    late = [engine.start_read(there.session, target + at, source + at, step) for at in range(0, LARGE_BYTES, step)]
    assert all(engine.state(number) is SliceState.MOVING for number in late)
    marks = fill(pair.near.memory, 3)
    hasty.resume(pair.far)
    assert poll(lambda: bytes(pair.near.memory) == bytes(pair.far.memory), DEADLINE_S), "nothing landed late"
    assert bytes(pair.near.memory) != marks
    engine.close()


@pytest.mark.slow
def test_a_read_that_timed_out_is_quarantined_until_its_engine_is_closed_and_never_lands(
    hasty: ProcessHarness,
) -> None:
    pair = hasty.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(hasty, pair.near)
    fill(pair.far.memory, 2)
    arrives(log, pair, count(100))
    hasty.pause(pair.far)
    for job in (2, 3):
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, LARGE_BYTES)]))
    ends = [log.rest(job) for job in (2, 3)]
    assert [end.reason for end in ends] == [Reason.TRANSFER_TIMEOUT] * 2
    assert not ends[0].at_rest, "it ended before its reads were at rest, and said otherwise"
    order = [event for event in log.events if event.job == 2]  # type: ignore[union-attr]
    assert [type(event) for event in order] == [CopyEnded, CopyRested]
    marks = fill(pair.near.memory, 3)
    hasty.resume(pair.far)
    arrives(log, pair, count(10_000), 4096)
    assert bytes(pair.near.memory) == bytes(pair.far.memory[:4096]) + marks[4096:]


@pytest.mark.slow
def test_cancelling_one_copy_of_a_stopped_peer_does_not_fail_the_others(
    processes: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[int] = []

    class Noting(MooncakeEngine):
        def start_read(self, session: str, target: int, source: int, size: int) -> int:
            number = super().start_read(session, target, source, size)
            targets.append(target)
            return number

    monkeypatch.setattr(mooncake_link, "MooncakeEngine", Noting)
    pair = processes.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(processes, pair.near)
    fill(pair.far.memory, 2)
    half = LARGE_BYTES // 2
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    log.end(1)
    processes.pause(pair.far)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, half)]))
    assert pair.near.transport.submit(copy(3, pair.far, READ, [(half, half, half)]))
    last = address_of(pair.near.memory) + LARGE_BYTES - (512 << 10)
    assert poll(lambda: last in targets, DEADLINE_S), "the last slice of the last copy was not begun"
    pair.near.transport.cancel(JobId(2))
    assert log.rest(2) == CopyEnded(JobId(2), Reason.CANCELLED, True)
    marks = fill(pair.near.memory, 3)
    assert not log.ends(3)
    processes.resume(pair.far)
    assert log.end(3).reason is None
    assert bytes(pair.near.memory) == marks[:half] + bytes(pair.far.memory[half:])
    processes.reset()


@pytest.mark.slow
def test_copies_in_line_for_a_peer_that_never_answers_end_by_the_dial_deadline(hasty: ProcessHarness) -> None:
    pair = hasty.pair(SMALL_BYTES, SMALL_BYTES)
    log = Log(hasty, pair.near)
    hasty.pause(pair.far)  # the library itself would wait for 60 s
    assert pair.near.transport.submit(copy(1, pair.far, READ, []))  # a copy of nothing opens the way too
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.UNREACHABLE, True) and "did not answer" in end.detail
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 64)]))
    assert log.end(2).at_rest
    hasty.resume(pair.far)
    arrives(log, pair, count(3))  # a peer that is back is reached again


@pytest.mark.slow
def test_a_full_queue_refuses_while_a_peer_is_stopped(hasty: ProcessHarness) -> None:
    pair = hasty.pair(SMALL_BYTES, SMALL_BYTES)
    log = Log(hasty, pair.near)
    assert pair.near.transport.submit(copy(0, pair.far, READ, [(0, 0, 64)]))
    log.end(0)
    hasty.pause(pair.far)
    taken = [pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, 64)])) for job in range(1, 12)]
    assert taken == [True] * 8 + [False] * 3
    hasty.resume(pair.far)
    assert all(log.rest(job) for job in range(1, 9))
    assert pair.near.transport.submit(copy(20, pair.far, READ, [(0, 0, 64)]))


# --- batches


def test_a_copy_of_thousands_of_slices_never_has_more_than_1024_under_way(
    regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    live: set[int] = set()
    most = 0

    class Counting(MooncakeEngine):
        def start_read(self, session: str, target: int, source: int, size: int) -> int:
            nonlocal most
            number = super().start_read(session, target, source, size)
            live.add(number)
            most = max(most, len(live))
            return number

        def state(self, number: int) -> SliceState:
            state = super().state(number)
            if state is not SliceState.MOVING:
                live.discard(number)
            return state

    monkeypatch.setattr(mooncake_link, "MooncakeEngine", Counting)
    harness = in_process(regions)
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    source = fill(pair.far.memory, 2)
    spans = [(16 * index, SMALL_BYTES - 16 * (index + 1), 16) for index in range(SMALL_BYTES // 16)]
    assert len(spans) == 4096
    assert pair.near.transport.submit(copy(1, pair.far, READ, spans))
    assert Log(harness, pair.near).end(1).reason is None
    assert bytes(pair.near.memory) == b"".join(source[there : there + 16] for _, there, _ in spans)
    assert 256 < most <= mooncake_engine.SLICES_MAX and not live
    harness.reset()


# --- who is there


@pytest.mark.slow
def test_a_peer_that_was_killed_and_came_back_at_its_port_is_a_new_peer() -> None:
    low = random.randrange(18_000, 31_000)  # not where engines of other tests look for a port, 15000 to 17000
    before = ProcessHarness("mooncake", MC_MIN_RPC_PORT=str(low), MC_MAX_RPC_PORT=str(low + 3))
    first = before.pair(SMALL_BYTES, SMALL_BYTES)  # not dialled: a port that was in use stays taken for a minute
    near, log = first.near, Log(before, first.near)
    port = parse(first.far.peer, first.far.transport.endpoint(near.peer)).port
    before.kill(first.far)
    after = ProcessHarness("mooncake", MC_MIN_RPC_PORT=str(port), MC_MAX_RPC_PORT=str(port + 3))
    found: list[tuple[PeerId, bytes]] = []

    def at_the_same_port() -> bool:
        after.reset()
        pair = after.pair(SMALL_BYTES, SMALL_BYTES)
        fill(pair.far.memory, 5)
        found.append((pair.far.peer, pair.far.transport.endpoint(near.peer)))
        return parse(*found[-1]).port == port

    try:
        assert poll(at_the_same_port, DEADLINE_S), "the engine never took the old port"
        marks = fill(near.memory, 3)
        assert near.transport.submit(copy(1, first.far, READ, [(0, 0, 64)]))
        end = log.end(1)
        assert (end.reason, end.at_rest) == (Reason.UNREACHABLE, True), end
        assert bytes(near.memory) == marks
        peer = PeerId(WorkerId("far"), Incarnation(77))
        there = msgspec.structs.replace(parse(*found[-1]), owner=peer)
        near.transport.connect(peer, msgspec.msgpack.encode(there))
        assert near.transport.submit(Copy(JobId(2), peer, READ, 0, 0, array("q", [0, 0, 64])))
        assert log.end(2).reason is None
        assert bytes(near.memory) == noise(SMALL_BYTES, 5)[:64] + marks[64:]
    finally:
        before.close()
        after.close()


def test_a_process_with_another_mark_is_not_read_from(regions: list[Region]) -> None:
    harness = in_process(regions)
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    marks = fill(pair.near.memory, 3)
    there = parse(pair.far.peer, pair.far.transport.endpoint(pair.near.peer))
    other = msgspec.structs.replace(there, mark=bytes(len(there.mark)))
    pair.near.transport.connect(pair.far.peer, msgspec.msgpack.encode(other))
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    end = Log(harness, pair.near).end(1)
    assert (end.reason, end.at_rest) == (Reason.UNREACHABLE, True) and "is not far@" in end.detail
    assert bytes(pair.near.memory) == marks
    harness.reset()


@pytest.mark.slow
def test_a_peer_that_was_killed_in_the_middle_is_reached_again_at_its_new_endpoint(processes: ProcessHarness) -> None:
    first = processes.pair(LARGE_BYTES, LARGE_BYTES)
    near, log = first.near, Log(processes, first.near)
    assert near.transport.submit(copy(1, first.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    processes.kill(first.far)
    assert near.transport.submit(copy(2, first.far, READ, [(0, 0, 64)]))
    end = log.end(2)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True), end
    second = processes.pair(LARGE_BYTES, LARGE_BYTES)
    fill(second.far.memory, 5)
    near.transport.disconnect(first.far.peer)
    near.transport.connect(second.far.peer, second.far.transport.endpoint(near.peer))
    assert near.transport.submit(copy(3, second.far, READ, [(0, 0, LARGE_BYTES)]))
    assert log.end(3).reason is None
    assert bytes(near.memory) == bytes(second.far.memory)
    processes.reset()


# --- the door


GOOD = MooncakeEndpoint(FAR, "127.0.0.1", 15000, 4096, bytes(16), {0: MooncakePlace(8192, 100)})


@pytest.mark.parametrize(
    "changes",
    [
        {"owner": PeerId(WorkerId("other"), Incarnation(1))},
        {"host": "localhost"},
        {"host": "127.0.0.1:80"},
        {"port": 0},
        {"port": 65536},
        {"mark": b"short"},
        {"mark_address": 0},
        {"regions": {0: MooncakePlace(0, 100)}},
        {"regions": {0: MooncakePlace(8192, 0)}},
        {"regions": {0: MooncakePlace((1 << 64) - 10, 100)}},
        {"regions": {0: MooncakePlace(-1, 100)}},
        {"regions": {index: MooncakePlace(8192, 1) for index in range(300)}},
        {"host": "1" * (20 << 10)},
    ],
    ids=str,
)
def test_an_endpoint_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    assert parse(FAR, msgspec.msgpack.encode(GOOD)) == GOOD
    with pytest.raises(ValueError):
        parse(FAR, msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **changes)))


def test_an_endpoint_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not an endpoint of mooncake"):
        parse(FAR, msgspec.msgpack.encode(GOOD).replace(b"mooncake1", b"mooncake2"))


def test_a_write_is_refused_and_a_fence_is_not_offered(regions: list[Region]) -> None:
    harness = in_process(regions)
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    assert pair.near.transport.submit(copy(1, pair.far, WRITE, [(0, 0, 64)]))
    assert Log(harness, pair.near).end(1).reason is Reason.NO_TRANSPORT
    with pytest.raises(NotImplementedError):
        pair.near.transport.fence(pair.far.peer)
    harness.reset()


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(DEADLINE_S)


def test_nothing_is_read_before_the_device_is_done(regions: list[Region]) -> None:
    harness = in_process(regions)
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    log = Log(harness, pair.near)
    event = Event()
    waits = Copy(JobId(1), pair.far.peer, READ, 0, 0, array("q", [0, 0, 64]), event)
    assert pair.near.transport.submit(waits)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(64, 64, 64)]))
    assert log.end(2).reason is None and not log.ends(1)
    pair.far.memory[:64] = noise(64, 9)
    event.done.set()
    assert log.end(1).reason is None
    assert pair.near.memory[:64] == noise(64, 9)
    harness.reset()


def test_memory_that_cannot_be_shared_is_refused() -> None:
    transport = MooncakeTransport(FAR)
    for memory in (memoryview(b"read only"), memoryview(bytearray(0))):
        with pytest.raises(ValueError, match="region 0"):
            transport.register(0, memory)
    transport.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "::1"])
def test_an_address_that_peers_cannot_dial_is_refused(host: str) -> None:
    with pytest.raises(ValueError):
        MooncakeConfig(host=host)


def test_close_leaves_no_thread_and_no_socket_behind(regions: list[Region]) -> None:
    def held() -> tuple[int, int]:
        sockets = [name for name in os.listdir("/proc/self/fd") if _link(name).startswith("socket:")]
        return len(os.listdir("/proc/self/task")), len(sockets)

    def used() -> InProcessHarness:
        harness = in_process(regions)
        pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
        assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
        Log(harness, pair.near).end(1)
        return harness

    used().reset()  # the first engine of a process starts what the library keeps for good
    before = _settled(held)
    harness = used()
    assert held() > before
    harness.reset()
    assert poll(lambda: held() <= before, DEADLINE_S), (before, held())


def _settled(held: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What it tells once it tells the same for a while: what earlier tests left is on its way out."""
    told = [held()]

    def stays() -> bool:
        time.sleep(0.3)
        told.append(held())
        return told[-1] == told[-2]

    assert poll(stays, DEADLINE_S), told
    return told[-1]


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


# --- the library


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("No module named 'mooncake'", "pip install mooncake-transfer-engine"),
        ("libibverbs.so.1: cannot open shared object file", "libibverbs1"),
    ],
)
def test_a_missing_library_is_named(cause: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise ImportError(cause)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MooncakeMissing, match=advice):
        MooncakeTransport(FAR)


def test_the_library_is_loaded_only_by_whoever_makes_a_transport() -> None:
    code = "import sys, kvbaton.transports.mooncake.mooncake_transport; sys.exit('mooncake.engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
