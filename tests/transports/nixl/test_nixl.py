"""NIXL keeps the contract, and what it cannot do shows: a read that was given up lands late, in memory kept for it.

Needs nixl: `make planes-env` installs it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Case, InProcessHarness, Log, Pair, check_transport
from kvbaton.testing.transport_case import (
    LARGE_BYTES,
    READ,
    SMALL_BYTES,
    STRANGER,
    WRITE,
    copy,
    fill,
    offered,
    scatter,
)
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.nixl import nixl_agent
from kvbaton.transports.nixl.nixl_transport import CAPABILITIES, NixlConfig, NixlTransport
from tests.transports.peer_process import WAYS, Kind, make
from tests.transports.process_harness import ProcessHarness, allocated_in

pytestmark = pytest.mark.library("nixl")

HALF = LARGE_BYTES // 2
STAYS_S = 0.2  # how long something that must not happen is waited for
CASES = check_transport.cases
TOGETHER = [case for case in CASES if case.needs <= frozenset({"idle", "write"})]
APART = [case for case in CASES if case.needs & {"kill"}]
# The contract runs these where a cancel brings a copy to rest. Here it rests by itself, later, and all of them hold.
GIVEN_UP = [
    case
    for case in CASES
    if case.name
    in {
        "nothing_lands_after_a_cancelled_read_has_come_to_rest",
        "nothing_lands_after_a_cancelled_write_has_come_to_rest",
        "cancelling_what_is_unknown_or_over_is_ignored",
        "a_write_to_a_stopped_peer_ends_when_cancelled_and_rests_when_it_can",
    }
]


@pytest.fixture(scope="module", params=WAYS)
def processes(request: pytest.FixtureRequest) -> Iterator[ProcessHarness]:
    harness = ProcessHarness(request.param)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def tcp() -> Iterator[ProcessHarness]:
    harness = ProcessHarness("nixl_tcp")
    yield harness
    harness.close()


@pytest.fixture
def far(tcp: ProcessHarness) -> Iterator[ProcessHarness]:
    yield tcp
    tcp.reset()


def together(kind: Kind, regions: list[Region]) -> InProcessHarness:
    return InProcessHarness(partial(make, kind), allocated_in(regions), CAPABILITIES)


def near_of(pair: Pair) -> NixlTransport:
    assert isinstance(pair.near.transport, NixlTransport)
    return pair.near.transport


def connected(pair: Pair) -> Log:
    """A first copy has arrived."""
    log = Log(HERE, pair.near)
    assert pair.near.transport.submit(copy(0, pair.far, READ, [(0, 0, 64)]))
    assert log.end(0).reason is None
    return log


def stuck(harness: ProcessHarness, pair: Pair, log: Log, job: int, size: int) -> None:
    """A read of the stopped peer, with NIXL's request open."""
    harness.pause(pair.far)
    before = near_of(pair).handles
    assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, size)]))
    assert log.wait(lambda: near_of(pair).handles > before)


HERE = InProcessHarness(NixlTransport, lambda size: memoryview(bytearray(size)), CAPABILITIES)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_within_one_process_the_contract_is_kept(kind: Kind, case: Case, regions: list[Region]) -> None:
    case(together(kind, regions))


@pytest.mark.parametrize("case", APART, ids=str)
def test_a_peer_in_another_process_keeps_the_contract(case: Case, processes: ProcessHarness) -> None:
    assert case.needs <= offered(processes)
    case(processes)


@pytest.mark.parametrize("case", GIVEN_UP, ids=str)
def test_what_was_given_up_comes_to_rest_by_itself(case: Case, processes: ProcessHarness) -> None:
    try:
        case.run(processes)
    finally:
        processes.reset()


def test_a_read_that_was_given_up_lands_late_in_quarantined_memory_alone(far: ProcessHarness) -> None:
    pair = far.pair(LARGE_BYTES, LARGE_BYTES)
    data = fill(pair.far.memory, 2)
    log = connected(pair)
    stuck(far, pair, log, 1, HALF)
    pair.near.transport.cancel(JobId(1))  # what the node does at a handoff's deadline
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.CANCELLED, False)
    reused = fill(pair.near.memory[HALF:], 3)
    assert not log.wait(lambda: log.rested(1), STAYS_S), "at rest, with the peer stopped in the middle"
    fill(pair.near.memory[:HALF], 4)
    far.resume(pair.far)
    log.rest(1)
    assert bytes(pair.near.memory[:HALF]) == data[:HALF], "the late bytes did not come: this test shows nothing"
    assert bytes(pair.near.memory[HALF:]) == reused
    assert len(log.ends(1)) == 1
    marks = fill(pair.near.memory, 5)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 4096)]))
    assert log.end(2).reason is None
    assert bytes(pair.near.memory) == data[:4096] + marks[4096:], "bytes landed after rest"


def test_a_disconnect_leaves_a_stuck_read_unrested_and_the_peer_can_be_connected_again(far: ProcessHarness) -> None:
    pair = far.pair(LARGE_BYTES, LARGE_BYTES)
    endpoint = pair.far.transport.endpoint(pair.near.peer)
    log = connected(pair)
    stuck(far, pair, log, 1, HALF)
    pair.near.transport.disconnect(pair.far.peer)
    end = log.end(1)
    assert (end.reason, end.at_rest) == (Reason.PEER_GONE, False)
    pair.near.transport.connect(pair.far.peer, endpoint)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 64)]))
    far.resume(pair.far)
    log.rest(1)
    assert log.end(2).reason is None


