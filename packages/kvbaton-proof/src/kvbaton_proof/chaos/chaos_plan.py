"""Faults, targets and times. A plan is drawn from its seed and kept as JSON, so that `--replay` repeats it.

Law: a plan is data: the same plan does the same things in the same order, as far as real processes allow.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbaton_proof.chaos.fault_catalogue import KNOWN, Moment, Target
from kvbaton_proof.chaos.liars import lies
from kvbaton_proof.rig.connectors import CONNECTORS

STEPS_MAX = 120_000
SECONDS_MAX = 5 * 86400
"""A plan of that length has fewer steps than `STEPS_MAX`."""
LIES_MAX = 64
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault. `at_s` is counted from when the cluster is up; `seconds` is how long it lasts, where it lasts."""

    at_s: Seconds
    fault: str
    target: str = ""  # a member's name, two for a link (p0-d1: from p0 to d1 where it matters), "" for none
    moment: Moment = Moment.ANY
    seconds: Seconds = 0.0
    detail: str = ""  # what sort of it: of poison, of a changed configuration; of a liar, what it poses as
    lies: Annotated[tuple[str, ...], Meta(max_length=LIES_MAX)] = ()  # of a liar, in order: name@member

    def __post_init__(self) -> None:
        if self.fault not in KNOWN:
            raise ValueError(f"fault: got {self.fault!r}, expected one of {', '.join(KNOWN)}")
        if self.moment not in KNOWN[self.fault].moments:
            raise ValueError(f"moment: {self.fault} cannot be done at {self.moment}")
        if (self.fault == lies.LIAR) is not bool(self.lies):
            raise ValueError(f"lies: {len(self.lies)} of {self.fault}; a liar tells some, and nobody else any")
        if self.lies:
            _check_lies(self)

    def title(self) -> str:
        """As people read it: kill d0 mid-copy."""
        moment = "" if self.moment is Moment.ANY else str(self.moment)
        lasts = f"{self.seconds:g} s" if self.seconds else ""
        return " ".join(word for word in (self.fault, self.target, moment, self.detail, lasts) if word)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run."""

    name: str  # random, standard or streams
    seed: int
    engine: Literal["embedded", "vllm"]
    connector: str = "kvbaton"  # of `rig.connectors`
    prefills: Annotated[int, Meta(ge=1, le=16)] = 2
    decodes: Annotated[int, Meta(ge=1, le=16)] = 2
    seconds: Seconds = 180.0
    streams: Annotated[int, Meta(ge=0, le=1024)] = 0  # long ones, kept open all the time
    prompt_tokens: Annotated[int, Meta(ge=16, le=3072)] = 64  # of a long stream
    copies_percent: Annotated[float, Meta(ge=0, le=100)] = 0.0  # of a D's blocks, as copies of answers in the store
    streams_continue: bool = True  # else the router lets them die with their D: the check must see it
    steps: Annotated[tuple[Step, ...], Meta(max_length=STEPS_MAX)] = ()

    def __post_init__(self) -> None:
        if self.connector not in CONNECTORS:
            raise ValueError(f"connector: got {self.connector!r}, expected one of {', '.join(CONNECTORS)}")
        if self.engine != "embedded":
            return
        engines = {f"p{n}" for n in range(self.prefills)} | {f"d{n}" for n in range(self.decodes)}
        roles = lies.roles((*engines, "router", "store"))
        for number, step in enumerate(self.steps):
            if not _fits(step, engines):
                known = ", ".join(sorted(engines))
                raise ValueError(
                    f"steps[{number}].target: {step.fault} cannot be done to {step.target!r} among {known}"
                )
            for told in map(lies.parse, step.lies):
                if roles.get(told.to) not in told.lie.to:
                    raise ValueError(f"steps[{number}].lies: {told.lie.name} cannot be told to {told.to!r}")


def _fits(step: Step, engines: Set[str]) -> bool:
    targets = KNOWN[step.fault].targets
    if Target.LINK in targets:
        ends = step.target.split("-")
        return len(set(ends)) == len(ends) == 2 and engines | {"router"} >= set(ends)
    if Target.ROUTER in targets:
        return step.target == "router"
    if Target.PREFILL in targets or step.fault == "full-shm":
        return step.target in engines
    return not step.target


def _check_lies(step: Step) -> None:
    guises = [str(guise) for guise in lies.Guise]
    if step.detail not in guises:
        raise ValueError(f"detail: got {step.detail!r}, expected what the liar poses as: {', '.join(guises)}")
    for told in map(lies.parse, step.lies):
        if lies.Guise(step.detail) not in told.lie.guises:
            raise ValueError(f"lies: {told.lie.name} cannot be told by a {step.detail}")


def to_json(plan: Plan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def from_json(text: bytes) -> Plan:
    """The plan again; ValueError names the field at fault."""
    try:
        return msgspec.json.decode(text, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a plan: {error}") from None
