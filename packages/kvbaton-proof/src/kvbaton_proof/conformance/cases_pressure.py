"""Cases of P whose cache may be pinned by handoffs only in part: who waits, who is refused, and what is left of it;
and of a piece of the connector itself that fails: once, somewhere inside, and no hook may show it to vLLM.

Law: such a failure is put in after the engines have started, into one function at one of its calls, and every function
of the pieces that is called then gets its turn (what a rehearsal calls). Requests may be computed again or fail, but
they end; blocks come back.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from kvbaton.api.params import REFUSED_FOR_D
from kvbaton.engines.vllm.block_pool import ASKED_MAX
from kvbaton.node.pin_budget import PinBudget
from kvbaton.node.prompt_account import PromptAccount
from kvbaton.protocol.geometry.layout import needed_blocks
from kvbaton_proof.conformance import stores
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import (
    BrokenLabError,
    Lab,
    LabHandoff,
    d_params,
    demand,
    p_params,
    prompt_of,
    router_ticket,
)

ONE = 0.001
"""A share that one prompt has to itself, whatever its size."""
SHAPES = {
    "one group": EngineShape(),
    "two groups": EngineShape(windows=(0, 8), blocks=121),
    "two ranks": EngineShape(ranks=2),
}
MANY = ASKED_MAX + 6
TOKENS = 20


def budget_of(engine: LabEngine) -> PinBudget:
    found: PinBudget = engine.connector._scheduler.presence.node.doorway.budget
    return found


def account_of(engine: LabEngine) -> PromptAccount:
    found: PromptAccount = engine.connector._scheduler.reporting.prompts
    return found


def is_refused(params: dict[str, Any] | None) -> bool:
    """Whether P says so; vLLM adds words of its own."""
    return params is not None and {**params, **REFUSED_FOR_D} == params


def leased(lab: Lab, seed: int) -> dict[str, Any]:
    """A prompt that P keeps for whoever comes, and that nobody reads yet."""
    return lab.prefill(prompt_of(TOKENS, seed))[1]


def taken(lab: Lab, seed: int, params: dict[str, Any]) -> None:
    d = lab.engines["d0"]
    name = d.add(prompt_of(TOKENS, seed), params)
    lab.answered(d, name)


@case(mode=MODES, shape=tuple(SHAPES))
def a_prompt_that_finds_no_room_in_time_is_refused_for_the_price_of_a_step(lab: Lab, mode: str, shape: str) -> None:
    p, d = lab.duo(SHAPES[shape], pin_share=ONE, pin_wait_s=0.3)
    first = leased(lab, 1)
    ticket = None if mode == "pull" else router_ticket()
    at_d = "" if ticket is None else d.add(prompt_of(TOKENS, 2), d_params(mode, ticket))
    second = p.add(prompt_of(TOKENS, 2), p_params(mode, ticket), max_tokens=1)
    lab.ended(p, second)
    told = p.outcomes[second].params
    demand(is_refused(told), f"P gave {told}")
    computed = p.runners[0].computed_of[second]
    demand(computed <= 1, f"{computed} tokens were computed")
    demand(budget_of(p).refused_total == 1, f"{budget_of(p).refused_total} were refused")
    at_d = at_d or d.add(prompt_of(TOKENS, 2), dict(told or {}))
    lab.answered(d, at_d)
    if ticket is not None:
        lab.until(lambda: d.ends["pins_full"] == 1, "D to count how its handoff ended", 5.0)
    alone = account_of(d).figures()["alone_tokens_total"]
    reason = "prefill_full" if ticket is None else "pins_full"
    demand(alone == {reason: TOKENS - 1}, f"D's account says {alone}")
    taken(lab, 1, first)


@case(shape=tuple(SHAPES))
def many_that_wait_have_their_turn_one_after_the_other(lab: Lab, shape: str) -> None:
    """Also those that are put aside, and never is more pinned than one prompt."""
    p, d = lab.duo(SHAPES[shape], pin_share=ONE, pin_wait_s=30.0)
    asked = [p.add(prompt_of(TOKENS, seed), p_params("pull"), max_tokens=1) for seed in range(MANY)]
    most = len(SHAPES[shape].windows) * needed_blocks(TOKENS, SHAPES[shape].block_tokens)
    answers: dict[int, str] = {}

    def goes_on() -> bool:
        for seed, name in enumerate(asked):
            params = p.outcomes[name].params
            if p.outcomes[name].reason and seed not in answers:
                demand(params is not None and params.get("ticket"), f"{name} got {params}")
                answers[seed] = d.add(prompt_of(TOKENS, seed), dict(params or {}))
        pinned = budget_of(p).pinned_blocks
        demand(pinned <= most, f"{pinned} blocks are pinned, one prompt has at most {most}")
        return len(answers) == MANY and all(d.outcomes[name].reason for name in answers.values())

    lab.until(goes_on, "all to have been answered", 60.0)
    for name in answers.values():
        lab.right(d, name)


@case(mid_step=(False, True))
def an_abort_while_it_waits_for_room_leaves_nothing(lab: Lab, mid_step: bool) -> None:
    p, _ = lab.duo(EngineShape(), pin_share=ONE, pin_wait_s=15.0)
    first = leased(lab, 1)
    names = [p.add(prompt_of(TOKENS, seed), p_params("pull"), max_tokens=1) for seed in range(2, 2 + MANY)]
    lab.run(8)
    for name in names:
        p.abort(name, mid_step=mid_step)
    lab.until(lambda: budget_of(p).waiting == 0, "nobody to wait any more", 5.0)
    taken(lab, 1, first)
    demand(budget_of(p).promised_blocks == 0, "room is kept for requests that are over")


@case()
def leases_that_nobody_reads_pin_no_more_than_the_share(lab: Lab) -> None:
    """As where a D claims and never ends: P goes on, with the rest of its cache, and all is over with the leases."""
    p, d = lab.duo(EngineShape(), pin_share=0.4, pin_wait_s=0.2, lease_s=1.0)
    names = [p.add(prompt_of(TOKENS, seed), p_params("pull"), max_tokens=1) for seed in range(12)]
    limit = budget_of(p).blocks_max
    demand(limit == int(p.shape.usable_blocks * 0.4), f"the limit is {limit}")

    def all_over() -> bool:
        pinned = budget_of(p).pinned_blocks
        demand(pinned <= limit, f"{pinned} blocks are pinned, at most {limit}")
        return all(p.outcomes[name].reason for name in names)

    lab.until(all_over, "all to have ended")
    refused = [name for name in names if is_refused(p.outcomes[name].params)]
    demand(refused and len(refused) < len(names), f"{len(refused)} of {len(names)} were refused")
    plain = d.add(prompt_of(TOKENS, 50))
    lab.answered(d, plain)


_BASE = "kvbaton.engines.vllm"
_SIDE = "kvbaton.engines.side"
PIECES = (
    "kvbaton.node.doorway",
    "kvbaton.node.pin_budget",
    "kvbaton.node.prompt_account",
    f"{_SIDE}.decode",
    f"{_SIDE}.asks",
    f"{_SIDE}.prefill",
    f"{_SIDE}.stored_puts",
    f"{_SIDE}.store",
    f"{_SIDE}.protocols",
    f"{_BASE}.content.request_content",
    f"{_BASE}.block_pool",
    "kvbaton.engines.shared.presence",
    f"{_BASE}.counting",
    f"{_BASE}.scheduler_side",
    f"{_BASE}.vllm_stats",
    f"{_BASE}.worker_side",
)
WITH_STORE = tuple(f"{_SIDE}.{name}" for name in ("stored_puts", "store"))
QUICK: dict[str, Any] = {
    "lease_s": 0.4,
    "max_hold_s": 1.0,
    "transfer_timeout": 0.5,
    "defer_timeout": 0.5,
    "claim_timeout": 0.5,
}
NEVER = 0  # of calls: the first is 1
_MAY_NOT_FAIL = frozenset(
    {"_on_reuse", "raise_epoch", "of", "all_of", "all_judged", "_is_told", "_are_told", "_watching", "_is_alone"}
    | {"_with_others"}
    | {"is_empty", "build_step", "allocated", "step_begun"}
    | {"_post", "_unpinned", "hand_in", "unpin", "unpinned", "let_go", "back_to_vllm"}
    | {"CacheResets.scheduled", "CacheResets._forget", "Pace.begin"}
)
"""Nothing is put in at the entry of these: callbacks that cannot raise by construction (rule 7), what vLLM itself calls
on our data, bodies of hooks that only call others, which get their turn; appends to and pops from queues and tables;
and vLLM's own release of blocks, which nobody can repeat safely without knowing how far it came."""


