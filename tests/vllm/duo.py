"""One P and one D on real vLLM behind kvbaton's own router, and what one aggregated vLLM answers.

Law: a prompt is a list of token ids drawn from a seed, so that no two sets share a block by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvbaton.control import keyring
from kvbaton.control.keyring import data_parallel_name
from kvbaton.local_cluster.router_front import Sources, run_router
from kvbaton.protocol.ids import TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.workers.directory import ListedEngine
from tests.vllm.engines import (
    Answer,
    Engine,
    EngineError,
    ask,
    connector_config,
    free_port,
    make_cluster_keys,
    start_engine,
    until,
)

MODES = ("pull", "stream", "push")
BLOCK = 128
LENGTHS = (
    1, 2, 31, 32, 33, 64, 127, 128, 129, 130, 200, 255, 256, 257, 383, 384, 385, 500, 512, 640, 700, 767, 768, 769, 900,
    1000, 1023, 1024, 1025, 1200, 1279, 1280, 1281, 1400, 1499, 1500,
)  # fmt: skip
TOKENS = 12
VOCABULARY = range(10, 500)

Prompt = list[int]


def prompt_of(length: int, seed: object) -> Prompt:
    rng = random.Random(f"{seed}/{length}")
    return [rng.choice(VOCABULARY) for _ in range(length)]


def forty_prompts(seed: str) -> list[Prompt]:
    """1 to 1,500 tokens: block boundaries and their neighbours, two repeats, and two that share a prefix."""
    found = [prompt_of(length, seed) for length in LENGTHS]
    shared = prompt_of(400, f"{seed} shared")
    return [
        *found,
        found[10],
        found[20],
        [*shared, *prompt_of(90, f"{seed} a")],
        [*shared, *prompt_of(300, f"{seed} b")],
    ]


class Duo:
    """P, D and a router, all up."""

    def __init__(self, p: Engine, d: Engine, url: str, key_directory: Path) -> None:
        self.p = p
        self.d = d
        self.url = url
        self.keyring = keyring.load(key_directory, "router")

    def ask(self, prompt: Prompt, mode: str, **more: Any) -> Answer:
        """Through the router."""
        return ask(self.url, prompt, TOKENS, headers={"x-kvbaton-mode": mode}, **more)

    def ask_all(self, prompts: Sequence[Prompt], mode: str, at_once: int = 8) -> list[Answer]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, mode), prompts))

    def prefill(self, prompt: Prompt) -> dict[str, Any]:
        """P's half of a pull; what it gives for D."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        told = self.p.ask(prompt, 1, kv_transfer_params=params).kv_transfer_params
        assert told is not None and told["do_remote_prefill"] is True
        return told

    def decode(self, prompt: Prompt, params: object) -> Answer:
        return self.d.ask(prompt, TOKENS, kv_transfer_params=params)

    def router_ticket(self, source: str = "p0", target: str = "d0", ttl_s: float = 60.0) -> str:
        handoff = handoff_id(TransferId(secrets.token_hex(16)))
        ticket = Ticket(handoff, WorkerId(source), time.time() + ttl_s, target=WorkerId(target))
        return seal(ticket, self.keyring.ticket_keys[0])

    def delivered(self) -> float:
        return ends(self.d).get("delivered", 0.0)

    def handed_over(self, since: float, count: int, what: object = "") -> None:
        """Exactly so many were delivered since. D tells it with one of its steps, perhaps after the answer."""
        try:
            until(lambda: self.delivered() - since == count, 10, f"{count} handed over")
        except EngineError as error:
            raise AssertionError(f"{what}: {self.delivered() - since:.0f}, not {count}: {ends(self.d)}") from error

    def at_rest(self) -> bool:
        return all(
            found.get("kvbaton_pinned_blocks", 0) == 0 and found["vllm:kv_cache_usage_perc"] == 0
            for found in (self.p.metrics(), self.d.metrics())
        )

    def come_to_rest(self, within_s: float = 40.0) -> None:
        until(self.at_rest, within_s, "no pins and no used blocks in P and D")
        until(lambda: self.p.is_healthy() and self.d.is_healthy(), 20, "P and D are healthy")


def ends(engine: Engine) -> dict[str, float]:
    """How handoffs ended in a D, by reason, over all its data-parallel ranks."""
    found: Counter[str] = Counter()
    for name, value in engine.metrics().items():
        if name.startswith("kvbaton_ends_total{") and value:
            found[label(name, "end")] += value  # type: ignore[assignment]
    return dict(found)


