"""shm and tcp keep the contract of `Transport`, within one process and across two, with both movers."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import pytest

from kvbaton.protocol.ids import PeerId
from kvbaton.testing import Case, InProcessHarness, check_transport
from kvbaton.testing.transport_case import offered
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.shm import shm_transport
from kvbaton.transports.shm.shm_transport import ShmConfig, ShmTransport
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpTransport
from tests.transports.process_harness import allocated_in

from .process_harness import ProcessHarness

MAKE: dict[str, Callable[[PeerId], Transport]] = {
    "shm": ShmTransport,
    "shm_pure_python": lambda peer: ShmTransport(peer, ShmConfig(pure_python=True, threads=1)),
    "tcp": TcpTransport,
    "tcp_pure_python": lambda peer: TcpTransport(peer, TcpConfig(pure_python=True)),
    "tcp_one_stream_many_threads": lambda peer: TcpTransport(peer, TcpConfig(streams=1, threads=3)),
    "tcp_encrypted": lambda peer: TcpTransport(peer, TcpConfig(encrypt="on")),
    "tcp_over_ipv6": lambda peer: TcpTransport(peer, TcpConfig(host="::1", streams=3)),
}
APART = [case for case in check_transport.cases if case.needs & {"kill", "pause"}]
TOGETHER = [case for case in check_transport.cases if not case.needs & {"kill", "pause"}]
SHM_APART = [case for case in APART if not case.needs & {"write", "fence"}]  # there nobody writes into another's memory


def harness_of(name: str, regions: list[Region]) -> InProcessHarness:
    capabilities = shm_transport.CAPABILITIES if name.startswith("shm") else tcp_transport.CAPABILITIES
    harness = InProcessHarness(MAKE[name], allocated_in(regions), capabilities)
    if name not in {"shm", "tcp", "tcp_encrypted"}:
        harness.offers = frozenset()  # a second each; their idling is the same code
    return harness


HERE = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name in MAKE
    for case in TOGETHER
    if case.needs <= offered(harness_of(name, []))
]


@pytest.mark.parametrize(("name", "case"), HERE)
def test_within_one_process_the_contract_is_kept(name: str, case: Case, regions: list[Region]) -> None:
    case(harness_of(name, regions))


@pytest.mark.slow
@pytest.mark.parametrize("case", SHM_APART, ids=str)
def test_a_shm_peer_in_another_process_keeps_the_contract(case: Case, shm_processes: ProcessHarness) -> None:
    case(shm_processes)


@pytest.mark.slow
@pytest.mark.parametrize("case", APART, ids=str)
def test_a_tcp_peer_in_another_process_keeps_the_contract(case: Case, tcp_processes: ProcessHarness) -> None:
    case(tcp_processes)


@pytest.mark.slow
@pytest.mark.parametrize("case", APART, ids=str)
def test_an_encrypted_tcp_peer_in_another_process_keeps_the_contract(
    case: Case, encrypted_processes: ProcessHarness
) -> None:
    case(encrypted_processes)


@pytest.mark.slow
def test_the_suite_runs_as_a_whole_and_says_what_it_skipped(shm_processes: ProcessHarness) -> None:
    skipped = check_transport(shm_processes)
    assert "a_fenced_writer_cannot_land_a_byte" in skipped
    assert "scattered_spans_arrive_exactly" not in skipped


def test_a_case_that_needs_more_than_is_offered_is_skipped() -> None:
    case = next(case for case in check_transport.cases if "kill" in case.needs)
    with pytest.raises(unittest.SkipTest, match="kill"):
        case(InProcessHarness(TcpTransport, lambda size: memoryview(bytearray(size)), tcp_transport.CAPABILITIES))
