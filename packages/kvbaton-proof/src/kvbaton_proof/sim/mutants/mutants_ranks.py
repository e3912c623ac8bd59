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
from kvbaton.ranks.rank_link import RankLink
from kvbaton.ranks.rank_messages import Submit
from kvbaton.ranks.rank_planes import HostedPlane
from kvbaton.ranks.rank_store import RankValues
from kvbaton.ranks.rank_store_link import RemoteRankStore
from kvbaton.ranks.rank_stream import Stream, StreamEnvelope
from kvbaton.ranks.rank_transport import RemoteTransport
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


# --- ranks that are lost


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


def _lost_ends_loans(original: Any) -> Any:
    def on_lost(self: Any, detail: str) -> None:
        original(self, detail)
        for job in list(self._loans):
            self._loans.discard(job)
            self._jobs.loan_ended(CopyEnded(job, Reason.TRANSFER_FAILED))

    return on_lost


# --- ends


def _reported_twice_ends_twice(original: Any) -> Any:
    def take_end(self: Any, news: Any) -> None:
        known = news.job in self._loans or self._jobs.find(news.job) or self._restless.get(news.job)
        original(self, news)
        if not known:
            self._jobs.loan_ended(CopyEnded(news.job, news.reason, news.at_rest))

    return take_end


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
    Mutant("rank_lost_by_seconds", "20", "an engine that stood still takes its ranks for lost",
           swap(RankLink, "due", _lost_by_seconds)),
    Mutant("rank_lost_is_done", "20, 31", "a copy of a rank that is lost counts as done",
           swap(RemoteTransport, "_abandon", _lost_is_done)),
    Mutant("rank_lost_is_at_rest", "18, 20", "a copy of a rank that is lost counts as at rest",
           swap(RemoteTransport, "_abandon", _lost_is_at_rest)),
    Mutant("rank_lost_ends_loans", "28", "what a lost rank has lent counts as taken back",
           swap(RemoteTransport, "on_lost", _lost_ends_loans)),
    Mutant("rank_reported_twice", "20", "a rank reports a copy twice, and it ends twice",
           swap(RemoteTransport, "_take_end", _reported_twice_ends_twice)),
    Mutant("rank_loan_ended_at_cancel", "28", "a loan counts as over when its rank was told to take it back",
           swap(RemoteTransport, "cancel", _loan_ends_when_taken_back)),
    Mutant("rank_fences_merged", "18", "found here: two fences of a peer ended as one, the other was waited for",
           both(swap(RemoteTransport, "fence", _fences_are_one), swap(RemoteTransport, "take", _fenced_is_noted))),
    Mutant("rank_torn_table_used", "20", "of a table in parts some are missing, and the rest is copied",
           swap(rank_planes, "copy_of", _torn_is_used)),
    Mutant("rank_parts_kept", "20", "the parts of a table stay in the rank after its copy was started",
           swap(HostedPlane, "_submit", _parts_are_kept)),
    Mutant("torn_loan_blames_the_plane", "20", "a loan whose table came in part ends as if its plane had failed",
           swap(HostedPlane, "_lend", _torn_is_failed)),
    Mutant("rank_progress_for_all", "30", "how far one rank's device is counts for all",
           swap(rank_link.RankLinks, "drain_progress", _rank_0_speaks_for_all)),
    Mutant("rank_names_mixed_up", "20", "all ranks are told to be rank 0",
           swap(rank_link.__dict__, "rank_peer", _all_ranks_are_rank_0)),
    Mutant("rank_lost_ends_gets", "20, 32", "a get of a rank that is lost ends, and its bytes land later",
           swap(RemoteRankStore, "on_lost", _lost_ends_gets)),
    Mutant("rank_value_of_another_block", "20", "a rank's values are those of a neighbouring block",
           swap(RankValues, "pieces", _another_block)),
)  # fmt: skip
