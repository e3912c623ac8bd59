"""The planes of device memory keep the contract of `Transport` on a device made of host memory, in one process and two,
with checksums around them and without.

On a real GPU the same cases are run by `python -m tests.transports.cuda_check`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.testing import Case, check_transport
from kvbaton.testing.transport_case import offered

from .device_harness import DeviceHarness

PLANES = ("cuda", "staged-shm", "staged-tcp", "cuda+sums", "staged-tcp+sums")
CASES = [
    case
    for case in check_transport.cases
    if not case.needs & {"write", "fence"} and case.needs <= offered(DeviceHarness("cuda"))
]
HERE = [case for case in CASES if not case.needs & {"kill", "pause"}]


@pytest.fixture(scope="module", params=PLANES)
def apart(request: pytest.FixtureRequest) -> Iterator[DeviceHarness]:
    harness = DeviceHarness(request.param)
    yield harness
    harness.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_between_two_processes(apart: DeviceHarness, case: Case) -> None:
    case(apart)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("case", HERE, ids=str)
def test_within_one_process(plane: str, case: Case) -> None:
    harness = DeviceHarness(plane, together=True)
    try:
        case(harness)
    finally:
        harness.close()
    assert not harness.gpu.live and not harness.gpu.regions and not harness.gpu.pinned  # type: ignore[attr-defined]
