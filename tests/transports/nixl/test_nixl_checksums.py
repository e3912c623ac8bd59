"""NIXL keeps the contract with checksums around it, and a byte that it gets wrong is caught.

Needs nixl: run it with `.venv-vllm/bin/python -m pytest tests/transports/nixl/test_nixl_checksums.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.testing import Case, InProcessHarness, Log, check_transport
from kvbaton.testing.transport_case import LARGE_BYTES, READ, SMALL_BYTES, WRITE, copy, fill
from kvbaton.testing.transport_harness import CorruptingTransport, some_byte
from kvbaton.transports.checksum.checksum_memory import Checksum
from kvbaton.transports.checksum.checksum_transport import BYTES_MAX, SumConfig, SummedTransport
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import Direction
from kvbaton.transports.nixl.nixl_transport import CAPABILITIES, NixlTransport
from tests.transports.process_harness import ProcessHarness, allocated_in

pytestmark = pytest.mark.library("nixl")

TOGETHER = [case for case in check_transport.cases if case.needs <= frozenset({"idle", "write"})]
APART = [
    case
    for case in check_transport.cases
    if case.needs & {"kill"}
    or case.name
    in {
        "nothing_lands_after_a_cancelled_read_has_come_to_rest",
        "nothing_lands_after_a_cancelled_write_has_come_to_rest",
        "cancelling_what_is_unknown_or_over_is_ignored",
    }
]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessHarness]:
    harness = ProcessHarness("nixl+sums")
    yield harness
    harness.close()


def together(regions: list[Region], mode: Checksum = Checksum.FULL, seed: int | None = None) -> InProcessHarness:
    """Both sides here; with a seed, the plane gets a byte of every copy wrong."""

    def make(me: PeerId) -> SummedTransport:
        plane = NixlTransport(me)
        return SummedTransport(
            plane if seed is None else CorruptingTransport(plane, some_byte(seed)), me, SumConfig(mode)
        )

    return InProcessHarness(make, allocated_in(regions), CAPABILITIES)


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_within_one_process_the_contract_is_kept(case: Case, regions: list[Region]) -> None:
    case(together(regions))


@pytest.mark.slow
@pytest.mark.parametrize("case", APART, ids=str)
def test_a_peer_in_another_process_keeps_the_contract(case: Case, processes: ProcessHarness) -> None:
    try:
        case.run(processes)
    finally:
        processes.reset()


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_a_wrong_byte_is_caught(direction: Direction, regions: list[Region]) -> None:
    harness = together(regions, seed=3)
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    fill(pair.near.memory, 1)
    fill(pair.far.memory, 2)
    log = Log(harness, pair.near)
    for job in range(3):
        assert pair.near.transport.submit(copy(job, pair.far, direction, [(0, SMALL_BYTES, LARGE_BYTES // 2)]))
        end = log.end(job)
        assert (end.reason, end.at_rest) == (Reason.CHECKSUM_MISMATCH, True), end
    harness.reset()


def test_an_endpoint_of_many_regions_is_small_enough_to_be_told(regions: list[Region]) -> None:
    me, peer = (PeerId(WorkerId(name), Incarnation((1 << 63) - 1)) for name in ("w" * 60 + "#7", "peer"))
    transport = SummedTransport(NixlTransport(me), me)
    for region in range(64):
        regions.append(allocate(1 << 16))
        transport.register(region, regions[-1].view)
    assert len(transport.endpoint(peer)) <= BYTES_MAX
    transport.close()
