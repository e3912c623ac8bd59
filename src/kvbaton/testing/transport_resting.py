"""Cases about rest: after a copy has come to rest, after a death and after a fence, not one byte lands."""

from __future__ import annotations

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.testing.transport_case import LARGE_BYTES, READ, SMALL_BYTES, STRANGER, WRITE, Cases, copy, fill
from kvbaton.testing.transport_harness import Log, Pair, Side, TransportHarness
from kvbaton.transports.core.transport import FenceEnded

JOBS = range(1, 5)
CASES = Cases()


def _still(harness: TransportHarness, side: Side, other: Side, job: int, log: Log | None = None) -> None:
    """Mark all of `side`'s memory, let a later copy elsewhere prove that life went on, and find every mark."""
    marks = fill(side.memory, 17)
    log = log or Log(harness, side)
    assert side.transport.submit(copy(job, other, READ, [(0, 0, 4096)]))
    assert log.end(job).reason is None
    assert bytes(side.memory) == bytes(other.memory[:4096]) + marks[4096:], "bytes landed after rest"
    assert all(len(log.ends(job)) <= 1 for job in JOBS), "a copy ended twice"


@CASES.add("cancel")
def nothing_lands_after_a_cancelled_read_has_come_to_rest(harness: TransportHarness) -> None:
    spans = [(offset, offset, 65536) for offset in range(0, LARGE_BYTES, 65536)]
    for landed_bytes in (0, 1, LARGE_BYTES // 2):
        pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
        log = Log(harness, pair.near)
        fill(pair.far.memory, 2)
        for job in JOBS:
            assert pair.near.transport.submit(copy(job, pair.far, READ, spans))
        if landed_bytes:
            _landed(pair, log, landed_bytes - 1)
        _cancelled(pair.near, log)
        _still(harness, pair.near, pair.far, 9, log)
        harness.reset()


@CASES.add("cancel", "write")
def nothing_lands_after_a_cancelled_write_has_come_to_rest(harness: TransportHarness) -> None:
    for _ in range(3):
        pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
        log = Log(harness, pair.near)
        for job in JOBS:
            assert pair.near.transport.submit(copy(job, pair.far, WRITE, [(0, 0, LARGE_BYTES)]))
        _cancelled(pair.near, log)
        _still(harness, pair.far, pair.near, 9)
        harness.reset()


def _landed(pair: Pair, log: Log, at: int) -> None:
    """Wait until the byte at `at` has come (if chance made it right before, all the sooner)."""
    log.wait(lambda: pair.near.memory[at] == pair.far.memory[at])


def _cancelled(side: Side, log: Log) -> None:
    for job in JOBS:
        side.transport.cancel(JobId(job))
    for job in JOBS:
        assert log.rest(job).reason in {None, Reason.CANCELLED}


@CASES.add("cancel")
def cancelling_what_is_unknown_or_over_is_ignored(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    log = Log(harness, pair.near)
    pair.near.transport.cancel(JobId(5))
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    pair.near.transport.cancel(JobId(1))
    assert not log.wait(lambda: len(log.events) != 1, 0.02), log.events


@CASES.add("cancel", "pause")
def a_read_from_a_stopped_peer_rests_when_cancelled_and_the_peer_changes_nothing_later(
    harness: TransportHarness,
) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.near)
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None  # connected
    harness.pause(pair.far)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, LARGE_BYTES)]))
    pair.near.transport.cancel(JobId(2))
    end = log.rest(2)
    assert end.reason in {None, Reason.CANCELLED}, end
    marks = fill(pair.near.memory, 3)
    harness.resume(pair.far)
    assert pair.near.transport.submit(copy(3, pair.far, READ, []))
    log.end(3)
    assert bytes(pair.near.memory) == marks
    _still(harness, pair.near, pair.far, 4)


@CASES.add("cancel", "pause", "write")
def a_write_to_a_stopped_peer_ends_when_cancelled_and_rests_when_it_can(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.near)
    assert pair.near.transport.submit(copy(1, pair.far, WRITE, [(0, 0, 64)]))
    assert log.end(1).reason is None
    harness.pause(pair.far)
    assert pair.near.transport.submit(copy(2, pair.far, WRITE, [(0, 0, LARGE_BYTES)]))
    pair.near.transport.cancel(JobId(2))
    log.end(2)  # while the peer is stopped
    marks = fill(pair.far.memory, 3) if log.rested(2) else b""
    harness.resume(pair.far)
    log.rest(2)
    assert not marks or bytes(pair.far.memory) == marks
    _still(harness, pair.far, pair.near, 3)


