"""The planes of device memory keep the contract of `Transport` on a device made of host memory, in one process and two,
with checksums around them and without.

On a real GPU the same cases are run by `python -m tests.transports.cuda_check`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.proof.contracts.transport_case import offered
from kvbaton.testing import Case, check_transport

from .device_harness import DeviceHarness

PLANES = ("cuda", "nixl", "staged-shm", "staged-tcp", "cuda+sums", "staged-tcp+sums")


def cases(together: bool) -> list[tuple[str, Case]]:
    """What each plane can be asked, one plane after the other."""
    return [
        (plane, case)
        for plane in PLANES
        for case in check_transport.cases
        if case.needs <= offered(DeviceHarness(plane, together=together))
    ]


def named(value: object) -> str:
    return str(value)


@pytest.fixture(scope="module")
def harnesses() -> Iterator[dict[str, DeviceHarness]]:
    made = {plane: DeviceHarness(plane) for plane in PLANES}
    yield made
    for harness in made.values():
        harness.close()


@pytest.mark.parametrize(("plane", "case"), cases(together=False), ids=named)
def test_between_two_processes(harnesses: dict[str, DeviceHarness], plane: str, case: Case) -> None:
    case(harnesses[plane])


@pytest.mark.parametrize(("plane", "case"), cases(together=True), ids=named)
def test_within_one_process(plane: str, case: Case) -> None:
    harness = DeviceHarness(plane, together=True)
    try:
        case(harness)
    finally:
        harness.close()
    assert not harness.gpu.live and not harness.gpu.regions and not harness.gpu.pinned  # type: ignore[attr-defined]
