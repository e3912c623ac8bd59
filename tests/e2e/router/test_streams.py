"""Streams that outlive their D, with real worker processes: each is the unbroken one, and each token is there once.

Law: a stream is compared with the same request where nobody fails. All are cut at one moment, so at many tokens.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvbaton.router.router_settings import Fallback, RouterSettings
from tests.e2e.router.crew import Crew, Town, crew_in, town
from tests.router.stream_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETTINGS = RouterSettings(
    streams_continue=True, policy="round-robin", deadline_s=90.0, first_byte_s=30.0, suspect_s=0.05, settle_s=2.0,
    probe_min_s=0.2, probe_max_s=0.5, fallback=Fallback.STRICT, stall_s=1.0,
)  # fmt: skip
TOKENS = 700
CUT_AT = 60
"""Events of the slowest stream when D goes."""
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "kvbaton-tiny", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
SAY = {"messages": [{"role": "user", "content": "go on for long"}]}
USAGE = {"stream_options": {"include_usage": True}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETION, {"prompt": "a greedy one", "temperature": 0}),
    "seeded": (COMPLETION, {"prompt": "a seeded one", "seed": 7, **USAGE}),
    "ids": (COMPLETION, {"prompt": "one with ids", "seed": 8, "return_token_ids": True}),
    "logprobs": (COMPLETION, {"prompt": "a telling one", "seed": 9, "logprobs": 2, "max_tokens": 300}),
    "stop": (COMPLETION, {"prompt": "one that may stop", "seed": 10, "stop": ["zq", "Q7"]}),
    "chat": (CHAT, {**SAY, "temperature": 0, **USAGE}),
    "seeded chat": (CHAT, {**SAY, "seed": 11}),
    "telling chat": (CHAT, {**SAY, "seed": 12, "logprobs": True, "top_logprobs": 2, "max_tokens": 300}),
}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew_in(tmp_path_factory.mktemp("streams")) as made:
        yield made


@asynccontextmanager
async def streets(crew: Crew, *names: str, **settings: Any) -> AsyncIterator[Town]:
    await asyncio.to_thread(crew.need, *names)
    async with town(crew, *names, settings=msgspec.structs.replace(SETTINGS, **settings)) as made:
        yield made
        await made.at_rest()
        assert made.router.stats.in_flight == 0


async def read(made: Town, kind: str, mode: str, reader: Reader) -> Reader:
    path, fields = KINDS[kind]
    body = LONG | fields
    async with made.session.post(made.url + path, json=body, headers={"x-kvbaton-mode": mode}) as response:
        assert response.status == 200, await response.text()
        rest = b""
        async for data in response.content.iter_any():
            whole, mark, rest = (rest + data).rpartition(b"\n\n")
            reader.read(whole + mark)
        assert not rest
    return reader


async def read_all(made: Town, kinds: Sequence[str], mode: str, readers: Sequence[Reader]) -> list[Reader]:
    return await asyncio.gather(*(read(made, *each) for each in zip(kinds, [mode] * len(kinds), readers, strict=True)))


async def cut(made: Town, kinds: Sequence[str], mode: str, end: Any) -> list[Reader]:
    """Read streams of these kinds, and call `end` when all are under way."""
    readers = [Reader() for _ in kinds]
    reading = asyncio.create_task(read_all(made, kinds, mode, readers))
    while min(each.events for each in readers) < CUT_AT:
        assert not reading.done(), reading.result()
        await asyncio.sleep(0.002)
    end()
    return await reading


def check(found: Sequence[Reader], expected: Sequence[Reader], kinds: Sequence[str]) -> None:
    for kind, got, right in zip(kinds, found, expected, strict=True):
        assert got.answer == right.answer, kind
        assert len(got.heads) == 1, kind
        assert (got.dones, len(got.finishes)) == (1, 1), kind


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_streams_of_every_kind_outlive_a_d_that_is_killed(crew: Crew, mode: str) -> None:
    kinds = list(KINDS)
    async with streets(crew, "p0", "p1", "d0", "strict") as made:
        right = await read_all(made, kinds, mode, [Reader() for _ in kinds])
        assert made.router.stats.waits.moves == {}
        found = await cut(made, kinds, mode, lambda: crew.kill("d0"))
        check(found, right, kinds)
        assert sum(made.router.stats.waits.moves.values()) >= 3, "about half of them were there"
        assert made.router.stats.waits.moves_failed == {}


async def test_streams_outlive_a_d_that_stands_still(crew: Crew) -> None:
    kinds = ["greedy", "seeded", "chat", "seeded chat"]
    async with streets(crew, "p0", "d0", "strict") as made:
        right = await read_all(made, kinds, "pull", [Reader() for _ in kinds])
        stopped = crew.stopped("d0")
        try:
            check(await cut(made, kinds, "pull", stopped.__enter__), right, kinds)
            assert set(made.router.stats.waits.moves) == {"stalled"}
        finally:
            crew.signal("d0", signal.SIGCONT)


async def test_streams_leave_a_d_that_drains(crew: Crew) -> None:
    kinds = ["greedy", "seeded", "chat", "seeded chat"]
    async with streets(crew, "p0", "d0", "strict") as made:
        right = await read_all(made, kinds, "pull", [Reader() for _ in kinds])
        found = await cut(made, kinds, "pull", lambda: crew.signal("d0", signal.SIGTERM))
        check(found, right, kinds)
        assert set(made.router.stats.waits.moves) == {"draining"}
        assert await asyncio.to_thread(crew.wait_ended, "d0", 30.0) == 0


async def test_a_stream_outlives_one_d_after_the_other(crew: Crew) -> None:
    async with streets(crew, "p0", "d0", "d1", "strict") as made:
        (right,) = await read_all(made, ["seeded"], "pull", [Reader()])
        reader = Reader()
        reading = asyncio.create_task(read(made, "seeded", "pull", reader))
        dead: set[str] = set()
        for at in (40, 120):  # early: what is left must last until D is found and killed
            here: set[str] = set()
            while reader.events < at or not here:
                assert not reading.done(), reading.result()
                workers = (await made.get("/workers"))["workers"]
                busy = [each for each in workers if each["role"] == "decode" and each["tokens_under_way"]]
                here = {each["name"] for each in busy} - dead
            dead |= here
            crew.kill(here.pop())
        check([await reading], [right], ["seeded"])
        assert made.router.stats.waits.moves == {"died": 2}


async def test_a_move_to_a_d_that_has_died_too_is_followed_by_another(crew: Crew) -> None:
    """No try of a move may be repeated within it here: whoever is asked first and is dead would have been the end."""
    kinds = ["greedy", "seeded", "chat", "seeded chat", "greedy", "seeded", "chat", "seeded chat", "ids"]
    async with streets(crew, "p0", "d0", "d1", "strict", decode_retries=0) as made:
        right = await read_all(made, kinds, "pull", [Reader() for _ in kinds])

        def end() -> None:
            crew.kill("d0")
            crew.kill("d1")

        check(await cut(made, kinds, "pull", end), right, kinds)
        assert made.router.stats.waits.moves_failed == {}


async def test_where_nobody_can_go_on_the_stream_ends_with_the_error_event(crew: Crew) -> None:
    async with streets(crew, "p0", "d0") as made:
        reader = Reader()
        reading = asyncio.create_task(read(made, "greedy", "pull", reader))
        while reader.events < CUT_AT:
            await asyncio.sleep(0.002)
        crew.kill("d0")
        await reading
        assert (reader.errors, reader.dones) == (["worker_died"], 0)
        assert made.router.stats.waits.moves_failed == {"nobody": 1}


async def test_what_is_off_is_off(crew: Crew) -> None:
    async with streets(crew, "p0", "d0", "strict", streams_continue=False) as made:
        readers = [Reader(), Reader()]
        reading = asyncio.create_task(read_all(made, ["seeded", "seeded chat"], "pull", readers))
        while min(each.events for each in readers) < CUT_AT:
            await asyncio.sleep(0.002)
        crew.kill("d0")
        await reading
        assert sorted(each.errors for each in readers) == [[], ["worker_died"]]
