"""How each fault of the standard plan is applied to a P and a D on real vLLM, the same for both connectors.

Laws: a step counts every request that it makes, and waits for all of them. It returns when the fault is over: what was
killed serves again, what was stopped goes on. It leaves no task and no connection behind, but those it hands over to be
closed when the row is judged.

The standard plan: what is done to a P and a D on real vLLM, one thing after the other, whatever connector they have.

Laws: the same steps in the same order for every connector. `at_s` is the order, not a time: a step begins when the
engines are well again after the one before, or were started anew. A mutation of parameters is pure: it names what a
part of them is for (source, blocks), and the connector says in which field it keeps that; kvbaton keeps all of it in
its ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvbaton.engines.vllm.launch.launching import HOST
from kvbaton_proof.chaos import strangers
from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.fault_catalogue import Moment
from kvbaton_proof.chaos.vllm.vllm_judge import LONG, USUAL, Pair, request_id
from kvbaton_proof.rig.client import Answer, Tally, ask, both_legs, prefilled
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
ANYBODYS = ("only the flag", "both flags")
"""Those for which no field has to be known."""

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
    can = [step for step in _STEPS if step.fault != "poison" or step.detail in ANYBODYS or _takes_all(connector)]
    chosen = [step for step in can if faults is None or step.fault in faults or step.title() in faults]
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


def _takes_all(connector: str) -> bool:
    return CONNECTORS[connector].takes_all_poison


def poisoned(name: str, connector: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What P gave, changed as `name` says; KeyError if there is no such change."""
    source, blocks = CONNECTORS[connector].source_field, CONNECTORS[connector].blocks_field
    missing = sorted({source, blocks} - {""} - set(params))
    if missing:
        raise ValueError(f"kv_transfer_params: P gave no {missing[0]}; is this {connector}?")
    return MUTATIONS[name](dict(params), source, blocks)


DEADLINE_S = 30.0
CROWDED_DEADLINE_S = 60.0  # where requests queue because there are many, not because anything is wrong
POISON_DEADLINE_S = 15.0
CLIENTS = 8
RETRY_S = 0.5
LOADED_S = 4.0
MID_COPY = 8
PENDING_S = 2.0
HELD = 32
FREE_S = 45.0
LATE = 24
LATE_S = 36.0  # NIXL's lease is 30 s, kvbaton's 15 s: both by default
REUSES = 64
ABORT_CLIENTS, ABORT_LOAD_S, ABORT_SHARE, ABORT_AFTER_S = 32, 10.0, 0.7, 1.5
FLOOD = 160
REPLAYS = 8
RESETS, RESET_S = 12, 0.5
RESET_KINDS: Sequence[Mapping[str, str]] = ({}, {"reset_running_requests": "true"}, {"reset_external": "true"})
STRANGERS_S, IDLE = 5.0, 50
SETTLE_S = 1.0  # an engine that is killed by a request says so a moment later


@dataclass(slots=True)
class Scene:
    """One step under way."""

    pair: Pair
    step: Step
    rng: random.Random
    later: contextlib.AsyncExitStack  # closed once the row is judged
    tally: Tally = field(default_factory=Tally)
    note: str = ""
    problems: list[str] = field(default_factory=list)  # broken promises that are no count of a row
    late_s: float = field(default_factory=lambda: LATE_S)
    clients: int = ABORT_CLIENTS
    share: float = ABORT_SHARE  # of the clients that hang up

    async def request(self, number: int, deadline_s: float = DEADLINE_S) -> bool:
        """Both legs of one prompt, counted."""
        pair = self.pair
        answer = await both_legs(
            pair.session, pair.p.url, pair.d.url, pair.prompts[number], deadline_s=deadline_s,
            request_id=request_id(pair),
        )  # fmt: skip
        return pair.count(self.tally, answer, number)

    async def prefill(self, number: int) -> dict[str, Any] | None:
        """P's leg; what it gives for D, nothing if its connector needs no words. None: a failure, which is counted."""
        pair = self.pair
        answer = await prefilled(
            pair.session, pair.p.url, pair.prompts[number], deadline_s=DEADLINE_S, request_id=request_id(pair)
        )
        if answer.error:
            self.tally.count(answer, ())
            return None
        return answer.params or {}

    async def decode(self, number: int, params: object, deadline_s: float = DEADLINE_S) -> Answer:
        """D's leg, counted."""
        pair = self.pair
        answer = await ask(
            pair.session, pair.d.url, pair.prompts[number], params=params, deadline_s=deadline_s,
            request_id=request_id(pair),
        )  # fmt: skip
        pair.count(self.tally, answer, number)
        return answer

    async def prefills(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        found = await asyncio.gather(*map(self.prefill, numbers))
        return {number: params for number, params in zip(numbers, found, strict=True) if params is not None}

    async def reuse(self) -> None:
        """Other prompts on P alone, all at once and for several tokens: vLLM gives out first what was freed last, so
        that fewer would take turns in a few blocks and leave the rest of the pool as it was.
        """
        pair = self.pair
        answers = await asyncio.gather(*(
            ask(pair.session, pair.p.url, pair.prompts[number][::-1], deadline_s=CROWDED_DEADLINE_S)
            for number in range(REUSES)
        ))  # fmt: skip
        for answer in answers:
            if answer.error:
                self.tally.count(answer, ())

    @contextlib.asynccontextmanager
    async def load(self, clients: int = CLIENTS, deadline_s: float = DEADLINE_S) -> AsyncIterator[None]:
        """Clients that never stop asking; at the end each ends its request."""
        over = asyncio.Event()

        async def client(number: int) -> None:
            turn = number
            while not over.is_set():
                if not await self.request(turn % USUAL, deadline_s):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(over.wait(), RETRY_S)
                turn += clients

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)


