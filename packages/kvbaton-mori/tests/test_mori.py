"""The mori data plane over a fake of mori.io: it keeps the contract, and bears what mori does to whoever drives it."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest
from fake_mori import (
    BackendType,
    FakeMori,
    IOEngine,
    IOEngineConfig,
    MemoryLocationType,
    StatusCode,
)
from fake_mori_wire import INVALID_ARGS, RDMA_OP

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Case, InProcessHarness, Log, Pair, Side, check_transport
from kvbaton.testing.transport_case import LARGE_BYTES, READ, SMALL_BYTES, STRANGER, WRITE, copy, fill
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested
from kvbaton_mori import engine as mori_engine
from kvbaton_mori import mover as mori_mover
from kvbaton_mori.endpoint import ENDPOINT_BYTES_MAX, VERSION, MoriEndpoint, name_engine, pack, parse
from kvbaton_mori.engine import DISORDER, MoriMissing
from kvbaton_mori.transport import CAPABILITIES, ROWS_MAX, MoriConfig, MoriTransport

HALF = SMALL_BYTES // 2
DIAL = "MORI_IO_CP_TIMEOUT_MS"
STAYS_S = 0.05  # how long something that must not happen is waited for
QUICK = MoriConfig(redial_s=0.0)
FULL = RDMA_OP, "SQ full (batch): ep=0 depth=8192 requested=1 max=8192"
ENGINE_METHODS = (
    "create_backend",
    "remove_backend",
    "get_engine_desc",
    "register_remote_engine",
    "deregister_remote_engine",
    "register_memory",
    "register_torch_tensor",
    "deregister_memory",
    "allocate_transfer_uid",
    "read",
    "write",
    "batch_read",
    "batch_write",
    "create_session",
    "pop_inbound_transfer_status",
    "wait_all",
)
CASES = check_transport.cases
# The contract runs these where a cancel brings a copy to rest. Here it rests by itself, later, and all of them hold.
GIVEN_UP = {
    "nothing_lands_after_a_cancelled_read_has_come_to_rest",
    "cancelling_what_is_unknown_or_over_is_ignored",
}


class FakeHarness(InProcessHarness):
    """Both sides here; a side is killed by taking its engine off the wire."""

    offers = frozenset({"idle", "kill"})

    def __init__(self, config: MoriConfig | None = None) -> None:
        self.fake = FakeMori()
        self.wire = self.fake.wire
        super().__init__(
            lambda me: MoriTransport(me, config or QUICK, self.fake), lambda n: memoryview(bytearray(n)), CAPABILITIES
        )

    def kill(self, side: Side) -> None:
        transport = side.transport
        assert isinstance(transport, MoriTransport)
        self.wire.dead.add(transport._engine.key)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in DISORDER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(DIAL, "")  # so that it is as before afterwards
    os.environ.pop(DIAL)
    yield


@pytest.fixture
def harness() -> Iterator[FakeHarness]:
    made = FakeHarness()
    yield made
    made.reset()
    assert made.wire.dropped == [], "mori would have written to a status that was gone"
    assert made.fake.engines == {}, "an engine was left behind"


def connected(harness: FakeHarness, size: int = SMALL_BYTES) -> tuple[Pair, Log]:
    """A pair whose first copy has arrived."""
    pair = harness.pair(size, size)
    log = Log(harness, pair.near)
    assert pair.near.transport.submit(copy(0, pair.far, READ, [(0, 0, 64)]))
    assert log.end(0).reason is None
    return pair, log


def in_flight(harness: FakeHarness, count: int) -> None:
    assert harness.wait(lambda: len(harness.wire.flights) == count, 10), harness.wire.flights


def start(pair: Pair, job: int, low: int = 0, high: int = HALF) -> None:
    assert pair.near.transport.submit(copy(job, pair.far, READ, [(low, low, high - low)]))


# --- the contract


@pytest.mark.parametrize("case", [case for case in CASES if case.needs <= {"idle", "kill"}], ids=str)
def test_the_contract_is_kept(case: Case, harness: FakeHarness) -> None:
    case(harness)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in GIVEN_UP], ids=str)
def test_what_was_given_up_comes_to_rest_by_itself(case: Case, harness: FakeHarness) -> None:
    case.run(harness)


# --- rest


def test_a_read_that_was_given_up_lands_late_in_quarantined_memory_alone(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    data = fill(pair.far.memory, 2)
    harness.wire.stalled = True
    start(pair, 1)
    in_flight(harness, 1)
    pair.near.transport.cancel(JobId(1))  # what the node does at a handoff's deadline
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.CANCELLED, False)
    reused = fill(pair.near.memory[HALF:], 3)
    assert not log.wait(lambda: log.rested(1), STAYS_S), "at rest, with the read in flight"
    harness.wire.stalled = False
    log.rest(1)
    assert bytes(pair.near.memory[:HALF]) == data[:HALF], "the late bytes did not come: this test shows nothing"
    assert bytes(pair.near.memory[HALF:]) == reused
    marks = fill(pair.near.memory, 5)
    harness.wire.deliver()
    assert bytes(pair.near.memory) == marks, "bytes landed after rest"
    assert [type(event) for event in log.events] == [CopyEnded, CopyEnded, CopyRested]


def test_a_disconnect_leaves_a_read_unrested_and_the_peer_can_be_connected_again(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    endpoint = pair.far.transport.endpoint(pair.near.peer)
    harness.wire.stalled = True
    start(pair, 1)
    in_flight(harness, 1)
    pair.near.transport.disconnect(pair.far.peer)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.PEER_GONE, False)
    pair.near.transport.connect(pair.far.peer, endpoint)
    start(pair, 2, HALF, SMALL_BYTES)
    in_flight(harness, 2)
    harness.wire.stalled = False
    log.rest(1)
    assert log.end(2).reason is None


def test_a_close_under_a_read_brings_it_to_rest_and_nothing_lands_later(
    harness: FakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mori_mover, "GRACE_S", 0.01)
    pair, log = connected(harness)
    harness.wire.stalled = True
    start(pair, 1)
    in_flight(harness, 1)
    pair.near.transport.close()
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.CANCELLED, True)
    marks = fill(pair.near.memory, 3)
    harness.wire.deliver()
    assert bytes(pair.near.memory) == marks


def test_a_status_is_kept_for_as_long_as_mori_holds_it(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.stalled = True
    for job in range(1, 5):
        start(pair, job)
    in_flight(harness, 4)
    pair.near.transport.disconnect(pair.far.peer)
    for job in range(1, 5):
        assert not log.end(job).at_rest
    gc.collect()
    assert all(flight.status() is not None for flight in harness.wire.flights)
    harness.wire.stalled = False
    for job in range(1, 5):
        log.rest(job)


def test_the_last_statuses_outlive_their_batches(harness: FakeHarness) -> None:
    """mori stores the code of success first, and then still wakes whoever waits on the same status."""
    pair, _ = connected(harness)
    assert isinstance(pair.near.transport, MoriTransport)
    assert [status.Code() for status in pair.near.transport._engine._buried] == [StatusCode.SUCCESS]


# --- a full send queue


def test_a_full_send_queue_is_waited_for_and_nothing_fails(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.answers.extend([FULL] * 4)
    data = fill(pair.far.memory, 2)
    for job in range(1, 4):
        start(pair, job)
    assert [log.end(job).reason for job in range(1, 4)] == [None] * 3
    assert bytes(pair.near.memory[:HALF]) == data[:HALF]
    assert not harness.wire.answers


def test_a_batch_that_is_tried_again_is_the_same_batch(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.answers.extend([FULL] * 3)
    before = len(harness.wire.posts)
    start(pair, 1)
    assert log.end(1).reason is None
    assert harness.wire.posts[before:] == [(1, 1)], "numbers follow each other: none was taken for a new try"


def test_a_send_queue_that_stays_full_fails_the_copy_by_its_deadline_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = FakeHarness(MoriConfig(full_s=0.05))
    pair, log = connected(harness)
    harness.wire.depth = 0
    marks = fill(pair.near.memory, 3)
    start(pair, 1)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_TIMEOUT, True)
    assert "SQ full" in end.detail
    assert harness.wire.refusals < 60, "it hardly paused between its tries"
    assert bytes(pair.near.memory) == marks
    harness.wire.depth = 100
    start(pair, 2)
    assert log.end(2).reason is None, "the next one has a time of its own"
    harness.reset()


def test_a_copy_that_waits_for_room_rests_at_once_when_it_is_cancelled(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.depth = 0
    start(pair, 1)
    assert harness.wait(lambda: harness.wire.refusals > 1, 10)
    pair.near.transport.cancel(JobId(1))
    assert log.rest(1).reason is Reason.CANCELLED
    harness.wire.depth = 100
    start(pair, 2)
    assert log.end(2).reason is None


def test_no_more_rows_are_under_way_than_the_send_queue_holds() -> None:
    harness = FakeHarness(MoriConfig(rows_max=ROWS_MAX))
    pair, log = connected(harness)
    harness.wire.depth = ROWS_MAX
    harness.wire.stalled = True
    rows = [(8 * index, 8 * index, 8) for index in range(ROWS_MAX // 2 + 1)]
    for job in (1, 2):
        assert pair.near.transport.submit(copy(job, pair.far, READ, rows))
    in_flight(harness, 1)
    assert not log.wait(lambda: len(harness.wire.flights) > 1, STAYS_S)
    harness.wire.stalled = False
    assert [log.end(job).reason for job in (1, 2)] == [None, None]
    assert harness.wire.refusals == 0
    harness.reset()


# --- errors


@pytest.mark.parametrize("code", [RDMA_OP, int(StatusCode.ERR_GPU_OP), 99])
def test_a_read_that_failed_is_over_and_its_peer_is_given_up(harness: FakeHarness, code: int) -> None:
    pair, log = connected(harness)
    harness.wire.stalled = True
    for job in range(1, 12):
        start(pair, job)
    in_flight(harness, 8)  # the window
    if code in set(StatusCode):
        harness.wire.fates.append((code, "a cable was pulled"))
    else:
        harness.wire.dead.add(harness.wire.flights[0].pair[1])
    harness.wire.stalled = False
    ends = [log.end(job) for job in range(1, 12)]
    assert {(end.reason, end.at_rest) for end in ends} == {(Reason.TRANSFER_FAILED, True)}
    assert code not in set(StatusCode) or any("a cable was pulled" in end.detail for end in ends)


@pytest.mark.parametrize("name", [None, "MORI_IO_QP_PER_TRANSFER", "MORI_IO_ENABLE_CHUNKING"])
def test_where_errors_come_out_of_order_a_failed_read_rests_only_when_the_engine_is_closed(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv(name, "4")
    harness = FakeHarness(MoriConfig(queues=1 if name else 2, redial_s=0.0))
    pair, log = connected(harness)
    harness.wire.fates.append((RDMA_OP, "one queue pair failed"))
    start(pair, 1)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, False)
    assert not log.wait(lambda: log.rested(1), STAYS_S)
    pair.near.transport.close()
    log.rest(1)
    harness.reset()
    assert harness.wire.dropped == []


def half_posted(harness: FakeHarness) -> tuple[Pair, Log, bytes]:
    """Copy 2 of two rows waits for room in the one queue, which copy 1 fills, and has its first row in the other."""
    pair, log = connected(harness)
    data = fill(pair.far.memory, 2)
    fill(pair.near.memory, 3)
    harness.wire.stalled, harness.wire.depth = True, 1
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    in_flight(harness, 1)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(64, 64, 64), (128, 128, 64)]))
    assert harness.wait(lambda: harness.wire.refusals > 1, 10)
    in_flight(harness, 2)
    gc.collect()
    return pair, log, data


def test_several_queues_of_which_one_was_full_are_done_when_the_same_batch_is() -> None:
    harness = FakeHarness(MoriConfig(queues=2))
    pair, log, data = half_posted(harness)
    harness.wire.stalled, harness.wire.depth = False, 100
    assert [log.end(job).reason for job in (1, 2)] == [None, None]
    assert bytes(pair.near.memory[:192]) == data[:192]
    assert not harness.wire.flights
    harness.reset()
    assert harness.wire.dropped == []


def test_several_queues_of_which_one_was_full_are_not_at_rest_when_the_copy_is_given_up() -> None:
    harness = FakeHarness(MoriConfig(queues=2))
    pair, log, data = half_posted(harness)
    pair.near.transport.cancel(JobId(2))
    end = log.end(2)
    assert (end.reason, end.at_rest) == (Reason.CANCELLED, False)
    assert not log.wait(lambda: log.rested(2), STAYS_S)
    harness.wire.deliver()
    assert bytes(pair.near.memory[64:128]) == data[64:128], "the late bytes did not come: this test shows nothing"
    pair.near.transport.close()
    log.rest(2)
    harness.reset()
    assert harness.wire.dropped == []


def test_a_batch_that_failed_while_it_was_handed_over_may_have_begun(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.answers.append((RDMA_OP, "ibv_post_send failed with 12: (posted 3/7 WRs)"))
    start(pair, 1)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, False)
    pair.near.transport.close()
    log.rest(1)


@pytest.mark.parametrize("name", ["batch_read", "allocate_transfer_uid"])
def test_a_call_that_mori_no_longer_has_fails_the_copy_and_says_which(
    name: str, harness: FakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, log = connected(harness)
    monkeypatch.delattr(harness.fake.IOEngineSession, name)
    start(pair, 1)
    end = log.end(1)
    assert name in end.detail
    begun = name == "batch_read"  # what it does before it raises nobody knows
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED if begun else Reason.UNREACHABLE, not begun)


def test_a_batch_that_was_refused_fails_its_copy_alone(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.answers.append((INVALID_ARGS, "length out of range"))
    start(pair, 1)
    start(pair, 2)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True)
    assert "ERR_INVALID_ARGS: length out of range" in end.detail
    assert log.end(2).reason is None


def test_too_much_without_a_proof_closes_the_door(harness: FakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori_mover, "UNPROVEN_MAX", 1)
    pair, log = connected(harness)
    harness.wire.answers.append((RDMA_OP, "ibv_post_send failed with 12"))
    start(pair, 1)
    assert not log.end(1).at_rest
    assert not pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 64)]))


def test_a_write_is_refused_because_its_end_would_not_mean_that_it_can_be_seen(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    marks = fill(pair.far.memory, 3)
    assert pair.near.transport.submit(copy(1, pair.far, WRITE, [(0, 0, 64)]))
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.NO_TRANSPORT, True)
    assert bytes(pair.far.memory) == marks
    with pytest.raises(NotImplementedError, match="can_fence"):
        pair.near.transport.fence(pair.far.peer)


# --- reaching a peer


def test_a_copy_of_nothing_opens_the_session_that_later_copies_use(harness: FakeHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    assert isinstance(pair.near.transport, MoriTransport)
    engine = harness.fake.engines[pair.near.transport._engine.key]
    log = Log(harness, pair.near)
    for job in range(3):
        assert pair.near.transport.submit(copy(job, pair.far, READ, [] if job == 0 else [(0, 0, 64)]))
        assert log.end(job).reason is None
        assert harness.fake.dials == 1
        assert engine._uids == job, "mori is not asked to read nothing"


@pytest.mark.parametrize("spans", [[], [(0, 0, 64)]], ids=["probe", "copy"])
def test_a_peer_that_is_gone_is_unreachable_and_left_alone_for_a_while(spans: list[tuple[int, int, int]]) -> None:
    harness = FakeHarness(MoriConfig(redial_s=60.0))
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    harness.kill(pair.far)
    log = Log(harness, pair.near)
    for job in range(4):
        assert pair.near.transport.submit(copy(job, pair.far, READ, spans))
    ends = [log.end(job) for job in range(4)]
    assert {(end.reason, end.at_rest) for end in ends} == {(Reason.UNREACHABLE, True)}
    assert all("Connection refused" in end.detail for end in ends)
    assert harness.fake.dials == 1, "every dial stops the whole process"
    harness.reset()


def test_a_session_that_mori_does_not_give_is_unreachable(
    harness: FakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    monkeypatch.setattr(IOEngine, "create_session", lambda *_: None)
    log = Log(harness, pair.near)
    start(pair, 1)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.UNREACHABLE, True)
    assert "no backend reaches" in end.detail


def test_a_session_that_is_no_longer_alive_is_replaced(harness: FakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, log = connected(harness)
    monkeypatch.setattr(harness.fake.IOEngineSession, "alive", lambda _: False)
    start(pair, 1)
    assert log.end(1).reason is None
    assert harness.fake.dials == 2


def test_a_worker_that_restarts_under_its_name_is_another_engine(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.fates.append((RDMA_OP, "the peer died"))
    start(pair, 1)
    assert log.end(1).reason is Reason.TRANSFER_FAILED
    reborn = PeerId(pair.far.peer.worker, Incarnation(77))
    after = MoriTransport(reborn, QUICK, harness.fake)
    memory = memoryview(bytearray(SMALL_BYTES))
    data = fill(memory, 9)
    after.register(0, memory)
    endpoint = after.endpoint(pair.near.peer)
    with pytest.raises(ValueError, match="not to far"):
        pair.near.transport.connect(pair.far.peer, endpoint)
    pair.near.transport.connect(reborn, endpoint)
    for job, peer, reason in ((2, pair.far.peer, Reason.UNREACHABLE), (3, reborn, None)):
        spans = array("q", [0, 0, SMALL_BYTES])
        assert pair.near.transport.submit(Copy(JobId(job), peer, READ, 0, 0, spans))
        assert log.end(job).reason is reason, "the connection to the old life is broken for good, the new one is new"
    assert bytes(pair.near.memory) == data
    after.close()


def test_a_disconnected_peer_is_forgotten_by_mori_unless_it_is_connected_again(harness: FakeHarness) -> None:
    pair, _ = connected(harness)
    assert isinstance(pair.near.transport, MoriTransport)
    engine = pair.near.transport._engine._engine
    assert len(engine._known) == 1
    pair.near.transport.disconnect(pair.far.peer)
    assert harness.wait(lambda: not engine._known, 10)


# --- idleness


def test_nobody_looks_when_nothing_is_under_way(harness: FakeHarness) -> None:
    pair, _ = connected(harness)
    assert isinstance(pair.near.transport, MoriTransport)
    mover = pair.near.transport._driver
    assert harness.wait(lambda: mover._patience() is None, 10), "it would wake without a reason"
    before = harness.wire.polls
    harness.wait(lambda: False, STAYS_S)
    assert harness.wire.polls == before


def test_a_read_that_takes_long_is_looked_at_less_and_less(harness: FakeHarness) -> None:
    pair, log = connected(harness)
    harness.wire.stalled = True
    start(pair, 1)
    in_flight(harness, 1)
    before, begun = harness.wire.polls, time.monotonic()
    assert harness.wait(lambda: time.monotonic() > begun + 0.2 and harness.wire.polls > before, 10)
    looks, waited_s = harness.wire.polls - before, time.monotonic() - begun
    assert looks < 80 + waited_s / mori_mover.LOOK_S[1], "an eighth of the time waited, and at most so often"
    harness.wire.stalled = False
    assert log.end(1).reason is None


# --- without mori


@pytest.mark.parametrize(
    "problem",
    [ModuleNotFoundError("No module named 'mori'"), OSError("libamdhip64.so.6: cannot open shared object file")],
    ids=["package", "rocm"],
)
def test_without_mori_one_clear_error_says_what_is_missing(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> ModuleType:
        assert name == "mori.io"
        raise problem

    monkeypatch.setattr(mori_engine, "importlib", SimpleNamespace(import_module=failing))
    with pytest.raises(MoriMissing, match="install amd_mori") as caught:
        MoriTransport(STRANGER)
    assert isinstance(caught.value, ImportError) and str(problem) in str(caught.value)


def test_importing_the_data_plane_imports_neither_mori_nor_its_fake() -> None:
    loaded = "any(name == 'mori' or 'fake' in name for name in sys.modules)"
    script = f"import sys, kvbaton_mori.transport; sys.exit({loaded})"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it need not be installed to be tested
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60, env=path).returncode == 0


def test_a_host_without_rdma_says_so() -> None:
    with pytest.raises(Exception, match="no active RDMA device"):
        MoriTransport(STRANGER, library=FakeMori(no_device=True))


def test_the_time_to_dial_is_told_to_mori_unless_the_operator_has(monkeypatch: pytest.MonkeyPatch) -> None:
    MoriTransport(STRANGER, MoriConfig(dial_s=1.5), FakeMori()).close()
    assert os.environ[DIAL] == "1500"
    monkeypatch.setenv(DIAL, "700")
    MoriTransport(STRANGER, MoriConfig(dial_s=1.5), FakeMori()).close()
    assert os.environ[DIAL] == "700"


@pytest.mark.parametrize(
    "bad",
    [{"host": "0.0.0.0"}, {"host": "localhost"}, {"window": 0}, {"rows_max": 1}, {"full_s": 0.0}, {"redial_s": -1.0}],
    ids=str,
)
def test_a_configuration_that_cannot_work_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        MoriConfig(**bad)  # type: ignore[arg-type]


# --- endpoints and memory


def made(name: str = "w", regions: int = 1) -> tuple[MoriTransport, FakeMori]:
    fake = FakeMori()
    transport = MoriTransport(PeerId(WorkerId(name), Incarnation(7)), library=fake)
    for region in range(regions):
        transport.register(region, memoryview(bytearray(4096)))
    return transport, fake


def test_an_endpoint_fits_a_control_message_or_the_regions_are_refused_in_time() -> None:
    transport, fake = made("w" * 40, 0)
    rng = random.Random(1)
    with pytest.raises(ValueError, match="register fewer and larger regions"):
        for region in range(256):
            transport.register(region, DeviceMemory(rng.randrange(1 << 12, 1 << 34) << 12, 1 << 26))
    endpoint = transport.endpoint(STRANGER)
    assert len(endpoint) <= ENDPOINT_BYTES_MAX, "what was registered before can still be told"
    found = {region: fake.MemoryDesc.unpack(packed) for region, packed in parse(endpoint).regions.items()}
    assert found == {region: plot.desc for region, plot in transport._plots.items()}
    assert len(found) > 100, "one for each layer of a large model"
    transport.close()


def test_descriptions_that_are_no_lists_travel_as_they_are() -> None:
    """mori says nothing of what is in them; that they are lists of fields only makes them smaller."""
    for packed in ([b"one", b"another"], [b"\x93\x01\x02\x03", b"\x92\x01\x02"], [b"\xcd\x00\x01"] * 2, []):
        there = MoriEndpoint(STRANGER, b"engine", dict(enumerate(packed)))
        assert parse(pack(there)) == there


@pytest.mark.parametrize(
    "change",
    [
        lambda there, _: msgspec.structs.replace(there, owner=STRANGER),
        lambda there, _: msgspec.structs.replace(there, engine=b""),
        lambda there, _: msgspec.structs.replace(there, engine=b"\x93\x01\x02\x03"),
        lambda there, _: msgspec.structs.replace(there, regions={0: b"\xc0"}),
        lambda there, _: msgspec.structs.replace(there, regions={256: there.regions[0]}),
        lambda there, fake: changed(there, fake, engine_key="another"),
        lambda there, fake: changed(there, fake, size=0),
        lambda there, fake: changed(there, fake, data=(1 << 64) - 8),
    ],
    ids=["owner", "no_engine", "shape", "no_region", "number", "key", "size", "address"],
)
def test_an_endpoint_that_names_what_it_may_not_is_refused(
    change: Callable[[MoriEndpoint, FakeMori], MoriEndpoint],
) -> None:
    transport, fake = made()
    me = PeerId(WorkerId("w"), Incarnation(7))
    good = transport.endpoint(STRANGER)
    reader = MoriTransport(STRANGER, library=fake)
    with pytest.raises(ValueError, match=r"endpoint|engine"):
        reader.connect(me, pack(change(parse(good), fake)))
    reader.connect(me, good)
    reader.close()
    transport.close()


def told(*fields: object) -> bytes:
    return VERSION + zlib.compress(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"mori2" + told(STRANGER, b"", [], [])[5:],
        told(STRANGER, b"", [], [])[:-3],
        VERSION + b"\x00" * 40,
        told(1, 2, 3),
        told(STRANGER, b"", [0, 0], [[b"common", []]]),
        told(STRANGER, b"", [0, 1], [[None, [1, 2, 3]]]),
        told(STRANGER, b"", [0], [[bytes(5000), []]]),
        VERSION + zlib.compress(bytes(900 << 10)),
        VERSION + bytes(1100),
    ],
    ids=["empty", "version", "cut", "noise", "shape", "twice", "count", "description", "bomb", "size"],
)
def test_nonsense_is_no_endpoint(bad: bytes) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        parse(bad)


def changed(there: MoriEndpoint, fake: FakeMori, **fields: object) -> MoriEndpoint:
    desc = msgspec.structs.replace(fake.MemoryDesc.unpack(there.regions[0]), **fields)
    return msgspec.structs.replace(there, regions={0: desc.pack()})


def test_the_engine_of_another_peer_cannot_be_replaced_by_a_description_under_its_key() -> None:
    transport, fake = made()
    stolen = msgspec.structs.replace(parse(transport.endpoint(STRANGER)), owner=STRANGER)
    reader = MoriTransport(PeerId(WorkerId("r"), Incarnation(1)), library=fake)
    with pytest.raises(ValueError, match="not to stranger"):
        reader.connect(STRANGER, pack(stolen))
    reader.close()
    transport.close()


def test_two_engines_of_one_worker_have_different_keys() -> None:
    assert name_engine(STRANGER) != name_engine(STRANGER)


def test_memory_of_a_device_is_registered_as_such(harness: FakeHarness) -> None:
    """The fake moves it like any other; that a GPU's is moved is for hardware to show."""
    owner = PeerId(WorkerId("gpu"), Incarnation(5))
    transport = MoriTransport(owner, QUICK, harness.fake)
    backing = memoryview(bytearray(range(64)))
    address = address_of(backing)
    transport.register(3, DeviceMemory(address, 64, device=2))
    packed = parse(transport.endpoint(STRANGER)).regions[3]
    desc = harness.fake.MemoryDesc.unpack(packed)
    assert (desc.data, desc.size, desc.device_id, desc.loc) == (address, 64, 2, MemoryLocationType.GPU)
    with pytest.raises(ValueError, match="taken"):
        transport.register(3, backing)
    pair, log = connected(harness)
    pair.near.transport.connect(owner, transport.endpoint(pair.near.peer))
    assert pair.near.transport.submit(Copy(JobId(1), owner, READ, 0, 3, array("q", [0, 0, 64])))
    assert log.end(1).reason is None
    assert bytes(pair.near.memory[:64]) == bytes(range(64))
    transport.close()


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_a_large_copy_is_cut_into_batches_that_a_send_queue_takes_whole(harness: FakeHarness) -> None:
    pair, log = connected(harness, LARGE_BYTES)
    rows = [(16 * index, 16 * index, 8) for index in range(3 * ROWS_MAX)]
    assert pair.near.transport.submit(copy(1, pair.far, READ, rows))
    assert log.end(1).reason is None
    assert max(rows for _, rows in harness.wire.posts) <= ROWS_MAX


