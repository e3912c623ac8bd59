"""A transport behind a rank link keeps the contract of `Transport`, for each data plane and both kinds of link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.ranks import rank_transport
from kvbaton.testing import Case, check_transport
from kvbaton.testing.transport_case import offered
from kvbaton.transports.core import jobs

from .rank_rig import LinkedHarness, LinkedProcessHarness

WAYS = {"sockets": False, "near": True}
TOGETHER = [
    pytest.param(kind, near, case, id=f"{kind}-{way}-{case}")
    for kind in ("shm", "tcp")
    for way, near in WAYS.items()
    for case in check_transport.cases
    if case.needs <= offered(LinkedHarness(kind, near))
]
APART = [
    pytest.param(kind, near, case, id=f"{kind}-{way}-{case}")
    for kind in ("shm", "tcp")
    for way, near in WAYS.items()
    for case in check_transport.cases
    if case.needs & {"kill", "pause"} and not (kind == "shm" and case.needs & {"write", "fence"})
]


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract asks for endpoints once; a busy machine may take longer than a node would wait. What is not lent
    is asked for again for less long, except where it comes."""
    monkeypatch.setattr(rank_transport, "ENDPOINT_WAIT_S", 20.0)
    if request.node.callspec.params["case"].name != "what_is_lent_while_it_is_asked_for_is_had":
        monkeypatch.setattr(jobs, "LENT_WAIT_S", 0.3)


@pytest.mark.parametrize(("kind", "near", "case"), TOGETHER)
def test_a_transport_behind_a_link_keeps_the_contract(kind: str, near: bool, case: Case) -> None:
    case(LinkedHarness(kind, near))


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, LinkedProcessHarness]]:
    harnesses = {"shm": LinkedProcessHarness("shm"), "tcp": LinkedProcessHarness("tcp")}
    yield harnesses
    for harness in harnesses.values():
        harness.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "near", "case"), APART)
def test_with_a_peer_that_is_stopped_or_killed_it_does_too(
    kind: str, near: bool, case: Case, processes: dict[str, LinkedProcessHarness]
) -> None:
    processes[kind].near = near
    case(processes[kind])
