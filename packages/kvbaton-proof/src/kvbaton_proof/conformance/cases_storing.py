"""Cases with a shared store: what one engine computed another loads; and whatever the store does, nothing is left."""

from __future__ import annotations

import time
from typing import Any

from kvbaton_proof.conformance import stores
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import (
    LOADING,
    Lab,
    d_params,
    demand,
    landing_before_steps,
    leave_in_flight,
    prompt_of,
    router_ticket,
)

SHAPES = {
    "one rank": EngineShape(),
    "two ranks": EngineShape(ranks=2),
    "not aggregated": EngineShape(aggregated=False),
    "blocks outermost": EngineShape(layout="BLHNC"),
    "no prefix cache": EngineShape(prefix_caching=False),
}
QUICK: dict[str, Any] = {"store_timeout": 0.5, "transfer_timeout": 1.0}
BLOCK = EngineShape().block_tokens


def run(lab: Lab, engine: LabEngine, prompt: list[int], **options: Any) -> str:
    """One request from its arrival to its right end."""
    name = engine.add(prompt, **options)
    lab.answered(engine, name)
    return name


def fill(lab: Lab, engine: LabEngine, prompt: list[int], **options: Any) -> None:
    """Compute a prompt, and wait until the store has its whole blocks."""
    whole = lab.stores[-1].values + len(prompt) // BLOCK * engine.shape.ranks
    run(lab, engine, prompt, **options)
    lab.until(lambda: lab.stores[-1].values >= whole, "the store to have the prompt")
    lab.until(lambda: engine.blocks_left == 0, "the put's pin to go")


@case(shape=tuple(SHAPES))
def what_one_engine_put_another_loads(lab: Lab, shape: str) -> None:
    p, d = lab.sharing(SHAPES[shape])
    for length in (3, 4, 5, 16, 17, 40):
        prompt = prompt_of(length)
        fill(lab, p, prompt)
        name = run(lab, d, prompt)
        expected = (length - 1) // BLOCK * BLOCK
        demand(d.watch.loaded_tokens[name] == expected, f"{length}: {d.watch.loaded_tokens[name]}, not {expected}")
        demand(not d.watch.failed[name], f"{length}: the load failed")


