"""Golden transcripts: a scenario is a text file, and a change of behaviour is a difference to review.

`UPDATE_SCENARIOS=1 pytest tests/scenarios` writes what happens now into the files.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from script import Script

FILES = sorted(Path(__file__).parent.glob("*.txt"))
UPDATE = os.environ.get("UPDATE_SCENARIOS") == "1"


def replay(text: str) -> str:
    """The scenario with what its commands lead to now."""
    script, written, skipping = Script(), [], False
    for line in text.splitlines():
        if skipping:
            skipping = bool(line)
            if skipping:
                continue
        if line == "----":
            skipping = True
            continue
        written.append(line)
        if line and not line.startswith("#"):
            written.append("----")
            followed = script.play(line)
            written += [followed] if followed else []
    return "\n".join(written).rstrip("\n") + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_scenario_goes_as_written(path: Path) -> None:
    expected = path.read_text()
    actual = replay(expected)
    if UPDATE:
        path.write_text(actual)
    assert UPDATE or actual == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_scenario_says_what_it_is_about_and_comes_to_rest(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    assert "\nrest\n----\n" in text and text.rstrip().endswith("everything is at rest")


def test_there_are_enough_of_them() -> None:
    assert len(FILES) >= 14
