"""Cases about leases, tickets and rest: expiry, reuse, readers, shutdown, resets."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbaton.control import key_room
from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.node.doorway import Doorway, LoadReport
from kvbaton.protocol.effects import End
from kvbaton.protocol.ids import RequestId
from kvbaton_proof.conformance import stores
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.cases_ending import SHAPES
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import (
    LOADING,
    Lab,
    d_params,
    demand,
    key_directory,
    p_params,
    poll,
    prompt_of,
    reuse_all,
    router_ticket,
)


@case(shape=tuple(SHAPES))
def a_lease_that_nobody_claims_ends_by_itself(lab: Lab, shape: str) -> None:
    p, _ = lab.duo(SHAPES[shape], lease_s=0.4, max_hold_s=1.0)
    lab.prefill(prompt_of(30))
    demand(p.blocks_left > 0, "nothing was leased")
    demand(p.has_work, "an idle P with a lease must be kept stepping, or it never lets go")
    begun = time.monotonic()
    lab.settle(3.0)
    demand(time.monotonic() - begun < 2.0, "the lease outlived max_hold_s")


@case(mode=MODES)
def a_shutdown_waits_for_leases_no_longer_than_max_hold(lab: Lab, mode: str) -> None:
    p, d = lab.duo(lease_s=1.0, max_hold_s=1.5, transfer_timeout=1.0)
    with lab.loading(mode, prompt_of(30)):
        for engine in (p, d):
            for name in list(engine.scheduler.requests):
                engine.abort(name)
        lab.until(lambda: not p.has_work and not d.has_work, "both to be idle", 6.0)
    demand(not p.connector.has_pending_push_work(), "P still claims to have work")


@case(shape=tuple(SHAPES), connector=(False, True))
def a_cache_reset_ends_leases_and_succeeds(lab: Lab, shape: str, connector: bool) -> None:
    """As an engine alone answers it, which has no leases that could stand against it."""
    p, d = lab.duo(SHAPES[shape], lease_s=9.0)
    prompt = prompt_of(30)
    _, params = lab.prefill(prompt)
    demand(p.blocks_left > 0, "nothing was leased")
    demand(p.scheduler.reset_prefix_cache(reset_connector=connector), "a lease kept the cache from being emptied")
    demand(p.blocks_left == 0, f"{p.blocks_left} blocks are held")
    at_d = d.add(prompt, params)
    lab.answered(d, at_d)
    demand(d.watch.failed[at_d] or not d.watch.loads[at_d], "KV from before the reset was delivered")


@case(mode=MODES)
def a_wake_up_tells_the_ranks_again_and_changes_nothing(lab: Lab, mode: str) -> None:
    """vLLM (0.33) hands the workers' metadata over at each wake-up: also of an engine that only paused (level 0)."""
    p, d = lab.duo()
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        me = [engine.connector.scheduler.presence for engine in (p, d)]
        for engine in (p, d):
            engine.shake_hands()
        demand(me == [engine.connector.scheduler.presence for engine in (p, d)], "an engine registered twice")
        tap.release()
        lab.finish(handoff, loads=1)
    lab.finish(lab.hand_over(mode, prompt_of(34, 3)), loads=1)


def paused(engine: LabEngine, how: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    engine.scheduler.set_pause_state(PauseState[how])


@case(mode=MODES, moment=("loading", "arrived"), policy=("recompute", "fail"), shape=tuple(SHAPES))
def a_pause_that_empties_the_cache_preempts_loads(lab: Lab, mode: str, moment: str, policy: str, shape: str) -> None:
    """What `/pause?mode=keep` and a reset that preempts come to: vLLM raises where a load still has blocks."""
    small = SHAPES[shape]
    shaped = EngineShape(windows=small.windows, blocks=small.blocks, ranks=small.ranks, policy=policy)  # type: ignore[arg-type]
    _, d = lab.duo(shaped)
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        paused(d, "PAUSED_ALL")
        tap.release()
        if moment == "arrived":
            lab.until(lambda: not d.connector.has_pending_push_work(), "D to have it")
        demand(d.blocks_left > 0, "nothing was being loaded")
        emptied = d.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    demand(emptied and d.blocks_left == 0, f"{d.blocks_left} blocks are held")
    paused(d, "UNPAUSED")
    lab.finish(handoff)


@case(mode=MODES)
def an_answer_of_p_that_comes_with_a_reset_does_not_fail_it(lab: Lab, mode: str) -> None:
    """A pause answered 500 whenever P's word on a prompt that waits lay there just then."""
    p, d = lab.duo()
    paused(d, "PAUSED_NEW")
    handoff = lab.hand_over(mode, prompt_of(30))

    def lies_there() -> bool:
        p.step()
        return bool(d.connector.scheduler._live.door.holding)

    poll(lies_there, "an answer of P")
    demand(d.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True), "the reset failed")
    paused(d, "UNPAUSED")
    lab.finish(handoff)


