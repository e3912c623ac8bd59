"""The standard plan: what is done to a P and a D on real vLLM, one thing after the other, whatever connector they have.

Laws: the same steps in the same order for every connector. `at_s` is the order, not a time: a step begins when the
engines are well again after the one before, or were started anew. A mutation of parameters is pure: it names what a
part of them is for (source, blocks), and the connector says in which field it keeps that; kvbaton keeps all of it in
its ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.fault_catalogue import Moment
from kvbaton_proof.rig.connectors import CONNECTORS, D, P

UNDER_LOAD = "under load"
USED, FOREIGN = "used ticket", "foreign ticket"
OTHER_WEIGHTS = "other weights"


def _without(params: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != field}


def _half(value: Any) -> Any:
    """The first half of a ticket's characters or of each group's blocks."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [_half(group) for group in value]
    return value[: len(value) // 2]


def _huge(value: Any) -> Any:
    """2**62 wherever a number could be."""
    if isinstance(value, list):
        return [_huge(each) for each in value]
    return 2**62


MUTATIONS: Mapping[str, Callable[[dict[str, Any], str, str], dict[str, Any]]] = {
    "only the flag": lambda params, source, blocks: {"do_remote_prefill": True},
    "both flags": lambda params, source, blocks: {**params, "do_remote_prefill": True, "do_remote_decode": True},
    "no source": lambda params, source, blocks: _without(params, source),
    "no blocks": lambda params, source, blocks: _without(params, blocks),
    "empty blocks": lambda params, source, blocks: {**params, blocks: type(params[blocks])()},
    "half the blocks": lambda params, source, blocks: {**params, blocks: _half(params[blocks])},
    "a number of 2**62": lambda params, source, blocks: {**params, blocks: _huge(params[blocks])},
    "a list as source": lambda params, source, blocks: {**params, source: ["x"]},
    "unknown source": lambda params, source, blocks: {**params, source: "nobody-of-this-name"},
}
"""What is sent to D in place of the parameters that P gave; what no P ever gave."""

_STEPS: tuple[Step, ...] = (
    Step(0, "kill", P, detail=UNDER_LOAD),
    Step(0, "kill", P, Moment.MID_COPY),
    Step(0, "stop", P, Moment.MID_COPY, 40.0),
    Step(0, "kill", D, Moment.BEFORE_CLAIM, detail="(P holds 32 prefills)"),
    Step(0, "stop", D, seconds=15.0, detail=UNDER_LOAD),
    Step(0, "late-decode"),
    Step(0, "abort"),
    Step(0, "flood"),
    Step(0, "exhausted"),
    Step(0, "replay", D, detail=USED),
    Step(0, "replay", D, detail=FOREIGN),
    *(Step(0, "poison", D, detail=name) for name in MUTATIONS),
    Step(0, "strangers", P),
    Step(0, "reconfigure", P, detail=OTHER_WEIGHTS),
)


def standard(connector: str, seed: int, faults: Sequence[str] | None = None) -> Plan:
    """The plan; with `faults` only the steps whose fault, or whose title, is among them."""
    chosen = [step for step in _STEPS if faults is None or step.fault in faults or step.title() in faults]
    if faults is not None:
        known = {step.fault for step in _STEPS} | {step.title() for step in _STEPS}
        unknown = [name for name in faults if name not in known]
        if unknown:
            expected = ", ".join(dict.fromkeys(step.fault for step in _STEPS))
            raise ValueError(f"fault: got {unknown[0]!r}, expected one of {expected}, or a step's title")
    steps = tuple(
        Step(float(number), step.fault, step.target, step.moment, step.seconds, step.detail)
        for number, step in enumerate(chosen)
    )
    return Plan(
        name="standard", seed=seed, engine="vllm", connector=connector, prefills=1, decodes=1,
        seconds=0.0, steps=steps,
    )  # fmt: skip


def poisoned(name: str, connector: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What P gave, changed as `name` says; KeyError if there is no such change."""
    source, blocks = CONNECTORS[connector].source_field, CONNECTORS[connector].blocks_field
    missing = sorted({source, blocks} - set(params))
    if missing:
        raise ValueError(f"kv_transfer_params: P gave no {missing[0]}; is this {connector}?")
    return MUTATIONS[name](dict(params), source, blocks)
