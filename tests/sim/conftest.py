"""What the tests of the simulator share."""

from __future__ import annotations

import pytest

from kvbaton.sim import run
from kvbaton.sim.hearing import Hearing


@pytest.fixture
def worlds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the questions beside each world and the books of its ledgers, which see most of what others are for."""
    monkeypatch.setattr(run, "asked", lambda bank, seed: None)
    monkeypatch.setattr(Hearing, "_keep_books", lambda self, life: None)
