"""Behind routers that are not ours: one like vLLM's toy proxies, and the real vllm-router, in pull and in push.

MoRI-IO's modes: READ is a pull, WRITE sends both legs at once with addresses in the request id and no ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.duo import TOKENS, ends, prompt_of, same
from tests.vllm.engines import (
    Answer,
    Engine,
    ask,
    connector_config,
    free_port,
    make_cluster_keys,
    start_engine,
    until,
)
from tests.vllm.router_process import moriio_router, nixl_router
from tests.vllm.toy_proxy import toy_proxy

pytestmark = pytest.mark.timeout(900)

LENGTHS = (5, 128, 129, 300, 777)
PLAIN: dict[str, Any] = {"model": "tiny", "logprobs": None}
"""vllm-router in discovery mode rewrites floats and keeps the old Content-Length: a client then waits for ever."""


@contextlib.contextmanager
def announced_pair(
    python: str, model: Path, directory: Path, discovery: str, transfer_mode: str, mode: str
) -> Iterator[tuple[Engine, Engine]]:
    """P and D that know each other by a list, and announce themselves as MoRI-IO's workers do."""
    key_directory = make_cluster_keys(directory / "keys", ["p0", "d0"])
    control = {"p0": free_port(), "d0": free_port()}
    engines: list[Engine] = []
    try:
        for name, role in (("p0", "kv_producer"), ("d0", "kv_consumer")):
            port = free_port()
            extra: dict[str, Any] = {
                "mode": mode,
                "control_port": control[name],
                "peers": {other: f"tcp://127.0.0.1:{at}" for other, at in control.items() if other != name},
                "moriio": {"router": discovery, "transfer_mode": transfer_mode},
            }
            config = connector_config(role, name, key_directory, port, **extra)
            log = directory / f"{name}.log"
            engines.append(start_engine(python, model, port, kv_transfer_config=config, log=log))
        for engine in engines:
            engine.wait_ready()
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.stop()


async def answers_through(url: str, p: Engine, d: Engine, label: str) -> None:
    """Prompts through a router, each by a handoff, each as one engine answers it; and nothing is left."""
    before = ends(d).get("delivered", 0)
    prompts = [prompt_of(length, label) for length in LENGTHS]
    found: list[Answer] = [await asyncio.to_thread(ask, url, prompt, TOKENS, **PLAIN) for prompt in prompts]
    await asyncio.to_thread(until, lambda: _at_rest(p) and _at_rest(d), 40, "nothing is held")
    assert ends(d).get("delivered", 0) - before == len(prompts), (label, ends(d))
    alone = [await asyncio.to_thread(p.ask, prompt, TOKENS, **PLAIN) for prompt in prompts]
    assert [len(x) for x, a, b in zip(prompts, found, alone, strict=True) if not same(a, b)] == []


def _at_rest(engine: Engine) -> bool:
    found = engine.metrics()
    return found.get("kvbaton_pinned_blocks", 0) == 0 and found["vllm:kv_cache_usage_perc"] == 0


def test_pull_behind_a_toy_proxy_and_the_real_router_by_urls_and_by_discovery(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        async with moriio_router() as discovered:
            with announced_pair(vllm_python, tiny("llama"), tmp_path, _bare(discovered.discovery), "READ", "pull") as (
                p,
                d,
            ):
                async with toy_proxy(p.url, d.url) as proxy:
                    await answers_through(proxy.url, p, d, "toy proxy")
                async with nixl_router([p.url], [d.url]) as router:
                    await answers_through(router.url, p, d, "vllm-router, URLs")
                await discovered.until_paired()
                await answers_through(discovered.url, p, d, "vllm-router, MoRI-IO READ")

    asyncio.run(run())


def test_push_behind_the_real_router_by_discovery(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        async with moriio_router() as discovered:
            with announced_pair(vllm_python, tiny("llama"), tmp_path, _bare(discovered.discovery), "WRITE", "push") as (
                p,
                d,
            ):
                await discovered.until_paired()
                await answers_through(discovered.url, p, d, "vllm-router, MoRI-IO WRITE")
                stranger = "___prefill_addr_host:10.255.255.1,handshake:6301,notify:61005___decode_addr_host:127.0.0.1,"
                stranger += f"handshake:1,notify:1_{'a' * 32}"
                params = {"do_remote_prefill": True, "transfer_id": "tx-" + "a" * 32}
                prompt = prompt_of(200, "stranger")
                told = await asyncio.to_thread(
                    d.ask, prompt, TOKENS, kv_transfer_params=params, headers={"X-Request-Id": stranger}
                )
                assert same(told, await asyncio.to_thread(p.ask, prompt, TOKENS)), "an address that nobody has"
                assert ends(d).get("peer_unknown") == 1

    asyncio.run(run())


def _bare(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://")