# --- the fake itself


def test_the_fake_bears_mori_s_names_and_codes() -> None:
    fake = FakeMori()
    engine = fake.IOEngine("a", fake.IOEngineConfig(host="127.0.0.1"))
    for name in ENGINE_METHODS:
        assert callable(getattr(engine, name)), name
    assert [(code.name, int(code)) for code in StatusCode] == [
        ("SUCCESS", 0),
        ("INIT", 1),
        ("IN_PROGRESS", 2),
        ("ERR_INVALID_ARGS", 11),
        ("ERR_NOT_FOUND", 12),
        ("ERR_RDMA_OP", 13),
        ("ERR_BAD_STATE", 14),
        ("ERR_GPU_OP", 15),
    ]
    with pytest.raises(NotImplementedError):
        engine.create_backend(BackendType.TCP)


def test_in_the_fake_errors_stick_and_a_write_moves_bytes_the_other_way() -> None:
    fake = FakeMori()
    engines = [fake.IOEngine(key, IOEngineConfig("127.0.0.1")) for key in "ab"]
    buffers = [bytearray(b"x" * 8), bytearray(b"y" * 8)]
    descs = []
    for engine, buffer in zip(engines, buffers, strict=True):
        engine.create_backend(BackendType.RDMA)
        descs.append(engine.register_memory(address_of(memoryview(buffer)), 8, -1, MemoryLocationType.CPU))
    here, there = engines
    assert here.create_session(*descs) is None, "nobody has told it of the other"
    here.register_remote_engine(there.get_engine_desc())
    session = here.create_session(*descs)
    assert session is not None
    written = session.batch_write([0], [4], [2], session.allocate_transfer_uid())
    assert written.InProgress() and written.Succeeded()
    assert buffers[1] == b"yyyyxxyy"
    assert there.pop_inbound_transfer_status("a", 0) is not None
    outside = session.read(4, 0, 8, session.allocate_transfer_uid())
    assert outside.Failed() and outside.Code() is StatusCode.ERR_INVALID_ARGS
    outside.Update(StatusCode.SUCCESS, "")
    assert outside.Failed()
    assert here.wait_all([written, outside], 0) is StatusCode.ERR_INVALID_ARGS
    fake.wire.stalled = True
    stuck = session.read(0, 0, 8, session.allocate_transfer_uid())
    assert stuck.WaitFor(2) is StatusCode.IN_PROGRESS
    del stuck
    gc.collect()
    assert fake.wire.dropped == [2], "a status that is dropped too early is noticed"
