"""The conformance suite as pytest runs it: a test for each case, and one for each seed of interleavings.

Law: a case that was not in time while its process stood still is run again, and nothing else is. What came of each goes
with its report, as figures. `kvbaton conformance vllm` starts it, in vLLM's Python (see `conformance_run`).

Random schedules of two engines: arrivals, aborts, pressure, held and failed copies, lost frames, restarts, resets.

Laws: all choices come from the printed seed (threads and sockets are real, so a replay is the same plan, not the same
nanosecond). Afterwards everything is let go, and the books must balance: each request ended, and ended right.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest

from kvbaton_proof.conformance import case_registry, stores
from kvbaton_proof.conformance.case_registry import (
    MODES,
    Case,
    CaseVerdict,
    demand_no_faults,
    kind_of,
    unstalled,
    verdict_of,
)
from kvbaton_proof.conformance.configs import STATE, EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.conformance_run import VERDICT, wanted_cases, wanted_seeds
from kvbaton_proof.conformance.lab import (
    Lab,
    d_params,
    demand,
    key_directory,
    p_params,
    prompt_of,
    router_ticket,
)

COLLECT_EVERY = 20
_runs = itertools.count(1)

Note = Callable[[str, object], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", wanted_cases(metafunc.config), ids=lambda case: case.name)
    elif "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", wanted_seeds(metafunc.config))


@pytest.fixture(autouse=True)
def tidy() -> None:
    """Engines of earlier cases are cyclic garbage, with caches; a full collection takes as long as a case."""
    if next(_runs) % COLLECT_EVERY == 0:
        gc.collect()


def test_case(case: Case, record_property: Note) -> None:
    _judge(unstalled(lambda: case_registry.run_case(case)), record_property)


def test_seed(seed: int, record_property: Note) -> None:
    _judge(unstalled(lambda: run_seed(seed)), record_property)


def _judge(verdict: CaseVerdict, note: Note) -> None:
    note(VERDICT, msgspec.json.encode(verdict).decode())
    if not verdict.holds:
        pytest.fail(f"{verdict.what}\n{verdict.trace}", pytrace=False)


PATIENCE_S = 12.0
_LENGTH_MAX = 44
_DEVICE_S = (0.0, 0.0, 0.0, 0.0005, 0.003)
"""That a step waits for its device, while copies go on: what is in flight may run after what was scheduled later."""


@dataclass
class InterleavePlan:
    """What a seed decides once."""

    p: EngineShape
    d: EngineShape
    settings: dict[str, Any]
    actions: int
    weights: dict[str, int]
    copies: dict[str, float]
    frames_lost: float
    store: dict[str, tuple[str, ...]] = field(default_factory=dict)  # what may become of each call; empty: no store

    @classmethod
    def of(cls, rng: random.Random) -> InterleavePlan:
        windows = rng.choice(((0, 0), (0, 0), (0, 8), (0, 5, 0, 5)))
        caching, chunk = rng.random() < 0.7, rng.choice((8, 12, 16, 64))
        scale = len(set(windows))

        roles = rng.choice((("kv_both", "kv_both"), ("kv_producer", "kv_consumer")))

        def shape(least: int, most: int, role: str) -> EngineShape:
            return EngineShape(
                role=role,
                blocks=scale * rng.randint(least, most) + 1,
                windows=windows,
                ranks=rng.choice((1, 1, 1, 2)),
                chunk_tokens=chunk,
                seqs=rng.choice((2, 4, 8)),
                prefix_caching=caching,
                pipelined=rng.random() < 0.5,
                aggregated=rng.random() < 0.8,
                policy=rng.choice(("recompute", "recompute", "fail")),
            )

        lease_s = rng.choice((0.15, 0.3, 1.0))
        settings = {
            "transport": rng.choice(("tcp", "shm", "auto")),
            "lease_s": lease_s,
            "max_hold_s": lease_s + rng.choice((0.05, 0.4)),
            "transfer_timeout": rng.choice((0.2, 0.6)),
            "defer_timeout": rng.choice((0.2, 0.6)),
            "claim_timeout": rng.choice((0.2, 0.6)),
        }
        weights = {
            "turn": 40,
            "arrive": rng.randint(6, 14),
            "alone": rng.randint(0, 5),
            "abort": rng.randint(0, 4),
            "restart p": rng.choice((0, 0, 0, 1)),
            "reset": rng.choice((0, 0, 1)),
            "wake": 6,
        }
        faulty = rng.random() < 0.6
        copies = {"wait": rng.choice((0.0, 0.3, 0.7)), "fail": rng.choice((0.0, 0.05, 0.3))} if faulty else {}
        lost = rng.choice((0.0, 0.0, 0.05, 0.3))
        p, d = shape(18, 40, roles[0]), shape(18, 30, roles[1])
        return cls(p, d, settings, rng.randint(40, 140), weights, copies, lost)


def with_states(plan: InterleavePlan, rng: random.Random) -> InterleavePlan:
    """Some plans are of models with states; by a chance of its own, so that the others stay the same."""
    if rng.random() < 0.8:
        return plan
    windows = rng.choice(((0, STATE), (STATE, 0, STATE), (STATE,), (0, STATE, 8)))
    more = 20 * (len(windows) - 1)
    plan.p = msgspec.structs.replace(plan.p, windows=windows, blocks=plan.p.blocks + more)
    plan.d = msgspec.structs.replace(plan.d, windows=windows, blocks=plan.d.blocks + more, ranks=plan.p.ranks)
    return plan


def with_store(plan: InterleavePlan, rng: random.Random) -> InterleavePlan:
    """Some plans have a shared store between the engines; by a chance of its own, so that the others stay the same."""
    if rng.random() < 0.5 or any(plan.p.windows):
        return plan
    plan.p = msgspec.structs.replace(plan.p, policy="recompute", role="kv_both")  # as a producer it would be refused
    plan.d = msgspec.structs.replace(plan.d, policy="recompute")
    often = ("go",) * rng.choice((1, 3, 9))
    plan.store = {
        "exists": (*often, "wait", "raise"),
        "get": (*often, "wait", "raise", "part", "none"),
        "put": (*often, "wait", "raise", "refuse"),
    }
    plan.settings["store_timeout"] = rng.choice((0.1, 0.3))
    plan.weights["store"] = 8
    return plan


@dataclass
class World:
    """One seed's engines and what is known of their requests."""

    lab: Lab
    rng: random.Random
    plan: InterleavePlan
    granted: list[tuple[LabEngine, str, list[int]]] = field(default_factory=list)  # pulls whose P has not ended yet
    live: list[tuple[LabEngine, str]] = field(default_factory=list)

    def act(self, what: str, tap: stores.Copies, calls: stores.Calls) -> None:
        doing: dict[str, Callable[[], None]] = {
            "turn": self.turn,
            "arrive": self.arrive,
            "alone": self.alone,
            "abort": self.abort,
            "restart p": self.restart_p,
            "reset": self.reset,
            "wake": tap.wake,
            "store": partial(self.trouble, calls),
        }
        doing[what]()

    def turn(self) -> None:
        """Engines go at their own pace; a finished prefill finds its D sooner or later."""
        for name in self.rng.choice((("p0", "d0"), ("d0", "p0"), ("p0",), ("d0",))):
            self.lab.engines[name].step()
        if self.rng.random() < 0.7:
            self.pass_on()
        if self.rng.random() < 0.3:
            time.sleep(0.0005)

    def prompt(self) -> list[int]:
        """Few beginnings, so that caches hit; many ends."""
        base = prompt_of(_LENGTH_MAX, self.rng.randrange(3))[: self.rng.randint(1, _LENGTH_MAX)]
        return base + prompt_of(self.rng.randint(0, 6), self.rng.randrange(4))

    def arrive(self) -> None:
        p, d = self.lab.engines["p0"], self.lab.engines["d0"]
        mode, prompt, most = self.rng.choice(MODES), self.prompt(), self.rng.randint(1, 12)
        if mode == "pull":
            name = p.add(prompt, p_params("pull"), max_tokens=1, eos_first=self.rng.random() < 0.1)
            self.granted.append((p, name, prompt))
            self.live.append((p, name))
            return
        ticket = router_ticket()
        sides = [(p, p_params(mode, ticket), 1), (d, d_params(mode, ticket), most)]
        self.rng.shuffle(sides)
        for engine, params, tokens in sides:
            if self.rng.random() < 0.95:  # now and then a router reaches one side only
                self.live.append((engine, engine.add(prompt, params, max_tokens=tokens)))
            if self.rng.random() < 0.3:
                self.turn()

    def pass_on(self) -> None:
        for each in list(self.granted):
            engine, name, prompt = each
            outcome = engine.outcomes[name]
            if outcome.reason is None and not engine.closed:
                continue
            if outcome.params is None or self.rng.random() < 0.5:
                if outcome.params is None:
                    self.granted.remove(each)
                continue
            self.granted.remove(each)
            d = self.lab.engines["d0"]
            for _ in range(2 if self.rng.random() < 0.1 else 1):  # a replay, or n > 1
                at_d = d.add(prompt, dict(outcome.params), max_tokens=self.rng.randint(1, 12))
                self.live.append((d, at_d))

    def alone(self) -> None:
        engine = self.lab.engines[self.rng.choice(("p0", "d0"))]
        self.live.append((engine, engine.add(self.prompt(), max_tokens=self.rng.randint(1, 16))))

    def abort(self) -> None:
        self.live = [(e, n) for e, n in self.live if not e.closed and e.outcomes[n].reason is None]
        if self.live:
            engine, name = self.rng.choice(self.live)
            engine.abort(name, mid_step=self.rng.random() < 0.4)

    def restart_p(self) -> None:
        self.lab.engine("p0", self.plan.p, **self.plan.settings)

    def trouble(self, calls: stores.Calls) -> None:
        """The store behaves, misbehaves, or loses something."""
        if self.rng.random() < 0.4:
            calls.release()
        else:
            calls.set(**{kind: self.rng.choice(verdicts) for kind, verdicts in self.plan.store.items()})
        if self.rng.random() < 0.1:
            self.lab.stores[-1].forget(self.rng.randint(1, 8))

    def reset(self) -> None:
        self.lab.engines[self.rng.choice(("p0", "d0"))].scheduler.reset_prefix_cache(reset_connector=True)


