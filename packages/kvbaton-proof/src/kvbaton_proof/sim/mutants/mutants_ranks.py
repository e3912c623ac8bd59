"""Wrong ideas about rank links: ranks that are lost, replaced or slow, frames that come twice or not, torn tables (20).

Some are what these modules did before the simulator ran them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.ids import PeerId
from kvbaton.ranks import rank_link, rank_planes
from kvbaton.ranks.rank_host import RankHost
from kvbaton.ranks.rank_link import RankLink
from kvbaton.ranks.rank_messages import Cancel, Submit
from kvbaton.ranks.rank_planes import HostedPlane
from kvbaton.ranks.rank_store_host import RankStoreHost
from kvbaton.ranks.rank_store_link import RemoteRankStore
from kvbaton.ranks.rank_store_messages import RankStoreLookup
from kvbaton.ranks.rank_stream import Stream, StreamEnvelope
from kvbaton.ranks.rank_transport import Endpoints, RemoteTransport
from kvbaton.ranks.rank_values import RankValues
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap

_envelopes = msgspec.msgpack.Decoder(StreamEnvelope)

# --- frames


def _any_number_will_do(original: Any) -> Any:
    def take(self: Any, frame: bytes, now: float) -> Any:
        envelope = _envelopes.decode(frame)
        if envelope.session == self.session and envelope.number > self._received + 1:
            self._received = envelope.number - 1
        return original(self, frame, now)

    return take


def _repeated_is_taken_again(original: Any) -> Any:
    def take(self: Any, frame: bytes, now: float) -> Any:
        envelope = _envelopes.decode(frame)
        if envelope.session == self.session and 0 < envelope.number == self._received:
            self._received -= 1
        return original(self, frame, now)

    return take


def _never_again(original: Any) -> Any:
    def note_answer(self: Any, received: int, now: float) -> None:
        self._moved_at = now
        original(self, received, now)

    return note_answer


def _whoever_answers(original: Any) -> Any:
    def take(self: Any, frame: bytes, now: float) -> Any:
        envelope = _envelopes.decode(frame)
        self.session = self.session or envelope.session
        self.heard += 1
        return original(self, frame, now)

    return take


# --- ranks that are lost


def _never_lost(original: Any) -> Any:
    def lose(self: Any) -> None:
        self._pings = 0

    return lose


def _lost_by_seconds(original: Any) -> Any:
    def due(self: Any, now: float) -> Any:
        since = self.__dict__.setdefault("quiet_since", now)
        if not self._pings:
            self.__dict__["quiet_since"] = now
        if now - since > (self._pings_max + 1) * self._ping_s and not self.lost:
            self._lose()
        return original(self, now)

    return due


def _lost_is_done(original: Any) -> Any:
    def abandon(self: Any, job: Any, reason: Any, detail: str) -> None:
        if "pings" not in detail:
            original(self, job, reason, detail)
            return
        self._jobs.part_ended(job)

    return abandon


def _lost_is_at_rest(original: Any) -> Any:
    def abandon(self: Any, job: Any, reason: Any, detail: str) -> None:
        if "pings" in detail:
            job.live = 0
        original(self, job, reason, detail)

    return abandon


def _lost_ends_nothing(original: Any) -> Any:
    return lambda self, detail: None


def _lost_ends_loans(original: Any) -> Any:
    def on_lost(self: Any, detail: str) -> None:
        original(self, detail)
        for job in list(self._loans):
            self._loans.discard(job)
            self._jobs.loan_ended(CopyEnded(job, Reason.TRANSFER_FAILED))

    return on_lost


# --- ends


def _not_at_rest_is_at_rest(original: Any) -> Any:
    return lambda self, news: original(self, msgspec.structs.replace(news, at_rest=True))


def _reported_twice_ends_twice(original: Any) -> Any:
    def take_end(self: Any, news: Any) -> None:
        known = news.job in self._loans or self._jobs.find(news.job) or self._restless.get(news.job)
        original(self, news)
        if not known:
            self._jobs.loan_ended(CopyEnded(news.job, news.reason, news.at_rest))

    return take_end


def _rest_is_forgotten(original: Any) -> Any:
    def abandon(self: Any, job: Any, reason: Any, detail: str) -> None:
        original(self, job, reason, detail)
        self._restless._items.pop(job.copy.job, None)

    return abandon


def _tables_stay_counted(original: Any) -> Any:
    def abandon(self: Any, job: Any, reason: Any, detail: str) -> None:
        before = self._tables_bytes
        original(self, job, reason, detail)
        self._tables_bytes = before

    return abandon


def _loan_ends_when_taken_back(original: Any) -> Any:
    def cancel(self: Any, job: Any) -> None:
        lent = job in self._loans
        original(self, job)
        if lent:
            self._loans.discard(job)
            self._jobs.loan_ended(CopyEnded(job, Reason.CANCELLED))

    return cancel


def _fences_are_one(original: Any) -> Any:
    def fence(self: Any, peer: PeerId) -> None:
        fencing = self.__dict__.setdefault("fencing", set())
        if peer not in fencing:
            fencing.add(peer)
            original(self, peer)

    return fence


def _fenced_is_noted(original: Any) -> Any:
    def take(self: Any, news: Any) -> None:
        if type(news).__name__ == "Fenced":
            self.__dict__.setdefault("fencing", set()).discard(news.peer)
        original(self, news)

    return take


def _endpoint_is_kept(original: Any) -> Any:
    return lambda self, peer: None


# --- in the rank


def _torn_is_used(original: Any) -> Any:
    def copy_of(submit: Any, before: Any = b"") -> Any:
        came = len(before) + len(submit.table)
        if came < submit.spans_bytes:
            submit = msgspec.structs.replace(submit, spans_bytes=came, column_bytes=0, shifts_bytes=0)
        return original(submit, before)

    return copy_of


def _parts_are_kept(original: Any) -> Any:
    def submit(self: Any, command: Submit) -> None:
        before = self._parts.get(command.job)
        original(self, command)
        if before is not None:
            self._parts[command.job] = before

    return submit


def _cancelled_without_end(original: Any) -> Any:
    def carry_out(self: Any, command: Any) -> None:
        if isinstance(command, Cancel):
            self._waiting = type(self._waiting)(copy for copy in self._waiting if copy.job != command.job)
        original(self, command)

    return carry_out


def _no_room_is_forgotten(original: Any) -> Any:
    def turn(self: Any, now: float) -> Any:
        again = original(self, now)
        if self._waiting:
            self._waiting.popleft()
        return again

    return turn


def _stops_are_asked_once(original: Any) -> Any:
    def stop(self: Any, command: Any) -> None:
        original(self, command)
        self._again.clear()

    return stop


def _news_of_a_throwing_plane(original: Any) -> Any:
    def started(self: Any, copy: Any) -> bool:
        try:
            return bool(self.transport.submit(copy))
        except Exception:  # noqa: BLE001 - the wrong idea
            return True

    return started


def _given_twice(original: Any) -> Any:
    def give(self: Any, invitation: Any, session: int, tell: Any) -> Any:
        return original(self, invitation, session, tell) or self._given

    return give


# --- progress and names


def _rank_0_speaks_for_all(original: Any) -> Any:
    def drain_progress(self: Any) -> Any:
        ranks = range(len(self))
        return [msgspec.structs.replace(each, rank=rank) for each in original(self) for rank in ranks]

    return drain_progress


def _all_ranks_are_rank_0(original: Any) -> Any:
    return lambda peer, rank: original(peer, 0)


# --- the store


def _lost_ends_gets(original: Any) -> Any:
    def on_lost(self: Any, detail: str) -> None:
        original(self, detail)
        for order in list(self._open):
            self._finish(order, Reason.STORE_FAILED, detail)
        self._waker()

    return on_lost


def _lookups_wait(original: Any) -> Any:
    return lambda self, detail: None


def _order_end_twice(original: Any) -> Any:
    def take_end(self: Any, news: Any) -> bool:
        if news.order not in self._open:
            self._ends.append(news.end)
            return True
        return bool(original(self, news))

    return take_end


def _early_order_without_end(original: Any) -> Any:
    def begin(self: Any, command: Any) -> None:
        if self._store is not None:
            original(self, command)

    return begin


def _lookup_takes_no_end(original: Any) -> Any:
    def carry_out(self: Any, command: Any) -> None:
        original(self, command)
        if isinstance(command, RankStoreLookup):
            self._open.discard(command.order)

    return carry_out


def _another_block(original: Any) -> Any:
    def pieces(self: Any, regions: Any, block: int) -> Any:
        return original(self, regions, block ^ 1 if block > 1 and block ^ 1 < self.block_count else block)

    return pieces


def _torn_is_failed(original: Any) -> Any:
    def lend(self: Any, command: Any) -> None:
        end = self._end
        self._end = lambda job, reason, detail="": end(job, Reason.TRANSFER_FAILED, detail)
        original(self, command)
        del self._end

    return lend


RANK_MUTANTS: tuple[Mutant, ...] = (
    Mutant("rank_frame_after_a_gap", "20", "a link reconnects, and what was lost with the old connection is skipped",
           swap(Stream, "take", _any_number_will_do)),
    Mutant("rank_frame_twice", "20", "a frame that comes twice is carried out twice",
           swap(Stream, "take", _repeated_is_taken_again)),
    Mutant("rank_frame_never_again", "20", "what a broken connection has lost is not sent again",
           swap(Stream, "_note_answer", _never_again)),
    Mutant("rank_replaced_unnoticed", "20", "found here: another process in a rank's place was taken for it",
           swap(Stream, "take", _whoever_answers)),
    Mutant("rank_never_lost", "20", "a rank that is gone is waited for",
           swap(RankLink, "_lose", _never_lost)),
    Mutant("rank_lost_by_seconds", "20", "an engine that stood still takes its ranks for lost",
           swap(RankLink, "due", _lost_by_seconds)),
    Mutant("rank_lost_is_done", "20, 31", "a copy of a rank that is lost counts as done",
           swap(RemoteTransport, "_abandon", _lost_is_done)),
    Mutant("rank_lost_is_at_rest", "18, 20", "a copy of a rank that is lost counts as at rest",
           swap(RemoteTransport, "_abandon", _lost_is_at_rest)),
    Mutant("rank_lost_ends_nothing", "20", "copies of a rank that is lost go on being waited for",
           swap(RemoteTransport, "on_lost", _lost_ends_nothing)),
    Mutant("rank_lost_ends_loans", "28", "what a lost rank has lent counts as taken back",
           swap(RemoteTransport, "on_lost", _lost_ends_loans)),
    Mutant("rank_not_at_rest_is_at_rest", "18", "a rank says that bytes may still land, and it is ignored",
           swap(RemoteTransport, "_take_end", _not_at_rest_is_at_rest)),
    Mutant("rank_reported_twice", "20", "a rank reports a copy twice, and it ends twice",
           swap(RemoteTransport, "_take_end", _reported_twice_ends_twice)),
    Mutant("rank_rest_forgotten", "18", "a copy that was not at rest is forgotten; what it touches never comes back",
           swap(RemoteTransport, "_abandon", _rest_is_forgotten)),
    Mutant("rank_tables_stay_counted", "20", "the tables of copies that were given up fill the queue for ever",
           swap(RemoteTransport, "_abandon", _tables_stay_counted)),
    Mutant("rank_loan_ended_at_cancel", "28", "a loan counts as over when its rank was told to take it back",
           swap(RemoteTransport, "cancel", _loan_ends_when_taken_back)),
    Mutant("rank_fences_merged", "18", "found here: two fences of a peer ended as one, the other was waited for",
           both(swap(RemoteTransport, "fence", _fences_are_one), swap(RemoteTransport, "take", _fenced_is_noted))),
    Mutant("rank_endpoint_kept", "20", "an endpoint is given out again after its peer was fenced or forgotten",
           swap(Endpoints, "forget", _endpoint_is_kept)),
    Mutant("rank_torn_table_used", "20", "of a table in parts some are missing, and the rest is copied",
           swap(rank_planes, "copy_of", _torn_is_used)),
    Mutant("rank_parts_kept", "20", "the parts of a table stay in the rank after its copy was started",
           swap(HostedPlane, "_submit", _parts_are_kept)),
    Mutant("torn_loan_blames_the_plane", "20", "a loan whose table came in part ends as if its plane had failed",
           swap(HostedPlane, "_lend", _torn_is_failed)),
    Mutant("rank_cancelled_without_end", "20", "a copy that waits for room is cancelled, and never ends",
           swap(HostedPlane, "carry_out", _cancelled_without_end)),
    Mutant("rank_no_room_forgotten", "20", "a copy for which a data plane has no room is dropped",
           swap(HostedPlane, "turn", _no_room_is_forgotten)),
    Mutant("rank_throws_without_end", "20", "a data plane throws in its rank, and the copy never ends",
           swap(HostedPlane, "_started", _news_of_a_throwing_plane)),
    Mutant("rank_asked_to_stop_once", "14, 17, 20", "found here: a stop or fence that threw in its rank was forgotten",
           swap(HostedPlane, "_stop", _stops_are_asked_once)),
    Mutant("rank_given_twice", "20", "a second engine with the same invitation is given the data planes",
           swap(RankHost, "give", _given_twice)),
    Mutant("rank_progress_for_all", "30", "how far one rank's device is counts for all",
           swap(rank_link.RankLinks, "drain_progress", _rank_0_speaks_for_all)),
    Mutant("rank_names_mixed_up", "20", "all ranks are told to be rank 0",
           swap(rank_link.__dict__, "rank_peer", _all_ranks_are_rank_0)),
    Mutant("rank_lost_ends_gets", "20, 32", "a get of a rank that is lost ends, and its bytes land later",
           swap(RemoteRankStore, "on_lost", _lost_ends_gets)),
    Mutant("rank_lookups_wait", "20", "a look-up waits for a rank that is lost",
           swap(RemoteRankStore, "on_lost", _lookups_wait)),
    Mutant("rank_order_without_end", "20", "an order for a store that cannot be reached never ends",
           swap(RankStoreHost, "_begin", _early_order_without_end)),
    Mutant("rank_lookup_without_end", "20", "the end of a look-up is not told",
           swap(RankStoreHost, "carry_out", _lookup_takes_no_end)),
    Mutant("rank_value_of_another_block", "20", "a rank's values are those of a neighbouring block",
           swap(RankValues, "pieces", _another_block)),
)  # fmt: skip
