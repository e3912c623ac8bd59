"""Tables that may hold something at rest, each with what bounds it: any other that does holds what is over.

Law: when nothing is under way, the ledger, the node, the door and the ends of rank links remember nothing of it, but
what is listed here. A table that somebody adds is empty at rest, or has an entry here that says why not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from kvbaton.protocol.bounded import Remembered
from kvbaton_proof.sim.promises import LEAK, Broken
from kvbaton_proof.sim.world.life import Life

DEPTH_MAX = 4
COUNTERS_MAX = 300


def _tombstones(life: Life) -> int:
    return life.character.settings.tombstones_max


def _sessions(life: Life) -> int:
    return len(life.node.ledger.sessions.by_number)


def _sessions_max(life: Life) -> int:
    return life.character.settings.sessions_max


def _parked(life: Life) -> int:
    return life.character.settings.parked_max


def _peers(life: Life) -> int:
    return len(life.control.network.names)


def _held(life: Life) -> int:
    """A connection for each session, and for each link."""
    return _sessions(life) + len(life.node.ledger.consumer.links.by_worker)


def _planes(life: Life) -> int:
    return _peers(life) * len(life.character.transports)


def _counters(life: Life) -> int:
    return COUNTERS_MAX


def _ranks(life: Life) -> int:
    """One entry, or a few, for each rank or data plane."""
    return 4 * len(life.transports)


def _any(life: Life) -> float:
    """Bounded where it is kept, or made once."""
    return float("inf")


Bound = Callable[[Life], float]
AT_REST: dict[str, Bound] = {
    "Origins._names": _peers, "RankStoreTrust.writers": _peers,
    "Claims.parked": _parked, "PerPeer._counts": _peers,  # who left while it waited, for its term
    "Producer.ended": _tombstones, "Producer.tombstones": _tombstones, "DisownedTickets._why": _tombstones,
    "Remembered._items": _any, "Writer.sessions": _sessions, "Writer.revoked": _sessions,
    "Sessions.by_number": _sessions_max, "Links.by_worker": _peers, "Node._held": _held,
    "Buckets._left": _peers, "Buckets._refused": _peers, "Shunned._until": _planes,
    "LedgerContext.counts": _counters, "_Faults.counts": _counters, "Node._backlog": _ranks, "Node.ranks": _ranks,
    "EngineStore._ranks": _ranks, "RankHost._planes": _ranks, "RankLinks._links": _ranks, "RankLinks._near": _ranks,
    "RankLinks._transports": _ranks, "RankLinks._refusals_told": _ranks, "RankLinks._refused": _ranks,
    "LocalRankStore._regions": _ranks, "RankHost._given": _ranks,
    "EngineStore.counters": _counters, "RankHost.counters": _counters, "Stream.counters": _counters,
    "Ledger._of_source": _any, "Ledger._of_target": _any, "Ledger._on_event": _any, "Identity.compat": _any,
    "LedgerContext.marks": _any, "Recorder._failed": _any, "Recorder._kept": _any, "Recorder._untold": _any,
    "RankInvitation.capabilities": _any, "RankStoreHost._told": _any,
}  # fmt: skip


def check_tables(life: Life) -> None:
    """At rest."""
    roots: list[object] = [life.node, life.doorway]
    if life.ranks is not None:
        roots += [life.ranks.links, life.ranks.shelf, *(rank.host for rank in life.ranks.ranks)]
    seen: set[int] = set()
    for root in roots:
        for name, size in _tables(root, 0, seen):
            bound = AT_REST.get(name)
            if bound is None or size > bound(life):
                most = "none" if bound is None else f"at most {bound(life):g}"
                raise Broken(LEAK, f"{life.character.name}: {name} holds {size} at rest, {most} may be left")


def _tables(thing: object, depth: int, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Every table that is not empty, below one object of the product."""
    module = type(thing).__module__
    if id(thing) in seen or depth > DEPTH_MAX or not module.startswith("kvbaton.") or "kvbaton_proof" in module:
        return
    seen.add(id(thing))
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    for name in (*getattr(thing, "__dict__", ()), *slots):
        value = getattr(thing, name, None)
        if isinstance(value, dict | set | list | deque | Remembered) and isinstance(value, Collection) and value:
            yield f"{type(thing).__name__}.{name}", len(value)
        yield from _tables(value, depth + 1, seen)
