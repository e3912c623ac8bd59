"""Conditions after everything has healed and time has passed: the promises about endings.

Those that can be seen at every step are checked there (`life.py`, `engine.py`, `cluster.py`).
"""

from __future__ import annotations

from kvbaton.protocol.effects import Step
from kvbaton.protocol.ids import PeerId, WorkerId
from kvbaton.protocol.machines.pairing_state import LinkState
from kvbaton_proof.sim.checks import rank_checks
from kvbaton_proof.sim.checks.answer_checks import check_streams
from kvbaton_proof.sim.checks.tables import check_tables
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.promises import HANG, LEAK, NEEDLESS, RULE, Broken
from kvbaton_proof.sim.world.life import Life

SLOWEST = 0.95
"""Of the clocks that drift."""


def check_at_rest(cluster: Cluster) -> None:
    """Every request has ended, every block is free, and nobody remembers anything that they wait for."""
    for leg in cluster.legs:
        if not leg.ends and leg.life.alive:
            raise Broken(HANG, f"request {leg.index} never ended on {leg.life.peer.worker}")
    for life in cluster.lives.values():
        _check_life(life)
        cluster.step_invariants[life].record.check_at_rest()
    check_streams(cluster.streams)
    heard = cluster.version_checks
    for life in cluster.every_life:
        if life.character.name in heard.liars:
            continue
        farewell = cluster.step_invariants[life].farewell
        if any((life.peer.incarnation, other) not in heard.goodbyes for other in farewell):
            raise Broken(RULE, f"{life.peer} left, and did not say so to everybody")


def check_healthy(cluster: Cluster) -> None:
    """Where nothing was wrong but doubled and overtaking frames, every handoff was delivered."""
    if cluster.plan.profile != "healthy":
        return
    for life in cluster.every_life:
        for name, count in life.node.ledger.desk.counts.items():
            if name.startswith("ends.") and name != "ends.delivered":
                raise Broken(NEEDLESS, f"{life.character.name}: {count} x {name} in a healthy world")


def check_steps(cluster: Cluster) -> None:
    """Where no member lies, nothing happens that the tables call illegal."""
    if cluster.plan.liars:
        return
    for life in cluster.every_life:
        for name, count in life.node.ledger.desk.counts.items():
            if name.startswith("illegal."):
                raise Broken(RULE, f"{life.character.name}: {count} x {name}: a step that the rules do not know")


def check_recovery(cluster: Cluster, before: int, probes: int) -> None:
    """After all faults are over, every pair of workers hands over again, in every mode."""
    after = cluster.delivered()
    if after - before < probes:
        raise Broken(NEEDLESS, f"{after - before} of {probes} handoffs were delivered after everything had healed")


def check_planes(cluster: Cluster, healed_s: float) -> None:
    """A data plane that had failed has been tried again: every pair is back on the best one that it has (rule 23).

    Only where the last handoff of the pair was long enough after the last failure: P leaves a plane out for `shun_s`,
    and D, who sees only that P did, for as long again.
    """
    if cluster.plan.liars:
        return  # who lies may take any plane
    for life in cluster.lives.values():
        for link in life.node.ledger.consumer.links.by_worker.values():
            source = cluster.lives[link.worker]
            if link.state is not LinkState.UP or link.peer != source.peer or link.transport is None:
                continue
            patience_s = 2 * max(life.character.settings.shun_s, source.character.settings.shun_s) / SLOWEST
            best = next(name for name in source.character.transports if name in life.character.transports)
            asked_s = cluster.asked_at.get((source.character.name, life.character.name), 0.0)
            if asked_s > healed_s + patience_s + 1.0 and link.transport.name != best:
                what = f"still reads from {link.worker} over {link.transport.name}, and {best} works"
                raise Broken(RULE, f"{life.character.name}: {what}")


def _check_life(life: Life) -> None:
    if life.ranks is not None:
        rank_checks.check_at_rest(life.ranks)
    name, ledger, pool = life.character.name, life.node.ledger, life.engine.pool
    if pool.total or len(pool.free) != life.character.shape.blocks - 1:
        raise Broken(LEAK, f"{name}: {pool.total} references to blocks at rest")
    if life.doorway.pinned_blocks or (life.doorway.busy and not life.asleep):  # what came to a sleeper holds nothing
        raise Broken(LEAK, f"{name}: the door still holds {life.doorway.pinned_blocks} blocks at rest")
    if life.engine.turns is not None:
        life.engine.turns.check_rest()
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
    check_tables(life)
    _check_connections(life)
    held = {holder for held in life.node._held.values() for holder in held.by}
    known = {("session", n) for n in ledger.sessions.by_number} | {
        ("link", k.greeting.nonce) for k in consumer.links.by_worker.values()
    }
    if held - known:
        raise Broken(LEAK, f"{name}: data connections held for nobody at rest: {sorted(held - known)}")
    joined = [session.peer.worker for session in ledger.sessions.by_number.values() if session.joined]
    if len(joined) != len(set(joined)):
        raise Broken(LEAK, f"{name}: more than one session with the same worker at rest: {sorted(joined)}")
    timers = ledger.desk.timers._at.keys() - {("parked", reader) for reader in ledger.producer.parked}  # who left
    if timers:
        raise Broken(LEAK, f"{name}: {len(timers)} timers at rest, next {ledger.next_deadline()}")


def _check_connections(life: Life) -> None:
    """No rank's data plane is open to whom the node holds no connection to, unless it threw when it was opened."""
    threw = any(what.startswith("Connect") for what in life.node.faults)
    if threw or life.ranks is not None:  # ranks have checks of their own
        return
    for planes in life.transports:
        for plane, transport in planes.items():
            for rank in (*transport._links, *transport._invited):
                peer = PeerId(WorkerId(rank.worker.partition("#")[0]), rank.incarnation)
                if (peer, plane) not in life.node._held:
                    raise Broken(LEAK, f"{life.character.name}: {plane} of {transport.me.worker} is open to {rank}")
