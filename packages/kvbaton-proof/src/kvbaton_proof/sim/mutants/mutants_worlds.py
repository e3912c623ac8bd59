"""Wrong ideas that only harder worlds show: partly stale leases, transports that cannot fence, unreported reuse.

And those that show where engines differ in shape, transfers take their time, or a verdict is awaited.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.node import node
from kvbaton.protocol.effects import UnpinPut
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry import plan, spans
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.machines import consumer_filling, lease, producer, push_writer
from kvbaton.protocol.machines.consumer import Consumer
from kvbaton.protocol.machines.consumer_filling import Pulls, Pushes
from kvbaton.protocol.machines.inbound import IntakeState
from kvbaton.protocol.machines.lease import LeaseState
from kvbaton.protocol.machines.puts import Puts
from kvbaton.protocol.wire.messages import Feature
from kvbaton.ranks.engine_store import EngineStore
from kvbaton.ranks.rank_host import RankHost
from kvbaton.ranks.rank_link import RankLink
from kvbaton.ranks.rank_messages import Progressed
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap
from kvbaton_proof.sim.ranks import sim_rank_store


def _ends_at_a_missing_group(original: Any) -> Any:
    def moves(route: Any, cargo: Any, before: Any, after: Any) -> Any:
        groups = route.plan.target_groups
        end = groups.index(None) if None in groups else len(groups)
        return original(route, cargo, before, (*after[:end], *before[end:]))

    return moves


def _of_the_first_context_rank(original: Any) -> Any:
    def holdings(side: str, layout: Any, index: int, effort: Any) -> Any:
        found, ways = original(side, layout, index, effort)
        return {(layer, dcp): found[layer, 0] for layer, dcp in found}, ways

    return holdings


def _any_context_rank(original: Any) -> Any:
    def rank_values(layout: Any, rank: int, compat: str) -> Any:
        alike = tuple(msgspec.structs.replace(each, dcp=0) for each in layout.ranks)
        return original(msgspec.structs.replace(layout, ranks=alike), rank, compat)

    return rank_values


def _pinned_is_proven(original: Any) -> Any:
    def judge(held: Any, epochs_of: Any) -> Any:
        proven, good = original(held, epochs_of)
        return proven or (held.final and held.state is not LeaseState.RELEASED), good

    return judge


def _whole_in_target_blocks(original: Any) -> Any:
    def on_stale(self: Any, link: Any, message: Any, now: float) -> None:
        fail, size = self._fail, link.plan.target.groups[0].block_tokens

        def rounded(intake: Any, reason: Any, detail: str, now: float, good: int) -> None:
            fail(intake, reason, detail, now, min(-(-good // size) * size, intake.wanted.tokens))

        self._fail = rounded
        try:
            original(self, link, message, now)
        finally:
            self._fail = fail

    return on_stale


def _judged_goes_on(original: Any) -> Any:
    def void(self: Any, now: float, granted_only: bool = False) -> None:
        for intake in list(self.by_handoff.values()):
            if intake.end is None and intake.state is not IntakeState.JUDGING:
                self.fail(intake, Reason.ABORTED, "this engine's cache was replaced or is closing", now)

    return void


def _first_is_kept(original: Any) -> Any:
    def progressed(self: Any, lease: Any, progress: Any) -> None:
        if lease not in self._progress:
            original(self, lease, progress)

    return progressed


def _first_is_taken(original: Any) -> Any:
    def take_news(self: Any, news: Any) -> None:
        if not isinstance(news, Progressed) or news.lease not in self._progress:
            original(self, news)

    return take_news


def _one_failure_ends_all(original: Any) -> Any:
    def rank_ended(self: Any, index: int, end: Any) -> None:
        opened = self._open.get(end.order)
        if opened is not None and opened.what == "get" and end.reason is not None:
            opened.left = {index}
        if opened is not None:
            original(self, index, end)

    return rank_ended


SHAPE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("nothing_behind_a_missing_group", "25", "groups behind one that D has not are left uncopied",
           both(swap(consumer_filling.__dict__, "moves", _ends_at_a_missing_group),
                swap(push_writer.__dict__, "moves", _ends_at_a_missing_group))),
    Mutant("tokens_of_one_context_rank", "25", "all ranks of a context group are given the tokens of the first",
           swap(plan.__dict__, "_holdings", _of_the_first_context_rank)),
    Mutant("value_of_any_context_rank", "store", "ranks that have other tokens of a block share its values",
           swap(sim_rank_store.__dict__, "rank_values", _any_context_rank)),
    Mutant("pinned_is_proven", "6, 7", "what is pinned cannot have changed; a state is written to by its own request",
           swap(producer.__dict__, "judge", _pinned_is_proven)),
    Mutant("pinned_is_written", "6, 7", "likewise, of what P writes",
           swap(push_writer.__dict__, "judge", _pinned_is_proven)),
    Mutant("half_good_is_good", "6", "of a block of D's the first tokens are good, so it is",
           swap(consumer_filling.Pulls, "on_stale", _whole_in_target_blocks)),
    Mutant("judged_push_outlives_the_cache", "3, 35", "a push is delivered to a cache that was replaced meanwhile",
           swap(Consumer, "void", _judged_goes_on)),
    Mutant("rank_keeps_first_progress", "30", "a rank says how far it was, not how far it is",
           swap(RankHost, "progressed", _first_is_kept)),
    Mutant("rank_progress_taken_once", "30", "of what a rank says the first counts until it is looked at",
           swap(RankLink, "_take_news", _first_is_taken)),
    Mutant("get_ends_with_one_rank", "20, 32", "one rank's failure ends a get that others still carry out",
           swap(EngineStore, "_rank_ended", _one_failure_ends_all)),
)  # fmt: skip


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


def _unpinned_when_given_up(original: Any) -> Any:
    def on_timer(self: Any, put: Any, now: float) -> None:
        original(self, put, now)
        del self.states[put]
        self.desk.emit(UnpinPut(put))

    return on_timer


def _never_again(original: Any) -> Any:
    return ()


def _states_like_tokens(original: Any) -> Any:
    def windows(plan: Any, part: Any, rect: Any, lists: Any) -> Any:
        is_state = plan.source.groups[part.group].kind is GroupKind.STATE
        return {} if is_state and lists.target_first_token else original(plan, part, rect, lists)

    return windows


def _fenced_or_not(original: Any) -> Any:
    return lambda self, link: link.transport.can_write and bool(link.features & Feature.PUSH)


WORLD_MUTANTS: tuple[Mutant, ...] = (
    Mutant("written_without_a_fence", "16", "a writer that cannot be shut out is let in",
           swap(Pushes, "is_possible", _fenced_or_not)),
    Mutant("first_block_proves_all", "6", "of each group only the first block's epoch is looked at",
           swap(lease.__dict__, "_proven", _first_block_only)),
    Mutant("one_group_proves_all", "6", "one group was not reused, so none was",
           swap(producer.__dict__, "judge", _one_group_is_enough)),
    Mutant("good_prefix_in_own_blocks", "6", "D counts P's good blocks in blocks of its own size",
           swap(Pulls, "on_stale", _good_in_own_blocks)),
    Mutant("put_unpinned_when_given_up", "store", "unpinned when a put was told to stop, not when it has",
           swap(Puts, "on_timer", _unpinned_when_given_up)),
    Mutant("asked_to_stop_once", "14, 17", "a fence, or a stop, whose call threw is never asked for again",
           swap(node.__dict__, "_AWAITED", _never_again)),
    Mutant("state_left_out_behind_a_hit", "12", "D has the beginning of the prompt, so its old state is left in place",
           swap(spans.__dict__, "_windows", _states_like_tokens)),
)  # fmt: skip
