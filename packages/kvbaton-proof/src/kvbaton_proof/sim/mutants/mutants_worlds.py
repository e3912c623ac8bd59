"""Wrong ideas that only harder worlds show: partly stale leases, transports that cannot fence, unreported reuse."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from kvbaton.node import doorway, node
from kvbaton.node.doorway import Doorway
from kvbaton.node.epochs import EpochTable
from kvbaton.protocol.effects import UnpinPut
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry import spans
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.machines import lease, ledger, producer
from kvbaton.protocol.machines.consumer import Consumer
from kvbaton.protocol.machines.consumer_filling import Pulls, Pushes
from kvbaton.protocol.machines.producer import Producer
from kvbaton.protocol.machines.puts import Puts
from kvbaton.protocol.wire.messages import Feature
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _first_block_only(original: Any) -> Any:
    return lambda ids, noted, now: len(ids) if not ids or now[0] == noted[0] else 0


def _one_group_is_enough(original: Any) -> Any:
    def judge(held: Any, epochs_of: Any) -> tuple[bool, tuple[int, ...]]:
        proven, good = original(held, epochs_of)
        return proven or any(n == len(ids) for n, ids in zip(good, held.blocks, strict=True) if ids), good

    return judge


def _good_in_own_blocks(original: Any) -> Any:
    def on_stale(self: Any, link: Any, message: Any, now: float) -> None:
        plan = link.plan
        link.plan = msgspec.structs.replace(plan, source=plan.target)
        try:
            original(self, link, message, now)
        finally:
            link.plan = plan

    return on_stale


def _exact_or_not(original: Any) -> Any:
    return lambda self, held: lease.judge(held, self.desk.epochs_of)


def _told_or_not(original: Any) -> Any:
    return EpochTable.all_of


def _tombstones_stay(original: Any) -> Any:
    def void(self: Any, now: float, leaving: bool = False) -> None:
        tombstones = self.tombstones
        original(self, now, leaving)
        self.tombstones = tombstones

    return void


def _fenced_or_not(original: Any) -> Any:
    return lambda self, link: link.transport.can_write and bool(link.features & Feature.PUSH)


def _unpinned_when_given_up(original: Any) -> Any:
    def on_timer(self: Any, put: Any, now: float) -> None:
        original(self, put, now)
        del self.states[put]
        self.desk.emit(UnpinPut(put))

    return on_timer


def _busy_with(*names: str) -> Any:
    return lambda original: property(lambda self: any(getattr(self, name) for name in names))


def _parted_once(original: Any) -> Any:
    def disconnect(self: Any, effect: Any) -> None:
        again = list(self._again)
        original(self, effect)
        self._again = again

    return disconnect


def _never_again(original: Any) -> Any:
    return ()


def _every_number_is_a_block(original: Any) -> Any:
    return lambda blocks: tuple(chain.from_iterable(blocks))


def _early_blocks_forgotten(original: Any) -> Any:
    def on_granted(self: Any, link: Any, message: Any, now: float) -> None:
        intake = self.book.of(link, message.attempt)
        if intake is None or intake.end is not None:
            original(self, link, message, now)
            return
        target, intake.target = intake.target, None
        original(self, link, message, now)
        intake.target = target

    return on_granted


def _states_like_tokens(original: Any) -> Any:
    def windows(plan: Any, part: Any, rect: Any, lists: Any) -> Any:
        is_state = plan.source.groups[part.group].kind is GroupKind.STATE
        return {} if is_state and lists.target_first_token else original(plan, part, rect, lists)

    return windows


def _reset_of_any_life(original: Any) -> Any:
    def on_reset(self: Any, sender: Any, session: int, message: Any, now: float) -> None:
        link = self.consumer.links.by_worker.get(sender.worker)
        if link is not None:
            self.consumer.links.lose(link, Reason.WRONG_INCARNATION, "of any life", now)

    return on_reset


WORLD_MUTANTS: tuple[Mutant, ...] = (
    Mutant("reset_of_an_earlier_life", "3", "a Reset of an earlier life ends the link with the next one",
           swap(ledger.Ledger, "_on_reset", _reset_of_any_life)),
    Mutant("first_block_proves_all", "6", "of each group only the first block's epoch is looked at",
           swap(lease.__dict__, "_proven", _first_block_only)),
    Mutant("one_group_proves_all", "6", "one group was not reused, so none was",
           swap(producer.__dict__, "judge", _one_group_is_enough)),
    Mutant("good_prefix_in_own_blocks", "6", "D counts P's good blocks in blocks of its own size",
           swap(Pulls, "on_stale", _good_in_own_blocks)),
    Mutant("reuse_untold_unminded", "7", "a pool that tells of no reuse is believed after release",
           swap(Producer, "_judge", _exact_or_not)),
    Mutant("watcher_taken_unminded", "7", "another watcher took our place, and silence is taken for no reuse",
           swap(EpochTable, "all_judged", _told_or_not)),
    Mutant("tombstones_outlive_the_cache", "3", "a commit is judged by epochs of a cache that was replaced",
           swap(Producer, "void", _tombstones_stay)),
    Mutant("written_without_a_fence", "16", "a writer that cannot be shut out is let in",
           swap(Pushes, "is_possible", _fenced_or_not)),
    Mutant("put_unpinned_when_given_up", "store", "unpinned when a put was told to stop, not when it has",
           swap(Puts, "on_timer", _unpinned_when_given_up)),
    Mutant("sleeps_with_blocks_held", "19", "an engine that only holds blocks for a load says that it is idle",
           swap(Doorway, "busy", _busy_with("_pins", "_to_engine", "_wants"))),
    Mutant("sleeps_with_blocks_pinned", "19", "an idle engine never unpins",
           swap(Doorway, "busy", _busy_with("_holds", "_to_engine", "_wants"))),
    Mutant("parted_once", "3", "who was let go stays connected because the data plane threw once",
           swap(node.Node, "_disconnect", _parted_once)),
    Mutant("asked_to_stop_once", "14, 17", "a fence, or a stop, whose call threw is never asked for again",
           swap(node.__dict__, "_AWAITED", _never_again)),
    Mutant("windows_pinned_whole", "11", "what left a window is pinned by its number, which is none",
           swap(doorway.__dict__, "_real", _every_number_is_a_block)),
    Mutant("early_blocks_forgotten", "12", "blocks that were taken before P's answer are not filled by it",
           swap(Consumer, "on_granted", _early_blocks_forgotten)),
    Mutant("state_left_out_behind_a_hit", "12", "D has the beginning of the prompt, so its old state is left in place",
           swap(spans.__dict__, "_windows", _states_like_tokens)),
)  # fmt: skip
