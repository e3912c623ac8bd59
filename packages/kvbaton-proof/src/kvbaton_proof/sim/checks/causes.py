"""Why a handoff failed: every end is judged, when it is told, by what touched that very handoff.

Law: a handoff that fails was touched by something that brings such an end about: it struck the handoff itself, the pair
of its workers, or one of the two, while it was under way. What befell others excuses nothing, nor does a reason without
an entry. A member that lies excuses what it is a party to. And no time-out comes before its time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from kvbaton.protocol.effects import Begun, Copy, End, Ended, Mark, Side, Step
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, PeerId, WorkerId
from kvbaton.protocol.machines.context import MARKS_MAX, Parts
from kvbaton.protocol.machines.inbound import Intake, IntakeState
from kvbaton.protocol.machines.pairing_state import LinkState, Session
from kvbaton.protocol.machines.push_writer import Outlet
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton_proof.sim.checks.step_invariants import quarantined, restless
from kvbaton_proof.sim.checks.successes import check_pushed, check_streamed, watch
from kvbaton_proof.sim.promises import NEEDLESS, Broken
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.sim_transport import worker_of
from kvbaton_proof.sim.world.touches import ALWAYS, pair
from kvbaton_proof.sim.world.world import World

LIE, OTHER_NEEDS, FULL, BOUNDED = "lie", "other_needs", "full", "rank_bounded"
FENCED, WRITE_STUCK, RANK_SLOW = "fenced", "write_stuck", "rank_slow"
SLOW_TO_STOP = "slow_to_stop"
"""A copy that is honest, and too long for whoever is told to stop in the midst of it to say so in time."""
NO_TURN = float("inf")
UNPAIRED, SHORT_LEASE, NO_LEASE = "unpaired", "short_lease", "no_lease"

_R = Reason
_RANKS = ("rank_stalls", "rank_lost", "rank_link_cut", "rank_plane_threw", "rank_reports_late", "rank_frame_garbled")
_THREW = ("port_threw", "port_threw_late", "port_threw_slow")
_PAUSED = ("paused_process", "paused_loop", "paused_engine")
_CUT = ("lost", "partitioned", "delayed", "receive_threw", *_PAUSED, "crashed", "retired", *_THREW, *_RANKS)
_LEFT = ("aborted", "discarded", "retired", "cache_replaced")
_APART = ("crashed", "retired", "said_gone", "plane_shut", *_THREW, *_RANKS)
_STUCK = ("slow_copy", "stalled_copy", "failed_copy", "queued_copy", *_CUT)
_TURN = ("late_turn", "turn_let_go", "turn_unkept")
_TICKET = ("ticket_other_prompt", "ticket_replayed", "ticket_twice")

_UNBEGUN = (NO_LEASE, "no_room", "preempted", *_TICKET, *_LEFT, *_STUCK, *_APART)  # what keeps P from it

CAUSES: dict[Reason, tuple[str, ...]] = {
    _R.ABORTED: ("not_needed", "pins_refused", *_LEFT),
    _R.BAD_SPAN: (BOUNDED, *_RANKS),  # parts of what a rank was told were lost
    _R.BUSY: (FULL, BOUNDED, *_RANKS),
    _R.CLAIM_TIMEOUT: _CUT,
    _R.CONTENT_MISMATCH: ("ticket_other_prompt",),
    _R.DEFER_TIMEOUT: _UNBEGUN,
    _R.DISCARDED: ("discarded", "turn_let_go", "draining"),
    _R.DRAINING: ("draining", "retired"),
    _R.DUPLICATE: ("ticket_twice", "ticket_replayed"),
    _R.HANDSHAKE_TIMEOUT: (
        FULL,
        RANK_SLOW,
        FENCED,
        WRITE_STUCK,
        *_STUCK,
    ),  # each endpoint that came late costs a repeated Hello or Joined
    _R.LEASE_EXPIRED: (
        BOUNDED,
        RANK_SLOW,
        SHORT_LEASE,
        *_TURN,
        *_TICKET,
        "no_room",
        "late_ticket",
        "preempted",
        *_LEFT,
        *_STUCK,
        *_APART,
    ),
    _R.ORIGIN_GONE: ("removed",),
    _R.PEER_GONE: (FENCED, *_APART, *_STUCK),
    _R.PEER_UNKNOWN: ("ticket_of_nobody", *_APART, *_STUCK),
    _R.PINS_FULL: ("pins_refused",),
    _R.QUARANTINE_FULL: (FULL, *_STUCK),  # a push that was delivered is not at rest before its loans are back
    # Also a Quiesced of which only the repetition came, and what a floor covers where few revocations are remembered.
    _R.SOURCE_ABORTED: ("pins_refused", "preempted", FULL, *_LEFT, *_STUCK, *_APART),
    _R.SOURCE_PREEMPTED: ("preempted",),
    _R.STALE: ("nibbled", "overwritten", "cache_replaced", "late_ticket", *_STUCK, *_APART),  # reused after its lease
    _R.TICKET_EXPIRED: ("late_ticket", *_UNBEGUN),
    _R.TICKET_SPENT: ("discarded", "overwritten", FULL, WRITE_STUCK, *_TICKET, *_STUCK, *_APART),
    _R.TRANSFER_FAILED: ("failed_copy", *_APART, *_STUCK),
    _R.TRANSFER_TIMEOUT: (FENCED, WRITE_STUCK, *_STUCK),  # what a fence ends is judged after it
    _R.UNKNOWN_LEASE: (
        "draining",
        SHORT_LEASE,
        *_TURN,
        "no_room",
        FULL,
        "late_ticket",
        *_TICKET,
        "preempted",
        *_LEFT,
        *_STUCK,
        *_APART,
    ),
    # of all planes of a pair the last is never shut, but it may be shunned
    _R.UNREACHABLE: (BOUNDED, RANK_SLOW, *_STUCK),
    _R.WRONG_INCARNATION: (FULL, WRITE_STUCK, *_TURN, *_CUT, *_APART),  # P began anew, or has forgotten the session
    _R.WRONG_VERSION: (OTHER_NEEDS,),
}
_TIMEOUTS = {_R.CLAIM_TIMEOUT, _R.DEFER_TIMEOUT, _R.TRANSFER_TIMEOUT}
_EARLY = 0.9
"""Clocks drift, and one side's may be the one that counts."""

