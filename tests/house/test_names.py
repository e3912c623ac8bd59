"""One word per thing: no two classes of the product share a name."""

from __future__ import annotations

from collections import defaultdict

from tests.house.reading import PROOF, classes

CONTRACTS = "testing."
"""Authors of transports and engines import these by this name; in the product nothing does."""


def test_no_two_classes_of_the_product_share_a_name() -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for each in classes():
        if not each.module.startswith((PROOF, CONTRACTS)):
            by_name[each.name].append(each.place)
    assert {name: places for name, places in by_name.items() if len(places) > 1} == {}
