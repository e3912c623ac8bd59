"""The history of this field as one-place changes of the core: what the checkers are worth is what they catch.

Each mutant replaces one function, property or table entry of the production code while it is switched on. `rule` is the
rule of docs/protocol.md that it breaks, `story` where it comes from. `kvbaton sim --mutants` runs them all; those of
tickets that were taken back are in `mutants_discard.py`.
"""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from kvbaton.node import doorway
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.proof.sim.mutants.mutants_checkers import CHECKER_MUTANTS
from kvbaton.proof.sim.mutants.mutants_device import DEVICE_MUTANTS
from kvbaton.proof.sim.mutants.mutants_dialogue import DIALOGUE_MUTANTS
from kvbaton.proof.sim.mutants.mutants_discard import DISCARD_MUTANTS
from kvbaton.proof.sim.mutants.mutants_liars import LIAR_MUTANTS
from kvbaton.proof.sim.mutants.mutants_planes import PLANE_MUTANTS
from kvbaton.proof.sim.mutants.mutants_ranks import RANK_MUTANTS
from kvbaton.proof.sim.mutants.mutants_versions import VERSION_MUTANTS
from kvbaton.proof.sim.mutants.mutants_worlds import WORLD_MUTANTS
from kvbaton.proof.sim.mutants.mutation import Mutant, both, swap
from kvbaton.proof.sim.world import sim_engine, sim_request
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import nothing, whole
from kvbaton.protocol.geometry.spans import Side
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.machines import consumer, lease, pairing_source, pairing_target, producer, push_writer, puts
from kvbaton.protocol.machines import inbound as intake
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.machines.inbound import IntakeEvent, IntakeState
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.machines.movement import Cargo, Route, moves, start
from kvbaton.protocol.machines.push_write import OutletState
from kvbaton.protocol.machines.readiness import complete
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire import ticket

# --- P


def _epochs_never_raised(original: Any) -> Any:
    return lambda self, block: None


def _commit_from_lease_state(original: Any) -> Any:
    return lambda lease, epoch_of: (lease.final, tuple(len(ids) for ids in lease.blocks))


def _final_without_completion(original: Any) -> Any:
    return property(lambda self: complete(self.progress, [len(ids) for ids in self.blocks]))


def _readers_by_message(original: Any) -> Any:
    def on_commit(self: Any, session: Any, message: m.Commit, now: float) -> None:
        original(self, session, message, now)
        counts = self.__dict__.setdefault("_commits", {})
        counts[message.lease] = counts.get(message.lease, 0) + 1
        held = self.leases.get(message.lease)
        if held is not None and counts[message.lease] >= held.max_readers:
            self.close(held, Reason.TICKET_SPENT, now)

    return on_commit


