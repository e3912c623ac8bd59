"""A random plan from a seed: every fault of the catalogue, at every moment it has, in every round of three minutes.

There is one router, and without it no request is served: each named moment is either that of its death or of its stop.

Law: the same seed and options give the same plan. A plan too short for all of them holds as many as fit, in the order
drawn; nothing is asked of it that a network or a cluster of this size does not have.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.fault_catalogue import FAULTS, Fault, Moment, Target
from kvbaton_proof.chaos.injuries import CHANGES
from kvbaton_proof.chaos.liars import false_registry, false_worker, lies

ROUND_S = 170.0
"""How long one round of all faults takes at the pace of `GAP_S` and more."""
FIRST_S = 2.0
LAST_S = 10.0
"""Before the end: the last fault has to be over."""
GAP_S = 3.5
"""Between two steps, at least; an engine takes about two seconds to start again."""
TOGETHER = 4
"""One step in so many begins with the next one."""

LASTS: dict[str, tuple[float, float]] = {
    "kill": (0.0, 1.0), "kill-router": (0.2, 1.0), "stop": (2.0, 5.0), "stop-router": (1.0, 3.0),
    "reconfigure": (2.0, 3.0), "partition": (2.5, 5.0), "one-way": (2.5, 5.0), "delay": (2.0, 4.0), "loss": (2.0, 4.0),
    "full-disk": (3.0, 5.0), "slow-reader": (3.0, 5.0), "clock-step": (2.0, 4.0), "strangers": (2.0, 4.0),
    "liar": (10.0, 14.0), "false-registry": (4.0, 6.0), "false-writes": (4.0, 6.0),
}  # fmt: skip
"""Seconds, from and to, of faults that last; the others take what they take."""
SOAK_S = 300.0
"""From here on the last P and the last D live from beginning to end: whether memory is level shows within a life."""
RESTARTING = ("kill", "drain", "reconfigure", "full-shm")
FALSE: Mapping[str, Sequence[str]] = {"false-registry": tuple(false_registry.LIES), "false-writes": false_worker.WRITES}
"""What sort of a lie it is."""
OF_DECODE = ("tp 2", "blocks of 8")
"""A D of other weights answers otherwise, as it should: only P is given them."""


class Size(msgspec.Struct, frozen=True):
    """Of the cluster."""

    prefills: int
    decodes: int

    def some(self, target: Target, rng: random.Random) -> str:
        role, count = ("p", self.prefills) if target is Target.PREFILL else ("d", self.decodes)
        return f"{role}{rng.randrange(count)}"

    def roles(self) -> dict[str, str]:
        """By name, of everybody."""
        engines = [f"p{n}" for n in range(self.prefills)] + [f"d{n}" for n in range(self.decodes)]
        return lies.roles(["router", "store", *engines])

    def spared(self) -> Size:
        """Without the last P and the last D, where there are others."""
        return Size(max(1, self.prefills - 1), max(1, self.decodes - 1))


def draw(seed: int, seconds: float, size: Size, faults: Sequence[str] | None = None) -> Plan:
    """A plan; ValueError for a fault that is not in the catalogue."""
    rng = random.Random(seed)
    chosen = _chosen(faults)
    usable_s = max(0.0, seconds - FIRST_S - LAST_S)
    rounds = max(1, round(seconds / ROUND_S))
    steps: list[Step] = []
    for _ in range(rounds):
        found = [step for fault in _dealt(chosen, rng) for step in _steps(fault, _size(fault, size, seconds), rng)]
        rng.shuffle(found)
        steps += found
    slots = max(1, int(usable_s / GAP_S) + 1)
    times = _times(min(len(steps), slots + slots // TOGETHER), usable_s, rng)
    placed = [msgspec.structs.replace(step, at_s=at_s) for at_s, step in zip(times, steps, strict=False)]
    return Plan(
        name="random", seed=seed, engine="embedded", prefills=size.prefills, decodes=size.decodes, seconds=seconds,
        steps=tuple(sorted(placed, key=lambda step: step.at_s)),
    )  # fmt: skip


STREAM_FAULTS = ("kill", "stop", "drain", "roll")
STREAM_GAP_S = 6.0
STREAM_STOP_S = (4.0, 6.0)
"""Longer than the router waits for a token that it is owed."""


def draw_streams(seed: int, seconds: float, size: Size, streams: int, faults: Sequence[str] | None = None) -> Plan:
    """Only what a stream must outlive, of one D at a time, so that there is another: in turn, and as often as fits."""
    rng = random.Random(seed)
    chosen = [name for name in STREAM_FAULTS if faults is None or name in faults]
    unknown = [name for name in faults or () if name not in STREAM_FAULTS]
    if unknown or not chosen:
        raise ValueError(f"faults: got {', '.join(unknown) or 'none'}, expected some of {', '.join(STREAM_FAULTS)}")
    if size.decodes < 2:
        raise ValueError(f"decode: got {size.decodes}, expected 2 or more: a stream that goes on needs another D")
    rounds = (_stream_round(chosen, number, size, rng) for number in itertools.count())
    count = max(1, int((seconds - FIRST_S) / STREAM_GAP_S))
    steps = itertools.islice(itertools.chain.from_iterable(rounds), count)
    placed = [msgspec.structs.replace(step, at_s=FIRST_S + n * STREAM_GAP_S) for n, step in enumerate(steps)]
    return Plan(
        name="streams", seed=seed, engine="embedded", prefills=size.prefills, decodes=size.decodes, seconds=seconds,
        streams=streams, steps=tuple(placed),
    )  # fmt: skip


def _stream_round(chosen: Sequence[str], number: int, size: Size, rng: random.Random) -> list[Step]:
    """Each fault once, every second time with a P that is killed too."""
    found: list[Step] = []
    for name in chosen:
        whom = "" if name == "roll" else f"d{(number + len(found)) % size.decodes}"
        moment = Moment.MID_STREAM if name in ("kill", "stop") else Moment.ANY
        lasts = round(rng.uniform(*STREAM_STOP_S), 1) if name == "stop" else 0.0
        has_p = number % 2 == 1 and name in ("kill", "roll")
        detail = f"with p{rng.randrange(size.prefills)}" if has_p else ""
        found.append(Step(0.0, name, whom, moment, lasts, detail))
    return found


def _size(fault: Fault, size: Size, seconds: float) -> Size:
    return size.spared() if seconds >= SOAK_S and fault.name in RESTARTING else size


def _chosen(faults: Sequence[str] | None) -> list[Fault]:
    by_name = {fault.name: fault for fault in FAULTS}
    for name in faults or ():
        if name not in by_name:
            raise ValueError(f"faults: got {name!r}, expected some of {', '.join(by_name)}")
    return [fault for fault in FAULTS if faults is None or fault.name in faults]


def _dealt(faults: Sequence[Fault], rng: random.Random) -> Iterator[Fault]:
    """The same faults, those of a router with their share of the moments; one alone has them all."""
    of_router = [fault for fault in faults if fault.targets == (Target.ROUTER,)]
    named = [moment for moment in Moment if moment is not Moment.ANY]
    rng.shuffle(named)
    for fault in faults:
        if fault in of_router and len(of_router) > 1:
            share = named[of_router.index(fault) :: len(of_router)]
            yield msgspec.structs.replace(fault, moments=(Moment.ANY, *share))
        else:
            yield fault


def _times(count: int, usable_s: float, rng: random.Random) -> Iterator[float]:
    """Even, but for a jitter, and now and then two at once."""
    slots = [number - number // TOGETHER for number in range(count)]
    gap_s = usable_s / max(1, slots[-1] if slots else 1)
    for slot in slots:
        yield round(FIRST_S + slot * gap_s + rng.uniform(0, 0.2) * gap_s, 2)


def _steps(fault: Fault, size: Size, rng: random.Random) -> list[Step]:
    """One of each moment, of each target in turn; where a fault has one moment only, one of each target."""
    targets = list(fault.targets)
    rng.shuffle(targets)
    if len(fault.moments) > 1:
        pairs = list(zip(fault.moments, itertools.cycle(targets), strict=False))
    else:
        pairs = [(Moment.ANY, target) for target in targets]
    return [_step(fault, moment, target, size, rng) for moment, target in pairs]


def _step(fault: Fault, moment: Moment, target: Target, size: Size, rng: random.Random) -> Step:
    low, high = LASTS.get(fault.name, (0.0, 0.0))
    whom, detail = _target(fault, target, size, rng), _detail(fault, target, rng)
    told = lies.drawn(whom, lies.Guise(detail), size.roles(), rng) if fault.name == lies.LIAR else ()
    return Step(
        at_s=0.0,
        fault=fault.name,
        target=whom,
        moment=moment,
        seconds=round(rng.uniform(low, high), 1),
        detail=detail,
        lies=told,
    )


def _target(fault: Fault, target: Target, size: Size, rng: random.Random) -> str:
    if fault.name == "full-shm":
        return size.some(rng.choice((Target.PREFILL, Target.DECODE)), rng)
    if target is Target.ROUTER:
        return "router"
    if target is Target.LINK:
        ends = [size.some(Target.PREFILL, rng), size.some(Target.DECODE, rng)]
        if rng.random() < 0.25:
            ends[rng.randrange(2)] = "router"
        rng.shuffle(ends)
        return "-".join(ends)
    return size.some(target, rng) if target in (Target.PREFILL, Target.DECODE) else ""


def _detail(fault: Fault, target: Target, rng: random.Random) -> str:
    if fault.name == "reconfigure":
        return rng.choice(list(CHANGES) if target is Target.PREFILL else OF_DECODE)
    if fault.name == lies.LIAR:
        return str(lies.guise_for(str(target), rng))
    if fault.name in FALSE:
        return rng.choice(FALSE[fault.name])
    return rng.choice(("forth", "back")) if fault.name == "clock-step" else ""
