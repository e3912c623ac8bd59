"""shm and tcp keep the contract of `Transport` with checksums around them, within one process and across two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbaton.protocol.ids import PeerId
from kvbaton.testing import Case, InProcessHarness, check_transport
from kvbaton.testing.transport_case import offered
from kvbaton.transports.checksum.checksum_memory import Checksum
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import HostTransport
from kvbaton.transports.shm import shm_transport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from tests.transports.process_harness import ProcessHarness, allocated_in

PLANES = {"shm": (ShmTransport, shm_transport.CAPABILITIES), "tcp": (TcpTransport, tcp_transport.CAPABILITIES)}
MODES = {"shm": (Checksum.FULL, Checksum.SAMPLE), "tcp": tuple(Checksum)}
APART = [case for case in check_transport.cases if case.needs & {"kill", "pause"}]
TOGETHER = [case for case in check_transport.cases if not case.needs & {"kill", "pause"}]


def summed(plane: str, mode: Checksum) -> Callable[[PeerId], HostTransport]:
    return lambda me: SummedTransport(PLANES[plane][0](me), me, SumConfig(mode))


def harness_of(plane: str, mode: Checksum, regions: list[Region]) -> InProcessHarness:
    harness = InProcessHarness(summed(plane, mode), allocated_in(regions), PLANES[plane][1])
    if mode is not Checksum.FULL:
        harness.offers = frozenset()  # a second each; their idling is the same code
    return harness


HERE = [
    pytest.param(plane, mode, case, id=f"{plane}-{mode}-{case}")
    for plane, modes in MODES.items()
    for mode in modes
    for case in TOGETHER
    if case.needs <= offered(harness_of(plane, mode, []))
]
THERE = [
    pytest.param(plane, case, id=f"{plane}-{case}")
    for plane in PLANES
    for case in APART
    if plane == "tcp" or not case.needs & {"write", "fence"}
]


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, ProcessHarness]]:
    harnesses = {"shm": ProcessHarness("shm+sums"), "tcp": ProcessHarness("tcp+sums")}
    yield harnesses
    for harness in harnesses.values():
        harness.close()


@pytest.mark.parametrize(("plane", "mode", "case"), HERE)
def test_within_one_process_the_contract_is_kept(plane: str, mode: Checksum, case: Case, regions: list[Region]) -> None:
    case(harness_of(plane, mode, regions))


@pytest.mark.slow
@pytest.mark.parametrize(("plane", "case"), THERE)
def test_a_peer_in_another_process_keeps_the_contract(
    plane: str, case: Case, processes: dict[str, ProcessHarness]
) -> None:
    case(processes[plane])
