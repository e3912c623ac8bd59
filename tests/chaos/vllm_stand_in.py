"""A P and a D that are played by small HTTP servers in this process, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvbaton_proof.chaos.vllm.vllm_judge import BLOCKS, LONG, USUAL, Pair
from kvbaton_proof.rig.client import prompt_of
from kvbaton_proof.rig.connectors import D, P
from kvbaton_proof.rig.server import Engine

HOST = "127.0.0.1"


@dataclass
class Habits:
    """How an engine behaves."""

    wrong: bool = False
    silent: bool = False
    ill: bool = False
    held_blocks: int = 0
    hands_over: bool = True
    refuses: bool = False


@dataclass(slots=True)
class StandIn(Engine):
    """An engine of which only the HTTP door is there."""

    habits: Habits = field(default_factory=Habits)
    delivered: int = 0
    sent: list[signal.Signals] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return True

    def start(self) -> None:
        self.lives += 1
        self.habits.ill = False

    def kill(self) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.habits.ill else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f'vllm:kv_cache_usage_perc{{engine="0"}} {self.habits.held_blocks / (BLOCKS - 1)}']
        lines.append(f'kvbaton_ends_total{{end="delivered",engine="0"}} {self.delivered}')
        return web.Response(text="\n".join(["# HELP x", *lines]))

    async def _completions(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if self.habits.silent:
            await asyncio.sleep(30)
        if self.habits.refuses:
            return web.Response(status=500)
        asked = body.get("kv_transfer_params") or {}
        self.delivered += bool(asked.get("do_remote_prefill")) and self.habits.hands_over
        tokens = ["?"] if self.habits.wrong else list(right(body["prompt"]))
        answer: dict[str, Any] = {"choices": [{"text": "".join(tokens), "logprobs": {"tokens": tokens}}]}
        cached = len(body["prompt"]) if asked.get("do_remote_prefill") and self.habits.hands_over else 0
        answer["usage"] = {"prompt_tokens_details": {"cached_tokens": cached}}
        if asked.get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "mode": "pull", "ticket": "a ticket"}
        return web.json_response(answer)


def right(prompt: Sequence[int]) -> tuple[str, ...]:
    """What a good engine answers."""
    return tuple(str(token) for token in prompt[:3])


@contextlib.asynccontextmanager
async def stand_ins(directory: Path) -> AsyncIterator[tuple[Pair, Habits, Habits]]:
    """A pair of them, and the habits of P and of D."""
    prompts = [prompt_of(20, f"stand-in {number}") for number in range(USUAL + LONG)]
    engines: dict[str, StandIn] = {}
    models = [directory / "one", directory / "two"]
    async with contextlib.AsyncExitStack() as stack:
        for name in (P, D):
            engine = StandIn(name, 0, (), {}, directory / f"{name}.log")
            runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            engine.port = engine.side_port = runner.addresses[0][1]
            engines[name] = engine
        session = await stack.enter_async_context(aiohttp.ClientSession())
        expected = [right(prompt) for prompt in prompts]
        pair = Pair("kvbaton", directory, engines, session, prompts, expected, models, lambda text: None)
        yield pair, engines[P].habits, engines[D].habits
