"""The planes of device memory keep the contract of `Transport` on a device made of host memory, in one process and two,
with checksums around them and without.

Between two processes go the cases that need a second one, and those in which bytes, loans and fences cross. What one
side keeps to itself (what it refuses, its queue, its waker, its idling) is the same code there, and is asked within one
process; with checksums so is all that needs no second process, as for the planes of host memory. On a real GPU every
case is run both ways by `python -m tests.transports.device.cuda_check`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.testing import Case, check_transport, transport_ending
from kvbaton.testing.transport_case import offered
from kvbaton.transports.catalogue import SUMS
from tests.transports.device.device_harness import DeviceHarness

PLANES = ("cuda", "nixl", "staged-shm", "staged-tcp", "cuda+sums", "staged-tcp+sums")
REFUSALS = {
    "a_copy_of_nothing_ends_well", "a_span_outside_local_memory_moves_nothing", "an_unknown_peer_ends_the_copy",
    "a_span_of_impossible_size_moves_nothing", "an_unknown_region_moves_nothing", "a_nonsense_endpoint_is_refused",
    "cancelling_what_is_unknown_or_over_is_ignored", "a_fence_of_an_unknown_peer_ends",
}  # fmt: skip
ONE_SIDED = {case.name for case in transport_ending.CASES} | REFUSALS


def crosses(plane: str, case: Case) -> bool:
    """Whether a second process shows more of it."""
    return bool(case.needs & {"kill", "pause"}) or not (plane.endswith(SUMS) or case.name in ONE_SIDED)


def cases(together: bool) -> list[tuple[str, Case]]:
    """What each plane can be asked, one plane after the other."""
    return [
        (plane, case)
        for plane in PLANES
        for case in check_transport.cases
        if (together or crosses(plane, case)) and case.needs <= offered(DeviceHarness(plane, together=together))
    ]


def test_what_is_left_to_one_process_is_asked_there() -> None:
    within = set(cases(together=True))
    asked = {(plane, case) for plane in PLANES for case in check_transport.cases if not crosses(plane, case)}
    missed = {(plane, case) for plane, case in asked - within if case.needs <= offered(DeviceHarness(plane))}
    assert not missed and {case.name for case in check_transport.cases} >= ONE_SIDED


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
