"""The claims of `kvbaton bench transfer --peers`, as figures with bounds.

Law: pure. A claim is judged on ratios taken within the repetitions, and a library is represented by its fastest way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from kvbaton_proof.bench.transfer.machine_ways import AS_INSTALLED, MEMCPY, TCP

SHM_OF_MEMCPY_MIN = 0.9
DRIVING_MIN = 0.95
IDLE_PERCENT_MAX = 2.0
NEAR = 0.15  # of the bound: on a busy machine noise alone is as much

SAME_HOST = {"nixl": ("nixl", "nixl_2_threads", "nixl_no_thread"), "mooncake": ("mooncake",)}
"""By peer, its ways on one host; it is as fast as the fastest."""

OVER_TCP = {"nixl": ("nixl_tcp", "nixl_tcp_spin"), "mooncake": ("mooncake",)}
DRIVEN = {"nixl": (("kvbaton_nixl", "nixl"), ("kvbaton_nixl_tcp", "nixl_tcp"))}
"""What driving a library through kvbaton costs: both in the same configuration."""

Relation = Literal[">=", ">", "<"]
_HOLDS: Mapping[Relation, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
}


class Check(msgspec.Struct, frozen=True):
    """One claim: holds when `value relation bound`."""

    name: str
    value: float
    relation: Relation
    bound: float
    ok: bool
    ways: tuple[str, ...] = ()  # that it is about

    @property
    def is_delicate(self) -> bool:
        """Whether noise could decide it: near its bound, or about a cost of a few percent."""
        return abs(self.value - self.bound) <= NEAR * self.bound or self.bound == DRIVING_MIN


def check(name: str, value: float, relation: Relation, bound: float, ways: Sequence[str] = ()) -> Check:
    return Check(name, round(value, 3), relation, bound, _HOLDS[relation](value, bound), tuple(ways))


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
