"""Alerts that `kvbaton doctor` judges without a Prometheus: by the rules' own thresholds and severities."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvbaton.doctor import cluster_checks
from kvbaton.doctor.cluster_checks import CRITICAL, RULES, WARNING, gauges_of, router_alerts, worker_alerts
from tests.cli.talker import talker, whole

RULES_PAGE = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
DOCS = Path(__file__).parents[2] / "docs" / "alerts.md"
LEASE = {"oldest_lease_seconds": 0.81, "lease_hold_max_seconds": 1.0}
NEAR = {"quarantined_blocks": 6.0, "quarantine_max_blocks": 10.0}


def page(pairs: int = 2, **responses: int) -> str:
    counts = "".join(f'kvbaton_router_responses_total{{status="{each}"}} {n}\n' for each, n in responses.items())
    return f'kvbaton_router_pairs{{mode="pull"}} {pairs}\nkvbaton_router_pairs{{mode="push"}} 0\n{counts}'


def fired(first: str, then: str) -> list[str]:
    return [each.found.partition(":")[0] for each in router_alerts("http://r", first, then)]


def test_no_pair_fires_when_every_mode_has_none() -> None:
    assert fired(page(0), page(0)) == ["KvbatonNoPair"]
    assert fired(page(1), page(1)) == fired("", "") == fired("x 1e", "kvbaton_router_pairs many\n") == []


@pytest.mark.parametrize(
    ("before", "after", "fires"),
    [
        ({"5xx": 90, "2xx": 10}, {"5xx": 90, "2xx": 10}, False),  # long ago
        ({"5xx": 90, "2xx": 10}, {"5xx": 93, "2xx": 20}, True),
        ({}, {"5xx": 2}, False),  # too few
        ({}, {"5xx": 5, "2xx": 95}, False),  # a twentieth is borne
        ({}, {"5xx": 6, "2xx": 94}, True),
        ({}, {"5xx": 6, "2xx": 94, "gone": 900}, True),
        ({"5xx": 90}, {"5xx": 3}, False),  # it was restarted
    ],
)
def test_errors_fire_by_what_came_between_two_looks(
    before: Mapping[str, int], after: Mapping[str, int], fires: bool
) -> None:
    assert fired(page(**before), page(**after)) == ["KvbatonRouterErrors"] * fires


def test_gauges_of_a_worker_fire_beyond_their_share() -> None:
    told = [(each.code, each.found.partition(":")[0]) for each in worker_alerts("worker p0", LEASE | NEAR)]
    assert told == [(WARNING, "KvbatonPinsNearExpiry"), (WARNING, "KvbatonQuarantineNearBound")]
    nothing = {**LEASE, "oldest_lease_seconds": 0.8}, {}, {"quarantined_blocks": 1.0}, {"oldest_lease_seconds": 9.0}
    assert [list(worker_alerts("worker p0", each)) for each in nothing] == [[]] * 4


def test_of_several_engines_behind_one_page_the_worst_counts() -> None:
    told = 'kvbaton_oldest_lease_seconds{engine="0"} 1\nkvbaton_oldest_lease_seconds{engine="1"} 7\nkvbaton_pins 3\n'
    assert gauges_of(told) == {"oldest_lease_seconds": 7.0}


def test_thresholds_and_severities_are_the_rules_own() -> None:
    blocks = dict(re.findall(r"- alert: (\w+)\n(.*?)(?=\n      - alert|\Z)", RULES_PAGE.read_text(), re.DOTALL))
    for rule in RULES:
        assert f"> {rule.share_max}" in blocks[rule.name] and "severity: warning" in blocks[rule.name]
    assert f"> {cluster_checks.ERRORS_SHARE_MAX}\n" in blocks["KvbatonRouterErrors"]
    assert f"> {cluster_checks.ERRORS_MAX}\n" in blocks["KvbatonRouterErrors"]
    for name in ("KvbatonRouterErrors", "KvbatonNoPair"):
        assert "severity: critical" in blocks[name] and f"\n## {name}\n" in DOCS.read_text()


def test_a_router_that_refuses_now_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that never did, once."""
    monkeypatch.setattr(cluster_checks, "LOOKS_S", 0.0)
    looks: list[str] = []

    def answer(path: str) -> list[bytes]:
        if path != "/metrics":
            return whole(
                b'{"status": "ok", "workers": [], "pairs": {"pull": 2}}' if path == "/health" else b'{"workers": []}'
            )
        looks.append(path)
        return whole(page(**({"5xx": 10 * len(looks)} if refuses else {"2xx": 7})).encode())

    for refuses in (False, True):
        looks.clear()
        with talker(answer) as url:
            found = cluster_checks.router(url, 20.0)
        told = [(each.code, each.found.partition(":")[0]) for each in found.alerts]
        assert (len(looks), told) == ((2, [(CRITICAL, "KvbatonRouterErrors")]) if refuses else (1, []))
