"""Names of an engine's ranks: `p0.dp1` is data-parallel rank 1 of engine p0, `p0.1` is tensor-parallel rank 1 of it.

Laws: each data-parallel rank is a member of the cluster, with a key of its own. A tensor-parallel rank has a key of its
own only towards a store. A name is built and taken apart here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvbaton.protocol.ids import WorkerId

_RANK = re.compile(r"(?P<owner>.+)\.(?:dp)?[0-9]{1,5}")
_DATA_PARALLEL = re.compile(r"(?P<engine>.+)\.dp(?P<rank>0|[1-9][0-9]{0,4})")

_OWN_TAIL = re.compile(r"-[a-z]{6}\Z")
"""What a member whose name is `auto` puts behind it, so that no other has the name."""


def data_parallel_name(engine: str, rank: int) -> WorkerId:
    return WorkerId(f"{engine}.dp{rank}")


def engine_and_rank(name: str) -> tuple[str, int] | None:
    """The parts of a data-parallel rank's name; None for any other name."""
    found = _DATA_PARALLEL.fullmatch(name)
    return None if found is None else (found["engine"], int(found["rank"]))


def engine_of(name: str) -> str | None:
    """The engine of a data-parallel rank, also one that named itself (`pod.dp1-xkcdtr`); None for other names."""
    found = _DATA_PARALLEL.fullmatch(_OWN_TAIL.sub("", name))
    return None if found is None else found["engine"]


def are_related(one: str, other: str) -> bool:
    """Whether one may be a rank of the other, or both are data-parallel ranks of one engine."""
    engines = engine_of(one), engine_of(other)
    above = ({*owners(one), engines[0]}, {*owners(other), engines[1]})
    return other in above[0] or one in above[1] or (engines[0] is not None and engines[0] == engines[1])


def owners(name: str) -> Iterator[WorkerId]:
    """Whose rank this may be, the nearest first: `p0.dp1` and `p0` for `p0.dp1.2`."""
    while (found := _RANK.fullmatch(name)) is not None:
        name = found["owner"]
        yield WorkerId(name)
