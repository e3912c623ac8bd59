"""The contract of `Store` as a public suite: run it on any `Backend`, the ones here or your own.

    @pytest.mark.parametrize("case", check_store.cases, ids=str)
    def test_my_back_end_keeps_the_contract(case: StoreCase) -> None:
        case(MyHarness())

or `check_store(harness)` for all of it at once. A case that needs what the harness does not offer raises
`unittest.SkipTest`. Cases assert laws, never speed.
"""

from __future__ import annotations

import unittest

from kvbaton.testing import store_failing, store_keeping
from kvbaton.testing.store_case import StoreCase
from kvbaton.testing.store_harness import StoreHarness


class StoreContract:
    """Callable on a harness; `cases` to run them one by one."""

    cases: tuple[StoreCase, ...] = (*store_keeping.CASES, *store_failing.CASES)

    def __call__(self, harness: StoreHarness) -> list[str]:
        """Run every case; the names of those that could not be run."""
        skipped = []
        for case in self.cases:
            try:
                case(harness)
            except unittest.SkipTest:
                skipped.append(case.name)
        return skipped


check_store = StoreContract()
