"""Whether a P and a D are well again after a fault, and what is left in them.

Laws: well means: both healthy, and four fresh requests answered rightly whose KV was handed over, not computed again.
At rest means that neither holds a block or a pin. Both are waited for, and for so long; then the row says what is not.

A P and a D on real vLLM, with any connector, and what one engine that hands nothing over answers.

Law: prefix caching is off, so that every request moves its KV; the servers are those of `rig.servers`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.engines.vllm.launch import launching
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.fault_catalogue import KNOWN
from kvbaton_proof.chaos.outcome import Row
from kvbaton_proof.rig import meters, oracle, servers
from kvbaton_proof.rig.client import Answer, Prompt, Tally, both_legs, prompt_of
from kvbaton_proof.rig.connectors import CONNECTORS, D, P
from kvbaton_proof.rig.oracle import Right
from kvbaton_proof.rig.server import READY_S, Engine, EngineError
from kvbaton_proof.rig.servers import ALONE, Site, Spec, with_news

BLOCKS = 128
"""KV blocks of P and of D, of 128 tokens: so few that what is let go is soon computed over."""
USUAL, LONG = 64, 16
LONG_TOKENS = 1500  # twelve blocks: eleven such prompts are more than there is
LEARN_AT_ONCE = 8
LEARN_S = 300.0
MODEL = "weights"
MODEL_SEEDS = (1, 7)  # the weights of all, and others of the same shape
BATON_TIMES: Mapping[str, float] = {"claim_timeout": 8.0, "transfer_timeout": 10.0}
"""Shorter than kvbaton's own, as an operator sets them whose clients wait 30 s; NIXL has no such settings."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Pair:
    """P and D, the prompts they are asked, and the answers that are right."""

    connector: str
    directory: Path
    engines: Mapping[str, Engine]
    session: aiohttp.ClientSession
    prompts: Sequence[Prompt]  # the usual ones, then the long ones
    expected: list[tuple[str, ...]]
    weights: Sequence[Path]
    say: Say
    asked: int = field(default=0)
    blocks: Mapping[str, int] = field(default_factory=dict)  # of each engine, if others than usual

    @property
    def p(self) -> Engine:
        return self.engines[P]

    @property
    def d(self) -> Engine:
        return self.engines[D]

    def serve_weights(self, number: int) -> None:
        """Whoever starts from now on loads these, under the name of the others."""
        link = self.directory / "model"
        link.unlink(missing_ok=True)
        link.symlink_to(self.weights[number], target_is_directory=True)

    async def restart(self, *names: str) -> None:
        """Another life of each, on the same ports; EngineError if one does not come to serve."""
        for name in names:
            self.engines[name].kill()
        await self.died(*names)
        for name in names:
            self.engines[name].start()
        if names:
            await self.ready(*names)

    async def died(self, *names: str) -> None:
        """Called between two lives; for those who look at what the dead leave behind."""

    def count(self, tally: Tally, answer: Answer, number: int) -> bool:
        """Judge an answer to this prompt; whether it is right."""
        right = tally.count(answer, self.expected[number])
        if not (right or answer.error or answer.late):
            self.doubt(answer, number)
        return right

    def doubt(self, answer: Answer, number: int) -> None:
        """Called of every wrong answer; for those who look into it."""

    async def ready(self, *names: str) -> None:
        waiting = asyncio.gather(*(self.engines[name].ready(self.session) for name in names))
        news = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} starting"
        await with_news(waiting, lambda _: self.say(news))

    async def used(self, name: str) -> int | None:
        """Blocks and pins that an engine holds; None if it does not say."""
        figures = await self.engines[name].figures(self.session)
        return None if figures is None else meters.held(figures, self.blocks.get(name, BLOCKS))

    async def handed(self) -> int | None:
        """How many prompts came to D whole from elsewhere, in this life of it, as its connector counts them."""
        figures = await self.d.figures(self.session)
        return None if figures is None else meters.handed(figures, self.connector)


