"""The pair of ledgers that most tests talk through; its promises are checked when a test is over.

What chance reaches counts for no coverage: every branch is reached by a test that says so in its name, and properties,
measured, would take three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pair import Pair


def pytest_itemcollected(item: pytest.Item) -> None:
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker(pytest.mark.no_cover)


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """A factory of pairs, each of which must come to rest when the test is over."""
    made: list[Pair] = []

    def make(*names: str, **options: Any) -> Pair:
        made.append(Pair(*names, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.finish()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """P and D, with the default settings."""
    return make_pair("p", "d")
