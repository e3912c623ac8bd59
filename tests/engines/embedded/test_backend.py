"""The engine's thread seen from the event loop: every iterator ends, whatever becomes of the engine."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.engines.embedded.backend import EngineBackend, EngineThread
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig
from kvbaton.engines.embedded.http_worker import Finished, RefusedError, Token
from kvbaton.engines.embedded.server_plan import GenerateRequest

WAIT_S = 20.0


def backend(**config: int) -> tuple[EngineThread, EngineBackend]:
    thread = EngineThread(Engine(EngineConfig(cache=CacheConfig(blocks=256), **config)))
    return thread, EngineBackend(thread, None, dict)


async def answer(of: EngineBackend, name: str = "r", max_tokens: int = 8) -> tuple[str, Finished | None]:
    text, end = "", None
    request = GenerateRequest(
        request_id=name, prompt=(256, 65, 66), max_tokens=max_tokens, temperature=0.0, ignore_eos=True
    )
    async for event in of.generate(request):
        if isinstance(event, Token):
            text += event.text
        else:
            end = event
    return text, end


async def test_an_answer_is_told_token_by_token_and_finished():
    thread, told = backend()
    thread.start()
    text, end = await asyncio.wait_for(answer(told), WAIT_S)
    assert len(text) == 8
    assert end is not None and end.reason == "length"
    thread.stop()


async def test_an_engine_that_dies_tells_everybody_and_everybody_after():
    """Promise 2: those who wait, those who race with the death, and those who come later."""
    thread, told = backend()
    died = asyncio.Event()
    thread.on_death = died.set

    def explode() -> list[object]:
        raise AssertionError("planted")

    thread.engine.step = explode
    thread.start()
    with pytest.raises(RefusedError, match="died"):
        await asyncio.wait_for(answer(told), WAIT_S)
    await asyncio.wait_for(died.wait(), WAIT_S)
    assert not told.ready()
    with pytest.raises(RefusedError):
        await asyncio.wait_for(answer(told, "later"), WAIT_S)
    with pytest.raises(RefusedError, match="died"):  # it had looked before the death and adds itself after
        raise await asyncio.wait_for(thread.add(_engine_request()).get(), WAIT_S)


def _engine_request():
    from kvbaton.engines.embedded.engine_request import EngineRequest
    from kvbaton.protocol.ids import RequestId

    return EngineRequest(RequestId("raced"), (256, 65))


async def test_a_stopped_thread_ends_what_is_under_way():
    thread, told = backend()
    thread.start()
    task = asyncio.create_task(answer(told, max_tokens=3000))
    await asyncio.sleep(0)
    await asyncio.to_thread(thread.stop)
    with pytest.raises(RefusedError, match="stopping"):
        await asyncio.wait_for(task, WAIT_S)


async def test_a_full_queue_says_come_back_and_an_impossible_request_says_change_it():
    thread, told = backend(waiting_max=1, seqs_max=1)
    thread.start()
    tasks = [asyncio.create_task(answer(told, f"r{n}", 400)) for n in range(6)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    refused = [each for each in results if isinstance(each, RefusedError)]
    assert refused and {each.kind for each in refused} == {"full"}
    with pytest.raises(RefusedError) as impossible:
        await answer(told, "long", 100_000)
    assert impossible.value.kind == "invalid"
    thread.stop()