def specs(connector: str) -> list[Spec]:
    """One engine alone, and the pair."""
    alone = Spec(name=ALONE, model=MODEL, chunk_tokens=0, at_once=0, prefix_caching=False)
    own = {"p_blocks": BLOCKS, "d_blocks": BLOCKS, "settings": {"kvbaton": BATON_TIMES}}
    return [alone, msgspec.structs.replace(alone, name=connector, connector=connector, **own)]


@contextlib.asynccontextmanager
async def standing(
    connector: str, seed: int, directory: Path, logs: Path, python: str, say: Say
) -> AsyncIterator[Pair]:
    """Both engines up and the right answers known; all gone afterwards. `directory` is empty, and this pair's alone."""
    models = [launching.tiny_model(python, "llama", number) for number in MODEL_SEEDS]
    prompts = [prompt_of(150 + 7 * number, f"{seed} usual {number}") for number in range(USUAL)]
    prompts += [prompt_of(LONG_TOKENS + number, f"{seed} long {number}") for number in range(LONG)]
    link = directory / "model"
    link.symlink_to(models[0], target_is_directory=True)
    site = Site("cpu", python, directory, logs, {MODEL: link})
    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with (
        aiohttp.ClientSession(connector=connections, timeout=timeout) as session,
        servers.standing(site, specs(connector), session, say, READY_S) as groups,
    ):
        for group in groups.values():
            if not group.is_up:
                raise EngineError(group.problem)
        engines, alone = groups[connector].engines, groups[ALONE].alone
        pair = Pair(connector, directory, engines, session, prompts, [], models, say)
        say(f"one engine alone answers {len(prompts)} prompts")
        pair.expected = await learned(session, alone, prompts)
        alone.kill()
        yield pair


async def learned(session: aiohttp.ClientSession, alone: Engine, prompts: Sequence[Prompt]) -> list[tuple[str, ...]]:
    """The right answers, all of them."""
    found = await oracle.learned(session, alone.url, prompts, LEARN_AT_ONCE, deadline_s=LEARN_S)
    for answer in found:
        if not isinstance(answer, Right):
            raise launching.LaunchError(f"the reference engine did not answer: {answer}: {alone.tail()}")
    return [answer.tokens for answer in found if isinstance(answer, Right)]


RECOVER_S = 45.0
REST_S = 45.0
PROBES = 4
PROBE_DEADLINE_S = 15.0
FIGURES_LAG_S = 3.0  # vLLM's figures follow its steps
GRACE_S = 5.0
LEASE_S = 35.0  # probes that failed leave leases behind, which are not the fault's: NIXL's last 30 s
LOOK_S = 0.2
WORTH_SAYING_S = 3.0


Clock = Callable[[], float]


class Well(msgspec.Struct, frozen=True, kw_only=True):
    """What was found after a fault."""

    dead: tuple[str, ...] = ()
    recover_s: float | None = None
    wrong: int = 0  # of the requests that asked whether all is well
    left_over: int | None = 0
    rest_s: float | None = None  # from the end of the fault; None: never
    note: str = ""


async def examined(pair: Pair, ended_at: float, clock: Clock) -> Well:
    """Wait, bounded, until all is well; `ended_at` is when the fault was over. Who died serves again, in another life;
    EngineError if that cannot be.
    """
    dead = await _dead(pair)
    probed = Tally()
    unhanded = 0
    recover_s = None
    while not dead and clock() < ended_at + RECOVER_S:
        right, handed = await _probe(pair, probed)
        if right == PROBES and handed:
            recover_s = clock() - ended_at
            break
        unhanded += right == PROBES
        dead = await _dead(pair)
        await asyncio.sleep(LOOK_S)
    grace_s = GRACE_S if dead or recover_s is not None else LEASE_S
    restart = asyncio.create_task(pair.restart(*dead))  # meanwhile, since it takes as long as a lease
    try:
        left, rest_s = await _rest(pair, ended_at, max(ended_at + REST_S, clock() + grace_s), clock, dead)
    finally:
        await restart
    if not dead and (dead := await _dead(pair)):
        await pair.restart(*dead)
    note = complaint(probed, unhanded) if recover_s is None and not dead else ""
    return Well(
        dead=tuple(dead), recover_s=None if dead else recover_s, wrong=probed.wrong, left_over=left, rest_s=rest_s,
        note=note,
    )  # fmt: skip


