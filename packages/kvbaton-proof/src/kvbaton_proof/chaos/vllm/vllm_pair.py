"""A P and a D on real vLLM, with either connector, and what one engine that hands nothing over answers.

Laws: both connectors get the same model, words, surroundings and pools, and differ in their connector alone. Prefix
caching is off, so that every request moves its KV. Whatever was started is gone after `closing`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.control import keyring
from kvbaton.engines.vllm import launching
from kvbaton.processes.child_process import with_news
from kvbaton.processes.free_ports import free_ports
from kvbaton_proof.chaos.vllm.vllm_client import Prompt, Tally, Told, ask, prompt_of
from kvbaton_proof.chaos.vllm.vllm_plan import Connector, D, P
from kvbaton_proof.chaos.vllm.vllm_process import Engine, Figures

BLOCKS = 128
"""KV blocks of P and of D, of 128 tokens: so few that what is let go is soon computed over."""
USUAL, LONG = 64, 16
LONG_TOKENS = 1500  # twelve blocks: eleven such prompts are more than there is
LEARN_AT_ONCE = 8
LEARN_S = 300.0
SERVED_NAME = "tiny"
MODEL_SEEDS = (1, 7)  # the weights of all, and others of the same shape
BATON_TIMES: Mapping[str, float] = {"claim_timeout": 8.0, "transfer_timeout": 10.0}
"""Shorter than kvbaton's own, as an operator sets them whose clients wait 30 s; NIXL has no such settings."""
HANDED: Mapping[str, str] = {"kvbaton": 'end="delivered"', "nixl": "vllm:nixl_xfer_time_seconds_count"}

Say = Callable[[str], None]


@dataclass(slots=True)
class Pair:
    """P and D, the prompts they are asked, and the answers that are right."""

    connector: Connector
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

    def count(self, tally: Tally, told: Told, number: int) -> bool:
        """Judge an answer to this prompt; whether it is right."""
        right = tally.count(told, self.expected[number])
        if not (right or told.error or told.late):
            self.doubt(told, number)
        return right

    def doubt(self, told: Told, number: int) -> None:
        """Called of every wrong answer; for those who look into it."""

    async def ready(self, *names: str) -> None:
        waiting = asyncio.gather(*(self.engines[name].ready(self.session) for name in names))
        news = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} starting"
        await with_news(waiting, lambda _: self.say(news))

    async def used(self, name: str) -> int | None:
        """Blocks and pins that an engine holds; None if it does not say."""
        figures = await self.engines[name].figures(self.session)
        return None if figures is None else held(figures, self.blocks.get(name, BLOCKS))

    async def handed(self) -> int | None:
        """How many prompts came to D whole from elsewhere, in this life of it."""
        figures = await self.d.figures(self.session)
        return None if figures is None else handed(self.connector, figures)


def held(figures: Figures, blocks: int = BLOCKS) -> int:
    """Blocks in use, by vLLM's count or by what kvbaton says it holds, whichever is more."""
    used = round(figures.get("vllm:kv_cache_usage_perc", 0.0) * (blocks - 1))
    return max(used, int(figures.get("kvbaton_pinned_blocks", 0.0)), int(figures.get("kvbaton_leases_held", 0.0)))


def handed(connector: str, figures: Figures) -> int:
    if connector == "nixl":
        return int(figures.get(HANDED["nixl"], 0.0))
    found = [v for name, v in figures.items() if name.startswith("kvbaton_ends_total{") and HANDED["kvbaton"] in name]
    return int(sum(found))


@contextlib.asynccontextmanager
async def standing(
    connector: Connector, seed: int, directory: Path, logs: Path, python: str, say: Say
) -> AsyncIterator[Pair]:
    """Both engines up and the right answers known; all gone afterwards. `directory` is empty, and this pair's alone."""
    models = [launching.tiny_model(python, "llama", number) for number in MODEL_SEEDS]
    prompts = [prompt_of(150 + 7 * number, f"{seed} usual {number}") for number in range(USUAL)]
    prompts += [prompt_of(LONG_TOKENS + number, f"{seed} long {number}") for number in range(LONG)]
    ports = free_ports(5)
    engines = _engines(connector, directory, logs, python, ports)
    alone = Engine("alone", ports[4], _words(directory, python, ports[4]), launching.environment(), logs / "alone.log")
    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
        pair = Pair(connector, directory, engines, session, prompts, [], models, say)
        pair.serve_weights(0)
        try:
            for engine in (alone, *engines.values()):
                engine.start()
            await alone.ready(session)
            say(f"one engine alone answers {len(prompts)} prompts")
            pair.expected = await learned(session, alone, prompts)
            alone.kill()
            await pair.ready(P, D)
            yield pair
        finally:
            for engine in (alone, *engines.values()):
                engine.kill()


async def learned(session: aiohttp.ClientSession, alone: Engine, prompts: Sequence[Prompt]) -> list[tuple[str, ...]]:
    room = asyncio.Semaphore(LEARN_AT_ONCE)

    async def one(prompt: Prompt) -> Told:
        async with room:
            return await ask(session, alone.url, prompt, deadline_s=LEARN_S)

    found = await asyncio.gather(*map(one, prompts))
    bad = [told.error for told in found if told.error]
    if bad:
        raise launching.LaunchError(f"the reference engine did not answer: {bad[0]}: {alone.tail()}")
    return [told.tokens for told in found]


def _engines(connector: Connector, directory: Path, logs: Path, python: str, ports: Sequence[int]) -> dict[str, Engine]:
    """`ports`: HTTP of P and D, then where each speaks to the other."""
    if connector == "kvbaton":
        keyring.mint(directory / "keys", ["router", P, D])
    found = {}
    for name, other, port, side_port, other_side in (
        (P, D, ports[0], ports[2], ports[3]), (D, P, ports[1], ports[3], ports[2]),
    ):  # fmt: skip
        variables = launching.environment()
        if connector == "nixl":
            config: Mapping[str, Any] = launching.NIXL
            variables |= launching.nixl_environment(directory, side_port)
        else:
            own = {"name": name, "keys": str(directory / "keys"), "control_port": side_port, **BATON_TIMES}
            own["peers"] = {other: f"tcp://{launching.HOST}:{other_side}"}
            role = "kv_producer" if name == P else "kv_consumer"
            config = launching.kv_transfer_config(role, "recompute", own)
        command = [*_words(directory, python, port), "--num-gpu-blocks-override", str(BLOCKS)]
        command += ["--kv-transfer-config", msgspec.json.encode(config).decode()]
        found[name] = Engine(name, port, command, variables, logs / f"{name}.log", side_port)
    return found


def _words(directory: Path, python: str, port: int) -> list[str]:
    words = launching.server_argv(python, str(directory / "model"), SERVED_NAME, port)
    return [*words, "--no-enable-prefix-caching"]
