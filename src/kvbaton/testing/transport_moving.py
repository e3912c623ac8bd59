"""Cases about bytes: those that were asked for arrive, and no others are touched."""

from __future__ import annotations

import random

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId
from kvbaton.testing.transport_case import (
    LARGE_BYTES,
    READ,
    SMALL_BYTES,
    STRANGER,
    WRITE,
    Cases,
    Places,
    copy,
    directions,
    fill,
    flat,
    moved,
    scatter,
)
from kvbaton.testing.transport_harness import Log, TransportHarness
from kvbaton.transports.core.transport import Copy

CASES = Cases()


def _arrives(harness: TransportHarness, spans: Places, near_bytes: int, far_bytes: int) -> None:
    """The copy lands exactly, in each direction on offer, and touches nothing else on either side."""
    for direction in directions(harness):
        pair = harness.pair(near_bytes, far_bytes)
        near, far = fill(pair.near.memory, 1), fill(pair.far.memory, 2)
        assert pair.near.transport.submit(copy(1, pair.far, direction, spans))
        end = Log(harness, pair.near).end(1)
        assert (end.reason, end.at_rest) == (None, True), end
        if direction is READ:
            near = moved(near, far, spans, READ)
        else:
            far = moved(far, near, spans, WRITE)
        assert bytes(pair.near.memory) == near, "the bytes of the near side are not as they should be"
        assert bytes(pair.far.memory) == far, "the bytes of the far side are not as they should be"


@CASES.add()
def scattered_spans_arrive_exactly(harness: TransportHarness) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        _arrives(harness, scatter(rng, SMALL_BYTES, 2 * SMALL_BYTES, 60, 1024), SMALL_BYTES, 2 * SMALL_BYTES)


@CASES.add()
def adjacent_and_single_byte_spans_arrive_exactly(harness: TransportHarness) -> None:
    single = [(index * 2, 1000 - index, 1) for index in range(500)]
    adjacent = [(2000 + index * 16, 4000 + index * 16, 16) for index in range(64)]
    _arrives(harness, single + adjacent, SMALL_BYTES, SMALL_BYTES)


@CASES.add()
def spans_at_the_very_ends_of_memory_arrive_exactly(harness: TransportHarness) -> None:
    spans = [(0, SMALL_BYTES - 7, 7), (SMALL_BYTES - 1, 0, 1), (100, 100, 0), (SMALL_BYTES, SMALL_BYTES, 0)]
    _arrives(harness, spans, SMALL_BYTES, SMALL_BYTES)


@CASES.add()
def a_large_copy_arrives_exactly(harness: TransportHarness) -> None:
    block = 16 << 10
    order = random.Random(5).sample(range(LARGE_BYTES // 2 // block), LARGE_BYTES // 2 // block)
    spans = [(here * block, there * block, block) for here, there in enumerate(order)]
    _arrives(harness, [*spans, (LARGE_BYTES // 2, LARGE_BYTES // 2, LARGE_BYTES // 2)], LARGE_BYTES, LARGE_BYTES)


@CASES.add()
def a_copy_of_nothing_ends_well(harness: TransportHarness) -> None:
    _arrives(harness, [], SMALL_BYTES, SMALL_BYTES)


@CASES.add()
def many_copies_at_once_each_arrive(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    near, far = fill(pair.near.memory, 1), fill(pair.far.memory, 2)
    spans = scatter(random.Random(7), SMALL_BYTES, SMALL_BYTES, 60, 1024)
    for job, span in enumerate(spans):
        assert pair.near.transport.submit(copy(job, pair.far, READ, [span]))
    log = Log(harness, pair.near)
    assert all(log.end(job).reason is None for job in range(len(spans)))
    assert bytes(pair.near.memory) == moved(near, far, spans, READ)


BAD_OFFSETS = (-1, SMALL_BYTES - 7, SMALL_BYTES, SMALL_BYTES + 1, 2**63 - 1, -(2**63))
BAD_SIZES = (-1, SMALL_BYTES + 1, 2**63 - 1, -(2**63))


def _refused(harness: TransportHarness, spans: Places, region: int = 0) -> None:
    """The copy ends as BAD_SPAN, with its good spans unmoved as well."""
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    near, far = fill(pair.near.memory, 1), fill(pair.far.memory, 2)
    log = Log(harness, pair.near)
    for job, (direction, span) in enumerate((direction, span) for direction in directions(harness) for span in spans):
        assert pair.near.transport.submit(copy(job, pair.far, direction, [(0, 0, 64), span], region))
        end = log.end(job)
        assert (end.reason, end.at_rest) == (Reason.BAD_SPAN, True), (span, end)
    assert bytes(pair.near.memory) == near
    assert bytes(pair.far.memory) == far


@CASES.add()
def a_span_outside_local_memory_moves_nothing(harness: TransportHarness) -> None:
    _refused(harness, [(offset, 0, 8) for offset in BAD_OFFSETS])


@CASES.add()
def a_span_outside_remote_memory_moves_nothing(harness: TransportHarness) -> None:
    _refused(harness, [(0, offset, 8) for offset in BAD_OFFSETS])


@CASES.add()
def a_span_of_impossible_size_moves_nothing(harness: TransportHarness) -> None:
    _refused(harness, [(8, 8, size) for size in BAD_SIZES])


@CASES.add()
def an_unknown_region_moves_nothing(harness: TransportHarness) -> None:
    _refused(harness, [(0, 0, 8)], region=7)


@CASES.add()
def an_unknown_peer_ends_the_copy(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    near = fill(pair.near.memory, 1)
    assert pair.near.transport.submit(Copy(JobId(1), STRANGER, READ, 0, 0, flat([(0, 0, 8)])))
    end = Log(harness, pair.near).end(1)
    assert (end.reason, end.at_rest) == (Reason.PEER_UNKNOWN, True), end
    assert bytes(pair.near.memory) == near


@CASES.add()
def a_nonsense_endpoint_is_refused(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    for nonsense in (b"", b"\x00", b"no endpoint", bytes(range(256))):
        try:
            pair.near.transport.connect(STRANGER, nonsense)
        except ValueError:
            continue
        raise AssertionError(f"{nonsense!r} was taken for an endpoint")
