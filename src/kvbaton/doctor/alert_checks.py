"""Alerts of `deploy/prometheus/rules.yml` that fire now, as far as one or two looks at the figures can tell.

Law: pure. A threshold is the rule's own (`tests/doctor/test_doctor_alerts.py` compares them); what is no number fires
nothing. Alerts on what happened in the last minutes need a Prometheus, but for the share of 5xx between two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kvbaton.doctor.finding import Finding, finding
from kvbaton.observe.metrics.scraping import Sample, samples

CRITICAL, WARNING = "alert-critical", "alert-warning"
ERRORS_SHARE_MAX, ERRORS_MAX = 0.05, 2


class GaugeRule(msgspec.Struct, frozen=True):
    """Fires where a worker's gauge is more than a share of another one."""

    name: str
    gauge: str
    most: str
    share_max: float
    what: str


RULES = (
    GaugeRule("KvbatonPinsNearExpiry", "oldest_lease_seconds", "lease_hold_max_seconds", 0.8, "max_hold_s, a lease's"),
    GaugeRule("KvbatonQuarantineNearBound", "quarantined_blocks", "quarantine_max_blocks", 0.5, "the quarantine"),
)
GAUGES = frozenset(name for rule in RULES for name in (rule.gauge, rule.most))


def errors_and_all(page: str) -> tuple[float, float]:
    """5xx, and all responses that a client was still there for, since the router started."""
    told = [
        (labels.get("status"), value)
        for name, labels, value in _samples(page)
        if name.endswith("router_responses_total")
    ]
    return sum(n for status, n in told if status == "5xx"), sum(n for status, n in told if status != "gone")


def router_alerts(url: str, first: str, then: str) -> Iterator[Finding]:
    """By two pages of the router's metrics; both the same where one look was enough."""
    pairs = [value for name, _, value in _samples(then) if name == "kvbaton_router_pairs"]
    if pairs and max(pairs) == 0:
        yield _fires(CRITICAL, "KvbatonNoPair", f"router {url}", "no pair of P and D can serve")
    errors, count = (new - old for new, old in zip(errors_and_all(then), errors_and_all(first), strict=True))
    if errors > ERRORS_MAX and errors > ERRORS_SHARE_MAX * count:
        said = f"{errors:.0f} of {count:.0f} requests ended with a 5xx between two looks"
        yield _fires(CRITICAL, "KvbatonRouterErrors", f"router {url}", said)


def worker_alerts(where: str, gauges: Mapping[str, float]) -> Iterator[Finding]:
    for rule in RULES:
        value, most = gauges.get(rule.gauge, 0.0), gauges.get(rule.most, 0.0)
        if most > 0 and value > rule.share_max * most:
            yield _fires(WARNING, rule.name, where, f"{rule.gauge} is {value / most:.0%} of {rule.what} bound")


def gauges_of(page: str) -> dict[str, float]:
    """Those of a vLLM worker, by its page of metrics; of several engines the highest."""
    told = sorted((name.removeprefix("kvbaton_"), value) for name, _, value in _samples(page))
    return {name: value for name, value in told if name in GAUGES}


def _samples(page: str) -> list[Sample]:
    try:
        return samples(page)
    except ValueError:  # a value that is no number: no page of ours
        return []


def _fires(code: str, name: str, where: str, said: str) -> Finding:
    return finding(code, where, f"{name}: {said}", f"docs/alerts.md#{name.lower()} says what to do")
