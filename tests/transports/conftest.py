"""What the tests of transports share: processes to play the far side, and a check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .process_harness import ProcessHarness


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