@case(mode=MODES)
def a_reset_that_others_stand_against_ends_no_load(lab: Lab, mode: str) -> None:
    """A request that runs has blocks: vLLM refuses, as for an engine alone, and nothing is lost by having asked."""
    _, d = lab.duo()
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        runs = d.add(prompt_of(20, 7), None, max_tokens=60)
        lab.until(lambda: d.outcomes[runs].tokens, "another request to run")
        demand(not d.scheduler.reset_prefix_cache(), "a cache in use was emptied")
        tap.release()
    lab.finish(handoff, loads=1)
    lab.ended(d, runs)


@case(mode=MODES)
def a_cache_reset_while_loading_delivers_nothing_old(lab: Lab, mode: str) -> None:
    p, _ = lab.duo()
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        p.scheduler.reset_prefix_cache(reset_connector=True)
        lab.run(40)
        tap.release()
        lab.finish(handoff)


@contextmanager
def with_keys_of_its_own(lab: Lab, shape: EngineShape) -> Iterator[tuple[LabEngine, LabEngine, Path]]:
    """P and D, and the directory of D's keys, from which one can be removed."""
    with tempfile.TemporaryDirectory(prefix="kvbaton-conformance-") as base:
        keys = Path(base) / "keys"
        shutil.copytree(key_directory(), keys)
        yield lab.engine("p0", shape, lease_s=2.0), lab.engine("d0", shape, lease_s=9.0, keys=str(keys)), keys


def remove(d: LabEngine, keys: Path, name: str) -> None:
    """And wait, without a step of D, until its node has an engine's duty of it."""
    presence = d.connector.scheduler.presence
    key_room.remove(keys, name)
    presence.node.control.look_soon()
    poll(lambda: presence.node.ledger.desk.counts["cache_resets"], "D's node to know")
    poll(lambda: presence.node.doorway.holding, "D's duty")


def computed(d: LabEngine, name: str) -> int:
    return d.runners[0].computed_of[name]


@case(mode=MODES, shape=tuple(SHAPES))
def kv_of_a_removed_member_is_found_by_no_request(lab: Lab, mode: str, shape: str) -> None:
    """Neither in the cache, nor by a request that has just looked there, nor later in blocks of one under way."""
    with with_keys_of_its_own(lab, SHAPES[shape]) as (_, d, keys):
        prompt = prompt_of(30)
        lab.finish(lab.hand_over(mode, prompt), loads=1)
        runs = d.add(prompt, None, max_tokens=24)
        lab.until(lambda: d.outcomes[runs].tokens, "a request on P's KV")
        demand(computed(d, runs) < len(prompt), "it found nothing, so there is nothing to forget")
        looks = d.add(prompt, None, max_tokens=1)
        remove(d, keys, "p0")
        lab.ended(d, looks)
        demand(computed(d, looks) == len(prompt), f"{computed(d, looks)} of {len(prompt)} tokens were computed")
        lab.ended(d, runs)
        whole = [*prompt_of(30), *d.outcomes[runs].tokens]
        d.scheduler.reset_prefix_cache()  # what `looks` has computed may be found
        again = d.add(whole, None, max_tokens=1)
        lab.ended(d, again)
        for name in (runs, looks, again):
            lab.right(d, name)
        demand(computed(d, again) == len(whole), "a request under way put its blocks back")