_MAY_FAIL = frozenset(
    {(f"{_SIDE}.decode", "allocated"), (f"{_SIDE}.store", "allocated"), ("kvbaton.node.doorway", "allocated")}
)


def functions_of(module_name: str) -> Iterator[tuple[Any, str]]:
    """(owner, name) of all that a module defines and that could raise."""
    module = importlib.import_module(module_name)
    for name, value in sorted(vars(module).items()):
        if inspect.isfunction(value) and value.__module__ == module_name:
            for owner in _holders(value, name):
                yield owner, name
        elif inspect.isclass(value) and value.__module__ == module_name:
            for inner, method in sorted(vars(value).items()):
                plain = method.__func__ if isinstance(method, staticmethod | classmethod) else method
                dunder = inner.startswith("__")
                names = {inner, f"{name}.{inner}"}
                spared = bool(names & _MAY_NOT_FAIL) and (module_name, inner) not in _MAY_FAIL
                if inspect.isfunction(plain) and not dunder and not spared:
                    yield value, inner


def called(piece: str, times: int, rehearse: Callable[[], None]) -> list[tuple[Any, str]]:
    """Those functions of a piece that a rehearsal calls so often: a failure put into another never comes to pass."""
    found = list(functions_of(piece))
    with ExitStack() as stack:
        counts = [stack.enter_context(stores.failing_once(owner, name, NEVER)) for owner, name in found]
        rehearse()
    reached = [each for each, calls in zip(found, counts, strict=True) if calls[0] >= times]
    demand(reached, f"nothing of {piece} is called {times} times: there is nothing to fail")
    return reached


