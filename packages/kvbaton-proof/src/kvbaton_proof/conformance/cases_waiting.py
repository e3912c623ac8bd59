"""Cases of requests whose P has not answered: those with blocks, where P has the prompt, and those put aside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from kvbaton.engines.vllm.block_pool import ASKED_MAX
from kvbaton.protocol.effects import Report
from kvbaton_proof.conformance import stores
from kvbaton_proof.conformance.case_registry import case
from kvbaton_proof.conformance.cases_features import weights_of
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import LOADING, Lab, d_params, demand, p_params, poll, prompt_of, router_ticket

BEHIND = ("stream", "push")
SHAPES = {
    "one group": EngineShape(),
    "two groups": EngineShape(windows=(0, 8), blocks=121),
    "two ranks": EngineShape(ranks=2),
}
POLICIES = ("recompute", "fail")
MANY = ASKED_MAX + 6


@contextlib.contextmanager
def deaf(worker: str = "p0") -> Iterator[stores.Frames]:
    """Nothing that is said to this engine arrives."""
    with stores.frames() as tap:
        tap.loses = lambda control, to: str(to) == worker
        yield tap


def linked(lab: Lab, mode: str = "pull") -> None:
    """P and D know each other, so that what is lost from now on is the claim."""
    lab.finish(lab.hand_over(mode, prompt_of(9, 999)), loads=1)
    lab.settle()


def policy_of(shape: EngineShape, policy: str) -> EngineShape:
    return EngineShape(windows=shape.windows, blocks=shape.blocks, ranks=shape.ranks, policy=policy)  # type: ignore[arg-type]


def waiting_in_line(lab: Lab, mode: str, count: int = MANY) -> tuple[list[str], list[str]]:
    """So many requests at D for prompts that P was not asked for yet: (names, tickets)."""
    d = lab.engines["d0"]
    tickets = [router_ticket() for _ in range(count)]
    names = [d.add(prompt_of(20, seed), d_params(mode, ticket)) for seed, ticket in enumerate(tickets)]
    lab.run(8)
    return names, tickets


def prefill_all(lab: Lab, mode: str, tickets: list[str]) -> None:
    for seed, ticket in enumerate(tickets):
        lab.engines["p0"].add(prompt_of(20, seed), p_params(mode, ticket), max_tokens=1)


def all_end(lab: Lab, d: LabEngine, names: list[str], policy: str = "recompute") -> None:
    for name in names:
        reason = lab.ended(d, name)
        if policy == "fail":
            demand(reason == "error", f"{name} ended as {reason}")
        else:
            lab.right(d, name)


# --- blocks before the answer


@case(shape=tuple(SHAPES))
def a_computed_prompt_gets_blocks_before_p_has_answered(lab: Lab, shape: str) -> None:
    _, d = lab.duo(SHAPES[shape], claim_timeout=15.0)
    linked(lab)
    with stores.copies() as copies:
        with deaf():
            handoff = lab.hand_over("pull", prompt_of(20))
            lab.until(lambda: d.status(handoff.at_d) == LOADING, "D to have blocks")
            lab.run(20)
            demand(d.blocks_left and not copies.seen, f"{d.blocks_left} blocks, {copies.seen} copies without a grant")
        lab.finish(handoff, loads=1)
    demand(d.watch.received[handoff.at_d] == 1 and not d.watch.failed[handoff.at_d], "it was not delivered")


@case(shape=tuple(SHAPES), policy=POLICIES)
def a_claim_that_fails_after_blocks_were_taken_gives_them_back(lab: Lab, shape: str, policy: str) -> None:
    _, d = lab.duo(SHAPES[shape], policy_of(SHAPES[shape], policy), claim_timeout=0.4, lease_s=1.0)
    linked(lab)
    with deaf():
        handoff = lab.hand_over("pull", prompt_of(20))
        lab.until(lambda: d.status(handoff.at_d) == LOADING, "D to have blocks")
        all_end(lab, d, [handoff.at_d], policy)
    demand(d.watch.failed[handoff.at_d] == 1 == d.watch.loads[handoff.at_d], f"failed {d.watch.failed}")


@case(policy=POLICIES)
def a_claim_that_p_refuses_after_blocks_were_taken_gives_them_back(lab: Lab, policy: str) -> None:
    """The lease is spent: another has read by it."""
    _, d = lab.duo(EngineShape(), EngineShape(policy=policy))  # type: ignore[arg-type]
    first = lab.hand_over("pull", prompt_of(20))
    lab.finish(first, loads=1)
    lab.settle()
    demand(d.scheduler.reset_prefix_cache(), "D's own copy would be found")
    second = d.add(prompt_of(20), d_params("pull", first.ticket))
    all_end(lab, d, [second], policy)
    demand(d.watch.received[second] == d.watch.failed[second], "a spent ticket was honoured")


@case(mid_step=(False, True), shape=tuple(SHAPES))
def an_abort_before_p_has_answered_gives_the_blocks_back(lab: Lab, mid_step: bool, shape: str) -> None:
    _, d = lab.duo(SHAPES[shape], lease_s=1.0)
    linked(lab)
    with deaf():
        handoff = lab.hand_over("pull", prompt_of(20))
        lab.until(lambda: d.status(handoff.at_d) == LOADING, "D to have blocks")
        d.abort(handoff.at_d, mid_step=mid_step)
        lab.until(lambda: d.blocks_left == 0, "D's blocks to come back", 2.0)
    lab.settle()
    demand(d.watch.received[handoff.at_d] == 1, f"{d.watch.received[handoff.at_d]} reports")


@case()
def claims_without_an_answer_hold_a_bounded_share_of_the_cache(lab: Lab) -> None:
    """What is beyond it waits without blocks, and bars nobody."""
    p, d = lab.duo(EngineShape(blocks=161), EngineShape(blocks=41))
    linked(lab)
    prompts = [prompt_of(20, seed) for seed in range(5)]
    params = [lab.prefill(prompt)[1] for prompt in prompts]
    with deaf():
        names = [d.add(prompt, given) for prompt, given in zip(prompts, params, strict=True)]
        lab.run(10)
        own = d.add(prompt_of(60, 77), max_tokens=20)  # 20 of 40 blocks
        lab.answered(d, own)
        demand([d.status(name) for name in names].count(LOADING) == 2, f"{[d.status(name) for name in names]}")
        demand(d.blocks_left == 10, f"{d.blocks_left} blocks are held for claims")
    all_end(lab, d, names)
    demand(p.blocks_left == 0 or p.has_work, "P has forgotten a lease")


@case()
def a_cache_full_of_running_requests_lets_claims_wait(lab: Lab) -> None:
    """D has no block left, and preempts: nobody waits for somebody who waits for him."""
    _, d = lab.duo(EngineShape(blocks=161), EngineShape(blocks=21, prefix_caching=False))
    own = [d.add(prompt_of(24, 70 + seed), max_tokens=30) for seed in range(3)]
    some = [lab.hand_over("pull", prompt_of(20, seed), max_tokens=24) for seed in range(3)]
    all_end(lab, d, own)
    for each in some:
        lab.finish(each)


# --- put aside without blocks


@case(mode=BEHIND, shape=tuple(SHAPES))
def many_that_wait_for_p_are_put_aside_and_all_arrive(lab: Lab, mode: str, shape: str) -> None:
    _, d = lab.duo(SHAPES[shape])
    names, tickets = waiting_in_line(lab, mode)
    aside = [name for name in names if d.status(name) == LOADING]
    demand(len(aside) == MANY - ASKED_MAX, f"{len(aside)} of {MANY} are put aside")
    demand(d.blocks_left == 0, f"{d.blocks_left} blocks are held by those that wait")
    own = d.add(prompt_of(20, 77))
    lab.answered(d, own)
    prefill_all(lab, mode, tickets)
    all_end(lab, d, names)
    demand(all(d.watch.loads[name] == 1 for name in names), f"loads {dict(d.watch.loads)}")


@case(mode=BEHIND)
def a_report_counts_requests_and_blocks_as_vllm_does(lab: Lab, mode: str) -> None:
    """What routers are told of an engine, at every step; what was put aside waits, and does not load."""
    _, d = lab.duo()
    gauges: Callable[[], dict[str, float]] = d.connector._scheduler.presence._gauges
    names, tickets = waiting_in_line(lab, mode)
    demand(gauges()["waiting"] == MANY and gauges()["loading"] == 0, f"told {gauges()}")
    own = [d.add(prompt_of(20, 70 + seed)) for seed in range(3)]
    prefill_all(lab, mode, tickets)
    seen: set[str] = set()

    def over() -> bool:
        told = gauges()
        counted = (told["running"], told["waiting"] + told["loading"])
        demand(counted == d.scheduler.get_request_counts(), f"{d.scheduler.get_request_counts()}, told {told}")
        demand(told["blocks"] - told["free_blocks"] == d.blocks_left, f"{d.blocks_left} blocks in use, told {told}")
        seen.update(name for name in ("running", "waiting", "loading") if told[name])
        return all(d.outcomes[name].reason for name in (*names, *own))

    lab.until(over, "all to end", 30.0)
    demand(len(seen) == 3, f"only {seen} were seen")


@case(mode=BEHIND, mid_step=(False, True))
def an_abort_of_what_is_put_aside_leaves_nothing(lab: Lab, mode: str, mid_step: bool) -> None:
    _, d = lab.duo(lease_s=1.0)
    names, _ = waiting_in_line(lab, mode)
    if mid_step:
        busy = d.add(prompt_of(20, 77), max_tokens=8)
        lab.until(lambda: d.outcomes[busy].tokens, "a step that runs")
    for name in names:
        d.abort(name, mid_step=mid_step)
    lab.until(lambda: all(d.status(name) == "gone" for name in names), "vLLM to forget them", 2.0)
    lab.settle()


@case(mode=BEHIND, policy=POLICIES, shape=tuple(SHAPES))
def what_is_put_aside_ends_by_its_deadline(lab: Lab, mode: str, policy: str, shape: str) -> None:
    _, d = lab.duo(SHAPES[shape], policy_of(SHAPES[shape], policy), defer_timeout=0.4)
    linked(lab)
    names, _ = waiting_in_line(lab, mode)
    all_end(lab, d, names, policy)
    demand(not any(d.watch.received[name] > d.watch.failed[name] for name in names), "something was delivered")


@case(mode=BEHIND)
def what_comes_back_never_bars_a_load_that_has_arrived(lab: Lab, mode: str) -> None:
    """vLLM finds those put aside among requests that hold blocks, and stops at one for which there are none."""
    _, d = lab.duo(EngineShape(blocks=241), EngineShape(blocks=14, prefix_caching=False))  # two prompts at most
    names, tickets = waiting_in_line(lab, mode)
    prefill_all(lab, mode, tickets)
    all_end(lab, d, names)


@case(mode=BEHIND)
def a_cache_reset_ends_what_is_put_aside(lab: Lab, mode: str) -> None:
    _, d = lab.duo(lease_s=1.0)
    names, _ = waiting_in_line(lab, mode)
    d.scheduler.reset_prefix_cache(reset_connector=True)
    all_end(lab, d, names)


@case(mode=BEHIND)
def a_pause_and_its_end_lose_nobody_who_is_put_aside(lab: Lab, mode: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    _, d = lab.duo()
    names, tickets = waiting_in_line(lab, mode)
    d.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    prefill_all(lab, mode, tickets)
    lab.run(60)
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    all_end(lab, d, names)


@case(mode=("pull", *BEHIND))
def a_prompt_that_grows_takes_nothing_over(lab: Lab, mode: str) -> None:
    """A resumable request has no one prompt: no blocks are taken for it, and P need not wait."""
    p, d = lab.duo(lease_s=2.0)
    params = lab.prefill(prompt_of(20))[1] if mode == "pull" else d_params(mode, router_ticket())
    name = d.add(prompt_of(20), params, resumable=True)
    lab.until(lambda: len(d.outcomes[name].tokens) == 4, "its first answer")
    d.abort(name)
    lab.settle()
    demand(not d.watch.loads[name] and p.blocks_left == 0, f"loads {dict(d.watch.loads)}, P holds {p.blocks_left}")


# --- what has arrived


@case(shape=tuple(SHAPES))
def what_has_arrived_is_computed_by_the_second_step_from_then(lab: Lab, shape: str) -> None:
    """The step at whose end vLLM is told, and the next: whatever was in flight when it arrived."""
    _, d = lab.duo(SHAPES[shape])
    linked(lab)
    with stores.copies() as copies:
        copies.hold()
        handoff = lab.hand_over("pull", prompt_of(20))
        lab.until(lambda: d.status(handoff.at_d) == LOADING and copies.waiting, "D to load")
        lab.run(5)
        copies.release()
        news = d.connector.scheduler._live.door._to_engine
        poll(lambda: any(isinstance(each, Report) for each in list(news)), "the ledger's word, with nobody stepping")
    for _ in range(2):
        demand(not d.runners[0].computed_of[handoff.at_d], "it was computed before it was told")
        d.step()
    demand(d.runners[0].computed_of[handoff.at_d], "it was told a step later than it could have been")
    lab.finish(handoff, loads=1)


# --- claims while D's core is in a step


@case(shape=tuple(SHAPES))
def a_step_longer_than_a_lease_costs_no_handoff(lab: Lab, shape: str) -> None:
    """D's scheduler sees a request when its step is done; P has heard of it by then, and D's node renews."""
    lab.duo(SHAPES[shape], lease_s=1.0)
    d, prompt = lab.engines["d0"], prompt_of(20)
    _, params = lab.prefill(prompt)
    name = d.add(prompt, params, in_step=lambda: time.sleep(2.5))
    lab.answered(d, name)
    demand(d.watch.loads[name] == 1 and not d.watch.failed[name], "P gave up a D that was in a step")


@case(settles=False)
def a_claim_of_weights_that_are_replaced_meanwhile_is_given_up(lab: Lab) -> None:
    p, d = lab.duo()
    prompt = prompt_of(20)
    _, params = lab.prefill(prompt)
    name = d.add(prompt, params, in_step=lambda: weights_of(d).begin("files b"))
    lab.ended(d, name)
    demand(not d.watch.loads[name] or d.watch.failed[name], "KV of P's weights was delivered to D's new ones")
    lab.until(lambda: p.blocks_left == 0, "P to hold nothing", 5.0)
