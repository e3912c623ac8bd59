"""Wrong ideas between ledger and engine: tickets, epochs, pins, the doorway and the node; and about nodes of other
protocol versions (rule 24).
"""

from __future__ import annotations

from typing import Any

from kvbaton.engines.side import decode, prefill
from kvbaton.engines.side.protocols import Grouping
from kvbaton.node import doorway, node
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.machines import pairing_state
from kvbaton.protocol.wire.messages import SPOKEN
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap


def _own_newest(original: Any) -> Any:
    return lambda ours, greeted_in, bits: ours.newest


def _always_newest(original: Any) -> Any:
    def encode(sender: Any, to: Any, session: int, message: Any, version: int) -> Any:
        return original(sender, to, session, message, SPOKEN.newest)

    return encode


def _newest_once_linked(original: Any) -> Any:
    """The greeting is right; what follows forgets with whom it was settled."""

    def encode(sender: Any, to: Any, session: int, message: Any, version: int) -> Any:
        return original(sender, to, session, message, SPOKEN.newest if session else version)

    return encode


VERSION_MUTANTS: tuple[Mutant, ...] = (
    Mutant("source_settles_alone", "24", "P answers in its own newest version, whatever D speaks",
           swap(pairing_state.__dict__, "settle", _own_newest)),
    Mutant("hello_in_the_newest", "24", "an upgraded node says everything in its newest version",
           swap(node.__dict__, "encode", _always_newest)),
    Mutant("session_forgets_its_version", "24", "what is said in a session is not in the version that was settled",
           swap(node.__dict__, "encode", _newest_once_linked)),
)  # fmt: skip


def _same_digest_for_all(original: Any) -> Any:
    return lambda content: b"0123456789abcdef"


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


def _frames_before_events(original: Any) -> Any:
    def step(self: Any, now: float) -> None:
        for worker, frame in self.control.receive():
            self.ledger.on_frame(worker, frame, now)
            self._carry_out()
        original(self, now)

    return step


def _partial_blocks_ready(original: Any) -> Any:
    def whole_blocks(self: Any, tokens: int) -> tuple[int, ...]:
        sizes = zip(self.at_end, self.block_tokens, strict=True)
        return tuple(0 if late else -(-tokens // size) for late, size in sizes)

    return whole_blocks


DOOR_MUTANTS: tuple[Mutant, ...] = (
    Mutant("matches_again_after_failure", "17", "vLLM: 12 loads in 12 steps",
           both(swap(doorway.Doorway, "hand_in", _matches_again),
                swap(doorway.Doorway, "take_events", _asks_remembered))),
    Mutant("ticket_without_content", "2", "a genuine ticket with another prompt",
           both(*(swap(side.__dict__, "digest", _same_digest_for_all) for side in (prefill, decode)))),
    Mutant("release_without_watcher", "7", "freed without arming the epoch",
           swap(doorway.Doorway, "_unpinned", _release_without_watcher)),
    Mutant("watcher_per_lease", "7", "one slot per block: the second lease's closure is lost",
           swap(EpochTable, "raise_epoch", _watcher_per_lease)),
    Mutant("partial_blocks_ready", "10", "a block grows after it was read",
           swap(Grouping, "whole", _partial_blocks_ready)),
    Mutant("ready_before_done", "10", "Ready before the device is done",
           swap(doorway.Doorway, "pin", _ready_before_done)),
    Mutant("frames_before_events", "8", "a claim overtakes the lease that it is for",
           swap(Node, "step", _frames_before_events)),
)  # fmt: skip
