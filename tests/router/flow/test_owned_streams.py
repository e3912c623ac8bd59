"""Streams that go on at another D, before workers that do what a test tells them: what is asked, what is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api import sse
from kvbaton.api.params import HistoryWay
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.wire.ticket import check_history
from kvbaton.router.flow.owned_streams import BURST_S, MoveTurns
from tests.router.fake_workers import KEY, QUICK, Cluster, FakeWorker, Script, cluster, event, lease, until
from tests.router.stream_reader import Reader

OWN: dict[str, Any] = {"incarnation": Incarnation(1), "continues": HistoryWay.OUTPUT}
ON = msgspec.structs.replace(QUICK, streams_continue=True)
BODY = {"prompt": "abc", "max_tokens": 9, "stream": True}
ANSWER = "abcdefghi"


def told(at: int, *, chat: bool = False, end: bool = False) -> bytes:
    """The event of one token."""
    text = ANSWER[at]
    choice: dict[str, Any] = {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}
    choice |= {"token_ids": [at], "finish_reason": "length" if end else None}
    return event({"id": "cmpl-1", "created": 1, "model": "tiny", "choices": [choice]})


def until_token(count: int, then: str = "dies") -> Script:
    """A D that tells its answer from the first token, and ends behind so many."""

    async def script(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(min(count, len(ANSWER))):
            event_of_it = told(at, chat="messages" in body, end=at == len(ANSWER) - 1)
            if then == "says so at once" and at == count - 1:
                event_of_it += event({"error": {"message": "the worker left", "code": 503}})
            await response.write(event_of_it)
            await asyncio.sleep(0.001)
        if count >= len(ANSWER):
            await response.write(sse.DONE)
            return response
        assert request.transport is not None
        match then:
            case "dies":
                await asyncio.sleep(0.01)
                request.transport.abort()
            case "says so at once":
                return response
            case "says so":
                await response.write(event({"error": {"message": "engine died", "code": 500}}))
                return response
            case "aborts":
                choice = {"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}
                await response.write(event({"choices": [choice]}) + sse.DONE)
                return response
        await asyncio.Event().wait()
        raise AssertionError

    return script


WHOLE = until_token(99)


@contextlib.asynccontextmanager
async def ds(*scripts: Script, settings: Any = ON, **more: Any) -> AsyncIterator[Cluster]:
    async with cluster([lease], list(scripts), settings=settings, **{**OWN, **more}) as c:
        yield c


async def read(c: Cluster, body: dict[str, Any] = BODY, path: str = "/v1/completions") -> Reader:
    reader = Reader()
    async with c.session.post(c.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        reader.read(await response.read())
    return reader


def moves(c: Cluster) -> tuple[dict[str, int], dict[str, int]]:
    waits = c.app.stats.waits
    return dict(waits.moves), dict(waits.moves_failed)


@pytest.mark.parametrize("then", ["dies", "says so", "says so at once", "aborts"])
@pytest.mark.parametrize("chat", [False, True])
async def test_another_d_goes_on_behind_what_the_client_has(then: str, chat: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True} if chat else BODY
    async with ds(until_token(3, then), WHOLE) as c:
        reader = await read(c, body, "/v1/chat/completions" if chat else "/v1/completions")
        assert reader.texts == {("content" if chat else "text",): ANSWER}
        assert (reader.dones, reader.errors, reader.finishes, reader.ids) == (1, [], ["length"], [])
        assert moves(c) == ({"died": 1}, {})
        first, second = (each.bodies[0] for each in c.d)
        assert first["return_token_ids"] is second["return_token_ids"] is True
        assert first["seed"] == second["seed"], "sampling has none, so the router gives one, and to both the same"
        assert "history" not in first["kv_transfer_params"]
        for worker, asked in ((c.d[1], second), (c.p[0], c.p[0].bodies[-1])):
            history = asked["kv_transfer_params"]["history"]
            assert history["tokens"] == [0, 1, 2]
            check_history(history["proof"], history["tokens"], WorkerId(worker.name), [KEY], time.time())
        await until(lambda: not c.app.stats.in_flight)


async def test_of_several_choices_each_moves_by_itself() -> None:
    async with ds(until_token(4), WHOLE) as c:
        events = await c.events({**BODY, "n": 2})
        texts = ["".join(choice["text"] for each in events if each != "[DONE]" for choice in each["choices"]
                         if choice["index"] == index) for index in (0, 1)]  # fmt: skip
        assert texts == [ANSWER, ANSWER]
        assert events[-1] == "[DONE]"
        assert sum(moves(c)[0].values()) >= 1


async def test_a_d_that_tells_nothing_is_left_and_a_slow_client_is_no_silence() -> None:
    settings = msgspec.structs.replace(ON, stall_s=0.3)
    async with ds(until_token(3, "hangs"), WHOLE, settings=settings) as c:
        assert (await read(c)).texts == {("text",): ANSWER}
        assert moves(c) == ({"stalled": 1}, {})
        await until(lambda: c.d[0].aborted == 1)


async def test_comments_are_no_sign_of_life() -> None:
    async def comments(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(told(0))
        for _ in range(200):
            await response.write(b": still here\n\n")
            await asyncio.sleep(0.05)
        raise AssertionError

    async with ds(comments, WHOLE, settings=msgspec.structs.replace(ON, stall_s=0.3)) as c:
        assert (await read(c)).texts == {("text",): ANSWER}
        assert moves(c) == ({"stalled": 1}, {})


async def test_a_slow_d_is_waited_for_where_nobody_else_can_go_on() -> None:
    settings = msgspec.structs.replace(ON, stall_s=0.05)

    async def slow(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(len(ANSWER)):
            await response.write(told(at, end=at == len(ANSWER) - 1))
            await asyncio.sleep(0.3 if at == 2 else 0)
        await response.write(sse.DONE)
        return response

    async with ds(slow, settings=settings) as c:
        assert (await read(c)).texts == {("text",): ANSWER}
        assert moves(c) == ({}, {})


@pytest.mark.parametrize("how", ["drain", "lose"])
async def test_streams_go_from_a_d_that_drains_or_leaves(how: str) -> None:
    async with ds(until_token(3, "hangs"), WHOLE) as c:
        reading = asyncio.create_task(read(c))
        await until(lambda: c.d[0].bodies)
        await asyncio.sleep(0.05)
        getattr(c.directory, how)("d0")
        assert (await reading).texts == {("text",): ANSWER}
        assert moves(c) == ({"draining" if how == "drain" else "left": 1}, {})
        states = {each["name"]: each["state"] for each in (await c.get("/workers"))[1]["workers"]}
        assert states.get("d0", "draining") == "draining", "who drains is not blamed"


async def test_where_nobody_is_left_the_stream_ends_with_the_error_event() -> None:
    async with ds(until_token(3)) as c:
        reader = await read(c)
        assert (reader.texts, reader.errors, reader.dones) == ({("text",): "abc"}, ["worker_died"], 0)
        assert moves(c) == ({}, {"nobody": 1})
        await until(lambda: not c.app.stats.in_flight)


async def test_the_last_event_of_a_d_that_gave_up_is_told_where_nobody_is_left() -> None:
    async with ds(until_token(3, "says so")) as c:
        assert (await read(c)).errors == [500]


@pytest.mark.parametrize(("bound", "name"), [({"moves_max": 1}, "moves_max"), ({"history_max": 2}, "history_max"),
    ({"histories_max": 2}, "histories_max")])  # fmt: skip
async def test_moves_are_bounded(bound: dict[str, Any], name: str) -> None:
    async with ds(until_token(3), until_token(5), until_token(7), settings=msgspec.structs.replace(ON, **bound)) as c:
        reader = await read(c)
        assert reader.errors == ["worker_died"]
        assert moves(c)[1] == {name: 1}


async def test_another_history_is_never_shown() -> None:
    async def other(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "text": "abXd", "token_ids": [0, 1, 2, 3], "finish_reason": "length"}
        await response.write(event({"choices": [choice]}) + sse.DONE)
        return response

    async with ds(until_token(3), other, settings=msgspec.structs.replace(ON, suspect_s=60)) as c:
        reader = await read(c)
        assert (reader.texts, reader.errors, reader.dones) == ({("text",): "abc"}, ["worker_died"], 0)
        assert moves(c)[1] == {"differs": 1}
        listed = (await c.get("/workers"))[1]["workers"]
        states = {each["name"]: each["state"] for each in listed}
        assert states["d0"] == "suspect" != states["d1"], (
            "who died is to blame; of the texts nobody knows whose is right"
        )


@pytest.mark.parametrize(("more", "seed"), [({"seed": 7}, 7), ({"seed": None}, None), ({"temperature": 0}, None)])
async def test_a_seed_is_given_only_where_sampling_has_none(more: dict[str, Any], seed: int | None) -> None:
    async with ds(WHOLE) as c:
        await read(c, {**BODY, **more})
        assert c.d[0].bodies[0].get("seed") == seed


@pytest.mark.parametrize("wanted", [True, False])
async def test_ids_reach_the_client_only_where_it_asked_for_them(wanted: bool) -> None:
    async with ds(until_token(3), WHOLE) as c:
        reader = await read(c, {**BODY, "return_token_ids": wanted})
        assert reader.ids == (list(range(9)) if wanted else [])
        assert b"".join(c.d[0].raw).count(b"return_token_ids") == 1


async def test_a_d_that_takes_the_history_for_the_prompt_goes_on_with_greedy_sampling_alone() -> None:
    plain, kept = {**BODY, "temperature": 0}, {**BODY, "temperature": 0, "presence_penalty": 1}
    async with ds(until_token(3), WHOLE, continues=HistoryWay.PROMPT) as c:
        assert (await read(c, plain)).texts == {("text",): ANSWER}
    async with ds(until_token(3), WHOLE, continues=HistoryWay.PROMPT) as c:
        assert (await read(c, kept)).errors == ["worker_died"]
        assert moves(c) == ({}, {"nobody": 1})


@pytest.mark.parametrize("more", [{"continues": HistoryWay.NONE}, {"incarnation": Incarnation(0)}])
async def test_workers_that_do_not_say_how_they_continue_are_asked_as_before(more: dict[str, Any]) -> None:
    async with ds(until_token(3), WHOLE, **more) as c:
        reader = await read(c)
        assert reader.errors == ["worker_died"]
        assert "return_token_ids" not in c.d[0].bodies[0]
        assert "seed" not in c.d[0].bodies[0]


async def test_streams_go_on_in_a_router_of_several_processes() -> None:
    async with ds(until_token(3), WHOLE, processes=2) as c:
        for _ in range(4):
            assert (await read(c)).texts == {("text",): ANSWER}


def test_moves_have_their_turns() -> None:
    turns = MoveTurns(10)
    waits = [turns.take(100.0) for _ in range(13)]
    assert waits[:11] == pytest.approx([0.0] * 11), f"{BURST_S} s of them at once"
    assert waits[11:] == pytest.approx([0.1, 0.2])
    assert turns.wait_s(100.0) == pytest.approx(0.3)
    assert turns.take(101.0) == 0.0