@case(settles=False)
def a_cache_that_could_not_be_forgotten_is_forgotten_at_the_next_step(lab: Lab) -> None:
    with with_keys_of_its_own(lab, EngineShape()) as (_, d, keys):
        prompt = prompt_of(30)
        lab.finish(lab.hand_over("pull", prompt), loads=1)
        with stores.failing_once(PinnedPool, "forget_spoilt") as calls:
            remove(d, keys, "p0")
            lab.until(lambda: calls[0] == 2, "a second attempt")
        found = d.add(prompt, None, max_tokens=1)
        lab.ended(d, found)
        demand(computed(d, found) == len(prompt), "KV of a member that is gone was found")
        lab.settle()


@case(mode=MODES, shape=tuple(SHAPES))
def what_is_loaded_when_a_member_is_removed_is_computed(lab: Lab, mode: str, shape: str) -> None:
    with with_keys_of_its_own(lab, SHAPES[shape]) as (_, d, keys):
        lab.finish(lab.hand_over(mode, prompt_of(20, 3)), loads=1)
        with lab.loading(mode, prompt_of(30)) as (tap, handoff):
            remove(d, keys, "p0")
            lab.run(5)
            tap.release()
            lab.finish(handoff, loads=1)
        demand(d.watch.failed[handoff.at_d], "KV of a member that is gone was delivered")
        demand(computed(d, handoff.at_d) >= 30, "not all of it was computed")


@case(mode=MODES)
def what_was_computed_on_kv_of_a_removed_member_is_granted_to_nobody(lab: Lab, mode: str) -> None:
    """D's own lease, and one that begins as the request goes on."""
    with with_keys_of_its_own(lab, EngineShape(blocks=121)) as (_, d, keys):
        prompt = prompt_of(30)
        lab.finish(lab.hand_over(mode, prompt), loads=1)
        granted = d.add(prompt, p_params("pull"), max_tokens=1)
        lab.ended(d, granted)
        demand(d.blocks_left > 0, "nothing was leased")
        late = d.add([*prompt, *prompt_of(60)], p_params("pull"), max_tokens=1)
        lab.until(lambda: computed(d, late), "another to be under way")
        demand(d.outcomes[late].reason is None, "it is over already")
        remove(d, keys, "p0")
        lab.until(lambda: d.blocks_left == 0, "D's leases to end", 4.0)
        demand(not (d.outcomes[late].params or {}).get("ticket"), "KV on P's was granted")
        lab.right(d, late)


@case(mode=MODES, shape=tuple(SHAPES))
def a_commit_on_blocks_that_were_reused_is_never_delivered(lab: Lab, mode: str, shape: str) -> None:
    """P's lease ends while D's copy is held back; P computes others into the same blocks; then the copy goes on."""
    small = SHAPES[shape]
    p_shape = EngineShape(windows=small.windows, ranks=small.ranks, blocks=25, prefix_caching=False)
    p, d = lab.duo(p_shape, small, lease_s=0.3, max_hold_s=0.6)
    with stores.copies() as tap:
        tap.hold()
        handoff = lab.hand_over(mode, prompt_of(30))
        lab.until(lambda: d.status(handoff.at_d) == LOADING or d.outcomes[handoff.at_d].reason, "D to load")
        lab.until(lambda: p.outcomes[handoff.at_p].reason, "P to have computed the prompt")  # or it holds nothing yet
        lab.until(lambda: p.blocks_left == 0, "P's lease to end", 5.0)
        reuse_all(p)
        tap.release()
        lab.finish(handoff)
    if d.watch.loads[handoff.at_d]:
        demand(d.watch.failed[handoff.at_d] or d.watch.invalid_blocks, "a load of reused blocks was believed")


