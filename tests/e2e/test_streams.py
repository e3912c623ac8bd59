"""What a user's streams live through with `kvbaton up`: the D that answers is killed, another is drained."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import time

import aiohttp
import openai
import pytest

from tests.e2e.cluster import Up, all_at_rest, eventually, get_json, some_prompts, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS, TOKENS = 6, 1200
DRAIN_S = 20.0


def test_streams_outlive_a_d_that_is_killed_and_one_that_drains(tmp_path):
    """Promise 6, by an unmodified client, beside the same requests of which nobody was hurt."""
    prompts = some_prompts(STREAMS, "streams")
    with up(tmp_path, "--decode", "2", "--lease-s", "2") as cluster:

        async def kill(name: str) -> None:
            os.kill(cluster.pid(name), signal.SIGKILL)

        async def drain(name: str) -> None:
            command = re.search(r"^  drain (.+) NAME (.+)$", cluster.text(), re.MULTILINE)
            words = [*shlex.split(command[1]), name, *shlex.split(command[2]), "--force"]
            begun = time.monotonic()
            done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert time.monotonic() - begun < DRAIN_S, "it waits for no stream's end"

        async def scenario() -> None:
            async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
                right = await asyncio.gather(*(_stream(client, prompt) for prompt in prompts))
                assert {len(text) for text in right} == {TOKENS}
                for hurt, reason in ((kill, "died"), (drain, "draining")):
                    before = await _moves(cluster)
                    begun = asyncio.Barrier(STREAMS + 1)
                    asked = asyncio.gather(*(_stream(client, prompt, begun) for prompt in prompts))
                    # At once when every D has told something: the first token is P's, and one behind which no D has
                    # told anything is asked anew, and is not moved.
                    await begun.wait()
                    await hurt("d0")  # both have some of them
                    assert await asked == right, reason
                    after = await _moves(cluster)
                    assert after.get(reason, 0) > before.get(reason, 0), (before, after)
                    if reason == "died":
                        cluster.restart("d0")
                        await eventually(lambda: _both(cluster), 30.0)

        asyncio.run(scenario())
        asyncio.run(all_at_rest(cluster, {"p0"}))


async def _stream(client: openai.AsyncOpenAI, prompt: str, begun: asyncio.Barrier | None = None) -> str:
    chunks = await client.completions.create(
        model="kvbaton-tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text = ""
    async for chunk in chunks:
        text += chunk.choices[0].text if chunk.choices else ""
        if begun is not None and len(text) > 1:
            await begun.wait()
            begun = None
        await asyncio.sleep(0)  # what lies in a buffer is read without a pause, and nobody else is heard meanwhile
    return text


async def _both(cluster: Up) -> bool:
    return {"d0", "d1"} <= set(await cluster.workers())


async def _moves(cluster: Up) -> dict[str, int]:
    async with aiohttp.ClientSession() as session:
        return (await get_json(session, f"{cluster.url}/stats"))["moves_total"]
