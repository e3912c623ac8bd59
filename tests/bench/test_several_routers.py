"""Routers that do not hear of each other send what begins alike to one worker, and keep the workers evenly busy."""

from __future__ import annotations

import pytest

from kvbaton.router import policy
from kvbaton_proof.bench.router.several_routers import ROUTERS, SeveralLoad, as_lines, several_routers

LOAD = SeveralLoad(requests=800)


def test_hits_and_balance_hold_with_more_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.routers: row for row in several_routers(LOAD, ["prefix"])}
    assert tuple(rows) == ROUTERS and as_lines([*rows.values()])[1].split()[:2] == ["prefix", "1"]
    assert all(row.hit_rate >= 0.95 * rows[1].hit_rate and row.balance < 1.35 for row in rows.values()), rows
    monkeypatch.setattr(policy, "HOME_SHARE", 0.0)
    without = {row.routers: row for row in several_routers(LOAD, ["prefix"])}
    assert rows[4].hit_rate > 1.05 * without[4].hit_rate, (rows[4], without[4])


def test_the_same_seed_gives_the_same_rows() -> None:
    short = SeveralLoad(requests=100)
    assert several_routers(short) == several_routers(short)
