"""What the tests of transports share: processes to play the far side, and a check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.testing import Case
from kvbaton.transports.checksum import checksum_client
from kvbaton.transports.core import jobs
from kvbaton.transports.core.shared_memory import Region

from .process_harness import ProcessHarness

REFUSED_S = 0.3
LENT_LATE = "what_is_lent_while_it_is_asked_for_is_had"


@pytest.fixture(autouse=True)
def _soon_refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the contract's cases blocks that are not lent are asked for again for less long, except where they come."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    if isinstance(case, Case) and case.name != LENT_LATE:
        monkeypatch.setattr(jobs, "LENT_WAIT_S", REFUSED_S)
        monkeypatch.setattr(checksum_client, "LENT_WAIT_S", REFUSED_S)


@pytest.fixture
def regions() -> Iterator[list[Region]]:
    """Memory that a test has allocated."""
    found: list[Region] = []
    yield found
    for region in found:
        region.close()


@pytest.fixture(scope="session")
def shm_processes() -> Iterator[ProcessHarness]:
    harness = ProcessHarness("shm")
    yield harness
    harness.close()


@pytest.fixture(scope="session")
def encrypted_processes() -> Iterator[ProcessHarness]:
    harness = ProcessHarness("tcp_encrypted")
    yield harness
    harness.close()


@pytest.fixture(scope="session")
def tcp_processes() -> Iterator[ProcessHarness]:
    harness = ProcessHarness("tcp")
    yield harness
    harness.close()
