"""Cases in which a piece of the connector itself fails: once, somewhere inside; no hook may show it to vLLM.

Law: the failure is put in after the engines have started, into one function at one of its calls, and every function of
the pieces that is called then gets its turn (what a rehearsal calls). Requests may be computed again or fail, but they
end; blocks come back.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from kvbaton_proof.conformance import taps
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.lab import BrokenLabError, Lab, LabHandoff, demand, prompt_of

_BASE = "kvbaton.engines.vllm"
_SIDE = "kvbaton.engines.side"
PIECES = (
    "kvbaton.node.doorway",
    "kvbaton.node.pin_budget",
    "kvbaton.node.prompt_account",
    f"{_SIDE}.decode",
    f"{_SIDE}.asks",
    f"{_SIDE}.pin_admission",
    f"{_SIDE}.prefill",
    f"{_SIDE}.second_loads",
    f"{_SIDE}.stored_loads",
    f"{_SIDE}.stored_puts",
    f"{_SIDE}.store",
    f"{_SIDE}.grouping",
    f"{_BASE}.content.request_content",
    f"{_BASE}.block_pool",
    f"{_BASE}.presence",
    f"{_BASE}.prompt_counting",
    f"{_BASE}.scheduler_side",
    f"{_BASE}.vllm_stats",
    f"{_BASE}.waiting",
    f"{_BASE}.worker_side",
)
WITH_STORE = tuple(f"{_SIDE}.{name}" for name in ("second_loads", "stored_loads", "stored_puts", "store"))
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
                spared = inner in _MAY_NOT_FAIL and (module_name, inner) not in _MAY_FAIL
                if inspect.isfunction(plain) and not dunder and not spared:
                    yield value, inner


def called(piece: str, times: int, rehearse: Callable[[], None]) -> list[tuple[Any, str]]:
    """Those functions of a piece that a rehearsal calls so often: a failure put into another never comes to pass."""
    found = list(functions_of(piece))
    with ExitStack() as stack:
        counts = [stack.enter_context(taps.failing_once(owner, name, NEVER)) for owner, name in found]
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
        with taps.failing_once(owner, name, call):
            _work(lab, seed)
        lab.settle(4.0)
    except Exception as error:  # noqa: BLE001 - it is what this case looks for
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""