@CASES.add("kill")
def a_copy_from_a_peer_that_dies_ends_at_rest(harness: TransportHarness) -> None:
    for round_ in range(3):
        pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
        log = Log(harness, pair.near)
        fill(pair.far.memory, 2)
        if round_:  # connected, and perhaps in the middle
            assert pair.near.transport.submit(copy(0, pair.far, READ, [(0, 0, 64)]))
            assert log.end(0).reason is None
        for job in range(1, 9):
            assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, LARGE_BYTES)]))
        harness.kill(pair.far)
        for job in range(1, 9):
            end = log.end(job)
            assert end.at_rest and end.reason in {None, Reason.TRANSFER_FAILED, Reason.UNREACHABLE}, end
        if log.ends(8)[0].reason is None:
            assert bytes(pair.near.memory) == bytes(pair.far.memory)
        marks = fill(pair.near.memory, 3)
        assert pair.near.transport.submit(copy(9, pair.far, READ, []))
        log.end(9)
        assert bytes(pair.near.memory) == marks
        harness.reset()


@CASES.add("kill", "write")
def a_write_to_a_peer_that_dies_ends_at_rest(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.near)
    assert pair.near.transport.submit(copy(0, pair.far, WRITE, [(0, 0, 64)]))
    assert log.end(0).reason is None
    for job in range(1, 9):
        assert pair.near.transport.submit(copy(job, pair.far, WRITE, [(0, 0, LARGE_BYTES)]))
    harness.kill(pair.far)
    if "unproven" in harness.offers:  # nobody can prove for a dead peer that it is dead: it is forgotten some day
        for job in range(1, 9):
            log.end(job)
        pair.near.transport.disconnect(pair.far.peer)
    for job in range(1, 9):
        end = log.rest(job)
        assert end.reason in {None, Reason.TRANSFER_FAILED, Reason.UNREACHABLE}, end


def _fence(harness: TransportHarness, near: Side, far: PeerId) -> None:
    near.transport.fence(far)
    log = Log(harness, near)
    assert log.wait(lambda: FenceEnded(far) in log.events), "the fence did not end"


@CASES.add("fence")
def a_fenced_writer_cannot_land_a_byte(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.far)
    for job in range(6):
        assert pair.far.transport.submit(copy(job, pair.near, WRITE, [(0, 0, LARGE_BYTES)]))
    _fence(harness, pair.near, pair.far.peer)
    marks = fill(pair.near.memory, 3)
    for job in range(6, 12):
        assert pair.far.transport.submit(copy(job, pair.near, WRITE, [(0, 0, LARGE_BYTES)]))
    for job in range(12):
        end = log.end(job)
        assert job < 6 or end.reason is not None, "a write after the fence succeeded"
    assert bytes(pair.near.memory) == marks, "bytes landed after the fence"


@CASES.add("fence", "pause")
def a_writer_that_is_stopped_is_fenced_without_its_help(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.far)
    for job in range(6):
        assert pair.far.transport.submit(copy(job, pair.near, WRITE, [(0, 0, LARGE_BYTES)]))
    harness.pause(pair.far)
    _fence(harness, pair.near, pair.far.peer)
    marks = fill(pair.near.memory, 3)
    harness.resume(pair.far)
    for job in range(6):
        log.end(job)
    assert bytes(pair.near.memory) == marks, "bytes landed after the fence"


@CASES.add("fence")
def a_fenced_writer_comes_back_only_with_a_new_endpoint(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    log = Log(harness, pair.far)
    old = pair.near.transport.endpoint(pair.far.peer)
    _fence(harness, pair.near, pair.far.peer)
    new = pair.near.transport.endpoint(pair.far.peer)
    for job, endpoint, works in ((1, old, False), (2, new, True)):
        pair.far.transport.connect(pair.near.peer, endpoint)
        marks = fill(pair.near.memory, 3)
        assert pair.far.transport.submit(copy(job, pair.near, WRITE, [(0, 0, SMALL_BYTES)]))
        assert (log.end(job).reason is None) is works
        assert bytes(pair.near.memory) == (bytes(pair.far.memory) if works else marks)


@CASES.add("fence")
def a_fence_of_an_unknown_peer_ends(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    _fence(harness, pair.near, STRANGER)
