"""Wrong ideas that only a member that lies turns into harm (rules 25 to 29, and what the others leave to trust), and
those about rules 11, 19 and 21.

Most are one guard less: the text of one function without it, compiled in place of the original.
"""

from __future__ import annotations
import __future__ as future

import contextlib
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from kvbaton.node.doorway import Doorway
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.geometry import layout, spans
from kvbaton.protocol.machines import claims, consumer_filling, ledger
from kvbaton.protocol.machines.claims import Claims
from kvbaton.protocol.machines.consumer_filling import Pulls, Pushes
from kvbaton.protocol.machines.context import Timers
from kvbaton.protocol.machines.inbound import ConsumerBook, Source
from kvbaton.protocol.machines.lease import ReaderEvent, ReaderState
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.machines.pairing_state import Sessions
from kvbaton.protocol.machines.producer import Producer
from kvbaton.protocol.machines.push_writer import Writer
from kvbaton.protocol.machines.quotas import Buckets
from kvbaton.protocol.wire.codec import read
from kvbaton.transports.core.loans import Loans, WriteRecords
from kvbaton_proof.sim.mutants.mutation import Mutant, Switch, both, swap
from kvbaton_proof.sim.world.sim_transport import SimTransport

FLAGS = future.annotations.compiler_flag


def edited(*changes: tuple[str, str]) -> Callable[[Any], Any]:
    """The function, or property, with each `old` of its text replaced by `new`; one that is not there is an error."""

    def make(original: Any) -> Any:
        before: Any = original.fget if isinstance(original, property) else original
        text = textwrap.dedent(inspect.getsource(before)).removeprefix("@property\n")
        for old, new in changes:
            if text.count(old) != 1:
                raise LookupError(f"{before.__qualname__}: {old!r} is there {text.count(old)} times, expected once")
            text = text.replace(old, new)
        module = compile(text, f"<mutant of {before.__qualname__}>", "exec", FLAGS)
        code = next(each for each in module.co_consts if isinstance(each, CodeType))
        after = FunctionType(code, before.__globals__, before.__name__, before.__defaults__)
        return property(after) if isinstance(original, property) else after

    return make


def without(owner: Any, name: str, old: str, new: str = "False") -> Switch:
    return swap(owner, name, edited((old, new)))


def _believes_the_envelope(original: Any) -> Any:
    def on_frame(self: Any, worker: Any, frame: bytes, now: float) -> None:
        with contextlib.suppress(ProtocolError):
            worker = read(frame, self.desk.identity.versions)[0].worker
        original(self, worker, frame, now)

    return on_frame


def _any_reader_of_that_number(original: Any) -> Any:
    def on_commit(self: Any, session: Any, message: Any, now: float) -> None:
        lease = self.leases.get(message.lease)
        for reader, seat in list(lease.seats.items()) if lease is not None else []:
            if reader.attempt == message.attempt and seat.state is ReaderState.LIVE:
                proven, seat.good = self._judge(lease)
                self.leave(lease, reader, ReaderEvent.PROVEN if proven else ReaderEvent.DISPROVEN, now)
                return
        original(self, session, message, now)

    return on_commit


def _always(answer: bool) -> Callable[[Any], Any]:
    return lambda original: lambda *arguments, **named: answer


def _as_asked(original: Any) -> Any:
    """Timers as anybody would write them."""
    text = "at = max(self._soonest, at)  # in this order: a NaN, which the heap would lose, is due next"
    return edited((text, "pass"))(original)


def _unchecked(original: Any) -> Any:
    return lambda *arguments: None


def _nobody_told(original: Any) -> Any:
    return lambda self, event, now: None


def _unpinned_chunks(original: Any) -> Any:
    """The blocks are listed, with their epochs, and nobody holds them."""

    def pin(self: Any, lease: Any, blocks: Any) -> tuple[int, ...]:
        original(self, lease, blocks)
        if lease in self._pins:
            self._pins[lease].clear()
        return ()

    return pin


