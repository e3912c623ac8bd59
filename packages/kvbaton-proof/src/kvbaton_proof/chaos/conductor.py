"""One run on the embedded engine: a cluster, clients, a plan; then rest, and a verdict.

Laws: the load goes on until the last fault is over. The verdict is over what was seen, never over what was planned: a
step that could not be done is a problem. Whatever happens, processes, wires and sockets are gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.control import keyring
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton_proof.chaos import members, rest_oracle
from kvbaton_proof.chaos.breakpoints import BreakpointServer
from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.chaos_scene import CLIENTS, SLACK_S, WIRES, Load, Scene, make_prompts, stream_text
from kvbaton_proof.chaos.draw import STREAM_FAULTS
from kvbaton_proof.chaos.fault_catalogue import KNOWN
from kvbaton_proof.chaos.fleet import Fleet, FleetError
from kvbaton_proof.chaos.injuries import INJURIES, Done
from kvbaton_proof.chaos.judged_request import Board, Prompt, Verdict, ask
from kvbaton_proof.chaos.liars import lies
from kvbaton_proof.chaos.network import rooms
from kvbaton_proof.chaos.network.networks import Network
from kvbaton_proof.chaos.outcome import AtRest, Finds, Row, Sample, Seen, seen
from kvbaton_proof.chaos.streams.stream_load import EMBEDDED, StreamLoad, learned, moves_of

PROMPTS = 120
SLOW_ANSWERS, SLOW_TOKENS = 4, 120
WARM_S = 4.0
RECOVER_S = 45.0
HANDOFFS_ASKED = 4
STOP_AGAIN_S = 20.0
"""Longer than an orderly end takes."""
NEWS_S = 5.0
SAMPLE_S = 2.0
SAMPLES_MAX = 100_000
STEP_S_MAX = 300.0
"""The longest that one fault takes, its recovery included: starting an engine again takes at most `fleet.START_S`."""
SHORT_CLIENTS = 2
"""Beside long streams."""
STREAM_TEXTS, STREAM_TOKENS = 3, 240
BLOCK_TOKENS, SPARE_BLOCKS = 16, 12
PROBE_S = 1.0
"""Between two prompts that are computed anew, to compare with the silence after a cut."""
DECODES = "a D, beside which another lives"
_WIRE_FAULTS = frozenset({"partition", "one-way", "delay", "loss"})

Say = Callable[[str], None]


class Run:
    """One run of one plan."""

    def __init__(self, plan: Plan, network: Network, logs: Path, say: Say) -> None:
        self.plan = plan
        self.network = network
        self.logs = logs
        self.say = say
        self.board = Board()
        self.rows: list[Row] = []
        self.current: dict[str, None] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.begun_at = 0.0
        self.deadline_s = members.STREAM_DEADLINE_S if plan.streams else members.DEADLINE_S

    async def go(self) -> Seen:
        rng = random.Random(self.plan.seed)
        files = rest_oracle.shared_files()
        sizes = {path: path.stat().st_size for path in self.logs.glob("*.log")}  # of an earlier run into this folder
        with tempfile.TemporaryDirectory(prefix="kvbaton-chaos-") as folder:
            home = Path(folder)
            around = self._surroundings(home)
            specs = members.specs(self.plan.prefills, self.plan.decodes, self.network, rng)
            breakpoints = BreakpointServer(home / "breakpoints")
            await breakpoints.listen()
            try:
                async with Fleet(specs, self.network, around, self.logs, self.say) as fleet:
                    done = await self._with(fleet, breakpoints, rng)
            finally:
                await breakpoints.close()
        left = rest_oracle.left_files(files, rest_oracle.shared_files())
        for path in sorted(self.logs.glob("*.log")):
            left += rest_oracle.unexpected(path.stem, path.read_bytes()[sizes.get(path, 0) :].decode(errors="replace"))
        return msgspec.structs.replace(
            done, outcome=msgspec.structs.replace(done.outcome, problems=(*done.outcome.problems, *left))
        )

    def _surroundings(self, home: Path) -> members.Surroundings:
        keyring.mint(home / "keys", [*members.names(self.plan.prefills, self.plan.decodes), lies.OPERATORS_KEY])
        (home / "disk").mkdir()
        return members.Surroundings(
            keys=str(home / "keys"),
            breakpoints=str(home / "breakpoints"),
            disk=str(home / "disk"),
            has_rooms=rooms.are_allowed(),
            transport="auto" if self.network.kind == "namespaces" else "tcp",
            deadline_s=self.deadline_s,
            first_byte_s=members.STREAM_FIRST_BYTE_S if self.plan.streams else members.FIRST_BYTE_S,
            streams=self.plan.streams,
            stream_blocks=(self.plan.prompt_tokens + STREAM_TOKENS) // BLOCK_TOKENS + SPARE_BLOCKS,
            copies_percent=self.plan.copies_percent,
            streams_continue=self.plan.streams_continue,
        )

    async def _with(self, fleet: Fleet, breakpoints: BreakpointServer, rng: random.Random) -> Seen:
        names = " ".join(fleet.engines)
        self.say(f"plan {self.plan.name}, seed {self.plan.seed}: {len(self.plan.steps)} faults on {names}")
        (prompts, slow), _ = await asyncio.gather(
            asyncio.to_thread(_all_prompts, random.Random(self.plan.seed)), fleet.start_all()
        )
        timeout = aiohttp.ClientTimeout(None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = SHORT_CLIENTS if self.plan.streams else CLIENTS
            load = Load(fleet.router_url, prompts, self.board, rng, clients, self.deadline_s + SLACK_S)
            async with load.running():
                scene = Scene(fleet, self.network, breakpoints, load, self.board, session, rng, slow, self.say)
                if self.plan.streams:
                    scene.load.streams = await self._streams(scene)
                return await self._judged(scene)

    async def _streams(self, scene: Scene) -> StreamLoad:
        """With what one engine answers: a D that is asked whole, at its own door, and does all of it alone."""
        name = next(name for name, spec in scene.fleet.specs.items() if spec.role == "decode")
        self.say(f"{name} alone answers {STREAM_TEXTS} prompts in {len(EMBEDDED)} ways")
        texts = [stream_text(scene.rng, number, self.plan.prompt_tokens) for number in range(STREAM_TEXTS)]
        url, headers = scene.fleet.specs[name].url, scene.fleet.pass_for(name)
        asked = await learned(scene.session, url, headers, EMBEDDED, texts, STREAM_TOKENS)
        late_s = self.deadline_s + SLACK_S
        load = StreamLoad(scene.fleet.router_url, asked, self.plan.streams, self.board, late_s, scene.rng)
        load.board.must_go_on = self.plan.name == "streams"  # among other faults a router, or every D, may be gone
        return load

    async def _judged(self, scene: Scene) -> Seen:
        before = await self._warm(scene)
        self.begun_at = scene.now()
        watching = [asyncio.create_task(self._sample(scene.fleet)), asyncio.create_task(self._tell(scene))]
        try:
            scene.load.resume()
            async with scene.load.streams.running() if scene.load.streams is not None else contextlib.nullcontext():
                watching += [asyncio.create_task(self._probe(scene))] if scene.load.streams is not None else []
                await self._carry_out(scene)
            await scene.load.pause()
        finally:
            for task in watching:
                task.cancel()
        seconds = scene.now() - self.begun_at
        streams = None if scene.load.streams is None else scene.load.streams.board.counts(await self._moves(scene))
        self.say(f"{seconds:.0f} s: the load has ended; waiting until everybody is at rest")
        _, problems = await rest_oracle.at_rest(scene.fleet)
        handoffs = await self._handoffs(scene)
        problems += [f"after all of it, mode {mode}: no KV came over" for mode, count in handoffs.items() if not count]
        problems += await self._last_answers(scene)
        holds, more = await rest_oracle.at_rest(scene.fleet)
        problems += more
        finds = Finds(
            seconds=seconds,
            network=self.network.kind,
            rows=self.rows,
            at_rest={
                name: AtRest(life.count, before[name], rest_oracle.usage(life.pid), holds.get(name))
                for name, life in scene.fleet.lives.items()
            },
            samples=self.samples,
            deaths=scene.fleet.deaths,
            problems=[
                *scene.problems,
                *problems,
                *(scene.load.streams.board.said if scene.load.streams is not None else ()),
            ],
            handoffs=handoffs,
            moments=scene.moments,
            lies=lies.figures(scene.lies),
            stolen=scene.lies.stolen,
            streams=streams,
        )
        return seen(self.plan, self.board, finds, self.begun_at)

    async def _warm(self, scene: Scene) -> dict[str, rest_oracle.Usage | None]:
        """Some seconds of load, so that links, pools and caches are there; then rest, and what everybody has."""
        self.say("all are up; warming up")
        scene.load.resume()
        await asyncio.sleep(WARM_S)
        await scene.load.pause()
        _, problems = await rest_oracle.at_rest(scene.fleet)
        if problems:
            raise FleetError(f"not at rest before the first fault: {'; '.join(problems)}")
        return {name: rest_oracle.usage(scene.fleet.pid(name)) for name in scene.fleet.specs}

    # --- the plan

    async def _carry_out(self, scene: Scene) -> None:
        tasks = []
        try:
            for step in sorted(self.plan.steps, key=lambda step: step.at_s):
                await asyncio.sleep(max(0.0, self.begun_at + step.at_s - scene.now()))
                tasks.append(asyncio.create_task(self._injure(scene, step)))
            await asyncio.sleep(max(0.0, self.begun_at + self.plan.seconds - scene.now()))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _injure(self, scene: Scene, step: Step) -> None:
        key = WIRES if step.fault in _WIRE_FAULTS else step.target or step.fault
        key = DECODES if self.plan.streams and step.fault in STREAM_FAULTS else key
        async with scene.locks[key]:
            begun_at, deaths = scene.now(), len(scene.fleet.deaths)
            title = step.title()
            self.current[title] = None
            self.say(f"{begun_at - self.begun_at:6.1f} s  {title}")
            try:
                async with asyncio.timeout(STEP_S_MAX):
                    done = await INJURIES[step.fault](scene, step)
                    well_at = await self._well(scene, done)
            except (OSError, ValueError, RuntimeError, LookupError, TimeoutError) as error:
                scene.problems.append(f"{title}: could not be done: {type(error).__name__}: {error}")
                done, well_at = Done(scene.now(), note=f"could not be done: {error}"), None
            finally:
                self.current.pop(title, None)
            counts = self.board.between(begun_at, scene.now())
            self.rows.append(
                Row(
                    at_s=round(begun_at - self.begun_at, 2), title=title, fault=step.fault,
                    promises=KNOWN[step.fault].promises, requests=counts.requests, right=counts.right,
                    errors=counts.errors, wrong=counts.wrong, late=counts.late,
                    dead=len(scene.fleet.deaths) - deaths,
                    left_over=None,  # others are asked for at the same time: seen at rest, at the end
                    recover_s=None if well_at is None else round(max(0.0, well_at - done.ended_at), 2),
                    note=done.note, seconds=round(scene.now() - begun_at, 2),
                )
            )  # fmt: skip

    async def _well(self, scene: Scene, done: Done) -> float | None:
        """When whoever was hurt took part in a right answer again; it is listed by now, so this takes seconds."""
        until = scene.now() + RECOVER_S
        while scene.now() < until:
            found = self.board.right_since(done.ended_at, done.who)
            if found is not None:
                return found
            await asyncio.sleep(0.1)
        return None

    async def _last_answers(self, scene: Scene) -> list[str]:
        """After all of it: every mode, through the router; then each D by itself."""
        problems = []
        doors: list[tuple[str, Mode | None]] = [(members.ROUTER, mode) for mode in Mode for _ in range(4)]
        doors += [(name, None) for name in scene.fleet.engines]
        for number, (name, mode) in enumerate(doors):
            prompt, _ = scene.load.prompt(scene.rng)
            way = scene.way(name, mode, stream=number % 2 == 0)
            found = await ask(scene.session, self.board, prompt, way)
            if found.verdict is not Verdict.RIGHT:
                problems.append(f"after all of it, {name} {mode or ''}: {found.verdict} {found.kind}")
        return problems

    async def _handoffs(self, scene: Scene) -> dict[str, int]:
        """By mode: how many of some prompts, which nobody has, came from P to D. A right answer alone does not say so:
        D computes what does not come."""
        found = {}
        for mode in Mode:
            before = await self._delivered(scene)
            for prompt in scene.load.longest(HANDOFFS_ASKED):
                await ask(scene.session, self.board, prompt, scene.way(members.ROUTER, mode))
            found[str(mode)] = await self._delivered(scene) - before
        return found

    async def _delivered(self, scene: Scene) -> int:
        stats = [await scene.fleet.ask(name, "/stats") for name in scene.fleet.engines]
        return sum(each["delivered_total"] for each in stats if each is not None)

    async def _moves(self, scene: Scene) -> dict[str, int]:
        """Streams that went on at another D, by reason, as the router counts them."""
        stats = await scene.fleet.ask(members.ROUTER, "/stats") or {}
        return moves_of(stats)

    # --- looking on

    async def _sample(self, fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for name, life in fleet.lives.items():
                now = rest_oracle.usage(life.pid) if life.runs else None
                kept = self.samples.setdefault(name, [])
                if now is not None and len(kept) < SAMPLES_MAX:
                    at_s = round(loop.time() - self.begun_at, 1)
                    kept.append(Sample(at_s, life.count, now.fds, now.threads, now.rss_mib))
            await asyncio.sleep(SAMPLE_S)

    async def _probe(self, scene: Scene) -> None:
        """What it costs a D, among the same streams, to compute a stream's prompt and half of its answer anew."""
        assert scene.load.streams is not None
        names = [name for name, spec in scene.fleet.specs.items() if spec.role == "decode"]
        for number in itertools.count():
            await asyncio.sleep(PROBE_S)
            name, text = names[number % len(names)], stream_text(scene.rng, number, self.plan.prompt_tokens)
            body = {"prompt": text + "a" * (STREAM_TOKENS // 2), "max_tokens": 1, "cache_salt": f"probe{number}"}
            url, headers = scene.fleet.specs[name].url, scene.fleet.pass_for(name)
            began_at = scene.now()
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with (
                    asyncio.timeout(self.deadline_s),
                    scene.session.post(url + BodyKind.COMPLETION.value, json=body, headers=headers) as answer,
                ):
                    await answer.read()
                    if answer.status == 200:
                        scene.load.streams.board.prefills.append(scene.now() - began_at)

    async def _tell(self, scene: Scene) -> None:
        while True:
            await asyncio.sleep(NEWS_S)
            counts = self.board.counts()
            now = ", ".join(self.current) or "no fault"
            said = f"{counts.right} right, {counts.errors} errors, {counts.wrong} wrong, {counts.late} late"
            self.say(f"{scene.now() - self.begun_at:6.1f} s  {counts.requests} requests, {said}; {now}")


def _all_prompts(rng: random.Random) -> tuple[list[Prompt], list[Prompt]]:
    prompts = make_prompts(rng, PROMPTS)
    texts = [f"at length, {number}: {prompts[number].text[:60]}" for number in range(SLOW_ANSWERS)]
    answers = reference_answers(texts, SLOW_TOKENS)
    return prompts, [Prompt(text, right, SLOW_TOKENS) for text, right in zip(texts, answers, strict=True)]


def run(plan: Plan, network: Network, logs: Path, say: Say) -> Seen:
    """Carry out a plan on a network whose host "client" this process is. The network is closed afterwards."""
    try:
        return asyncio.run(_until_told(Run(plan, network, logs, say)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # told to stop
    finally:
        network.close()


async def _until_told(run: Run) -> Seen:
    """SIGTERM and Ctrl-C end it, in order; told again where something under way swallowed the first word."""
    told = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, told.set)
    going, asked = asyncio.create_task(run.go()), asyncio.create_task(told.wait())
    await asyncio.wait((going, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    while not going.done():
        going.cancel()
        await asyncio.wait((going,), timeout=STOP_AGAIN_S)
    return going.result()