def by_rank(engine: Engine, name: str) -> dict[str, float]:
    """A counter's value for each data-parallel rank of an engine, summed over its other labels."""
    found: Counter[str] = Counter()
    for full, value in engine.metrics().items():
        if full.startswith(f"{name}{{"):
            found[label(full, "engine")] += value  # type: ignore[assignment]
    return dict(found)


def label(name: str, which: str) -> str:
    return name.partition(f'{which}="')[2].partition('"')[0]


def members(name: str, ranks: int) -> list[str]:
    return [data_parallel_name(name, rank) for rank in range(ranks)] if ranks > 1 else [name]


@contextlib.contextmanager
def running_duo(
    python: str,
    model: Path,
    directory: Path,
    *,
    d_python: str | None = None,
    policy: str = "recompute",
    p_extra: dict[str, Any] | None = None,
    d_extra: dict[str, Any] | None = None,
    p_args: Sequence[str] = (),
    d_args: Sequence[str] = (),
    ranks: tuple[int, int] = (1, 1),
    before_waiting: Callable[[], None] = lambda: None,
    around: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda name, config: config,
    env: Mapping[str, str] | None = None,
) -> Iterator[Duo]:
    """Everything up, and gone afterwards. `ranks`: data-parallel ones of P and of D. `around` makes what vLLM is
    configured with of what our connector is."""
    named = [*members("p0", ranks[0]), *members("d0", ranks[1])]
    key_directory = make_cluster_keys(directory / "keys", named)
    p_args, d_args = (
        [*args, "--data-parallel-size", str(size)] if size > 1 else args
        for args, size in zip((p_args, d_args), ranks, strict=True)
    )
    engines: list[Engine] = []
    with kvbaton_router(key_directory) as (url, registry, listed):
        try:
            for name, role, extra, args in (
                ("p0", "kv_producer", p_extra, p_args), ("d0", "kv_consumer", d_extra, d_args),
            ):  # fmt: skip
                port = free_port()
                config = connector_config(
                    role, name, key_directory, port, policy=policy, registry=registry, **(extra or {})
                )
                log = directory / f"{name}.log"
                which = python if name == "p0" else d_python or python
                config = around(name, config)
                engines.append(
                    start_engine(which, model, port, kv_transfer_config=config, extra_args=args, env=env, log=log)
                )
            before_waiting()
            for engine in engines:
                engine.wait_ready()
            until(lambda: listed() == set(named), 60, "both engines are registered")
            duo = Duo(engines[0], engines[1], url, key_directory)
            try:
                yield duo
            finally:
                engines += [duo.p, duo.d]  # perhaps other lives than those of the start
        finally:
            for engine in engines:
                engine.stop()


@contextlib.contextmanager
def kvbaton_router(
    key_directory: Path, workers: Sequence[ListedEngine] = ()
) -> Iterator[tuple[str, str, Callable[[], set[str]]]]:
    """kvbaton's router and registry on a thread of this process; `workers` are those that do not register."""
    ring = keyring.load(key_directory, "router")
    sources = Sources(keyring=ring, registry_bind="tcp://127.0.0.1:0", workers=workers)
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        settings = RouterSettings(deadline_s=180.0, show_pair=True, fallback=Fallback.STRICT)
        async with run_router(sources, settings, host="127.0.0.1", port=0) as front:
            found.append(front)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        assert started.wait(30), "the router did not start"
        front = found[0]
        yield front.url, front.registry_endpoint, lambda: {str(worker.name) for worker in front.directory.snapshot()}
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


FOREIGN: dict[str, Any] = {"model": "tiny", "logprobs": None}
"""vllm-router in discovery mode rewrites floats and keeps the old Content-Length: a client then waits for ever."""


def answers_behind(url: str, duo: Duo, label: str) -> None:
    """Prompts through a router that is not ours, each by a handoff, each as one engine answers it; nothing is left."""
    before = duo.delivered()
    prompts = [prompt_of(length, label) for length in (5, 128, 129, 300, 777)]
    found = [ask(url, prompt, TOKENS, **FOREIGN) for prompt in prompts]
    duo.come_to_rest()
    duo.handed_over(before, len(prompts), label)
    alone = [duo.p.ask(prompt, TOKENS, **FOREIGN) for prompt in prompts]
    assert [len(x) for x, a, b in zip(prompts, found, alone, strict=True) if not same(a, b)] == [], label


def reference_of(engine: Engine, prompts: Sequence[Prompt]) -> list[Answer]:
    """What one engine that hands nothing over answers."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: engine.ask(prompt, TOKENS), prompts))


def same(ours: Answer, theirs: Answer) -> bool:
    """The same tokens, with the same certainty: batches of other sizes round differently, some 1e-5."""
    close = all(abs(a - b) < 1e-3 for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
    return ours.tokens == theirs.tokens and ours.text == theirs.text and close
