"""When every timer is due, by the settings and by what was seen to happen: measured at the moment it is set.

Laws (docs/protocol.md, rule 9; `settings.py` says which number is whose): a lease runs from its beginning, or from the
last sign of its reader, and never past its hold; a handoff waits as long as its state allows, and never past the hold
of its blocks; what has no answer is asked for again after `retry_s`; nothing fires early. What ran out ended for it,
and for the reason of the state that it was in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Allocated, LeaseBegun
from kvbaton.protocol.machines.claims import Parked
from kvbaton.protocol.machines.inbound import Intake, IntakeState
from kvbaton.protocol.machines.lease import LeaseState
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton.protocol.machines.push_writer import OutletState
from kvbaton.protocol.machines.puts import PutState
from kvbaton_proof.sim.promises import RULE, Broken
from kvbaton_proof.sim.world.life import BoundedTimers, Life

_S, _R = IntakeState, Reason
_EXACT_S = 1e-6
_SHORTEST_S = 0.05
"""In which anybody says anything again."""
_RAN_OUT = {
    _S.GREETING: _R.HANDSHAKE_TIMEOUT, _S.CLAIMING: _R.CLAIM_TIMEOUT, _S.GRANTED: _R.DEFER_TIMEOUT,
    _S.COPYING: _R.TRANSFER_TIMEOUT, _S.COMMITTING: _R.TRANSFER_TIMEOUT, _S.OFFERED: _R.TRANSFER_TIMEOUT,
    _S.JUDGING: _R.TRANSFER_TIMEOUT,
}  # fmt: skip
_MEMORY_MAX = 4096


class TimerChecks:
    """Of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._ledger = life.node.ledger
        self._name = life.character.name
        self._settings = life.character.settings
        self._begun: dict[Any, tuple[float, float]] = {}  # by lease: when, and until when it can be claimed
        self._held: dict[str, float] = {}  # by request: since when it has blocks
        self._greeted: dict[str, tuple[Link, float]] = {}  # by worker: the link, and since when it is wanted
        self._probed: dict[str, tuple[object, float]] = {}  # likewise: what opens its data plane
        self._fired: list[Callable[[], str | None]] = []
        timers = self._ledger.desk.timers
        assert isinstance(timers, BoundedTimers)
        timers.on_set, timers.on_due = self._set, self._due
        handlers = self._ledger._on_event
        handlers[LeaseBegun] = self._noting(handlers[LeaseBegun], self._begins)
        handlers[Allocated] = self._noting(handlers[Allocated], self._holds)
        life.after_node.append(self._after_step)
        self._expected: dict[str, Callable[[Any, float, float], float | None]] = {
            "lease": self._lease, "parked": self._parked, "put": self._put, "link": self._link,
            "outlet": self._outlet, "intake": self._intake, "pulse": self._pulse,
        }  # fmt: skip

    def _after_step(self) -> None:
        """What ran out has ended as it should."""
        for check in self._fired:
            what = check()
            if what is not None:
                raise Broken(RULE, f"{self._name}: {what}")
        self._fired.clear()
        if len(self._begun) > _MEMORY_MAX:
            self._begun = {id: self._begun[id] for id in self._ledger.producer.leases}
        if len(self._held) > _MEMORY_MAX:
            self._held.clear()

    # --- what happens

    def _noting(self, handle: Callable[[Any, float], None], note: Callable[[Any, float], None]) -> Any:
        def noted(event: Any, now: float) -> None:
            note(event, now)
            handle(event, now)

        return noted

    def _begins(self, event: LeaseBegun, now: float) -> None:
        if event.lease not in self._begun:
            first_s = self._settings.defer_timeout if event.deferred else self._settings.lease_s
            self._begun[event.lease] = now + event.keep_s, now + (event.keep_s or first_s)

    def _holds(self, event: Allocated, now: float) -> None:
        self._held[event.request] = now

    # --- what is due

    def _set(self, key: tuple[str, Any], at: float) -> None:
        now = self._life.clock()
        kind, name = key
        due = self._expected[kind](name, at, now)
        if due is not None and abs(max(at, now) - max(due, now)) > _EXACT_S:  # what is late is due at once
            raise Broken(RULE, f"{self._name}: {kind} {name} is due in {at - now:.4f} s, not in {due - now:.4f}")

    def _lease(self, id: Any, at: float, now: float) -> float:
        begun, claimable = self._begun[id]
        lease, hold = self._ledger.producer.leases[id], begun + self._settings.max_hold_s
        if not lease.seats:
            return min(claimable, hold)
        until = now + self._settings.lease_s
        if len(lease.seats) < lease.max_readers:
            until = max(until, claimable)
        return max(min(until, hold), now)

    def _parked(self, reader: Any, at: float, now: float) -> float:
        return now + self._settings.defer_timeout

    def _put(self, put: Any, at: float, now: float) -> float:
        return now + self._settings.transfer_timeout

    def _link(self, worker: Any, at: float, now: float) -> float:
        settings, link = self._settings, self._ledger.consumer.links.by_worker[worker]
        known = self._greeted.get(worker)
        if known is None or known[0] is not link:
            known = self._greeted[worker] = link, now
        due = min(now + settings.retry_s, known[1] + settings.claim_timeout)
        if link.probes is not None:
            probed = self._probed.get(worker)
            if probed is None or probed[0] is not link.probes:
                probed = self._probed[worker] = link.probes, now
            share_s = settings.claim_timeout / 2 / len(self._life.character.transports)
            due = min(due, probed[1] + min(settings.probe_timeout, share_s))
        return max(due, now)

    def _outlet(self, key: Any, at: float, now: float) -> float:
        settings, outlet = self._settings, self._ledger.producer.writer.outlets[key]
        if outlet.state is OutletState.STOPPING:
            return now + settings.transfer_timeout + settings.revoke_timeout
        return max(min(now + settings.retry_s, outlet.deadline), now)

    def _intake(self, handoff: Any, at: float, now: float) -> float:
        settings, intake = self._settings, self._ledger.consumer.by_handoff[handoff]
        if intake.state is _S.REVOKING:
            return now + settings.revoke_timeout
        due = now + self._patience_s(intake)
        if intake.state in (_S.GREETING, _S.CLAIMING) and intake.target is not None:
            due = self._ledger.desk.timers._at.get(("intake", handoff), due)
        held = self._held.get(intake.wanted.request) if intake.target is not None else None
        return max(due if held is None else min(due, held + settings.max_hold_s), now)

    def _patience_s(self, intake: Intake) -> float:
        settings = self._settings
        if intake.state in (_S.GREETING, _S.CLAIMING):
            return settings.defer_timeout if intake.wanted.deferred else settings.claim_timeout
        if intake.state is _S.GRANTED:
            return settings.defer_timeout
        return settings.claim_timeout if intake.state is _S.COMMITTING else settings.transfer_timeout

    def _pulse(self, handoff: Any, at: float, now: float) -> float:
        settings, intake = self._settings, self._ledger.consumer.by_handoff[handoff]
        source, wait_s = intake.source, settings.retry_s
        if intake.state in (_S.GRANTED, _S.COPYING, _S.OFFERED):
            assert source is not None
            wait_s = min(source.ttl_s, settings.lease_s) / 3
            if not source.final or (intake.state is _S.OFFERED and not intake.accepted):
                wait_s = min(wait_s, settings.retry_s)
        due, before = now + max(wait_s, _SHORTEST_S), self._ledger.desk.timers._at.get(("pulse", handoff))
        return before if before is not None and before == at < due else due  # what is due sooner may stay so

    # --- what ran out

    def _due(self, key: tuple[str, Any], at: float) -> None:
        kind, name = key
        if at > self._life.clock() + _EXACT_S:
            raise Broken(RULE, f"{self._name}: {kind} {name} comes {at - self._life.clock():.4f} s early")
        ledger = self._ledger
        if kind == "lease":
            lease = ledger.producer.leases[name]
            self._fired.append(lambda: self._expired(lease))
        elif kind == "parked":
            parked = ledger.producer.parked
            had_left = parked[name].left is not None
            self._fired.append(lambda: f"{name} waits on" if _waits_on(parked.get(name), had_left) else None)
        elif kind == "put":
            states = ledger.puts.states
            self._fired.append(lambda: f"put {name} goes on" if states.get(name) is PutState.PUTTING else None)
        elif kind == "intake":
            intake = ledger.consumer.by_handoff[name]
            state = intake.state
            self._fired.append(lambda: self._ran_out(intake, state))

    def _expired(self, lease: Any) -> str | None:
        if lease.state not in (LeaseState.CLOSING, LeaseState.RELEASED):
            return f"the term of lease {lease.id} is over, and it is {lease.state.value}"
        why = self._ledger.producer.ended.get(lease.handoff)
        return f"lease {lease.id} expired, and says {why}" if why not in (None, _R.LEASE_EXPIRED) else None

    def _ran_out(self, intake: Intake, state: IntakeState) -> str | None:
        if state is _S.REVOKING:
            shut = intake.link.fencing or intake.state is not _S.REVOKING
            return None if shut else f"{intake.wanted.request} waits on for Quiesced"
        reason = _RAN_OUT[state]
        if reason is _R.CLAIM_TIMEOUT and intake.wanted.deferred:
            reason = _R.DEFER_TIMEOUT
        found = intake.end.reason if intake.end is not None else None
        return None if found is reason else f"{intake.wanted.request} ran out of time, {state.value}, and says {found}"


def _waits_on(parked: Parked | None, had_left: bool) -> bool:
    """A claim that came to its deadline is refused, and remembered once more as long; then it is forgotten."""
    return parked is not None and (had_left or parked.left is None)