def run_seed(seed: int) -> CaseVerdict:
    """One schedule from its seed to rest."""
    from kvbaton.engines.side import guard

    rng = random.Random(seed)
    plan = with_states(InterleavePlan.of(rng), random.Random(f"states {seed}"))
    plan, lab, begun = with_store(plan, random.Random(f"store {seed}")), Lab(), time.monotonic()
    faults, what, kind, trace = sum(guard.faults.values()), "", "", ""
    try:
        with stores.copies() as tap, stores.frames() as wire, stores.calls() as calls:
            _play(World(lab, rng, plan), tap, wire, calls)
            tap.release()
            calls.release()
            wire.loses = lambda control, worker: False
            lab.settle(PATIENCE_S)
        _balanced(lab)
        demand_no_faults(faults)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this seed's verdict
        what, kind = f"{type(error).__name__}: {error}", kind_of(error)
        trace = traceback.format_exc(limit=-12)
    finally:
        with contextlib.suppress(Exception):
            lab.close()
    return verdict_of(f"seed {seed}", lab, time.monotonic() - begun, faults, what=what, kind=kind, trace=trace)


def _play(world: World, tap: stores.Copies, wire: stores.Frames, calls: stores.Calls) -> None:
    plan, outside = world.plan, random.Random(world.rng.random())  # asked by other threads
    if plan.store:
        world.lab.stores.append(stores.LabStore(key_directory()))
        plan.settings["store"] = world.lab.stores[-1].url
    device = random.Random(plan.actions)
    world.lab.before_executing = lambda: time.sleep(device.choice(_DEVICE_S))
    world.lab.duo(plan.p, plan.d, **plan.settings)

    def decide(copy: Any) -> str:
        drawn = outside.random()
        for verdict, share in plan.copies.items():
            if drawn < share:
                return verdict
            drawn -= share
        return "go"

    tap.decide = decide
    wire.loses = lambda control, worker: outside.random() < plan.frames_lost
    kinds, weights = list(plan.weights), list(plan.weights.values())
    for _ in range(plan.actions):
        world.act(world.rng.choices(kinds, weights)[0], tap, calls)
    for _ in range(60):
        world.pass_on()


def _balanced(lab: Lab) -> None:
    """Every request ended, and every answer is right as far as it goes."""
    from kvbaton_proof.conformance.conformance_oracle import EOS, answer

    for name, engine in lab.engines.items():
        for each, outcome in engine.outcomes.items():
            right = answer(outcome.prompt, len(outcome.tokens))
            if each in engine.first_eos:
                right = [EOS] * len(outcome.tokens)
            refused = (outcome.params or {}).get("refused")  # for want of room to pin: its answer is nobody's
            demand(refused or outcome.tokens == right, f"{name} {each}: {outcome.tokens}, a single engine says {right}")
            allowed = {"length", "stop", "abort"} | ({"error"} if engine.shape.policy == "fail" else set())
            demand(outcome.reason in allowed, f"{name} {each} ended as {outcome.reason}")
        most = 2 if lab.stores else 1  # the store is a second source
        over = {each: n for each, n in engine.watch.received.items() if n > most}
        demand(not over, f"{name}: reported more often than loaded {over}")