SHUNNED = 2.2
"""P leaves a plane out for `shun_s`, and D for as long again; clocks drift."""
SLOW = 0.4
"""The share of the shortest time for a transfer below which a copy must cost nothing."""
LEASE_BYTES = 4096
"""More than any prompt of these worlds takes."""
AFTERMATH_S = 0.2
"""For which one of a pair may not know what has just befallen the pair."""
PAIRING_S = 0.5
"""For which a lease must last, or a pair that has still to greet may come too late, without anybody's fault."""
_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, str, int, int, int, list[Any]])
_FIELDS: dict[int, tuple[str, ...]] = {
    kind.__struct_config__.tag: kind.__struct_fields__ for kind in m.Message.__args__
}


class HeardMarks(deque[Mark]):
    """A ledger's marks, heard as they are made."""

    def __init__(self, on_mark: Callable[[Mark], None]) -> None:
        super().__init__(maxlen=MARKS_MAX)
        self._on_mark = on_mark

    def append(self, mark: Mark) -> None:
        super().append(mark)
        self._on_mark(mark)


class Causes:
    """Judges the ends of all handoffs of a cluster."""

    def __init__(self, world: World, lives: Mapping[WorkerId, Life], liars: Collection[WorkerId]) -> None:
        self._world = world
        self._lives = lives
        self._liars = liars
        self._born: dict[HandoffId, float] = {}

    def begun(self, handoffs: Iterable[HandoffId]) -> None:
        """Requests for them are with an engine, which may be a while before its node hears of it."""
        for each in filter(None, handoffs):
            self._born.setdefault(each, self._world.now)

    def watch(self, life: Life) -> None:
        if life.character.name in self._liars:
            return
        desk, begun = life.node.ledger.desk, dict[int, tuple[Begun, float]]()
        leased = dict[int, tuple[Begun, float]]()

        def on_mark(mark: Mark) -> None:
            if isinstance(mark.what, Begun):
                self._born.setdefault(mark.what.handoff, self._world.now)
                if mark.side is Side.DECODE:
                    begun[mark.key] = mark.what, mark.at
                    self._note_unpaired(life, mark.what)
                else:
                    leased[mark.key] = mark.what, mark.at if mark.detail else NO_TURN
            elif mark.side is Side.PREFILL and mark.step is Step.CLOSED:
                assert isinstance(mark.what, Ended)
                what, kept_at = leased.pop(mark.key)
                self._note_closed(life, what.handoff, mark.what.end, mark.at - kept_at)
            elif mark.side is Side.DECODE and mark.step is Step.ENDED:
                assert isinstance(mark.what, Ended)
                what, asked_at = begun.pop(mark.key)
                if what.peer:  # else the door turned it away
                    self._judge(life, what, mark.what.end, mark.at - asked_at)
                if mark.what.end.delivered:
                    check_pushed(life, self._lives, life.node.ledger.consumer.by_attempt[mark.key])

        self._note_stuck(life)
        watch(life)
        desk.marks = HeardMarks(on_mark)
        life.after_node.append(partial(self._after_step, life, begun))

    def _after_step(self, life: Life, begun: Mapping[int, tuple[Begun, float]]) -> None:
        # A pair that had to take a worse plane has given up its link for a handoff (rule 23), and a source that is full
        # may have forgotten the session in which one asks.
        for each, _ in begun.values():
            self._note_unpaired(life, each)
        check_streamed(life)
        if not self._liars and is_full(life):  # a table that is full refuses the next one; a liar has its share
            self._world.touch(FULL, life.character.name)

    def _judge(self, life: Life, what: Begun, end: End, waited_s: float) -> None:
        reason = end.reason
        if reason is None or what.peer in self._liars:
            return
        touched = self._touched(what, life, reason)
        if LIE in touched:
            return
        who = f"{life.character.name}: {what.request} of {what.peer}"
        if reason in _TIMEOUTS and waited_s < _EARLY * _soonest_s(life.character.settings):
            raise Broken(NEEDLESS, f"{who} ended after {waited_s:.2f} s, {end}")
        if touched.isdisjoint(CAUSES.get(reason, ())):
            raise Broken(NEEDLESS, f"{who} failed for no cause, {end}; touched by {sorted(touched)}")

    def _touched(self, what: Begun, life: Life, reason: str) -> set[str]:
        """All that befell this handoff: by itself, with its pair, and with each of the two."""
        touches, now, target = self._world.touches, self._world.now, life.character.name
        since = self._born[what.handoff] - AFTERMATH_S
        if reason is _R.UNREACHABLE:  # the planes that were left may have failed before
            since -= SHUNNED * life.character.settings.shun_s
        found = touches.between(what.handoff, 0.0, now)
        if reason is _R.HANDSHAKE_TIMEOUT or UNPAIRED in found:  # the greeting may be older
            since -= 2 * life.character.settings.claim_timeout  # and begin with what an earlier one left behind
        for whom in (pair(what.peer, target), what.peer, target):
            found |= touches.between(whom, since, now)
        for each in (life, self._lives.get(what.peer)):
            if each is not None and not self._liars and is_full(each):
                found.add(FULL)
            if each is not None and each.character.ranks is not None and each.character.ranks.bounded:
                found.add(BOUNDED)
        return found | self._before_fence(what, life)

    def _note_closed(self, life: Life, handoff: HandoffId, end: End, kept_s: float) -> None:
        """P was full; or a turn ran out, in its time, or was not kept by one that drains."""
        if end.reason is _R.BUSY:
            self._world.touch(NO_LEASE, handoff)
        elif kept_s < 0:
            return
        elif end.reason is _R.DRAINING:
            self._world.touch("turn_unkept", handoff)
        elif life.engine.turns is not None and kept_s >= _EARLY * life.engine.turns.keeper.settings.turn_s:
            self._world.touch("late_turn", handoff)

    def _note_unpaired(self, life: Life, what: Begun) -> None:
        """A handoff that waits for its pair's greeting waits for what befell that; its lease runs meanwhile."""
        link, source = life.node.ledger.consumer.links.by_worker.get(what.peer), self._lives.get(what.peer)
        if link is None or link.state is not LinkState.UP:
            self._world.touch(UNPAIRED, what.handoff)
            short = source is not None and _lasts_s(source, what.handoff, self._world.now) < PAIRING_S
            if short or is_full(life) or (source is not None and is_full(source)):  # then a greeting waits for room
                self._world.touch(SHORT_LEASE, what.handoff)

    def _note_stuck(self, life: Life) -> None:
        """A write whose rest was never proven ends its session, and all that is under way in it."""
        producer, world = life.node.ledger.producer, self._world
        end = producer.writer.on_stuck

        def on_stuck(session: Session, now: float) -> None:
            writes = [each for key, each in producer.writer.outlets.items() if key[0] == session.number]
            handoffs = [producer.leases[each.lease].handoff for each in writes]
            if any(world.touches.between(each, 0.0, world.now) & set(_STUCK) for each in handoffs):
                world.touch(WRITE_STUCK, pair(life.character.name, session.peer.worker))
            end(session, now)

        producer.writer.on_stuck = on_stuck
        self._note_fences(life)

    def _note_fences(self, life: Life) -> None:
        """A fence ends both roles of a pair: also what the one that is shut out takes from the one that fences."""
        links, world = life.node.ledger.consumer.links, self._world
        end = links.on_fence

        def on_fence(peer: PeerId, now: float) -> None:
            if self._stopped_stuck(life, peer.worker):
                world.touch(WRITE_STUCK, pair(life.character.name, peer.worker))
            end(peer, now)

        links.on_fence = on_fence

    def _before_fence(self, what: Begun, life: Life) -> set[str]:
        """Who does not confirm that it has stopped is fenced, and all that is under way with it ends."""
        return {FENCED} if self._stopped_stuck(life, what.peer) else set()

    def _stopped_stuck(self, life: Life, source: WorkerId) -> bool:
        """Whether that source may have stuck in a write that it was told to stop."""
        consumer, now = life.node.ledger.consumer, self._world.now
        ended = (each for each in consumer.by_handoff.values() if each.state is IntakeState.REVOKING)
        stopped = (each.wanted.handoff for each in ended if each.wanted.source == source)
        return any(self._world.touches.between(each, 0.0, now) & {*_STUCK, SLOW_TO_STOP} for each in stopped)

    # --- fates of frames and copies

    def frame_fate(self, source: WorkerId, target: WorkerId, frame: bytes, what: str, late_s: float) -> None:
        handoff = self._of_frame(source, target, frame)
        self._world.touch(what, handoff or pair(source, target), lasts_s=late_s)

    def _of_frame(self, source: WorkerId, target: WorkerId, frame: bytes) -> str:
        """The handoff that a message is about; none if it is about the pair."""
        try:
            _, _, speaker, listener, _, body = _ENVELOPE.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return ""  # a liar's
        said = dict(zip(_FIELDS[body[0]], body[1:], strict=False))
        if "handoff" in said:
            return str(said["handoff"])
        for name, incarnation in ((source, speaker), (target, listener)):
            life = self._lives.get(name)
            if life is None or life.peer.incarnation != incarnation:
                continue
            consumer = life.node.ledger.consumer
            intake = consumer.by_attempt.get(said.get("attempt", 0)) or consumer.by_reservation.get(
                said.get("reservation", 0)
            )
            if intake is not None and intake.wanted.source in (source, target):
                return intake.wanted.handoff
        return ""

    def copy_fate(self, owner: Life, copy: Copy, what: str, lasts_s: float) -> None:
        owners = owner.node.ledger.desk.owners
        if what == "slow_copy" and lasts_s < SLOW * self._soonest_of_copy_s(owner, copy):
            if lasts_s < _EARLY * min(each.revoke_timeout for each in self._both(owner, copy)):
                return  # renewals keep the lease meanwhile
            what = SLOW_TO_STOP
        if what == "queued_copy":  # and all behind it
            for parts in {id(each): each for each in owners.values()}.values():
                self._touch_owner(owner, copy, parts, what, lasts_s)
        elif copy.job in owners:
            self._touch_owner(owner, copy, owners[copy.job], what, lasts_s)

    def _soonest_of_copy_s(self, owner: Life, copy: Copy) -> float:
        """The shortest time that either side gives a transfer."""
        return min(min(each.transfer_timeout, each.max_hold_s) for each in self._both(owner, copy))

    def _both(self, owner: Life, copy: Copy) -> list[Settings]:
        other = self._lives.get(worker_of(copy.peer))
        return [each.character.settings for each in (owner, other) if each is not None]

    def _touch_owner(self, owner: Life, copy: Copy, parts: Parts, what: str, lasts_s: float) -> None:
        by = parts.owner
        if isinstance(by, Intake):
            self._world.touch(what, by.wanted.handoff, lasts_s=lasts_s)
        elif isinstance(by, Outlet):
            lease = owner.node.ledger.producer.leases.get(by.lease)
            self._world.touch(what, lease.handoff if lease is not None else "", lasts_s=lasts_s)
        else:  # it tries whether the data plane is open
            self._world.touch(what, pair(owner.character.name, worker_of(copy.peer)), lasts_s=lasts_s)


