"""Wrong ideas about devices: what was issued is taken for done (rules 30, 31), and blocks change hands under it (32).

Also those about loans (28). Most replace what an adapter does, so the simulator's engine stands in for it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvbaton.protocol.effects import CancelCopy, Direction
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.machines.context import LedgerContext
from kvbaton.protocol.machines.producer import Producer
from kvbaton_proof.sim.mutants.mutation import Mutant, swap
from kvbaton_proof.sim.world.sim_announcing import Announcer
from kvbaton_proof.sim.world.sim_device import Step
from kvbaton_proof.sim.world.sim_engine import SimEngine
from kvbaton_proof.sim.world.sim_transport import SimTransport

# --- P


def _layer_at_issue(original: Any) -> Any:
    def issue(self: Any, works: Any) -> None:
        original(self, works)
        for work in works if self.announcer.layerwise else ():
            if work.has > work.had:
                self.doorway.progressed(work.lease, self.announcer._ahead(work, 1))

    return issue


def _chunk_at_issue(original: Any) -> Any:
    def issue(self: Any, works: Any) -> None:
        original(self, works)
        for work in works:
            if work.has > work.had:
                self.doorway.progressed(work.lease, whole([work.has] * len(self.shape.group_layers)))

    return issue


def _grant_at_issue(original: Any) -> Any:
    def issue(self: Any, works: Any) -> None:
        original(self, works)
        for work in works:
            if work.request.role == "prefill" and work.request.mode == "pull" and work.stop == work.request.tokens:
                self._prefilled(work.request)

    return issue


def _one_layer_more(original: Any) -> Any:
    return lambda self, work, layers: original(self, work, min(layers + 1, self.shape.layers))


def _event_for_all_ranks(original: Any) -> Any:
    def announce_layer(self: Any, work: Any, rank: int, layer: int, late_s: float) -> None:
        for each in range(self.shape.ranks):
            original(self, work, each, layer, late_s)

    return announce_layer


def _first_rank_is_enough(original: Any) -> Any:
    return property(lambda self: self.ranks_left < self.ranks)


# --- whoever loads


def _ended_at_launch(original: Any) -> Any:
    def launch(self: Any, job: Any) -> None:
        original(self, job)
        if job.spans and job.copy.direction is Direction.READ:
            self._jobs.pop(job.copy.job)
            self._note(CopyEnded(job.copy.job))
            self._waker()
            job.given_up = True

    return launch


def _frees_at_once(on_prefillers_only: bool) -> Any:
    def make(original: Any) -> Any:
        def free(self: Any, request: Any) -> None:
            in_flight = self._in_flight
            if not on_prefillers_only or self.name.startswith("p"):
                self._in_flight = deque()
            original(self, request)
            self._in_flight = in_flight

        return free

    return make


def _frees_with_the_first_output(original: Any) -> Any:
    def free(self: Any, request: Any) -> None:
        before = len(self._deferred)
        original(self, request)
        if len(self._deferred) > before:
            self._deferred.append((self._in_flight[0].number, self._deferred.pop()[1]))

    return free


def _hold_ends_with_the_request(original: Any) -> Any:
    def abort(self: Any, id: Any) -> None:
        original(self, id)
        for fetch in self.fetching.open:
            if fetch.request.id == id:
                self.pool.let_go(fetch.held)
                fetch.held = ()

    return abort


# --- loans


def _lends_what_is_pinned(original: Any) -> Any:
    def lend(self: Any, lease: Any, reader: Any, seat: Any) -> None:
        before = seat.lent or tuple(0 for _ in lease.blocks)
        fresh = tuple(tuple(ids[had:]) for ids, had in zip(lease.blocks, before, strict=True))
        seat.lent = tuple(len(ids) for ids in lease.blocks)
        self.desk.lend(seat.loans, seat.plane, reader.peer, Direction.READ, fresh)

    return lend


def _never_taken_back(original: Any) -> Any:
    def cancel(self: Any, parts: Any) -> None:
        for job, moving in parts.moving.items():
            if moving.bytes:
                self.effects.append(CancelCopy(moving.rank, moving.transport, job))

    return cancel


DEVICE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("layer_announced_at_issue", "30", "a layer is announced when its hook is called, not by its event",
           swap(SimEngine, "_issue", _layer_at_issue)),
    Mutant("chunk_announced_at_issue", "30", "a chunk is announced when it is scheduled, not with its output",
           swap(SimEngine, "_issue", _chunk_at_issue)),
    Mutant("granted_at_issue", "30", "a prompt is leased when its last chunk is issued",
           swap(SimEngine, "_issue", _grant_at_issue)),
    Mutant("event_of_the_layer_before", "30", "an event was recorded before the layer that it is taken for",
           swap(Announcer, "_ahead", _one_layer_more)),
    Mutant("event_of_another_rank", "30", "one rank's event is taken for all",
           swap(Announcer, "_announce_layer", _event_for_all_ranks)),
    Mutant("output_of_the_first_rank", "30", "a step is taken for done when one rank is",
           swap(Step, "done", _first_rank_is_enough)),
    Mutant("copy_ended_at_launch", "31", "a copy is reported when it is launched: the forward overtakes it",
           swap(SimTransport, "_launch", _ended_at_launch)),
    Mutant("freed_under_a_step", "32", "vLLM #45704, #47282: blocks are loaded under a step that still writes them",
           swap(SimEngine, "_free", _frees_at_once(on_prefillers_only=False))),
    Mutant("freed_under_a_step_by_p", "32", "vLLM defers frees for consumers only, and a P may load from a store",
           swap(SimEngine, "_free", _frees_at_once(on_prefillers_only=True))),
    Mutant("freed_with_the_first_output", "32", "two steps are in flight, and the first one's output frees the blocks",
           swap(SimEngine, "_free", _frees_with_the_first_output)),
    Mutant("hold_ends_with_the_request", "32", "given back when its get is given up, not when that is at rest",
           swap(SimEngine, "abort", _hold_ends_with_the_request)),
    Mutant("lent_when_pinned", "28", "found in review: lent before it is computed, an earlier prompt's KV is shown",
           swap(Producer, "lend", _lends_what_is_pinned)),
    Mutant("loan_never_taken_back", "28", "a reader has left, and what was lent to it stays lent",
           swap(LedgerContext, "cancel", _never_taken_back)),
)  # fmt: skip