def _record_goes_on(original: Any) -> Any:
    def lend(self: Any, loan: Any, sizes: Any) -> None:
        original(self, loan, sizes)
        records = self.__dict__.setdefault("of_all", {})
        record, before = self._by_job.get(loan.job), records.get(loan.peer)
        if record is not None:
            for region, pieces in (before._by_region if before is not None else {}).items():
                record._by_region.setdefault(region, []).extend(pieces)
            records[loan.peer] = record

    return lend


def _one_block_less(original: Any) -> Any:
    def due(plan: Any, blocks: Any, tokens: int, first_token: int) -> Any:
        fewer = max(first_token + 1, tokens - plan.target.groups[0].block_tokens)
        return original(plan, blocks, fewer, first_token)

    return due


def _without_waking(original: Any) -> Any:
    return lambda self, effect: self._to_engine.append(effect)


def _copies_on_the_loop(original: Any) -> Any:
    """Whoever submits a copy waits for its end, and with him the loop."""

    def launch(self: Any, job: Any) -> None:
        original(self, job)
        life = getattr(self._waker, "__self__", None)
        if life is not None and job.spans:
            self.fabric.world.after(0.0, lambda: _wait_for(self, life, job))

    return launch


def _wait_for(plane: Any, life: Any, job: Any) -> None:
    life._node_due = not (job.over or not plane.alive)  # as if a step were under way
    if life._node_due:
        plane.fabric.world.after(0.002, lambda: _wait_for(plane, life, job))
    else:
        life.wake()