def note_strangers(world: World, characters: Collection[Character]) -> None:
    """Pairs that can never hand over, since one needs what the other has not."""
    for one in characters:
        for other in characters:
            if not can_talk(one, other):
                world.touch(OTHER_NEEDS, pair(one.name, other.name), lasts_s=ALWAYS)


def can_talk(one: Character, other: Character) -> bool:
    """Nothing is required that the other has not, and there is a version that both speak."""
    ours, theirs = one.versions, other.versions
    return not (one.required or other.required) and max(ours.oldest, theirs.oldest) <= min(ours.newest, theirs.newest)


def _lasts_s(source: Life, handoff: HandoffId, now: float) -> float:
    """For how long P keeps this handoff's lease from now on, or from when it begins or renews it."""
    ledger = source.node.ledger
    lease = ledger.producer.by_handoff.get(handoff)
    until = ledger.desk.timers._at.get(("lease", lease.id)) if lease is not None else None
    return min(source.character.settings.lease_s, math.inf if until is None else until - now)


def is_full(life: Life) -> bool:
    """Whether one of its tables has no room for one more. Asked after every step, so what costs least comes first."""
    ledger, settings = life.node.ledger, life.character.settings
    producer, consumer = ledger.producer, ledger.consumer
    held, quarantine = producer.held, settings.quarantine_blocks_max
    return (
        len(producer.parked) >= settings.parked_max
        or len(producer.leases) >= settings.leases_max
        or len(producer.tombstones) >= settings.tombstones_max
        or len(producer.ended) >= settings.tombstones_max
        or len(ledger.sessions.by_number) >= settings.sessions_max
        or len(consumer.by_handoff) >= settings.intakes_max
        or max(held._seats.values(), default=-1) >= settings.seats_per_peer_max
        or max(held._bytes.values(), default=-1) >= settings.bytes_per_peer_max - LEASE_BYTES
        or max(producer.parked._counts.values(), default=-1) >= settings.parked_per_peer_max
        or quarantined(consumer) >= quarantine
        or restless(producer) >= quarantine
    )


def _soonest_s(settings: Settings) -> float:
    return min(settings.claim_timeout, settings.defer_timeout, settings.transfer_timeout, settings.max_hold_s)
