"""Cases in which a side gives up: aborts, preemption, failed and refused loads, a P that dies.

Cases of bad `kv_transfer_params`: whatever a client sends, the engine lives and that request alone pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvbaton_proof.conformance import stores
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.lab import (
    LOADING,
    Lab,
    d_params,
    demand,
    prompt_of,
    router_ticket,
)

SHAPES = {
    "one group": EngineShape(),
    "two groups": EngineShape(windows=(0, 8), blocks=81),
    "two ranks": EngineShape(ranks=2),
}


@case(mode=MODES)
def an_abort_while_waiting_for_the_match_leaves_nothing(lab: Lab, mode: str) -> None:
    _, d = lab.duo(lease_s=1.0)
    if mode == "pull":
        handoff = lab.hand_over(mode, prompt_of(20))
        d.abort(handoff.at_d)
        name = handoff.at_d
    else:
        name = d.add(prompt_of(20), d_params(mode, router_ticket()))
        lab.run(20)
        demand(d.status(name) == "WAITING", d.status(name))
        d.abort(name)
    lab.settle()
    demand(not d.watch.received[name], "an unknown request was reported")


@case(mode=MODES, mid_step=(False, True), shape=tuple(SHAPES))
def an_abort_while_loading_still_gets_its_one_report(lab: Lab, mode: str, mid_step: bool, shape: str) -> None:
    _, d = lab.duo(SHAPES[shape])
    with lab.loading(mode, prompt_of(20)) as (tap, handoff):
        d.abort(handoff.at_d, mid_step=mid_step)
        lab.run(30)
        tap.release()
        lab.settle()
    demand(d.watch.received[handoff.at_d] == 1, f"{d.watch.received[handoff.at_d]} reports")


@case(mode=MODES)
def an_abort_of_a_load_that_never_moves_ends_by_its_deadline(lab: Lab, mode: str) -> None:
    _, d = lab.duo(transfer_timeout=1.0, lease_s=1.0, max_hold_s=3.0)
    with lab.loading(mode, prompt_of(20)) as (_, handoff):
        d.abort(handoff.at_d)
        lab.settle(8.0)


@case(mode=MODES, mid_step=(False, True))
def an_abort_after_the_report_is_an_ordinary_abort(lab: Lab, mode: str, mid_step: bool) -> None:
    _, d = lab.duo()
    handoff = lab.hand_over(mode, prompt_of(20), max_tokens=40)
    lab.until(lambda: d.watch.received[handoff.at_d], "the report")
    d.abort(handoff.at_d, mid_step=mid_step)
    lab.settle()
    demand(d.watch.received[handoff.at_d] == 1, "reported twice")


@case(mode=MODES)
def an_abort_between_report_and_admission_is_an_ordinary_abort(lab: Lab, mode: str) -> None:
    _, d = lab.duo(EngineShape(), EngineShape(seqs=1))
    busy = d.add(prompt_of(9, 5), max_tokens=30)
    with stores.copies() as tap:
        tap.hold()
        handoff = lab.hand_over(mode, prompt_of(20))
        lab.until(lambda: d.status(busy) == "gone" or d.status(handoff.at_d) == LOADING, "a slot for the match")
        tap.release()
        lab.until(lambda: d.watch.received[handoff.at_d] or d.outcomes[handoff.at_d].reason, "the report")
        d.abort(handoff.at_d)
    lab.settle()


@case(mode=MODES)
def a_request_refused_before_admission_frees_p(lab: Lab, mode: str) -> None:
    """vLLM's front end sends such a request on, aborted at once, so that P may let go."""
    p, d = lab.duo(lease_s=2.0)
    if mode == "pull":
        _, params = lab.prefill(prompt_of(20))
    else:
        params = d_params(mode, router_ticket())
    d.add(prompt_of(20), params, at_once_aborted=True)
    lab.settle()
    demand(p.blocks_left == 0, "P still holds its blocks")


@case(mode=("stream", "push"), mid_step=(False, True))
def an_abort_on_p_while_it_computes_is_told_to_d(lab: Lab, mode: str, mid_step: bool) -> None:
    p, _ = lab.duo(EngineShape(chunk_tokens=8))
    handoff = lab.hand_over(mode, prompt_of(60))
    lab.until(lambda: p.runners[0].computed_of[handoff.at_p] >= 24, "P to be half-way")
    p.abort(handoff.at_p, mid_step=mid_step)
    lab.finish(handoff)


