"""Wrong ideas about pushing: outlets, revocations, and the fence that ends what cannot be asked any more."""

from __future__ import annotations

from typing import Any

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import nothing
from kvbaton.protocol.geometry.spans import SpanSide
from kvbaton.protocol.machines import consumer_filling, pairing_target, push_writer
from kvbaton.protocol.machines.movement import Cargo, Route, moves, start
from kvbaton.protocol.machines.push_writer import OutletState
from kvbaton.protocol.wire import messages as m
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


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
            route = Route(session.plan, SpanSide.SOURCE, session.peer, session.transport.name)
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


def _never_possible(original: Any) -> Any:
    return lambda self, link: False


def _only_when_all_is_there(original: Any) -> Any:
    def read_on(self: Any, intake: Any, now: float) -> None:
        if intake.source.final:
            original(self, intake, now)

    return read_on


def _sessions_kept(original: Any) -> Any:
    def forget_if_over(self: Any, session: int) -> None:
        kept = self.sessions.get(session)
        original(self, session)
        if kept is not None:
            self.sessions[session] = kept

    return forget_if_over


PUSH_MUTANTS: tuple[Mutant, ...] = (
    Mutant("writer_remembers_sessions", "18", "P remembers every session that it has ever written in",
           swap(push_writer.Writer, "_forget_if_over", _sessions_kept)),
    Mutant("nothing_is_streamed", "30", "D reads when P has computed all, and not before",
           swap(consumer_filling.Pulls, "read_on", _only_when_all_is_there)),
    Mutant("nothing_is_pushed", "16", "D copies what P could write",
           swap(consumer_filling.Pushes, "is_possible", _never_possible)),
    Mutant("quiesced_while_writing", "13", "P says quiet while its writes move",
           swap(push_writer.Writer, "on_rest", _quiesced_while_writing)),
    Mutant("revoke_overtakes_offer", "13", "an unknown Revoke is forgotten",
           swap(push_writer.Writer, "on_revoke", _revoke_forgotten)),
    Mutant("writes_after_written", "14", "P touches the spans again",
           swap(push_writer.Writer, "_repeat", _writes_again_after_written)),
    Mutant("written_before_visible", "15", "Written while writes are on the way",
           swap(push_writer.Writer, "_flush_if_done", _written_before_visible)),
    Mutant("fence_skipped", "14, 16", "silence, or a restart, taken for rest",
           swap(pairing_target.Links, "fence", _fence_skipped)),
    Mutant("offer_doubled_while_stopping", "13", "found in review: a doubled Offer gets Quiesced while P still writes",
           swap(push_writer.Writer, "on_offer", _offer_of_a_stopping_outlet)),
    Mutant("any_fence_counts", "14", "found in review: the end of an earlier fence is taken for the later one's",
           swap(pairing_target.Links, "on_fenced", _any_fence_counts)),
    Mutant("first_rank_fences_for_all", "14, 20", "one rank's fence is taken for all",
           swap(pairing_target.Links, "on_fenced", _first_rank_fences_for_all)),
)  # fmt: skip
