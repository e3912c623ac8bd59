"""Nothing leaves a guarded hook."""

from __future__ import annotations

from kvbaton.engines.side import guard


class TestGuard:
    def test_nothing_leaves_a_hook_and_the_fallback_answers(self) -> None:
        @guard.guarded(lambda given: ("fallback", given))
        def hook(given: int) -> tuple[str, int]:
            raise KeyError(given)

        before = guard.faults["hook"]
        assert hook(5) == ("fallback", 5) and guard.faults["hook"] == before + 1

    def test_fallbacks_are_not_shared(self) -> None:
        made = guard.makes(set)
        assert made() is not made() and guard.returns(7)(1, two=2) == 7