@case(mode=("stream", "push"))
def a_p_preempted_in_mid_stream_ends_the_stream(lab: Lab, mode: str) -> None:
    """The prompt that came first grows until the pool is full; the later one, in mid-stream, is preempted."""
    p, _ = lab.duo(EngineShape(blocks=21, chunk_tokens=8), EngineShape(blocks=81))
    eldest = p.add(prompt_of(30, 7), max_tokens=40)
    lab.until(lambda: p.runners[0].computed_of[eldest] >= 30, "the eldest to decode")
    handoff = lab.hand_over(mode, prompt_of(36))
    lab.finish(handoff)
    lab.answered(p, eldest)


@case(mode=MODES)
def a_preempted_d_computes_again_and_is_never_matched_again(lab: Lab, mode: str) -> None:
    _, d = lab.duo(EngineShape(), EngineShape(blocks=17, prefix_caching=False))
    first = lab.hand_over(mode, prompt_of(20, 1), max_tokens=24)
    second = lab.hand_over(mode, prompt_of(20, 2), max_tokens=24)
    lab.finish(first)
    lab.finish(second)
    demand(any(d.runners[0].computed_of[each.at_d] > 24 for each in (first, second)), "nobody was preempted")
    demand(max(d.watch.loads.values()) == 1, f"loads {d.watch.loads}")


@case(mode=MODES, shape=tuple(SHAPES))
def a_failed_load_is_computed_here_under_recompute(lab: Lab, mode: str, shape: str) -> None:
    _, d = lab.duo(SHAPES[shape])
    with stores.copies() as tap:
        tap.fail()
        handoff = lab.hand_over(mode, prompt_of(30))
        lab.finish(handoff)
    demand(d.watch.loads[handoff.at_d] <= 1, "it was loaded again: a livelock")
    if shape == "two groups":
        demand(d.watch.invalid_blocks == 0, "block errors with two groups are the engine's death")


@case(mode=MODES, shape=tuple(SHAPES))
def a_failed_load_is_an_error_under_fail(lab: Lab, mode: str, shape: str) -> None:
    p = SHAPES[shape]
    _, d = lab.duo(p, EngineShape(windows=p.windows, blocks=p.blocks, ranks=p.ranks, policy="fail"))
    with stores.copies() as tap:
        tap.fail()
        handoff = lab.hand_over(mode, prompt_of(30))
        lab.until(lambda: d.outcomes[handoff.at_d].reason, "an end")
    reason = d.outcomes[handoff.at_d].reason
    demand(reason == "error", f"ended as {reason}")
    lab.settle()
    demand(d.free_blocks == d.shape.usable_blocks, f"{d.blocks_left} blocks are gone")


@case(mode=("stream", "push"), how=("abort", "stop"))
def a_p_that_dies_half_way_leaves_d_a_right_answer(lab: Lab, mode: str, how: str) -> None:
    """What nobody can vouch for any more is computed again, however much of it has arrived."""
    p, d = lab.duo(EngineShape(chunk_tokens=8), transfer_timeout=2.0)
    handoff = lab.hand_over(mode, prompt_of(80))
    lab.until(lambda: p.runners[0].computed_of[handoff.at_p] >= 40, "P to be half-way")
    with stores.copies() as tap:
        deadline = time.monotonic() + 1.0
        while not tap.begun and time.monotonic() < deadline:
            d.step()  # only D goes on: it reads what P has announced
    if how == "abort":
        p.abort(handoff.at_p)
    else:
        lab.stop("p0")
    lab.finish(handoff)


@case()
def what_p_proves_good_is_kept_with_one_group(lab: Lab) -> None:
    """A stale commit names the first bad block; what comes before it is not computed again.

    Over shm: tcp serves nothing of a lease that has ended.
    """
    small = EngineShape(blocks=25, prefix_caching=False, chunk_tokens=128)
    p = lab.engine("p0", small, lease_s=0.3, max_hold_s=0.6, transport="shm")
    d = lab.engine(
        "d0", EngineShape(), transfer_timeout=20.0, max_hold_s=30.0, transport="shm"
    )  # D is patient: P's lease ends
    with lab.loading("pull", prompt_of(32)) as (tap, handoff):
        lab.until(lambda: p.blocks_left == 0, "P's lease to end", 5.0)
        p.add(prompt_of((24 - 8 + 2) * 4 - 1, 5), max_tokens=1)  # 18 of 24 blocks: two of the eight are reused
        lab.until(lambda: not p.has_work, "P to reuse two blocks")
        tap.release()
        lab.finish(handoff)
    demand(d.watch.loads[handoff.at_d] == 1 and d.watch.invalid_blocks, f"no block was named: {d.watch.failed}")
    computed = d.runners[0].computed_of[handoff.at_d]
    demand(computed < 32, f"D computed {computed} positions: nothing was kept of the six good blocks")