def _no_deadline_for_deferred(original: Any) -> Any:
    def on_begun(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.deferred and event.lease in self.leases:
            self.desk.timers.clear(("lease", event.lease))

    return on_begun


def _claim_before_request_dropped(original: Any) -> Any:
    def park(self: Any, reader: Any, session: Any, claim: Any, ticket: Any, now: float) -> None:
        raise ProtocolError(Reason.UNKNOWN_LEASE, "not here")

    return park


def _shortened_ids(original: Any) -> Any:
    def on_claim(self: Any, session: Any, claim: Any, now: float) -> None:
        close = next((h for h in self.by_handoff if h[:1] == claim.handoff[:1]), claim.handoff)
        held = self.by_handoff.get(claim.handoff)
        if close in self.by_handoff and held is not self.by_handoff[close]:
            alike = self.by_handoff[close]
            self.by_handoff[claim.handoff] = alike
            try:
                original(self, session, claim, now)
            finally:
                if held is None:
                    self.by_handoff.pop(claim.handoff, None)
                else:
                    self.by_handoff[claim.handoff] = held
        else:
            original(self, session, claim, now)

    return on_claim


def _hold_without_limit(original: Any) -> Any:
    def extend(self: Any, lease: Any, now: float) -> float:
        self.desk.timers.set(("lease", lease.id), now + self.desk.settings.lease_s)
        return float(self.desk.settings.lease_s)

    return extend


def _failed_store_keeps_pin(original: Any) -> Any:
    def on_ended(self: Any, event: ev.StoreEnded, now: float) -> None:
        if event.reason is None:
            original(self, event, now)
        else:
            self.states.pop(event.put, None)
            self.desk.timers.clear(("put", event.put))

    return on_ended


def _store_exception_keeps_pin(original: Any) -> Any:
    def store(self: Any, effect: Any) -> None:
        with contextlib.suppress(RuntimeError):
            if isinstance(effect, fx.StorePut):
                self.store.put(effect.put, effect.blocks, effect.keys)
            else:
                original(self, effect)

    return store


def _released_while_writing(original: Any) -> Any:
    return lambda self, lease: True


def _slowest_is_first(original: Any) -> Any:
    return lambda ranks: ranks[0]


def _old_sessions_live_on(original: Any) -> Any:
    return lambda self, session, now: []


# --- push


def _written_before_visible(original: Any) -> Any:
    def flush(self: Any, key: Any, outlet: Any, lease: Any, now: float) -> None:
        moving, outlet.parts.moving = outlet.parts.moving, {}
        try:
            original(self, key, outlet, lease, now)
        finally:
            outlet.parts.moving = moving

    return flush


def _revoke_forgotten(original: Any) -> Any:
    def on_revoke(self: Any, session: Any, message: Any, now: float) -> None:
        if (session.number, message.reservation) in self.outlets:
            original(self, session, message, now)
        else:
            self.sessions[session.number] = session
            self._send((session.number, message.reservation), m.Quiesced(message.reservation, None))

    return on_revoke


def _writes_again_after_written(original: Any) -> Any:
    def repeat(self: Any, key: Any, outlet: Any) -> None:
        original(self, key, outlet)
        if outlet.state is OutletState.FLUSHED:
            held = self._leases.leases.get(outlet.lease)
            if held is None:
                return
            session = self.sessions[key[0]]
            route = Route(session.plan, Side.SOURCE, session.peer, session.transport.name)
            cargo = Cargo(held.blocks, outlet.blocks, held.tokens, outlet.first_token)
            empty = nothing(len(held.blocks))
            start(self.desk, outlet.parts, route, moves(route, cargo, empty, held.progress))

    return repeat


def _quiesced_while_writing(original: Any) -> Any:
    def on_rest(self: Any, outlet: Any, now: float) -> None:
        key = self.by_reader.get((outlet.lease, outlet.reader))
        if key is not None and outlet.state is OutletState.STOPPING and not outlet.parts.at_rest:
            self._send(key, m.Quiesced(outlet.reservation, outlet.reason))
        original(self, outlet, now)

    return on_rest


def _fence_skipped(original: Any) -> Any:
    def fence(self: Any, link: Any, now: float) -> None:
        self.lose(link, Reason.PEER_GONE, "believed dead", now)
        self._watcher.on_link_fenced(link, now)

    return fence


# --- D


def _rest_at_first_failure(original: Any) -> Any:
    return property(lambda self: getattr(self.owner, "end", None) is not None or original.fget(self))


def _ended_means_rested(original: Any) -> Any:
    return lambda self, job, at_rest: original(self, job, True)


def _hold_dropped_at_end(original: Any) -> Any:
    def tell_end(self: Any, intake: Any, now: float) -> None:
        original(self, intake, now)
        if intake.target is not None:
            self.desk.emit(fx.DropHold(intake.wanted.request, intake.wanted.handoff))

    return tell_end


def _reported_twice(original: Any) -> Any:
    def rest(self: Any, intake: Any, now: float) -> None:
        was = intake.state
        original(self, intake, now)
        if was is IntakeState.SETTLING and intake.state is IntakeState.DONE and intake.target is not None:
            self.desk.emit(fx.Report(intake.wanted.request, intake.end))

    return rest


def _report_without_load(original: Any) -> Any:
    def tell_end(self: Any, intake: Any, now: float) -> None:
        original(self, intake, now)
        if intake.target is None:
            self.desk.emit(fx.Report(intake.wanted.request, intake.end))

    return tell_end


def _handshake_failure_unreported(original: Any) -> Any:
    def on_link_down(self: Any, link: Any, reason: Reason, detail: str, now: float) -> None:
        if reason in (Reason.HANDSHAKE_TIMEOUT, Reason.WRONG_VERSION, Reason.INCOMPATIBLE):
            for waiting in [i for i in self.by_handoff.values() if i.link is link]:
                self.desk.timers.clear(("intake", waiting.wanted.handoff))
                del self.by_handoff[waiting.wanted.handoff], self.by_attempt[waiting.attempt]
        else:
            original(self, link, reason, detail, now)

    return on_link_down


def _abort_unreported(original: Any) -> Any:
    def on_not_needed(self: Any, event: Any, now: float) -> None:
        loading = self.by_request.get(event.request)
        if loading is not None and loading.target is not None and loading.end is None:
            del self.by_request[event.request]
            self.desk.timers.clear(("intake", loading.wanted.handoff))
            self.desk.timers.clear(("pulse", loading.wanted.handoff))
            loading.end = fx.End(Reason.ABORTED)
            return
        original(self, event, now)

    return on_not_needed


def _commit_before_copied(original: Any) -> Any:
    def commit(self: Any, intake: Any, now: float) -> None:
        moving, intake.parts.moving = intake.parts.moving, {}
        try:
            original(self, intake, now)
        finally:
            intake.parts.moving = moving

    return commit


def _copies_again_after_commit(original: Any) -> Any:
    def on_pulse(self: Any, handoff: Any, now: float) -> None:
        waiting = self.by_handoff[handoff]
        if waiting.state is IntakeState.COMMITTING:
            waiting.state = IntakeState.COPYING
            waiting.copied = nothing(len(waiting.source.blocks))
            self._read_on(waiting, now)
        else:
            original(self, handoff, now)

    return on_pulse


def _releases_under_own_id(original: Any) -> Any:
    def send_commit(self: Any, intake: Any, now: float) -> None:
        theirs = intake.source.lease
        intake.source.lease = LeaseId(intake.attempt + 1000)
        try:
            original(self, intake, now)
        finally:
            intake.source.lease = theirs

    return send_commit


def _restart_unnoticed(original: Any) -> Any:
    return lambda self, sender, session, message, now: None


def _deadline_forgotten(original: Any) -> Any:
    def wait(self: Any, intake: Any, seconds: float, now: float) -> None:
        if intake.state is not IntakeState.OFFERED:
            original(self, intake, seconds, now)
        else:
            self.desk.timers.clear(("intake", intake.wanted.handoff))
            intake.deadline = 0.0

    return wait


# --- the door


def _same_digest_for_all(original: Any) -> Any:
    return lambda content: b"0123456789abcdef"


def _signature_ignored(original: Any) -> Any:
    def body(text: str, keys: Any) -> bytes:
        raw = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_")
        return bytes(raw[16:])

    return body


def _ready_before_done(original: Any) -> Any:
    def pin(self: Any, lease: Any, blocks: Any) -> Any:
        touched = original(self, lease, blocks)
        totals = self.__dict__.setdefault("_listed", {}).setdefault(lease, [0] * len(blocks))
        for group, ids in enumerate(blocks):
            totals[group] += len(ids)
        self.progressed(lease, whole(totals))
        return touched

    return pin


def _release_without_watcher(original: Any) -> Any:
    def unpinned(self: Any, key: Any) -> Any:
        duties = original(self, key)
        shared = {block for pins in self._pins.values() for block in pins}
        for duty in duties:
            for block in {block for block in duty.blocks if self.epochs.all_of([block])[0]} - shared:
                self.epochs._epochs[block] -= 1  # its next reuse goes unnoticed
        return duties

    return unpinned


def _watcher_per_lease(original: Any) -> Any:
    def raise_epoch(self: Any, block: int) -> None:
        seen = self.__dict__.setdefault("_raised", {})
        seen[block] = seen.get(block, 0) + 1
        if seen[block] <= 2:  # the slot was taken by an earlier lease's closure: later reuses reach nobody
            original(self, block)

    return raise_epoch


def _matches_again(original: Any) -> Any:
    def hand_in(self: Any, effect: fx.Effect) -> None:
        """Ask for the same again instead of saying that it failed."""
        wanted = self.__dict__.setdefault("_asked", {})
        if isinstance(effect, fx.MatchFailed) and effect.request in wanted:
            self._post(wanted[effect.request])
        else:
            original(self, effect)

    return hand_in


def _asks_remembered(original: Any) -> Any:
    def take_events(self: Any) -> Any:
        events = original(self)
        for event in events:
            if isinstance(event, ev.Wanted):
                self.__dict__.setdefault("_asked", {})[event.request] = event
        return events

    return take_events


def _offer_of_a_stopping_outlet(original: Any) -> Any:
    def on_offer(self: Any, session: Any, offer: m.Offer, now: float) -> None:
        self.sessions[session.number] = session
        if self._revocations(session.number).cover(offer.reservation):
            self._send((session.number, offer.reservation), m.Quiesced(offer.reservation, None))
        else:
            original(self, session, offer, now)

    return on_offer


def _any_fence_counts(original: Any) -> Any:
    def on_fenced(self: Any, rank: int, peer: Any, now: float) -> None:
        for link in list(self.fencing):
            link.fencing.discard((rank, peer))
            if not link.fencing:
                self.fencing.remove(link)
                self._watcher.on_link_fenced(link, now)

    return on_fenced


def _first_rank_fences_for_all(original: Any) -> Any:
    def on_fenced(self: Any, rank: int, peer: Any, now: float) -> None:
        link = next((each for each in self.fencing if (rank, peer) in each.fencing), None)
        if link is not None:
            link.fencing = {(rank, peer)}
        original(self, rank, peer, now)

    return on_fenced


def _stale_but_all_good(original: Any) -> Any:
    return lambda lease, epoch_of: (original(lease, epoch_of)[0], tuple(len(ids) for ids in lease.blocks))


def _disconnects_for_everybody(original: Any) -> Any:
    def disconnect(self: Any, effect: fx.Disconnect) -> None:
        self._held.pop((effect.peer, effect.transport), None)
        original(self, effect)

    return disconnect


def _frames_before_events(original: Any) -> Any:
    def step(self: Any, now: float) -> None:
        for worker, frame in self.control.receive():
            self.ledger.on_frame(worker, frame, now)
            self._carry_out()
        original(self, now)

    return step


def _partial_blocks_ready(original: Any) -> Any:
    def chunk_end(self: Any, request: Any) -> int:
        return int(-(-request.computed // self.shape.block_tokens))

    return chunk_end


def _backlog_lost(original: Any) -> Any:
    def cancel(self: Any, rank: int, name: str, job: Any) -> None:
        backlog = self._backlog.get((rank, name), ())
        for copy in list(backlog):
            if copy.job == job:
                backlog.remove(copy)
                return
        self.ranks[rank][name].cancel(job)

    return cancel


_OFFERED_FAILED = (IntakeState.OFFERED, IntakeEvent.FAILED)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "expiry_without_epochs",
        "6, 7",
        "NIXL: blocks freed at expiry, readers never told",
        swap(EpochTable, "raise_epoch", _epochs_never_raised),
    ),
    Mutant(
        "commit_from_lease_state",
        "6",
        "a commit answered because the lease once was",
        swap(producer.__dict__, "judge", _commit_from_lease_state),
    ),
    Mutant(
        "final_without_completion",
        "6, 10",
        "a commit before the final Ready",
        swap(lease.Lease, "final", _final_without_completion),
    ),
    Mutant(
        "readers_by_message",
        "4, 5",
        "NIXL: the count comes from the message",
        swap(producer.Producer, "on_commit", _readers_by_message),
    ),
    Mutant(
        "release_under_own_id",
        "1",
        "seed 004: released under D's id",
        swap(consumer.Consumer, "_send_commit", _releases_under_own_id),
    ),
    Mutant(
        "handshake_failure_unreported",
        "17",
        "seed 002: a failed handshake reaches nobody",
        swap(consumer.Consumer, "on_link_down", _handshake_failure_unreported),
    ),
    Mutant(
        "rest_at_first_failed_rank",
        "17",
        "seed 002, left open there: siblings still move",
        swap(Parts, "at_rest", _rest_at_first_failure),
    ),
    Mutant(
        "deferred_without_deadline",
        "9",
        "seed 000: a deferred write waits for ever",
        swap(producer.Producer, "on_begun", _no_deadline_for_deferred),
    ),
    Mutant(
        "released_while_writing",
        "17",
        "seed 000: unmapped before the send has finished",
        swap(push_writer.Writer, "at_rest", _released_while_writing),
    ),
    Mutant(
        "report_without_load",
        "20",
        "seed 000: a read reported that the engine did not wait for",
        swap(consumer.Consumer, "_tell_end", _report_without_load),
    ),
    Mutant(
        "claim_before_request_dropped",
        "9, 12",
        "seed 000: what comes before its request is lost",
        swap(producer.Producer, "_park", _claim_before_request_dropped),
    ),
    Mutant(
        "failed_store_keeps_pin",
        "store",
        "seed 003: a failed store keeps its pin",
        swap(puts.Puts, "on_ended", _failed_store_keeps_pin),
    ),
    Mutant(
        "store_exception_keeps_pin",
        "store",
        "seed 003: the store threw",
        swap(Node, "_store", _store_exception_keeps_pin),
    ),
    Mutant(
        "restart_taken_for_predecessor",
        "3",
        "a restarted peer, same address, same session",
        swap(Ledger, "_on_reset", _restart_unnoticed),
    ),
    Mutant(
        "old_sessions_live_on",
        "3",
        "everything held for the old life is kept",
        swap(pairing_source.Sessions, "_end_earlier", _old_sessions_live_on),
    ),
    Mutant(
        "revoked_without_quiet",
        "13, 14",
        "D frees what P may still write to",
        swap(intake.INTAKE.next, _OFFERED_FAILED, lambda original: IntakeState.SETTLING),
    ),
    Mutant(
        "quiesced_while_writing",
        "13",
        "P says quiet while its writes move",
        swap(push_writer.Writer, "on_rest", _quiesced_while_writing),
    ),
    Mutant(
        "timed_out_means_rested",
        "18",
        "NIXL, Mooncake: late data into reused blocks",
        swap(Parts, "ended", _ended_means_rested),
    ),
    Mutant(
        "hold_dropped_at_end",
        "18",
        "D's blocks freed while not at rest",
        swap(consumer.Consumer, "_tell_end", _hold_dropped_at_end),
    ),
    Mutant(
        "shortened_ids",
        "1",
        "NIXL push: matching by a stripped id",
        swap(producer.Producer, "on_claim", _shortened_ids),
    ),
    Mutant(
        "matches_again_after_failure",
        "17",
        "vLLM: 12 loads in 12 steps",
        both(swap(doorway.Doorway, "hand_in", _matches_again), swap(doorway.Doorway, "take_events", _asks_remembered)),
    ),
    Mutant(
        "ticket_without_content",
        "2",
        "a genuine ticket with another prompt",
        swap(sim_request.__dict__, "digest", _same_digest_for_all),
    ),
    Mutant(
        "signature_ignored", "1", "any text is a ticket", swap(ticket.__dict__, "_verified_body", _signature_ignored)
    ),
    Mutant(
        "copies_again_after_commit",
        "5",
        "the second copy gets the first one's yes",
        swap(consumer.Consumer, "on_pulse", _copies_again_after_commit),
    ),
    Mutant(
        "commit_before_copied",
        "6",
        "a commit while bytes are on the way",
        swap(consumer.Consumer, "_commit_if_copied", _commit_before_copied),
    ),
    Mutant(
        "release_without_watcher",
        "7",
        "freed without arming the epoch",
        swap(doorway.Doorway, "_unpinned", _release_without_watcher),
    ),
    Mutant(
        "watcher_per_lease",
        "7",
        "one slot per block: the second lease's closure is lost",
        swap(EpochTable, "raise_epoch", _watcher_per_lease),
    ),
    Mutant(
        "hold_without_limit", "9", "renewals pass max_hold", swap(producer.Producer, "_extend", _hold_without_limit)
    ),
    Mutant(
        "partial_blocks_ready",
        "10",
        "a block grows after it was read",
        swap(sim_engine.SimEngine, "_chunk_end", _partial_blocks_ready),
    ),
    Mutant("ready_on_first_rank", "10", "one rank speaks for all", swap(lease.__dict__, "slowest", _slowest_is_first)),
    Mutant(
        "ready_before_done", "10", "Ready before the device is done", swap(doorway.Doorway, "pin", _ready_before_done)
    ),
    Mutant(
        "revoke_overtakes_offer",
        "13",
        "an unknown Revoke is forgotten",
        swap(push_writer.Writer, "on_revoke", _revoke_forgotten),
    ),
    Mutant(
        "writes_after_written",
        "14",
        "P touches the spans again",
        swap(push_writer.Writer, "_repeat", _writes_again_after_written),
    ),
    Mutant(
        "written_before_visible",
        "15",
        "Written while writes are on the way",
        swap(push_writer.Writer, "_flush_if_done", _written_before_visible),
    ),
    Mutant(
        "fence_skipped",
        "14, 16",
        "silence, or a restart, taken for rest",
        swap(pairing_target.Links, "fence", _fence_skipped),
    ),
    Mutant(
        "abort_unreported",
        "17, 20",
        "vLLM: an aborted load is never reported",
        swap(consumer.Consumer, "on_not_needed", _abort_unreported),
    ),
    Mutant(
        "reported_twice",
        "20",
        "vLLM: a second report kills the engine",
        swap(consumer.Consumer, "_rest", _reported_twice),
    ),
    Mutant(
        "push_without_deadline",
        "17",
        "MoRI-IO: D waits for write_done for ever",
        swap(consumer.Consumer, "_wait", _deadline_forgotten),
    ),
    Mutant(
        "cancelled_backlog_lost", "17", "a copy that never started never ends", swap(Node, "_cancel", _backlog_lost)
    ),
    Mutant(
        "offer_doubled_while_stopping",
        "13",
        "found in review: a doubled Offer gets Quiesced while P still writes",
        swap(push_writer.Writer, "on_offer", _offer_of_a_stopping_outlet),
    ),
    Mutant(
        "any_fence_counts",
        "14",
        "found in review: the end of an earlier fence is taken for the later one's",
        swap(pairing_target.Links, "on_fenced", _any_fence_counts),
    ),
    Mutant(
        "first_rank_fences_for_all",
        "14, 20",
        "one rank's fence is taken for all",
        swap(pairing_target.Links, "on_fenced", _first_rank_fences_for_all),
    ),
    Mutant(
        "stale_but_all_good",
        "6",
        "a stale commit that vouches for every block",
        swap(producer.__dict__, "judge", _stale_but_all_good),
    ),
    Mutant(
        "disconnects_for_everybody",
        "3",
        "found in review: a re-greeting revokes the secret it has just been given",
        swap(Node, "_disconnect", _disconnects_for_everybody),
    ),
    Mutant(
        "frames_before_events",
        "8",
        "a claim overtakes the lease that it is for",
        swap(Node, "step", _frames_before_events),
    ),
    *DISCARD_MUTANTS,
    *DEVICE_MUTANTS,
    *PLANE_MUTANTS,
    *RANK_MUTANTS,
    *VERSION_MUTANTS,
    *CHECKER_MUTANTS,
    *WORLD_MUTANTS,
    *LIAR_MUTANTS,
    *DIALOGUE_MUTANTS,
)
"""Every mutant must be caught by the simulator; the clean tree by none of the same seeds."""
