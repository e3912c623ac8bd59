"""A P and a D on real vLLM, with any connector, and what one engine that hands nothing over answers.

Law: prefix caching is off, so that every request moves its KV; the servers are those of `rig.servers`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.engines.vllm.launch import launching
from kvbaton_proof.rig import meters, oracle, servers
from kvbaton_proof.rig.client import Answer, Prompt, Tally, prompt_of
from kvbaton_proof.rig.connectors import D, P
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
        """How many prompts came to D whole from elsewhere, in this life of it."""
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
