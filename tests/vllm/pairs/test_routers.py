"""P and D that know each other by a list, push where a request names no mode, and hand over through NIXL: the same
answers behind kvbaton's router, which has a list too, in every mode, and behind the real vllm-router.

MoRI-IO's WRITE sends both legs at once with addresses in the request id and no ticket; its READ, which is a pull, is
asked for in test_one_p_one_d.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.protocol.ids import WorkerId
from kvbaton.router.workers.directory import ListedEngine
from tests.vllm.duo import (
    MODES,
    TOKENS,
    Duo,
    answers_behind,
    ends,
    kvbaton_router,
    prompt_of,
    same,
)
from tests.vllm.engines import Engine, connector_config, free_port, make_cluster_keys, start_engine
from tests.vllm.router_process import moriio_router

pytestmark = pytest.mark.timeout(1200)

LENGTHS = (5, 127, 128, 129, 300, 512, 777, 1300)


@contextlib.contextmanager
def announced_pair(python: str, model: Path, directory: Path, discovery: str) -> Iterator[tuple[Engine, Engine]]:
    """P and D that announce themselves as MoRI-IO's workers do."""
    control = {"p0": free_port(), "d0": free_port()}
    engines: list[Engine] = []
    try:
        for name, role in (("p0", "kv_producer"), ("d0", "kv_consumer")):
            port = free_port()
            extra: dict[str, Any] = {
                "mode": "push",
                "transport": "nixl",
                "control_port": control[name],
                "peers": {other: f"tcp://127.0.0.1:{at}" for other, at in control.items() if other != name},
                "moriio": {"router": discovery, "transfer_mode": "WRITE"},
            }
            config = connector_config(role, name, directory / "keys", port, **extra)
            log = directory / f"{name}.log"
            engines.append(start_engine(python, model, port, kv_transfer_config=config, log=log))
        for engine in engines:
            engine.wait_ready()
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="module")
def discovery() -> str:
    """Where they announce themselves, whether anybody listens there or not."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def duo(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, discovery: str
) -> Iterator[Duo]:
    directory = tmp_path_factory.mktemp("announced")
    key_directory = make_cluster_keys(directory / "keys", ["p0", "d0"])
    with announced_pair(vllm_python, tiny("llama"), directory, discovery) as (p, d):
        workers = [ListedEngine(WorkerId("p0"), "prefill", p.url), ListedEngine(WorkerId("d0"), "decode", d.url)]
        with kvbaton_router(key_directory, workers) as (url, _, _):
            yield Duo(p, d, url, key_directory)


def test_handoffs_over_nixl_give_one_engines_answers(duo: Duo) -> None:
    for mode in MODES:
        prompts = [prompt_of(length, f"nixl {mode}") for length in LENGTHS]
        before = duo.delivered()
        answers = duo.ask_all(prompts, mode)
        duo.come_to_rest()
        duo.handed_over(before, len(prompts), f"{mode}: every one by a handoff")
        alone = [duo.p.ask(prompt, TOKENS) for prompt in prompts]
        assert [len(x) for x, a, b in zip(prompts, answers, alone, strict=True) if not same(a, b)] == [], mode
    planes = [name for name in duo.d.metrics() if name.startswith("kvbaton_links_total{")]
    assert len(planes) == 1 and 'transport="nixl"' in planes[0]


def test_push_behind_the_real_router_by_discovery(duo: Duo, discovery: str) -> None:
    async def behind_it() -> None:
        async with moriio_router(address=discovery) as router:
            await router.until_paired()
            await asyncio.to_thread(answers_behind, router.url, duo, "vllm-router, MoRI-IO WRITE")

    asyncio.run(behind_it())
    stranger = "___prefill_addr_host:10.255.255.1,handshake:6301,notify:61005___decode_addr_host:127.0.0.1,"
    stranger += f"handshake:1,notify:1_{'a' * 32}"
    params = {"do_remote_prefill": True, "transfer_id": "tx-" + "a" * 32}
    prompt = prompt_of(200, "stranger")
    told = duo.d.ask(prompt, TOKENS, kv_transfer_params=params, headers={"X-Request-Id": stranger})
    assert same(told, duo.p.ask(prompt, TOKENS)), "an address that no engine has"
    assert ends(duo.d).get("peer_unknown") == 1
