"""The contract of `Transport` as a public suite: run it on a real data plane, a simulated one, or your own.

    @pytest.mark.parametrize("case", check_transport.cases, ids=str)
    def test_my_transport_keeps_the_contract(case: Case) -> None:
        case(MyHarness())

or `check_transport(harness)` for all of it at once. A case that needs what the transport or the harness does not offer
raises `unittest.SkipTest`, which pytest shows as skipped. Cases assert laws, never speed: where a copy may win a race
against a cancel or a kill, both outcomes are checked.
"""

from __future__ import annotations

import unittest

from kvbaton.testing import transport_ending, transport_lending, transport_moving, transport_resting
from kvbaton.testing.transport_case import Case
from kvbaton.testing.transport_harness import TransportHarness


class TransportContract:
    """Callable on a harness; `cases` to run them one by one."""

    cases: tuple[Case, ...] = (
        *transport_moving.CASES,
        *transport_ending.CASES,
        *transport_resting.CASES,
        *transport_lending.CASES,
    )

    def __call__(self, harness: TransportHarness) -> list[str]:
        """Run every case; the names of those that could not be run."""
        skipped = []
        for case in self.cases:
            try:
                case(harness)
            except unittest.SkipTest:
                skipped.append(case.name)
        return skipped


check_transport = TransportContract()
