"""First tokens from P, with real worker processes: what a client reads is what it reads without, and sooner.

Law: a stream is compared with the same request where D tells all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.router.crew import Crew, Town, crew_in, until
from tests.e2e.router.test_streams import CHAT, COMPLETION, KINDS, LONG, SAY, USAGE, check, streets
from tests.router.stream_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MODES = ["pull", "stream", "push"]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (path, {**fields, "max_tokens": 40}) for name, (path, fields) in KINDS.items()},
    "one token": (COMPLETION, {"prompt": "only one", "temperature": 0, "max_tokens": 1, **USAGE}),
    "one telling token": (CHAT, {**SAY, "seed": 3, "max_tokens": 1, "logprobs": True, "top_logprobs": 2, **USAGE}),
    "two tokens": (CHAT, {**SAY, "temperature": 0, "max_tokens": 2, **USAGE}),
    "no seed for the greedy": (COMPLETION, {"prompt": "greedy and null", "temperature": 0, "seed": None}),
    "may end at once": (COMPLETION, {"prompt": "the end?", "seed": 4, "ignore_eos": False, "temperature": 9.0}),
}
STOPPED = {"prompt": "stop at the first letter", "temperature": 0, "max_tokens": 9}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew_in(tmp_path_factory.mktemp("first")) as made:
        yield made


async def read(made: Town, path: str, fields: dict[str, Any], mode: str) -> Reader:
    reader = Reader()
    async with made.session.post(made.url + path, json=LONG | fields, headers={"x-kvbaton-mode": mode}) as response:
        assert response.status == 200, await response.text()
        reader.read(await response.read())
    return reader


async def read_all(made: Town, mode: str) -> list[Reader]:
    return await asyncio.gather(*(read(made, path, fields, mode) for path, fields in ASKED.values()))


def told(made: Town) -> int:
    return sum(made.router.stats.waits.first_tokens.values())


async def test_streams_of_every_kind_are_those_that_d_alone_tells(crew: Crew) -> None:
    async with streets(crew, "p0", "d0", first_token=False) as made:
        right = await read_all(made, "pull")
        assert told(made) == 0
    for mode in MODES:
        async with streets(crew, "p0", "d0", stall_s=30.0) as made:
            reading = asyncio.create_task(read_all(made, mode))
            if mode != "pull":  # P and D are asked at once, and a busy machine may let D be first
                with crew.stopped("d0"):
                    await until(lambda: told(made) > 0)
            check(await reading, right, list(ASKED))
            least = 1 if mode != "pull" else len(ASKED) - 3
            assert told(made) >= least, "blanks of a chat or a stop text may begin it"
            assert made.router.stats.waits.moves == {}, "P and D of one engine sample the same"


@pytest.mark.parametrize("mode", MODES)
async def test_a_first_token_that_a_stop_text_may_cut_is_ds(crew: Crew, mode: str) -> None:
    async with streets(crew, "p0", "d0", first_token=False) as made:
        whole = (await read(made, COMPLETION, STOPPED, mode)).texts[("text",)]
    stopping = {**STOPPED, "stop": whole[:2], **USAGE}
    async with streets(crew, "p0", "d0") as made:
        found = await read(made, COMPLETION, stopping, mode)
        assert (found.texts, found.finishes, told(made)) == ({("text",): ""}, ["stop"], 0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_d_that_dies_with_the_first_tokens_of_its_streams_loses_none(crew: Crew, mode: str) -> None:
    kinds = ["greedy", "seeded", "chat", "ids", "logprobs"]
    async with streets(crew, "p0", "d0", "strict") as made:
        asked = [ASKED[kind] for kind in kinds]
        right = await asyncio.gather(*(read(made, *each, mode) for each in asked))
        before = told(made)
        reading = [asyncio.create_task(read(made, *each, mode)) for each in asked]
        while told(made) < before + 2 and not all(each.done() for each in reading):
            await asyncio.sleep(0.001)
        crew.kill("d0")
        check([await each for each in reading], right, kinds)
