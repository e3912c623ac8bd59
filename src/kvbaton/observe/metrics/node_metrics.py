"""Counters of one engine's ledger, control plane and transports, by metric names without their `kvbaton_`.

Law: only reads of ints and copies of small dicts, so that any thread may call it while the node's thread runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvbaton.transports.core.refusals import refusals_of

if TYPE_CHECKING:  # a router, a registry and a store have neither
    from kvbaton.protocol.machines.ledger import Ledger
    from kvbaton.transports.core.transport import Transport

_BY_REASON = {
    "leases_refused_total": "lease_refused.",
    "claims_refused_total": "claim_refused.",
    "offers_refused_total": "offer_refused.",
    "abandoned_total": "abandoned.",
    "hello_refused_total": "hello_refused.",
    "frames_refused_total": "frames_refused.",
    "sessions_total": "sessions.",
    "links_total": "links.",
    "planes_given_up_total": "planes_given_up.",
    "ends_total": "ends.",
    "turns_total": "turns.",
}
_FRONTS = {front.removesuffix("."): name for name, front in _BY_REASON.items()}
_PLAIN = {
    "bytes_total": "bytes_moved",
    "copies_total": "copies",
    "leases_total": "leases",
    "leases_expired_total": "leases_expired",
    "leases_discarded_total": "leases_discarded",
    "commits_good_total": "commits.good",
    "commits_stale_total": "commits.stale",
    "cache_resets_total": "cache_resets",
    "cache_reset_blocks_total": "cache_reset_blocks",
}


def counters(ledger: Ledger, control: Mapping[str, int]) -> dict[str, int | dict[str, int]]:
    """Counters. `control`: those of its control plane."""
    counts = dict(ledger.desk.counts)
    quotas = {what: counts.get(f"over_quota.{what}", 0) for what in ("greetings", "sessions")}
    return {
        **{name: counts.get(key, 0) for name, key in _PLAIN.items()},
        **_by_name(counts),
        "over_quota_total": {"frames": control.get("over_quota", 0), **quotas},
        **connections(control),
    }


def connections(control: Mapping[str, int]) -> dict[str, int]:
    """Connections to a control port."""
    return {
        "connections_total": control.get("connections", 0),
        "connections_admitted_total": control.get("admitted", 0),
        "connections_refused_total": control.get("refused", 0),
    }


def data_refused(ranks: Iterable[Mapping[str, Transport]]) -> dict[str, int]:
    """Refusals at the data ports of all ranks: `transport:cause`. All causes of each transport, from zero on."""
    found: Counter[str] = Counter()
    for rank in ranks:
        for name, transport in rank.items():
            for cause, count in refusals_of(transport).items():
                found[f"{name}:{cause}"] += count
    return dict(found)


def gauges(ledger: Ledger, now: float, blocks: float = math.inf) -> dict[str, float]:
    """Gauges; `now` is the node's clock, `blocks` those of the engine's cache, where they are known."""
    settings = ledger.desk.settings
    return {
        "leases_held": len(ledger.producer.leases),
        "claims_parked": ledger.producer.claims.waiting,
        "intakes": len(ledger.consumer.by_handoff),
        "quarantined_blocks": ledger.consumer.quarantined_blocks,
        "quarantine_max_blocks": min(settings.quarantine_blocks_max, blocks),
        "oldest_lease_seconds": _oldest(ledger, now),
        "lease_hold_max_seconds": settings.max_hold_s,
    }


def figures(ledger: Ledger, control: Mapping[str, int], now: float, blocks: int) -> dict[str, Any]:
    """Both, for a worker's `/stats`."""
    return {**gauges(ledger, now, blocks), **counters(ledger, control)}


def _oldest(ledger: Ledger, now: float) -> float:
    hold_s = ledger.desk.settings.max_hold_s
    leases = list(ledger.producer.leases.values())
    begun = [lease.term.hold_until - hold_s for lease in leases if not lease.term.is_turn]
    return round(max(now - min(begun), 0.0), 3) if begun else 0.0


def _by_name(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """In one pass: an engine's scheduler calls it at every step."""
    found: dict[str, dict[str, int]] = {name: {} for name in _FRONTS.values()}
    for key, count in counts.items():
        front, dot, label = key.partition(".")
        if dot and front in _FRONTS:
            found[_FRONTS[front]][label] = count
    return found
