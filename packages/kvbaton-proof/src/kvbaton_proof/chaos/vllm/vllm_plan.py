"""The standard plan: what is done to a P and a D on real vLLM, one thing after the other, whatever connector they have.

Laws: the same steps in the same order for every connector. `at_s` is the order, not a time: a step begins when the
engines are well again after the one before, or were started anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.fault_catalogue import Moment

Connector = Literal["kvbaton", "nixl"]

P, D = "p0", "d0"
UNDER_LOAD = "under load"
USED, FOREIGN = "used ticket", "foreign ticket"
OTHER_WEIGHTS = "other weights"
MUTATIONS: tuple[str, ...] = (
    "only the flag", "both flags", "no source", "no blocks", "empty blocks", "half the blocks", "a number of 2**62",
    "a list as source", "unknown source",
)  # fmt: skip
"""What is sent to D in place of the parameters that P gave; `vllm_poison` makes them."""

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


def standard(connector: Connector, seed: int, faults: Sequence[str] | None = None) -> Plan:
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