def test_a_peer_killed_under_a_read_that_was_given_up_brings_it_to_rest(far: ProcessHarness) -> None:
    pair = far.pair(LARGE_BYTES, LARGE_BYTES)
    log = connected(pair)
    stuck(far, pair, log, 1, HALF)
    pair.near.transport.cancel(JobId(1))
    assert not log.end(1).at_rest
    far.kill(pair.far)
    log.rest(1)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 64)]))
    assert log.end(2).reason is Reason.TRANSFER_FAILED


def test_a_close_under_a_stuck_read_is_bounded_and_nothing_lands_later(far: ProcessHarness) -> None:
    pair = far.pair(LARGE_BYTES, LARGE_BYTES)
    log = connected(pair)
    stuck(far, pair, log, 1, LARGE_BYTES)
    begun = time.monotonic()
    pair.near.transport.close()
    assert time.monotonic() - begun < 20
    assert log.end(1).at_rest and near_of(pair).handles == 0
    marks = fill(pair.near.memory, 3)
    far.resume(pair.far)
    far.wait(lambda: bytes(pair.near.memory) != marks, STAYS_S)
    assert bytes(pair.near.memory) == marks
    far.kill(pair.far)  # it may be dying of it: UCX aborts a process whose reader left while it was stopped


def test_a_full_queue_behind_a_stopped_peer_says_so_and_has_room_again_after_a_cancel(far: ProcessHarness) -> None:
    config = NixlConfig(copies_max=4, window=2, ucx=WAYS["nixl_tcp"])
    pair = far.pair(LARGE_BYTES, LARGE_BYTES, lambda me: NixlTransport(me, config))
    log = connected(pair)
    stuck(far, pair, log, 1, HALF)
    spans = [(HALF, 0, 64)]
    assert [pair.near.transport.submit(copy(job, pair.far, READ, spans)) for job in range(2, 6)] == [True] * 3 + [False]
    for job in range(1, 5):
        pair.near.transport.cancel(JobId(job))
    assert [log.end(job).reason for job in range(1, 5)] == [Reason.CANCELLED] * 4
    assert [log.end(job).at_rest for job in (1, 4)] == [False, True]
    assert pair.near.transport.submit(copy(6, pair.far, READ, spans))
    far.resume(pair.far)
    log.rest(1)
    assert log.end(6).reason is None


def test_every_handle_is_released_whatever_became_of_its_copy(processes: ProcessHarness) -> None:
    pair = processes.pair(SMALL_BYTES, SMALL_BYTES)
    log = connected(pair)
    lists = near_of(pair).handles  # prepared once, one for each side
    rng = random.Random(3)
    for job in range(1, 121):
        spans = {0: [(0, 0, 64), (64, 640, 64)], 1: scatter(rng, SMALL_BYTES, SMALL_BYTES, 20, 900), 2: [(0, -1, 8)]}
        direction = rng.choice((READ, WRITE))
        assert log.wait(lambda: pair.near.transport.submit(copy(job, pair.far, direction, spans[job % 3])))  # noqa: B023
        if job % 5 == 0:
            pair.near.transport.cancel(JobId(job))
    for job in range(1, 121):
        log.rest(job)
    assert lists == near_of(pair).handles == 2
    processes.kill(pair.far)
    for job in range(121, 140):
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, 64)]))
    for job in range(121, 140):
        log.rest(job)
    pair.near.transport.disconnect(pair.far.peer)
    pair.near.transport.close()
    assert near_of(pair).handles == 0
    processes.reset()


def test_metadata_that_nixl_refuses_fails_the_copy_and_a_good_endpoint_mends_it(far: ProcessHarness) -> None:
    pair = far.pair(SMALL_BYTES, SMALL_BYTES)
    log = connected(pair)
    good = nixl_agent.parse(pair.far.peer, pair.far.transport.endpoint(pair.near.peer))
    bad = msgspec.structs.replace(good, metadata=good.metadata[:60])
    for job, there, reason in ((1, bad, Reason.UNREACHABLE), (2, good, None)):
        pair.near.transport.connect(pair.far.peer, nixl_agent.pack(there))
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, 64)]))
        assert log.end(job).reason is reason


def test_metadata_of_another_peer_is_refused_and_does_that_peer_no_harm(far: ProcessHarness) -> None:
    """NIXL knows agents by name alone: what is loaded under a known name replaces what is there."""
    pair = far.pair(SMALL_BYTES, SMALL_BYTES)
    log = connected(pair)
    good = nixl_agent.parse(pair.far.peer, pair.far.transport.endpoint(pair.near.peer))
    theirs = msgspec.structs.replace(good, owner=STRANGER)
    renamed = msgspec.structs.replace(theirs, agent=nixl_agent.name_agent(STRANGER))
    for stolen in (theirs, renamed):
        with pytest.raises(ValueError, match="agent"):
            pair.near.transport.connect(STRANGER, nixl_agent.pack(stolen))
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None


def test_an_endpoint_is_small_even_with_many_regions(regions: list[Region]) -> None:
    transport = NixlTransport(PeerId(WorkerId("w"), Incarnation(1)))
    regions.append(allocate(64 * 4096))
    for region in range(64):
        transport.register(region, regions[0].view[region * 4096 : (region + 1) * 4096])
    assert len(transport.endpoint(STRANGER)) <= 1024  # what a control message carries
    with pytest.raises(ValueError, match="empty"):
        transport.register(64, memoryview(bytearray()))
    transport.close()


def test_settings_that_ucx_refuses_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match="set UCX_TLS instead"):
        NixlConfig(ucx={"TLS": "tcp,cma"})
    with pytest.raises(Exception, match="TLS=nonsense"):
        NixlTransport(STRANGER, NixlConfig(ucx={"TLS": "nonsense"}))
