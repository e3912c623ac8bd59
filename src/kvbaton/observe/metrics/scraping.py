"""Parsing a /metrics page: samples by name, labels and value.

Law: pure. Lines that are not samples are skipped; a missing name has no value, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Sample = tuple[str, Mapping[str, str], float]


def samples(text: str) -> list[Sample]:
    """Every line of Prometheus text: name, labels, value."""
    lines = map(_SAMPLE.match, text.splitlines())
    return [(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])) for found in lines if found is not None]


def total(found: Iterable[Sample], name: str) -> float | None:
    """The sum over a name's labels; None if there is no such name."""
    values = [value for each, _, value in found if each == name]
    return sum(values) if values else None


def figures(text: str) -> dict[str, float]:
    """By name, summed over labels, and by `name{labels}` as it is written."""
    found: dict[str, float] = {}
    for line in map(_SAMPLE.match, text.splitlines()):
        if line is not None:
            found[line[1]] = found.get(line[1], 0.0) + float(line[3])
            if line[2]:
                found[f"{line[1]}{{{line[2]}}}"] = float(line[3])
    return found