Do = Callable[[Scene], Awaitable[None]]


async def kill(scene: Scene) -> None:
    if scene.step.moment is Moment.MID_COPY:
        await _kill_mid_copy(scene)
    elif scene.step.moment is Moment.BEFORE_CLAIM:
        await _kill_before_claim(scene)
    else:
        async with scene.load():
            await asyncio.sleep(LOADED_S)
            await scene.pair.restart(scene.step.target)


async def _kill_mid_copy(scene: Scene) -> None:
    """P falls silent with eight prompts prefilled, D is asked for all of them, and then P is gone."""
    pair = scene.pair
    async with scene.load() if scene.step.detail == UNDER_LOAD else contextlib.nullcontext():
        if scene.step.detail == UNDER_LOAD:
            await asyncio.sleep(LOADED_S)
        handed = await scene.prefills(range(MID_COPY))
        pair.p.send(signal.SIGSTOP)
        asked = [asyncio.create_task(scene.decode(number, params)) for number, params in handed.items()]
        await asyncio.sleep(PENDING_S)
        pair.p.kill()
        told = await asyncio.gather(*asked)
    scene.note = f"answers took up to {max((each.seconds for each in told), default=0):.1f} s"
    await pair.restart(P)


async def _kill_before_claim(scene: Scene) -> None:
    """D is gone before it asks for any of what P keeps for it."""
    pair, loop = scene.pair, asyncio.get_running_loop()
    handed = await scene.prefills(range(HELD))
    begun, before = loop.time(), await pair.used(P)
    pair.d.kill()
    starting = asyncio.create_task(pair.restart(D))
    try:
        while await pair.used(P) != 0 and loop.time() < begun + FREE_S:
            await asyncio.sleep(0.2)
        scene.note = (
            f"P held {before} blocks for {len(handed)} prompts, and was free of them {loop.time() - begun:.0f} s after"
        )
    finally:
        await starting


async def stop(scene: Scene) -> None:
    if scene.step.moment is Moment.MID_COPY:
        await _stop_mid_copy(scene)
        return
    async with scene.load():
        await asyncio.sleep(LOADED_S)
        await _stopped(scene)
        await asyncio.sleep(LOADED_S)


async def _stopped(scene: Scene) -> None:
    engine = scene.pair.engines[scene.step.target]
    engine.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(scene.step.seconds)
    finally:
        engine.send(signal.SIGCONT)


async def _stop_mid_copy(scene: Scene) -> None:
    """P falls silent for longer than clients wait; D has eight prompts of it by then."""
    pair = scene.pair
    handed = await scene.prefills(range(MID_COPY))
    pair.p.send(signal.SIGSTOP)
    try:
        over = asyncio.create_task(asyncio.sleep(scene.step.seconds))
        told = await asyncio.gather(*(scene.decode(number, params) for number, params in handed.items()))
        slowest = max((each.seconds for each in told), default=0)
        await over
        kept = await pair.used(D)
    finally:
        pair.p.send(signal.SIGCONT)
    scene.note = f"slowest {slowest:.1f} s; D held {kept} blocks when P went on"


