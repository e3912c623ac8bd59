"""The claims of `kvbaton bench transfer --peers`, as figures with bounds.

Law: pure. A claim is judged on ratios taken within the repetitions, and a library is represented by its fastest way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvbaton_proof.bench.kit.lab_pages import Check, Relation, check
from kvbaton_proof.bench.transfer.ways_own import AS_INSTALLED, MEMCPY, TCP

SHM_OF_MEMCPY_MIN = 0.9
DRIVING_MIN = 0.95
IDLE_PERCENT_MAX = 2.0
NEAR = 0.15  # of the bound: on a busy machine noise alone is as much

SAME_HOST = {"nixl": ("nixl", "nixl_2_threads", "nixl_no_thread"), "mooncake": ("mooncake",)}
"""By peer, its ways on one host; it is as fast as the fastest."""

OVER_TCP = {"nixl": ("nixl_tcp", "nixl_tcp_spin"), "mooncake": ("mooncake",)}
DRIVEN = {"nixl": (("kvbaton_nixl", "nixl"), ("kvbaton_nixl_tcp", "nixl_tcp"))}
"""What driving a library through kvbaton costs: both in the same configuration."""


def is_delicate(claim: Check) -> bool:
    """Whether noise could decide it: near its bound, or about a cost of a few percent."""
    near = claim.value is not None and abs(claim.value - claim.bound) <= NEAR * claim.bound
    return near or claim.bound == DRIVING_MIN


def judge(ratio: Callable[[str, str], float], peers: Sequence[str], segment_bytes: int) -> list[Check]:
    """The claims about one segment size; `ratio(way, base)` is how much faster `way` is."""
    if not peers:
        return []
    at = f"at {segment_bytes >> 10} KiB"

    def ahead(what: str, way: str, others: Sequence[str], relation: Relation, bound: float) -> Check:
        return check(f"{what} {at}", min(ratio(way, other) for other in others), relation, bound, (way, *others))

    found = [ahead("shm / memcpy", AS_INSTALLED, (MEMCPY,), ">=", SHM_OF_MEMCPY_MIN)]
    for peer in peers:
        found.append(ahead(f"shm / {peer}", AS_INSTALLED, SAME_HOST[peer], ">", 1.0))
        found.append(ahead(f"tcp / {peer} over tcp", TCP, OVER_TCP[peer], ">", 1.0))
        for driven, direct in DRIVEN.get(peer, ()):
            found.append(ahead(f"{driven} / {direct}", driven, (direct,), ">=", DRIVING_MIN))
    return found


def judge_idle(percent: Mapping[str, float]) -> list[Check]:
    """`percent` of a core, by transport."""
    return [check(f"idle {name}, % of a core", used, "<", IDLE_PERCENT_MAX) for name, used in percent.items()]