@case(when=("before ours", "after ours", "both"))
def a_reuse_that_somebody_else_is_told_of_is_never_committed(lab: Lab, when: str) -> None:
    """vLLM tells one watcher of each block: HiSparse, or a connector beside ours, has its own for the same blocks."""
    p = lab.engine("p0", EngineShape(blocks=25, prefix_caching=False), lease_s=0.3, max_hold_s=0.6)
    d = lab.engine("d0", EngineShape(), transfer_timeout=20.0, max_hold_s=30.0)  # D is patient: only P's lease runs out
    told: set[int] = set()

    def watch(ids: list[int]) -> None:
        blocks = [p.pool.blocks[each] for each in ids]
        p.pool.touch(blocks)
        p.pool.unpin_blocks(blocks, lambda block: told.add(block.block_id))

    with lab.loading("pull", prompt_of(30)) as (tap, handoff):
        leased = [block.block_id for block in p.pool.blocks if block.ref_cnt and not block.is_null]
        if when != "after ours":
            watch(leased)
        lab.until(lambda: p.blocks_left == 0, "P's lease to end", 5.0)
        if when != "before ours":
            watch(leased)
        reuse_all(p)
        tap.release()
        lab.finish(handoff)
    demand(d.watch.loads[handoff.at_d] == 1, "nothing was loaded, so nothing was tried")
    demand(d.watch.failed[handoff.at_d] or d.watch.invalid_blocks, "a load of reused blocks was believed")
    demand(told == set(leased), f"the other was told of {sorted(told)}, not of {leased}")


@case(policy=("recompute", "fail"))
def a_ticket_is_good_for_one_reader(lab: Lab, policy: Any) -> None:
    _, d = lab.duo(EngineShape(), EngineShape(policy=policy, prefix_caching=False))
    prompt = prompt_of(30)
    _, params = lab.prefill(prompt)
    names = []
    for _ in range(2):  # the second is a replay, and must cost its own request alone
        names.append(d.add(prompt, dict(params)))
        lab.until(lambda: d.outcomes[names[-1]].reason, "an end")
    lab.right(d, names[0])
    if policy == "recompute":
        lab.right(d, names[1])
    else:
        demand(d.outcomes[names[1]].reason == "error", f"the replay ended as {d.outcomes[names[1]].reason}")
    demand(d.watch.received[names[1]] == d.watch.failed[names[1]], "a spent ticket was honoured")


@case()
def several_readers_at_once_are_each_right(lab: Lab) -> None:
    """n>1: vLLM gives every child the same parameters."""
    _, d = lab.duo(EngineShape(), EngineShape(prefix_caching=False))
    prompt = prompt_of(30)
    _, params = lab.prefill(prompt)
    names = [d.add(prompt, dict(params)) for _ in range(4)]
    for name in names:
        lab.answered(d, name)
    demand(any(d.watch.received[name] > d.watch.failed[name] for name in names), "nobody could read")


@case(mode=MODES)
def another_salt_is_another_prompt(lab: Lab, mode: str) -> None:
    p, d = lab.duo(defer_timeout=1.0, lease_s=1.0)
    prompt, ticket = prompt_of(30), router_ticket()
    at_p = p.add(prompt, p_params(mode) if mode == "pull" else p_params(mode, ticket), max_tokens=1, salt="one")
    if mode == "pull":
        lab.until(lambda: p.outcomes[at_p].reason, "P's prefill")
    given = p.outcomes[at_p].params if mode == "pull" else d_params(mode, ticket)
    at_d = d.add(prompt, given, salt="two")
    lab.answered(d, at_d)
    demand(d.watch.received[at_d] == d.watch.failed[at_d], "another tenant's KV was delivered")


@case(mode=MODES, shape=("one group", "two ranks"))
def unknown_and_duplicate_reports_cannot_happen(lab: Lab, mode: str, shape: str) -> None:
    """Whatever the node says, twice, late or of nobody, vLLM hears each load once."""
    _, d = lab.duo(SHAPES[shape])
    genuine = Doorway.duties
    said: list[Any] = []

    def doubled(self: Doorway) -> list[Any]:
        found = genuine(self)
        said.extend(each for each in found if isinstance(each, LoadReport))
        return [*found, *said, LoadReport(RequestId("nobody"), 0, End())]

    Doorway.duties = doubled  # type: ignore[method-assign]
    try:
        for length in (5, 20):
            lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)
        lab.settle()
    finally:
        Doorway.duties = genuine  # type: ignore[method-assign]
    wrong = {name: count for name, count in d.watch.received.items() if count != 1}
    demand(not wrong, f"reports {wrong}")
