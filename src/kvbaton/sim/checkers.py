"""What must be true when everything has healed and time has passed: the promises about endings.

Those that can be seen at every step are checked there (`life.py`, `engine.py`, `cluster.py`).
"""

from __future__ import annotations

from kvbaton.protocol.marks import Step
from kvbaton.sim.cluster import Cluster
from kvbaton.sim.life import Life
from kvbaton.sim.promises import HANG, LEAK, NEEDLESS, Broken


def check_at_rest(cluster: Cluster) -> None:
    """Every request has ended, every block is free, and nobody remembers anything that they wait for."""
    for leg in cluster.legs:
        if not leg.ends and leg.life.alive:
            raise Broken(HANG, f"request {leg.index} never ended on {leg.life.peer.worker}")
    for life in cluster.lives.values():
        _check_life(life)


def check_healthy(cluster: Cluster) -> None:
    """Where nothing was wrong but doubled and overtaking frames, every handoff was delivered."""
    if cluster.plan.profile != "healthy":
        return
    for life in cluster.every_life:
        for name, count in life.node.ledger.desk.counts.items():
            if name.startswith("ends.") and name != "ends.delivered":
                raise Broken(NEEDLESS, f"{life.character.name}: {count} x {name} in a healthy world")


def check_recovery(cluster: Cluster, before: int, probes: int) -> None:
    """After all faults are over, every pair of workers hands over again, in every mode."""
    after = cluster.delivered()
    if after - before < probes:
        raise Broken(NEEDLESS, f"{after - before} of {probes} handoffs were delivered after everything had healed")


def _check_life(life: Life) -> None:
    if life.ranks is not None:
        life.ranks.check_at_rest()
    name, ledger, pool = life.character.name, life.node.ledger, life.engine.pool
    if pool.total or len(pool.free) != life.character.shape.blocks - 1:
        raise Broken(LEAK, f"{name}: {pool.total} references to blocks at rest")
    if life.doorway.pinned_blocks or life.doorway.busy:
        raise Broken(LEAK, f"{name}: the door still holds {life.doorway.pinned_blocks} blocks at rest")
    if ledger.producer.leases or ledger.puts.states:
        raise Broken(LEAK, f"{name}: leases {list(ledger.producer.leases)} and puts {list(ledger.puts.states)} at rest")
    if not ledger.is_idle():
        raise Broken(HANG, f"{name}: intakes {list(ledger.consumer.by_handoff)} at rest")
    consumer, writer = ledger.consumer, ledger.producer.writer
    backlog = [copy for queue in life.node._backlog.values() for copy in queue]
    waiting = (
        consumer.by_request, consumer.by_attempt, consumer.by_reservation, writer.outlets, writer.by_reader,
        ledger.desk.owners, backlog, set(writer.revoked) - set(ledger.sessions.by_number),
    )  # fmt: skip
    if any(waiting):
        raise Broken(LEAK, f"{name}: still remembered at rest: {[list(each)[:3] for each in waiting]}")
    recorder = life.node.recorder
    moving = [each for each in recorder.under_way() if each.at(Step.RESTED) is None] if recorder is not None else []
    if moving or (recorder is not None and recorder.counters):
        raise Broken(HANG, f"{name}: on record as under way at rest: {moving[:3]}")
    held = {holder for holders in life.node._holders.values() for holder in holders}
    known = {("session", n) for n in ledger.sessions.by_number} | {
        ("link", k.nonce) for k in consumer.links.by_worker.values()
    }
    if held - known:
        raise Broken(LEAK, f"{name}: data connections held for nobody at rest: {sorted(held - known)}")
    joined = [session.peer.worker for session in ledger.sessions.by_number.values() if session.joined]
    if len(joined) != len(set(joined)):
        raise Broken(LEAK, f"{name}: more than one session with the same worker at rest: {sorted(joined)}")
    if len(ledger.desk.timers):
        raise Broken(LEAK, f"{name}: {len(ledger.desk.timers)} timers at rest, next {ledger.next_deadline()}")