def complaint(probed: Tally, unhanded: int) -> str:
    """Why they never were well again."""
    if unhanded:
        return "answers are right, but nothing is handed over any more: D computes every prompt itself"
    errors = ", ".join(f"{count} x {kind}" for kind, count in probed.errors.items())
    return f"afterwards: {probed.right} right, {probed.wrong} wrong, {probed.late} late, errors: {errors or 'none'}"


async def _probe(pair: Pair, probed: Tally) -> tuple[int, bool]:
    """How many of four fresh requests were right, and whether all were handed over."""
    before = await pair.handed()
    answers = await asyncio.gather(*(
        both_legs(
            pair.session, pair.p.url, pair.d.url, pair.prompts[number], deadline_s=PROBE_DEADLINE_S,
            request_id=request_id(pair),
        ) for number in range(PROBES)
    ))  # fmt: skip
    right = sum(pair.count(probed, each, number) for number, each in enumerate(answers))
    if right == PROBES and not CONNECTORS[pair.connector].handed:
        return right, all(each.cached for each in answers)  # without prefix caches these can only have come from P
    if right < PROBES or before is None:
        return right, False
    return right, await _within(FIGURES_LAG_S, lambda: _handed_since(pair, before))


async def _handed_since(pair: Pair, before: int) -> bool:
    now = await pair.handed()
    return now is not None and now - before >= PROBES


async def _within(seconds: float, condition: Callable[[], Awaitable[bool]]) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        if await condition():
            return True
        if loop.time() > deadline:
            return False
        await asyncio.sleep(LOOK_S)


async def _rest(
    pair: Pair, ended_at: float, deadline: float, clock: Clock, dead: list[str]
) -> tuple[int | None, float | None]:
    """What is held at the end, by those that live, and when nothing was."""
    living = [name for name in (P, D) if name not in dead]
    while True:
        found = [await pair.used(name) for name in living]
        if all(each == 0 for each in found):
            return 0, clock() - ended_at
        if clock() > deadline:
            known = [each for each in found if each is not None]
            return (sum(known) if known else None), None
        await asyncio.sleep(LOOK_S)


async def _dead(pair: Pair) -> list[str]:
    return [name for name, engine in pair.engines.items() if not await engine.is_well(pair.session)]


def request_id(pair: Pair) -> str:
    pair.asked += 1
    return f"chaos-{pair.asked}"


def row_of(step: Step, at_s: float, tally: Tally, well: Well, note: str) -> Row:
    """The row of one step; pure."""
    said = [note, well.note]
    if tally.errors:
        said.append("errors: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(tally.errors.items())))
    if well.dead:
        said.append(f"{' and '.join(well.dead)} died and had to be started again")
    elif well.rest_s is not None and well.rest_s > WORTH_SAYING_S:
        said.append(f"nothing held {well.rest_s:.0f} s after")
    return Row(
        at_s=round(at_s, 1), title=step.title(), fault=step.fault, promises=KNOWN[step.fault].promises,
        requests=tally.requests + well.wrong, right=tally.right, errors=tally.errors.total(),
        wrong=tally.wrong + well.wrong, late=tally.late, dead=len(well.dead), left_over=well.left_over,
        recover_s=None if well.recover_s is None else round(well.recover_s, 2), note="; ".join(filter(None, said)),
    )  # fmt: skip