def _holders(value: Any, name: str) -> list[Any]:
    """Every module that has the function under its name, its own among them."""
    ours = (module for key, module in list(sys.modules.items()) if key.startswith("kvbaton."))
    return [module for module in ours if module.__dict__.get(name) is value]


@case(settles=False, piece=PIECES, call=(1, 3))
def a_failure_inside_never_leaves_a_hook(lab: Lab, piece: str, call: int) -> None:
    shape = EngineShape(ranks=1 if call == 1 else 2, chunk_tokens=8)
    begin = lab.sharing if piece in WITH_STORE else lab.duo
    begin(shape, **QUICK)
    found, broken = called(piece, call, lambda: _work(lab, 0)), []
    for seed, (owner, name) in enumerate(found, 1):
        what = _one(lab, owner, name, call, seed)
        if what:
            broken.append(f"{getattr(owner, '__name__', owner)}.{name}: {what}")
            for engine in lab.engines.values():  # what is broken for good is told once, then one begins anew
                engine.watch.errors.clear()
            begin(shape, **QUICK)
    if broken:
        raise BrokenLabError("\n    ".join([f"{len(broken)} of {len(found)} functions:", *broken]))


def _share(lab: Lab, seed: int) -> None:
    """P computes prompts that go to the store, and D asks for them there."""
    for length in (21, 22, 23):
        for engine in lab.engines.values():
            name = engine.add(prompt_of(length, seed))
            lab.ended(engine, name, 6.0)
            lab.right(engine, name)


def _work(lab: Lab, seed: int) -> None:
    """A handoff in every mode, and prompts by way of the store where there is one."""
    some: list[LabHandoff] = []
    for mode in MODES:
        try:
            some.append(lab.hand_over(mode, prompt_of(20, seed * 10 + len(some))))
        except BrokenLabError as error:
            if "P gave no ticket" not in str(error):  # a lease that failed costs the handoff
                raise
    for each in some:
        lab.finish(each, patience_s=6.0)
    if lab.stores:
        _share(lab, seed)


def _one(lab: Lab, owner: Any, name: str, call: int, seed: int) -> str:
    try:
        with stores.failing_once(owner, name, call):
            _work(lab, seed)
        lab.settle(4.0)
    except Exception as error:  # noqa: BLE001 - it is what this case looks for
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""
