"""Modules of at most 450 lines, classes of at most 14 attributes; each exception says why."""

from __future__ import annotations

from pathlib import Path

from tests.house.reading import classes, lines_of, modules

LINES_MAX = 450
ATTRIBUTES_MAX = 14
LARGE = dict(
    line.split(" || ", 1)
    for line in (Path(__file__).parent / "large.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
"""What is larger, and why: `module` or `module:Class` || reason."""


def too_large() -> set[str]:
    long = {module for module in modules() if lines_of(module) > LINES_MAX}
    return long | {each.place for each in classes() if each.attributes > ATTRIBUTES_MAX}


def test_whatever_is_large_says_why() -> None:
    assert sorted(too_large() - LARGE.keys()) == []


def test_no_reason_is_left_over() -> None:
    assert sorted(LARGE.keys() - too_large()) == []


def test_every_reason_is_one() -> None:
    assert [name for name, reason in LARGE.items() if len(reason.split()) < 4] == []
