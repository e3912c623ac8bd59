"""What the tests of the simulator share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.protocol.machines.lease import Lease
from kvbaton.protocol.machines.producer import Producer
from kvbaton_proof.sim import run
from kvbaton_proof.sim.checks.version_checks import VersionChecks
from kvbaton_proof.sim.run import run_seed

from .seen_seeds import SeenSeeds

SEEDS = range(40)
"""All that the tests look for is met in the first thirty; that more hold, `make sim` shows."""


@pytest.fixture
def worlds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the books of a world's ledgers, which see most of what other checkers are for."""
    monkeypatch.setattr(VersionChecks, "_keep_books", lambda self, life: None)


@pytest.fixture(scope="session")
def seen() -> Iterator[SeenSeeds]:
    found, judge = SeenSeeds(), Producer._judge

    def watched(self: Producer, lease: Lease) -> tuple[bool, tuple[int, ...]]:
        proven, good = judge(self, lease)
        if not proven and good:
            found.judge(lease, good)
        return proven, good

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Producer, "_judge", watched)
        for beside in ("turn_world", "side_world", "answer_world"):  # which `make sim` runs
            patch.setattr(run, beside, lambda seed: None)
        for seed in SEEDS:
            found.results.append(run_seed(seed))
            found.faults.update(found.results[-1].faults)
            found.ends.update(found.results[-1].ends)
    yield found
