"""Wrong ideas that only a member that lies turns into harm (rules 25 to 29, and what the others leave to trust), and
those about rules 11, 19 and 21. One guard less is a generated mutant: `mutants_generated.txt` has those.
"""

from __future__ import annotations

import math
from typing import Any

from kvbaton.node.doorway import Doorway
from kvbaton.protocol.machines import consumer_filling
from kvbaton.protocol.machines.context import Timers
from kvbaton.protocol.machines.inbound import ConsumerBook
from kvbaton.protocol.machines.lease import ReaderEvent, ReaderState
from kvbaton.protocol.machines.producer import Producer
from kvbaton.transports.core.loans import WriteRecords
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap
from kvbaton_proof.sim.world.sim_transport import SimTransport


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


def _as_asked(original: Any) -> Any:
    """Timers as anybody would write them: what is set for now is due now."""

    def set_timer(self: Any, key: Any, at: float) -> None:
        soonest, self._soonest = self._soonest, -math.inf
        original(self, key, at)
        self._soonest = soonest

    return set_timer


def _at_once(original: Any) -> Any:
    def pulse(self: Any, intake: Any, seconds: float, now: float) -> None:
        self.desk.timers.set(("pulse", intake.wanted.handoff), now)

    return pulse


LIAR_MUTANTS: tuple[Mutant, ...] = (
    Mutant("a_time_handled_twice", "26", "a handler that arms itself for now keeps the loop",
           both(swap(Timers, "set", _as_asked), swap(ConsumerBook, "pulse", _at_once))),
    # --- who speaks
    Mutant("committed_by_another", "4", "a commit counts for the reader with that number, not for its sender",
           swap(Producer, "on_commit", _any_reader_of_that_number)),
    # --- what was written
    Mutant("written_under_another_loan", "35", "what a P wrote in one handoff counts in its next one",
           swap(WriteRecords, "lend", _record_goes_on)),
    Mutant("last_block_not_due", "35", "what a push must fill ends one block too early",
           swap(consumer_filling.__dict__, "due", _one_block_less)),
    # --- rules 11, 19 and 21
    Mutant("chunks_unpinned", "11", "a chunk is listed and not pinned: P preempts, and D reads on",
           swap(Doorway, "pin", _unpinned_chunks)),
    Mutant("copies_on_the_loop", "21", "the loop waits for its copies, and renews nothing meanwhile",
           swap(SimTransport, "_launch", _copies_on_the_loop)),
)  # fmt: skip
