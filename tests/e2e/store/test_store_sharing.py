"""Engines that share prefixes through a store in another process: answers are the single engine's, hits are counted."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kvbaton.api.params import TransferParams
from kvbaton.control import keyring
from kvbaton.control.addressing import ControlError
from kvbaton.control.registry import RegistryServer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig, ModelConfig
from kvbaton.engines.embedded.http_worker import RefusedError
from kvbaton.engines.embedded.worker_options import WorkerOptions
from tests.e2e.cluster import eventually, get_json, up, wait_for
from tests.e2e.pair import Pair
from tests.e2e.store.storehouse import StoreProcess, house, key_directory, some_store
from tests.mooncake_store.mooncake_processes import free_port

MOONCAKE = pytest.mark.library("mooncake")
KINDS = ["kvbaton", pytest.param("mooncake", marks=MOONCAKE)]
SHARED = "A long system prompt that every request of this service begins with, word for word, again and again. " * 3
PROMPTS = [f"{SHARED}Question {number}: what is {number} and {number}?" for number in range(6)]
SHORT_PROMPT = "short"
START_S = 60.0


async def _shared(tmp_path: Path, kind: str, **options: object) -> None:
    right = reference_answers(PROMPTS, 12)
    directory = key_directory(tmp_path)
    with some_store(kind, directory) as store:
        async with house(directory, store, "p0", "d0", **options) as both:
            assert [await both.answer("p0", prompt) for prompt in PROMPTS] == right
            await both.until(lambda: both.stat("p0", "store_puts_total") == len(PROMPTS))
            assert [await both.answer("d0", prompt) for prompt in PROMPTS] == right
            whole = [(len(prompt) - 1) // 16 for prompt in PROMPTS]
            shared = len(SHARED) // 16
            assert both.stat("d0", "store_hits_blocks_total") >= whole[0] + sum(each - shared - 1 for each in whole[1:])
            assert both.stat("d0", "store_gets_total") == len(PROMPTS)
            assert both.stat("d0", "store_errors_total") == both.stat("p0", "store_errors_total") == 0
            await both.at_rest()


@pytest.mark.parametrize("kind", KINDS)
def test_two_engines_share_prefixes(tmp_path: Path, kind: str) -> None:
    asyncio.run(_shared(tmp_path, kind))


def test_two_engines_of_two_ranks_share_prefixes(tmp_path: Path) -> None:
    asyncio.run(_shared(tmp_path, "kvbaton", tp=2))


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_a_prompt_that_p_loads_from_the_store_is_handed_over_in_every_mode(tmp_path: Path, mode: str) -> None:
    right = reference_answers(PROMPTS[:2], 12)
    directory = key_directory(tmp_path)
    with some_store("kvbaton", directory) as store:
        async with house(directory, store, "p0", "d0", "e0") as three:
            assert await three.answer("e0", PROMPTS[0]) == right[0]
            await three.until(lambda: three.stat("e0", "store_puts_total") == 1)
            both = Pair(three["p0"], three["d0"], keyring.load(directory, "p0").ticket_keys[0])
            assert [await both.answer(prompt, mode) for prompt in PROMPTS[:2]] == right
            assert three.stat("p0", "store_hits_blocks_total") >= (len(PROMPTS[0]) - 1) // 16
            assert both.ends() == {"delivered": 2}
            assert three.stat("d0", "store_lookups_total") == 0, "a handoff that goes well asks no store"
            await three.at_rest()


async def test_a_store_that_is_gone_costs_misses_and_one_that_is_back_has_what_was_on_disk(tmp_path: Path) -> None:
    directory = key_directory(tmp_path)
    flags = ("--disk", str(tmp_path / "disk"), "--bytes", "1MiB")
    served = StoreProcess(directory, *flags, port=free_port())  # which it needs again
    try:
        right = reference_answers(PROMPTS[:1], 12)[0]
        async with house(directory, served.url, "p0", "d0", store_timeout=2.0) as both:
            assert await both.answer("p0", PROMPTS[0]) == right
            await both.until(lambda: both.stat("p0", "store_puts_total") == 1)
            served.child.send_signal(signal.SIGTERM)
            assert served.child.wait(20) == 0
            assert await both.answer("d0", PROMPTS[0]) == right, "it was computed"
            assert both.stat("d0", "store_errors_total") >= 1
            await both.at_rest()
        url = served.url
        served.kill()
        served = StoreProcess(directory, *flags, port=served.port)
        async with house(directory, url, "e0") as one:
            assert await one.answer("e0", PROMPTS[0]) == right
            assert one.stat("e0", "store_hits_blocks_total") == (len(PROMPTS[0]) - 1) // 16
            await one.at_rest()
    finally:
        served.kill()


# --- the store as second source


async def prefilled(session: aiohttp.ClientSession, url: str, prompt: str) -> TransferParams:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": {"do_remote_decode": True}}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        parsed = TransferParams.parse((await response.json())["kv_transfer_params"])
    assert parsed is not None
    return parsed


@pytest.mark.parametrize(
    ("policy", "kind"), [("recompute", "kvbaton"), pytest.param("fail", "mooncake", marks=MOONCAKE)]
)
def test_a_prefiller_killed_after_its_prompt_was_put_costs_nothing(tmp_path: Path, policy: str, kind: str) -> None:
    """kill -9 between P's answer and D's claim: the ticket leads nowhere, the store has the prompt."""
    directory = key_directory(tmp_path)
    registry = RegistryServer(keyring.load(directory, "router"))
    registry.start()
    log = tmp_path / "p0.log"
    with some_store(kind, directory) as store:
        place = store.replace("lend=64MiB", "lend=0")  # else what it put would die with it
        flags = ["--keys", str(directory), "--registry", registry.endpoint, "--store", place]
        words = [sys.executable, "-m", "kvbaton.cli.main", "worker", "--name", "p0", "--role", "prefill", *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            url = wait_for(lambda: re.search(r" serves (http://\S+)", log.read_text()), START_S, log)[1]
            wait_for(lambda: len(registry.workers()) == 1, START_S, log)
            asyncio.run(_second_source(directory, store, policy, registry, url, process))
        finally:
            process.kill()
            process.wait(20)
            registry.close()


async def _second_source(
    directory: Path, store: str, policy: str, registry: RegistryServer, url: str, process: subprocess.Popen[bytes]
) -> None:
    right = reference_answers(PROMPTS[:2], 12)
    [listed] = registry.workers()
    ring = keyring.load(directory, "d0")
    async with house(directory, store, "d0", policy=policy, claim_timeout=1.0) as one:
        d: EmbeddedWorker = one["d0"]
        d.node.know({listed.registration.worker: (listed.registration.control_endpoint, ring.peers["p0"])})
        await one.answer("d0", "D is known to the store, and lends its memory, once it has asked", 1)
        async with aiohttp.ClientSession() as session:
            params = await prefilled(session, url, PROMPTS[0])
            other = await prefilled(session, url, SHORT_PROMPT)

            async with asyncio.timeout(30):
                while not (await get_json(session, f"{url}/stats"))["store_puts_total"]:
                    await asyncio.sleep(0.02)
        process.kill()
        process.wait(20)
        assert await one.answer("d0", PROMPTS[0], params=params) == right[0]
        assert one.stat("d0", "second_source_total") == 1
        assert sum(one["d0"].stats()["ends_total"].values()) == 1, "the handoff itself failed"
        if policy == "fail":
            with pytest.raises(RefusedError):  # too short for a block: the store cannot have it
                await one.answer("d0", SHORT_PROMPT, params=other)
        await one.at_rest()


def test_a_store_is_refused_for_kv_that_it_cannot_keep(tmp_path: Path) -> None:
    directory = key_directory(tmp_path)
    options = WorkerOptions(
        name="p0", role="both", keys=str(directory), registry="tcp://127.0.0.1:1", store="tcp://127.0.0.1:1"
    )
    config = EngineConfig(ModelConfig(sliding_layers=(1,)), CacheConfig(blocks=64))
    with pytest.raises(ControlError, match="'sliding' is sliding"):
        EmbeddedWorker(options, keyring.load(directory, "p0"), config)


async def test_up_starts_a_store_beside_the_cluster(tmp_path: Path) -> None:
    with up(tmp_path, "--store", "memory") as cluster:
        async with aiohttp.ClientSession() as session:
            body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
            async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
                text = (await response.json())["choices"][0]["text"]
        assert text == reference_answers(PROMPTS[:1], 12)[0]

        async def was_put() -> int:
            return int(str((await cluster.workers())["p0"]["store_puts_total"]))

        await eventually(was_put, START_S)