LIAR_MUTANTS: tuple[Mutant, ...] = (
    # --- numbers and time
    Mutant("tiny_term", "25", "a liar grants a term of a millisecond, and D renews three thousand times a second",
           without(ConsumerBook, "pulse", "max(seconds, DURATION_S_MIN)", "seconds")),
    Mutant("a_time_handled_twice", "26", "a handler that arms itself for now keeps the loop",
           both(swap(Timers, "set", _as_asked), without(ConsumerBook, "pulse", "max(seconds, DURATION_S_MIN)", "0.0"))),
    Mutant("groups_uncounted", "25", "a liar's offer has no list of blocks for some group",
           without(Writer, "_open", "len(offer.blocks) != len(session.plan.target.groups)")),
    Mutant("ready_of_other_groups", "25", "a liar's Ready has one group more than the prompt",
           without(Pulls, "_learn", "not len(message.start) == len(message.blocks) == len(message.progress) =="
                   " len(source.blocks)")),
    Mutant("final_without_the_rest", "10, 31", "a liar's final word names half of the blocks: D decodes on the rest",
           without(Source, "check", "self.final and ready.blocks_done < needed")),
    Mutant("blocks_out_of_reach", "25", "a liar names blocks that its card has not got",
           swap(spans.__dict__, "_check_ids", _unchecked)),
    # --- who speaks
    Mutant("envelope_believed", "29", "a member speaks in another's name, and is heard",
           swap(Ledger, "on_frame", _believes_the_envelope)),
    Mutant("role_ignored", "29", "a key that is for prefill greets, and is welcomed",
           swap(ledger.__dict__, "may_say", _always(True))),
    Mutant("session_of_another", "3", "a session's number is enough to speak in it",
           without(Ledger, "_from_target", "session is None or session.peer != sender", "session is None")),
    Mutant("answer_of_another_source", "3", "P's answer is accepted from any peer that names the attempt",
           without(ConsumerBook, "of", "intake is not None and intake.link is link", "intake is not None")),
    Mutant("written_by_another", "14", "a Written of a P that was not offered anything ends the handoff",
           without(Pushes, "on_written", " or intake.link is not link or intake.attempt != message.attempt", "")),
    Mutant("quiesced_by_another", "14", "another peer says that the writer has stopped",
           without(Pushes, "on_quiesced", "intake is None or intake.link is not link", "intake is None")),
    Mutant("committed_by_another", "4", "a commit counts for the reader with that number, not for its sender",
           swap(Producer, "on_commit", _any_reader_of_that_number)),
    # --- tickets
    Mutant("target_unread", "1", "a ticket that is for another D, signed anew, is as good",
           without(claims.__dict__, "_check_claim", 'lease.target not in ("", session.peer.worker)')),
    Mutant("ticket_of_another_target", "1", "a claim waits with a ticket that is for another",
           without(Claims, "_check_ticket", 'ticket.target not in ("", session.peer.worker)')),
    Mutant("ticket_of_another_source", "1", "a ticket for one P is taken by every P",
           without(Claims, "_check_ticket", "ticket.source != identity.me.worker or ticket.handoff != claim.handoff",
                   "ticket.handoff != claim.handoff")),
    Mutant("ticket_of_another_handoff", "1", "a claim names another handoff than its ticket",
           without(Claims, "_check_ticket", "ticket.source != identity.me.worker or ticket.handoff != claim.handoff",
                   "ticket.source != identity.me.worker")),
    Mutant("ticket_without_end", "1", "a ticket that is good for years",
           without(Claims, "_check_ticket", "not ticket.expires_unix_s - wall <= TICKET_LIFE_S_MAX")),
    Mutant("waits_for_what_was_computed", "12", "a claim for an unknown lease waits for it to start",
           without(Claims, "_park", "ticket.lease or not claim.deferred")),
    Mutant("ticket_judged_twice", "21", "a parked claim's ticket has expired when it is looked at again: P dies",
           swap(Claims, "_spend", edited(("ticket_keys, 0.0)", "ticket_keys, now + self.desk.identity.wall_offset_s)"),
                                         ("except ProtocolError:", "except LookupError:")))),
    # --- shares
    Mutant("all_that_is_registered", "28", "a plane serves whatever is in range, lent or not",
           swap(Loans, "_covers", _always(True))),
    Mutant("greetings_unmetered", "27", "cards are decoded, checked and mapped for any sender",
           swap(Buckets, "take", _always(True))),
    Mutant("card_believed", "27", "a liar's card has ranks whose shares are of no group",
           swap(layout.__dict__, "_validate_rank", _unchecked)),
    Mutant("unconfirmed_uncounted", "27", "one member's unconfirmed sessions evict all others",
           without(Ledger, "_may_greet", "len(waiting) >= settings.unconfirmed_per_peer_max")),
    Mutant("waiting_claims_uncounted", "9", "one member's claims fill the place where claims wait",
           without(Claims, "_make_room", "of_peer < settings.parked_per_peer_max", "True")),
    Mutant("earlier_sessions_kept", "3", "a liar confirms session after session, and each stays",
           without(Sessions, "_end_earlier", "s.peer.worker == worker and s.number < number")),
    # --- what was written
    Mutant("written_is_believed", "35", "P says Written, and nobody asks the ranks what came",
           without(Pushes, "on_loan_ended", "event.job in intake.parts.unproven")),
    Mutant("written_under_another_loan", "35", "what a P wrote in one handoff counts in its next one",
           swap(WriteRecords, "lend", _record_goes_on)),
    Mutant("last_block_not_due", "35", "what a push must fill ends one block too early",
           swap(consumer_filling.__dict__, "due", _one_block_less)),
    # --- rules 11, 19 and 21
    Mutant("preempted_in_silence", "11", "P's request is gone, and its readers are left to find out",
           swap(Producer, "on_source_ended", _nobody_told)),
    Mutant("chunks_unpinned", "11", "a chunk is listed and not pinned: P preempts, and D reads on",
           swap(Doorway, "pin", _unpinned_chunks)),
    Mutant("idle_while_pinned", "19", "an engine without requests says that it has nothing to do, and holds pins",
           swap(Doorway, "busy", edited(("len(self._pins) > len(self._turns) or ", "")))),
    Mutant("idle_while_held", "19", "the same of blocks that a load has not let go",
           swap(Doorway, "busy", edited(("self._holds or ", "")))),
    Mutant("news_without_a_step", "19", "what the node has to say waits until the engine happens to step",
           swap(Doorway, "hand_in", _without_waking)),
    Mutant("copies_on_the_loop", "21", "the loop waits for its copies, and renews nothing meanwhile",
           swap(SimTransport, "_launch", _copies_on_the_loop)),
)  # fmt: skip