async def late_decode(scene: Scene) -> None:
    """D is asked when the lease is over and others have written over P's blocks."""
    loop = asyncio.get_running_loop()
    handed = await scene.prefills(range(LATE))
    begun = loop.time()
    await asyncio.sleep(scene.late_s)
    await scene.reuse()
    scene.note = f"D asked {loop.time() - begun:.0f} s after P"
    await asyncio.gather(*(scene.decode(number, params) for number, params in handed.items()))


async def abort(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + ABORT_LOAD_S
    left = 0

    async def client(number: int) -> None:
        nonlocal left
        turn = number
        while loop.time() < end:
            leaves = scene.rng.random() < scene.share
            patience_s = scene.rng.uniform(0.0, ABORT_AFTER_S) if leaves else DEADLINE_S + 1
            task = asyncio.create_task(scene.request(turn % USUAL))
            done, _ = await asyncio.wait([task], timeout=patience_s)
            if not done:
                left += 1
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            turn += scene.clients

    await asyncio.gather(*map(client, range(scene.clients)))
    scene.note = f"{left} more hung up"


async def reset(scene: Scene) -> None:
    """Again and again under load: plainly, with all that runs thrown out, and with all that the connector holds. vLLM
    may refuse while blocks are in use; what it does not refuse must hurt nobody."""
    url = f"{scene.pair.engines[scene.step.target].url}/reset_prefix_cache"
    told: Counter[str] = Counter()
    async with scene.load():
        for number in range(RESETS):
            await asyncio.sleep(RESET_S)
            how = RESET_KINDS[number % len(RESET_KINDS)]
            told["asked"] += 1
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError, AttributeError):
                async with asyncio.timeout(DEADLINE_S), scene.pair.session.post(url, params=how) as answer:
                    told["done"] += bool((await answer.json(content_type=None)).get("success"))
    scene.note = f"{told['done']} of {told['asked']} resets done, others refused"


async def flood(scene: Scene) -> None:
    await asyncio.gather(*(scene.request(number % USUAL, CROWDED_DEADLINE_S) for number in range(FLOOD)))


async def exhausted(scene: Scene) -> None:
    await asyncio.gather(*(scene.request(USUAL + number, CROWDED_DEADLINE_S) for number in range(LONG)))


async def replay(scene: Scene) -> None:
    numbers = list(range(REPLAYS))
    handed = await scene.prefills(numbers)
    if scene.step.detail == USED:
        await asyncio.gather(*(scene.decode(number, params) for number, params in handed.items()))
        await scene.reuse()
        shown = handed
    else:
        shown = {number: handed[number ^ 1] for number in numbers if number ^ 1 in handed}
    await asyncio.gather(*(scene.decode(number, params) for number, params in shown.items()))


async def poison(scene: Scene) -> None:
    """Then what P really gave: a request that was not forged is served, and P need not keep its prompt."""
    number = scene.rng.randrange(USUAL)
    params = await scene.prefill(number)
    if params is None:
        return
    bad = poisoned(scene.step.detail, scene.pair.connector, params)
    told = await scene.decode(number, bad, POISON_DEADLINE_S)
    scene.note = "no answer" if told.late else told.error or f"answered in {told.seconds:.1f} s"
    await asyncio.sleep(SETTLE_S)
    if await scene.pair.d.is_well(scene.pair.session):
        await scene.decode(number, params, POISON_DEADLINE_S)


async def visited(scene: Scene) -> None:
    """Strangers at the ports where engines speak to each other, while others are served; then a D that is new there."""
    pair = scene.pair
    ports = [(HOST, engine.side_port) for engine in pair.engines.values()]
    async with scene.load(4):
        told = await strangers.visit(ports, STRANGERS_S, scene.rng)
        await scene.later.enter_async_context(strangers.crowd(ports, IDLE))
    let_in = told[strangers.LET_IN]
    scene.note = f"{told['visits']} visits, {let_in} let in, {IDLE} idle connections to each"
    if let_in:
        scene.problems.append(f"strangers were let in {let_in} times")
    await pair.restart(D)


async def reconfigure(scene: Scene) -> None:
    """P comes back with other weights under the same name; then with the right ones."""
    pair = scene.pair
    pair.serve_weights(1)
    try:
        await pair.restart(P)
        await asyncio.gather(*(scene.request(number) for number in range(LATE)))
    finally:
        pair.serve_weights(0)
    await pair.restart(P)


DO: Mapping[str, Do] = {
    "kill": kill, "stop": stop, "late-decode": late_decode, "abort": abort, "flood": flood, "exhausted": exhausted,
    "reset": reset, "replay": replay, "poison": poison, "strangers": visited, "reconfigure": reconfigure,
}  # fmt: skip