@case(mode=MODES, shape=tuple(SHAPES))
def a_p_that_stops_while_d_loads_fails_the_load(lab: Lab, mode: str, shape: str) -> None:
    lab.duo(SHAPES[shape], transfer_timeout=2.0)
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        lab.stop("p0")
        tap.release()
        lab.finish(handoff)


@case(shape=("one group", "two groups"))
def a_failed_load_never_bars_the_loads_behind_it(lab: Lab, shape: str) -> None:
    """vLLM keeps a failed load at the head of the queue of block holders, and stops at it when it does not fit.

    Behind a window a prompt that is computed again needs more blocks than its load did; those are held by loads that
    have arrived behind it, and wait for it. So a load that would leave no room for that is not begun (`room.Room`).
    """
    windows = (0, 8) if shape == "two groups" else (0, 0)
    roomy = EngineShape(windows=windows, blocks=161, chunk_tokens=64)
    _, d = lab.duo(roomy, EngineShape(windows=windows, blocks=29 if shape == "two groups" else 23, chunk_tokens=64))
    with stores.copies() as tap:
        tap.hold()
        first = lab.hand_over("pull", prompt_of(40, 1))
        lab.until(lambda: d.status(first.at_d) == LOADING and tap.waiting, "the first to load")
        jobs = set(tap.jobs)
        second = lab.hand_over("pull", prompt_of(40, 2))
        if shape == "one group":
            lab.until(lambda: d.status(second.at_d) == LOADING, "the second to load")
        else:
            lab.run(200)
            demand(d.status(second.at_d) != LOADING, "the second has begun, and there is no room for the first to fail")
        tap.decide = lambda copy: "fail" if copy.job in jobs else "wait"
        tap.wake()
        lab.until(lambda: d.watch.failed[first.at_d], "the first to fail")
        tap.release()
        lab.finish(second, patience_s=8.0)
        lab.finish(first, patience_s=8.0)


STRANGE: dict[str, Callable[[], Any]] = {
    "an empty object": dict,
    "a list": lambda: [1, 2],
    "an empty list": list,
    "text": lambda: "do_remote_prefill",
    "a number": lambda: 7,
    "true": lambda: True,
    "nulls": lambda: dict.fromkeys(("do_remote_prefill", "do_remote_decode", "mode", "ticket")),
    "text for truth": lambda: {"do_remote_prefill": "true", "ticket": router_ticket()},
    "both ways": lambda: {"do_remote_prefill": True, "do_remote_decode": True, "ticket": router_ticket()},
    "an unknown mode": lambda: {"do_remote_prefill": True, "mode": "smoke", "ticket": router_ticket()},
    "numbers for keys": lambda: {1: 2, None: 3},
    "deep": lambda: {"do_remote_prefill": {"a": [[[[[]]]]]}},
    "nixl": lambda: {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_request_id": "x",
    },
    "moriio": lambda: {"do_remote_prefill": True, "transfer_id": "tx-" + "0" * 32, "remote_dp_size": 1},
    "huge": lambda: {"do_remote_prefill": True, "mode": "pull", "ticket": "A" * 3_000_000},
    "huge fields": lambda: {"do_remote_prefill": True, "x" * 100_000: ["y"] * 100_000},
}
"""Parameters that ask for nothing that can be understood, or for what is not ours."""


@case(what=tuple(STRANGE), policy=("recompute", "fail"))
def strange_parameters_cost_their_own_request_alone(lab: Lab, what: str, policy: Any) -> None:
    p, d = lab.duo(EngineShape(), EngineShape(policy=policy))
    for engine in (p, d):
        name = engine.add(prompt_of(17), STRANGE[what]())
        if lab.ended(engine, name) != "error":
            lab.right(engine, name)
        else:
            demand(policy == "fail" or engine is d, "an error under recompute")
    lab.finish(lab.hand_over("pull", prompt_of(20, 3)), loads=1)


@case()
def parameters_are_not_changed_for_the_client(lab: Lab) -> None:
    """The router may send the same object to several engines, or log it."""
    _, d = lab.duo()
    _, params = lab.prefill(prompt_of(20))
    before = dict(params)
    name = d.add(prompt_of(20), params)
    lab.until(lambda: d.outcomes[name].reason, "an end")
    demand(params == before, f"they were {before}, now {params}")


@case()
def p_answers_with_plain_json(lab: Lab) -> None:
    import json

    lab.duo()
    _, params = lab.prefill(prompt_of(20))
    demand(json.loads(json.dumps(params)) == params, f"not plain: {params}")
    demand(not any("port" in key or "host" in key or "block" in key for key in params), f"it says too much: {params}")
    lab.engines["d0"].add(prompt_of(20), json.loads(json.dumps(params)))