@case(shape=("one rank", "two ranks"))
def a_prompt_that_begins_alike_loads_what_is_alike(lab: Lab, shape: str) -> None:
    p, d = lab.sharing(SHAPES[shape])
    fill(lab, p, prompt_of(20))
    name = run(lab, d, [*prompt_of(20)[:13], *prompt_of(15, 9)])
    demand(d.watch.loaded_tokens[name] == 12, f"{d.watch.loaded_tokens[name]} tokens")
    values = (5 + 28 // BLOCK - 3) * d.shape.ranks
    lab.until(lambda: lab.stores[-1].values == values, "the rest to be put as well, and no more")


@case()
def a_pending_lookup_holds_up_its_own_request_alone(lab: Lab) -> None:
    p, d = lab.sharing()
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap:
        tap.set(exists="wait")
        name = d.add(prompt_of(30))
        lab.until(lambda: tap.seen["exists"], "the look-up")
        lab.run(30)
        demand(d.status(name) == "WAITING", d.status(name))
        other = run(lab, d, prompt_of(3))
        demand(not d.watch.loads[other], "too short to be anywhere")
        tap.release()
        lab.answered(d, name)
    demand(d.watch.loaded_tokens[name] == 28, f"{d.watch.loaded_tokens[name]} tokens")


@case()
def lookups_beyond_the_bound_wait_their_turn(lab: Lab) -> None:
    from kvbaton.engines.side import store as store_side  # imports vLLM, which whoever only lists cases can do without

    p, d = lab.sharing(EngineShape(), EngineShape(blocks=81))
    prompts = [prompt_of(20 + seed, seed) for seed in range(6)]
    for prompt in prompts:
        fill(lab, p, prompt)
    bound, store_side.LOOKUPS_MAX = store_side.LOOKUPS_MAX, 2
    try:
        with stores.calls() as tap:
            tap.set(exists="wait")
            names = [d.add(prompt) for prompt in prompts]
            lab.run(20)
            demand({d.status(name) for name in names} == {"WAITING"}, "one of them did not wait")
            tap.release()
            for name in names:
                lab.answered(d, name)
    finally:
        store_side.LOOKUPS_MAX = bound
    demand(all(d.watch.loads[name] for name in names), f"only {dict(d.watch.loads)} were loaded")


@case(shape=("one rank", "two ranks"))
def a_partial_load_is_a_shorter_prefix(lab: Lab, shape: str) -> None:
    p, d = lab.sharing(SHAPES[shape])
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap:
        tap.set(get="part")
        name = run(lab, d, prompt_of(30))
    demand(d.watch.invalid_blocks == 6 * d.shape.ranks, f"{d.watch.invalid_blocks} blocks are to be computed again")
    demand(not d.watch.failed[name], "what came was thrown away")


@case(how=("none", "raise", "wait"), shape=("one rank", "two ranks"))
def a_load_that_brings_nothing_is_computed_here(lab: Lab, how: str, shape: str) -> None:
    p, d = lab.sharing(SHAPES[shape], **QUICK)
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap:
        tap.set(get=how)
        name = run(lab, d, prompt_of(30))
        demand(d.watch.loads[name] == 1, f"{d.watch.loads[name]} loads")
        demand(d.watch.failed[name] == 1, "nothing came, and it was not told")
        lab.settle()


@case(shape=("one rank", "two ranks"))
def a_load_whose_rank_is_silent_ends_by_its_deadline_and_keeps_its_blocks(lab: Lab, shape: str) -> None:
    """Nobody knows whether something still lands in them: they come back when the rank says that it has ended."""
    p, d = lab.sharing(SHAPES[shape], store_timeout=0.2)
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap, stores.silence() as ranks:
        tap.set(get="wait")
        name = d.add(prompt_of(30))
        lab.until(lambda: d.status(name) == LOADING, "D to load")
        ranks.hold()
        lab.ended(d, name, 6.0)
        lab.right(d, name)
        demand(d.watch.failed[name] == 1, "it was not told that nothing came")
        lab.run(20)
        demand(d.blocks_left == 7, f"{d.blocks_left} blocks are held, of 7 that may still be written to")
        tap.release()
        ranks.release()
        lab.settle()


@case(mid_step=(False, True))
def an_abort_during_the_lookup_leaves_nothing(lab: Lab, mid_step: bool) -> None:
    p, d = lab.sharing()
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap:
        tap.set(exists="wait")
        name = d.add(prompt_of(30))
        lab.until(lambda: tap.seen["exists"], "the look-up")
        d.abort(name, mid_step=mid_step)
        lab.run(10)
        tap.release()
        lab.settle()
    demand(not d.watch.received[name], "an unknown request was reported")


@case(mid_step=(False, True), shape=("one rank", "two ranks"))
def an_abort_during_a_load_from_the_store_gets_its_one_report(lab: Lab, mid_step: bool, shape: str) -> None:
    p, d = lab.sharing(SHAPES[shape])
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap:
        tap.set(get="wait")
        name = d.add(prompt_of(30))
        lab.until(lambda: d.status(name) == LOADING, "D to load")
        d.abort(name, mid_step=mid_step)
        lab.run(10)
        tap.release()
        lab.settle()
    demand(d.watch.received[name] == 1, f"{d.watch.received[name]} reports")


@case()
def preemption_of_what_was_loaded_and_put_is_survived(lab: Lab) -> None:
    p, d = lab.sharing(EngineShape(), EngineShape(blocks=25))
    prompts = [prompt_of(24 + seed, seed) for seed in range(5)]
    for prompt in prompts[:3]:
        fill(lab, p, prompt)
    names = [d.add(prompt, max_tokens=40) for prompt in prompts]
    for name in names:
        lab.answered(d, name)


@case(
    fault=("existence check raises", "put raises", "per-key errors", "time-out", "store gone"),
    shape=("one rank", "two ranks"),
)
def a_put_that_fails_leaves_no_pin(lab: Lab, fault: str, shape: str) -> None:
    p, _ = lab.sharing(SHAPES[shape], **QUICK)
    how = {"existence check raises": {"exists": "raise"}, "put raises": {"put": "raise"}}
    how |= {"per-key errors": {"put": "refuse"}, "time-out": {"put": "wait"}, "store gone": {}}
    with stores.calls() as tap:
        if fault == "store gone":
            lab.stores[-1].close()
        tap.set(**how[fault])
        for seed in range(3):
            run(lab, p, prompt_of(30, seed))
        lab.settle(8.0)
        demand(all(tap.seen[kind] for kind in how[fault] or ("exists",)), f"the fault did not occur: {tap.seen}")
    demand(not lab.stores[-1].values and p.counts["store_errors_total"], f"nothing failed: {p.counts}")
    demand(p.blocks_left == 0, f"{p.blocks_left} blocks are pinned")


@case()
def a_shutdown_while_putting_is_bounded_and_leaves_no_pin(lab: Lab) -> None:
    p, _ = lab.sharing()
    with stores.calls() as tap:
        tap.set(exists="wait")
        name = p.add(prompt_of(30), computes_all=True)  # it does not wait for the look-up
        lab.ended(p, name)
        lab.until(lambda: p.blocks_left, "the put's pin")
        begun = time.monotonic()
        lab.stop("p0")
        demand(time.monotonic() - begun < 15.0, "the shutdown hung")
    demand(p.blocks_left == 0, f"{p.blocks_left} blocks are pinned")


@case()
def another_salt_is_another_prompt_to_the_store(lab: Lab) -> None:
    p, d = lab.sharing()
    fill(lab, p, prompt_of(30), salt="one")
    for salt in ("two", None):
        name = run(lab, d, prompt_of(30), salt=salt)
        demand(not d.watch.loads[name], "another tenant's KV was loaded")
    name = run(lab, d, prompt_of(30), salt="one")
    demand(d.watch.loads[name], "its own was not")


@case()
def a_reset_voids_what_is_loaded_and_what_was_put(lab: Lab) -> None:
    """Weights may have been replaced: nothing from before is right."""
    p, d = lab.sharing()
    fill(lab, p, prompt_of(30))
    with stores.calls() as tap:
        tap.set(get="wait")
        name = d.add(prompt_of(30))
        lab.until(lambda: d.status(name) == LOADING, "D to load")
        d.scheduler.reset_prefix_cache(reset_connector=True)
        tap.release()
        lab.answered(d, name)
    demand(d.runners[0].computed_of[name] >= 30, "what came from before the reset was used")
    lab.until(lambda: d.scheduler.reset_prefix_cache(reset_connector=True), "a reset to succeed")
    name = run(lab, d, prompt_of(30))
    demand(not d.watch.loads[name], "KV from before the reset was loaded")


@case(mode=MODES)
def the_store_is_the_second_source_when_p_cannot_be_reached(lab: Lab, mode: str) -> None:
    """P is gone; what it has put is not."""
    p, d = lab.sharing(claim_timeout=0.5, defer_timeout=0.5)
    fill(lab, p, prompt_of(30))
    params = lab.prefill(prompt_of(30))[1] if mode == "pull" else d_params(mode, router_ticket())
    lab.stop("p0")
    name = run(lab, d, prompt_of(30), params=params)
    lab.settle()  # the last figures are told before rest
    tried = 30 if mode == "pull" else 0  # P had it computed, so blocks were taken while it was asked
    demand(d.watch.loaded_tokens[name] == tried + 28, f"{d.watch.loaded_tokens[name]} tokens")
    demand(d.counts["second_source_total"] == 1, f"{d.counts}")


@case(mode=MODES)
def the_store_is_the_second_source_when_a_load_fails(lab: Lab, mode: str) -> None:
    _, d = lab.sharing()
    fill(lab, lab.engines["p0"], prompt_of(30))
    with stores.copies() as tap:
        tap.fail()
        handoff = lab.hand_over(mode, prompt_of(30))
        lab.finish(handoff, loads=2)
    demand(d.watch.failed[handoff.at_d] == 1, "the handoff did not fail")
    demand(d.watch.loaded_tokens[handoff.at_d] == 30 + 28, f"{d.watch.loaded_tokens[handoff.at_d]} tokens")


@case()
def failed_loads_that_fill_the_cache_are_computed_where_a_second_load_has_no_room(lab: Lab) -> None:
    """vLLM reserves what a failed load had until its request runs: several would wait for one another for ever."""
    p, _ = lab.sharing(EngineShape(), EngineShape(blocks=19))
    prompts = [prompt_of(30 + seed, seed) for seed in range(3)]
    for prompt in prompts:
        fill(lab, p, prompt)
    with stores.copies() as tap:
        tap.fail()
        handoffs = [lab.hand_over("pull", prompt) for prompt in prompts]
        for handoff in handoffs:
            lab.finish(handoff)


@case(role=("kv_both", "kv_consumer"), overlapped=(True,))
def a_step_in_flight_never_writes_over_a_load_from_the_store(lab: Lab, role: str) -> None:
    """A request is aborted while a step that computes it has not run yet; its blocks may not be loaded into before.

    vLLM sees to that for consumers alone: as a producer, 16 of 28 loaded positions became the aborted request's.
    """
    p, _ = lab.sharing(EngineShape(blocks=25, role=role, prefix_caching=False), EngineShape())
    prompt = prompt_of(30)
    fill(lab, lab.engines["d0"], prompt)
    with stores.calls() as tap:
        tap.set(exists="wait")
        name = p.add(prompt)
        lab.until(lambda: tap.seen["exists"], "the look-up")
        leave_in_flight(p)
        tap.release()
        landing_before_steps(p, name, 30 // BLOCK)
        lab.answered(p, name)
    demand(p.watch.loads[name] == 1 and not p.watch.failed[name], "nothing was loaded, so nothing was tried")


@case(mode=MODES)
def a_p_that_also_loads_from_a_store_takes_over_nothing(lab: Lab, mode: str) -> None:
    """`role`: it is vLLM's kv_both, so that its loads are safe, and a P for everybody else."""
    p = lab.sharing(role="prefill")[0]
    d = lab.engine("d0", EngineShape(role="kv_consumer"), store=lab.stores[-1].url)
    handoff = lab.hand_over(mode, prompt_of(30))
    lab.finish(handoff, loads=1)
    name = p.add(prompt_of(30, 1), d_params(mode, router_ticket("d0", "p0")))
    lab.answered(p, name)
    demand(not p.watch.loads[name], "it took a prompt over")
    fill(lab, d, prompt_of(30, 2))
    name = run(lab, p, prompt_of(30, 2))
    demand(p.watch.loaded_tokens[name] == 28, f"{p.watch.loaded_tokens[name]} tokens came from the store")
    demand(p.connector.scheduler.presence.node.facts.role == "prefill", "it would be listed as another")


@case()
def a_cache_that_cannot_be_stored_is_refused_at_start_by_name(lab: Lab) -> None:
    refused = {
        "store: group": EngineShape(windows=(0, 8), blocks=81),
        "expected 'recompute'": EngineShape(policy="fail"),
        "expected 'kv_both'": EngineShape(role="kv_producer"),
    }
    for told, shape in refused.items():
        try:
            lab.engine("p0", shape, store="tcp://127.0.0.1:9")
        except ValueError as error:
            demand(told in str(error), str(error))
        else:
            demand(False, f"{shape} was accepted")
