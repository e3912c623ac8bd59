"""Wrong ideas between ledger and engine: tickets, epochs, pins, the doorway and the node."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from kvbaton.engines.side.grouping import Grouping
from kvbaton.node import doorway
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.wire import ticket
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap
from kvbaton_proof.sim.world import sim_request


def _epochs_never_raised(original: Any) -> Any:
    return lambda self, block: None


def _store_exception_keeps_pin(original: Any) -> Any:
    def store(self: Any, effect: Any) -> None:
        with contextlib.suppress(RuntimeError):
            if isinstance(effect, fx.StorePut):
                self.store.put(effect.put, effect.blocks, effect.keys)
            else:
                original(self, effect)

    return store


def _same_digest_for_all(original: Any) -> Any:
    return lambda content: b"0123456789abcdef"


def _signature_ignored(original: Any) -> Any:
    def body(text: str, keys: Any) -> bytes:
        raw = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_")
        return bytes(raw[16:])

    return body


def _another_spelling(original: Any) -> Any:
    def body(text: str, keys: Any) -> Any:
        with contextlib.suppress(ValueError):
            raw = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_")
            text = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        return original(text, keys)

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
    def whole_blocks(self: Any, tokens: int) -> tuple[int, ...]:
        sizes = zip(self.at_end, self.block_tokens, strict=True)
        return tuple(0 if late else -(-tokens // size) for late, size in sizes)

    return whole_blocks


def _backlog_lost(original: Any) -> Any:
    def cancel(self: Any, rank: int, name: str, job: Any) -> None:
        backlog = self._backlog.get((rank, name), ())
        for copy in list(backlog):
            if copy.job == job:
                backlog.remove(copy)
                return
        self.ranks[rank][name].cancel(job)

    return cancel


DOOR_MUTANTS: tuple[Mutant, ...] = (
    Mutant("expiry_without_epochs", "6, 7", "NIXL: blocks freed at expiry, readers never told",
           swap(EpochTable, "raise_epoch", _epochs_never_raised)),
    Mutant("store_exception_keeps_pin", "store", "seed 003: the store threw",
           swap(Node, "_store", _store_exception_keeps_pin)),
    Mutant("matches_again_after_failure", "17", "vLLM: 12 loads in 12 steps",
           both(swap(doorway.Doorway, "hand_in", _matches_again),
                swap(doorway.Doorway, "take_events", _asks_remembered))),
    Mutant("ticket_without_content", "2", "a genuine ticket with another prompt",
           swap(sim_request.__dict__, "digest", _same_digest_for_all)),
    Mutant("signature_ignored", "1", "any text is a ticket",
           swap(ticket.__dict__, "_verified_body", _signature_ignored)),
    Mutant("ticket_of_another_spelling", "1", "found here: bits of a ticket's text that no byte comes of",
           swap(ticket.__dict__, "_verified_body", _another_spelling)),
    Mutant("release_without_watcher", "7", "freed without arming the epoch",
           swap(doorway.Doorway, "_unpinned", _release_without_watcher)),
    Mutant("watcher_per_lease", "7", "one slot per block: the second lease's closure is lost",
           swap(EpochTable, "raise_epoch", _watcher_per_lease)),
    Mutant("partial_blocks_ready", "10", "a block grows after it was read",
           swap(Grouping, "whole", _partial_blocks_ready)),
    Mutant("ready_before_done", "10", "Ready before the device is done",
           swap(doorway.Doorway, "pin", _ready_before_done)),
    Mutant("cancelled_backlog_lost", "17", "a copy that never started never ends",
           swap(Node, "_cancel", _backlog_lost)),
    Mutant("disconnects_for_everybody", "3", "found in review: a re-greeting revokes the secret it has just been given",
           swap(Node, "_disconnect", _disconnects_for_everybody)),
    Mutant("frames_before_events", "8", "a claim overtakes the lease that it is for",
           swap(Node, "step", _frames_before_events)),
)  # fmt: skip
