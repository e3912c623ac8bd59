"""The first token of a stream, told as P sampled it: when it is told, what goes on behind it, and when it is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import HistoryWay
from kvbaton.protocol.ids import Incarnation
from kvbaton.router.flow.continuing import StreamLife
from kvbaton.router.flow.first_token import FirstToken, FirstTokenRule
from kvbaton.router.flow.said_text import HistoryRoom
from kvbaton.router.workers.directory import ListedEngine
from tests.router.fake_workers import (
    QUICK,
    Cluster,
    FakeWorker,
    Script,
    after,
    cluster,
    event,
    only_first,
    refuse,
    until,
)
from tests.router.flow.test_owned_streams import ANSWER, WHOLE, moves
from tests.router.stream_reader import Reader

OWN: dict[str, Any] = {"incarnation": Incarnation(1), "continues": HistoryWay.OUTPUT, "context_tokens": 100}
ON = msgspec.structs.replace(QUICK, streams_continue=True, first_token=True)
BODY = {"prompt": "abc", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}
MODES = ("pull", "stream", "push")
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def answer_of(
    body: dict[str, Any], token: int = 0, text: str = "a", finish: str = "length", **more: Any
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "token_ids": [token], "finish_reason": finish, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    return {"id": "cmpl-1", "created": 1, "model": "tiny", "usage": USAGE, "choices": [choice | more]}


def samples(**more: Any) -> Script:
    """A P that does its part, and says what it sampled."""

    async def script(worker: FakeWorker, _: web.Request, body: dict[str, Any]) -> web.Response:
        answer = answer_of(body, **more)
        if body["kv_transfer_params"]["mode"] == "pull":
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "mode": "pull",
                "ticket": f"ticket-{worker.name}-{len(worker.bodies)}",
            }  # fmt: skip
        return web.json_response(answer)

    return script


def says(text: str) -> Script:
    """A D that tells these letters, all at once."""

    async def script(_: FakeWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = [ord(letter) - ord("a") for letter in text]
        choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": "length"}
        head = {"id": "cmpl-2", "created": 2, "model": "tiny"}
        await response.write(event({**head, "choices": [choice]}) + sse.DONE)
        return response

    return script


@contextlib.asynccontextmanager
async def pd(p: Script | list[Script], *d: Script, settings: Any = ON, **more: Any) -> AsyncIterator[Cluster]:
    ps = p if isinstance(p, list) else [p]
    async with cluster(ps, list(d), settings=settings, **{**OWN, **more}) as c:
        yield c


async def read(c: Cluster, body: dict[str, Any] = BODY, mode: str = "pull", reader: Reader | None = None) -> Reader:
    reader = reader or Reader()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with c.session.post(c.url + path, json=body, headers={"x-kvbaton-mode": mode}) as response:
        assert response.status == 200, await response.text()
        async for data in response.content.iter_any():
            reader.read(data)
    return reader


def first_tokens(c: Cluster) -> int:
    return sum(c.app.stats.waits.first_tokens.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [BODY, CHAT])
async def test_the_client_has_ps_token_before_d_says_a_word(mode: str, body: dict[str, Any]) -> None:
    gate, reader = asyncio.Event(), Reader()
    async with pd(samples(), after(gate, WHOLE)) as c:
        reading = asyncio.create_task(read(c, body, mode, reader))
        channel = ("content" if "messages" in body else "text",)
        await until(lambda: reader.texts.get(channel))
        assert reader.texts[channel] == "a"
        gate.set()
        await reading
        assert reader.texts == {channel: ANSWER} | ({("role",): "assistant"} if "messages" in body else {})
        assert (reader.dones, reader.errors, reader.finishes, reader.ids) == (1, [], ["length"], [])
        assert len(reader.heads) == 1
        asked = c.p[0].bodies[0]
        assert (asked["max_tokens"], asked["stream"], asked["return_token_ids"]) == (1, False, True)
        assert "ignore_eos" not in asked
        assert asked["seed"] == c.d[0].bodies[0]["seed"], "P samples what D would sample"
        history = c.d[0].bodies[0]["kv_transfer_params"].get("history")
        assert (history and history["tokens"]) == ([0] if mode == "pull" else None)
        assert (first_tokens(c), moves(c)) == (1, ({}, {}))
        await until(lambda: not c.app.stats.in_flight)
        [flight] = (await c.get("/flights?last=9"))[1]["journeys"]
        assert flight["chunks"] == len(ANSWER), "P's token is one of them"


@pytest.mark.parametrize("mode", ["stream", "push"])
async def test_a_d_that_samples_another_token_is_asked_again_behind_ps(mode: str) -> None:
    gate = asyncio.Event()
    async with pd(samples(), only_first(after(gate, says("bcd")), says("acd"))) as c:
        reader = Reader()
        reading = asyncio.create_task(read(c, {**BODY, "temperature": 0}, mode, reader))
        await until(lambda: reader.texts)
        gate.set()
        await reading
        assert (reader.texts, reader.dones, reader.errors) == ({("text",): "acd"}, 1, [])
        assert c.d[0].bodies[1]["kv_transfer_params"]["history"]["tokens"] == [0]
        assert moves(c) == ({"differed": 1}, {})
        states = {each["name"]: each["state"] for each in (await c.get("/workers"))[1]["workers"]}
        assert states["d0"] == "serving", "nobody is blamed for a near tie"


async def test_a_d_that_had_the_token_and_differs_ends_the_stream() -> None:
    async with pd(samples(), says("bcd")) as c:
        reader = await read(c)
        assert (reader.texts, reader.errors) == ({("text",): "a"}, ["worker_died"])
        assert moves(c) == ({}, {"differs": 1})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("more", "sampled", "finish"),
    [({"max_tokens": 1}, {}, "length"), ({}, {"finish": "stop", "text": "", "token": 7}, "stop")],
)
async def test_where_ps_token_is_the_last_no_d_is_needed(
    mode: str, more: dict[str, Any], sampled: dict[str, Any], finish: str
) -> None:
    async with pd(samples(**sampled), after(asyncio.Event(), WHOLE)) as c:
        reader = await read(c, {**BODY, **more}, mode)
        assert reader.texts == {("text",): sampled.get("text", "a")}
        assert (reader.dones, reader.errors, reader.finishes, reader.usages) == (1, [], [finish], [USAGE])
        assert len(c.d[0].bodies) == (0 if mode == "pull" else 1)
        await until(lambda: len(c.d[0].bodies) == c.d[0].aborted)
        assert c.app.stats.discards == 1, "P is told that nobody comes for its lease"
        await until(lambda: not c.app.stats.in_flight)


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_goes_behind_the_first_token_leaves_nothing(mode: str) -> None:
    async with pd(samples(), after(asyncio.Event(), WHOLE)) as c:
        reader = Reader()
        reading = asyncio.create_task(read(c, BODY, mode, reader))
        await until(lambda: reader.texts and c.d[0].bodies)
        reading.cancel()
        await until(lambda: c.d[0].aborted == 1 and not c.app.stats.in_flight)
        assert c.app.stats.discards == 1
        listed = (await c.get("/workers"))[1]["workers"]
        assert not any(each["tokens_under_way"] for each in listed)


@pytest.mark.parametrize("mode", MODES)
async def test_a_d_that_fails_behind_the_first_token_is_followed_by_another(mode: str) -> None:
    gate = asyncio.Event()
    async with pd(samples(), after(gate, refuse(500)), WHOLE) as c:
        reader = Reader()
        reading = asyncio.create_task(read(c, BODY, mode, reader))
        await until(lambda: reader.texts)
        gate.set()
        assert (await reading).texts == {("text",): ANSWER}
        assert c.d[1].bodies[0]["kv_transfer_params"]["history"]["tokens"] == [0]
        assert "return_token_ids" not in c.p[0].bodies[1], "its token is there already"
        assert first_tokens(c) == 1


async def test_tries_of_a_stream_that_has_begun_do_not_end_before_its_moves() -> None:
    async with pd(samples(), only_first(refuse(500), WHOLE), only_first(refuse(500), WHOLE)) as c:
        assert (await read(c)).texts == {("text",): ANSWER}
        assert moves(c) == ({"refused": 1}, {})


async def test_a_full_d_behind_a_first_token_is_asked_again_when_it_said_and_not_before() -> None:
    full = refuse(429)  # come back after 7 s
    async with pd(samples(), full) as c:
        reading = asyncio.create_task(read(c))
        await until(lambda: c.d[0].bodies)
        asked = len(c.d[0].bodies)
        await asyncio.sleep(0.5)
        assert len(c.d[0].bodies) == asked
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not c.app.stats.in_flight)
    async with pd(samples(), WHOLE, full=True) as c:
        await read(c)
        assert first_tokens(c) == 0, "a D that is full may not take it"


async def test_a_d_that_dies_behind_its_last_token_needs_no_other_and_the_usage_is_right() -> None:
    life = StreamLife(BODY, HistoryRoom(100, 100), FirstTokenRule(BodyKind.COMPLETION, BODY))
    first = life.first and life.first.told(msgspec.json.encode(answer_of(BODY)), worker(), worker())
    assert first is not None
    reader = Reader()
    reader.read(life.say_first(first))
    choice = {"index": 0, "text": "ab", "token_ids": [0, 1], "finish_reason": "length"}
    reader.read(life.delivered.told(event({"id": "cmpl-2", "choices": [choice]})))
    reader.read(life.delivered.rest())
    assert reader.usages == [{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}]
    assert (reader.texts, reader.dones) == ({("text",): "ab"}, 1)


@pytest.mark.parametrize("room", [HistoryRoom(0, 9), HistoryRoom(9, 0)])
def test_a_token_that_cannot_be_remembered_is_not_told(room: HistoryRoom) -> None:
    first = FirstToken(7, b"", 3, is_last=False)
    assert not StreamLife(BODY, room).may_say(first)
    assert StreamLife(BODY, HistoryRoom(9, 9)).may_say(first)
    assert not StreamLife(BODY, HistoryRoom(9, 9)).may_say(msgspec.structs.replace(first, token=1 << 31))


async def test_where_no_d_is_left_the_stream_ends_with_the_error_event() -> None:
    async with pd(samples(), refuse(500), settings=msgspec.structs.replace(ON, moves_max=2)) as c:
        reader = await read(c)
        assert (reader.texts, len(reader.errors), reader.dones) == ({("text",): "a"}, 1, 0)
        assert sum(moves(c)[1].values()) == 1
        await until(lambda: not c.app.stats.in_flight)


async def test_each_of_several_choices_has_its_own_first_token() -> None:
    async with pd(samples(), WHOLE) as c:
        events = await c.events({**BODY, "n": 2, "seed": 5})
        texts = ["".join(choice["text"] for each in events if each != "[DONE]" for choice in each["choices"]
                         if choice["index"] == index) for index in (0, 1)]  # fmt: skip
        assert texts == [ANSWER, ANSWER]
        assert sorted(each["seed"] for each in c.p[0].bodies) == sorted(each["seed"] for each in c.d[0].bodies)
        assert first_tokens(c) == 2


PLAIN: dict[str, Any] = {"prompt": "abc", "max_tokens": 9, "stream": True}


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True}, {"seed": None, "temperature": 1.0}, {"stream_options": {"continuous_usage_stats": True}},
        {"max_completion_tokens": 3}, {"min_tokens": 12},
    ],
)  # fmt: skip
async def test_requests_whose_token_d_alone_may_tell_are_asked_as_before(more: dict[str, Any]) -> None:
    async with pd(samples(), WHOLE) as c:
        await read(c, PLAIN | more, "push")
        assert c.p[0].bodies[0]["ignore_eos"] is True
        assert "return_token_ids" not in c.p[0].bodies[0]
        assert first_tokens(c) == 0


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"first_token": False}, {}), ({"streams_continue": False}, {}), ({}, {"context_tokens": 0}),
        ({}, {"continues": HistoryWay.PROMPT}),
    ],
)  # fmt: skip
async def test_what_is_off_or_cannot_be_is_not_asked(settings: dict[str, Any], more: dict[str, Any]) -> None:
    async with pd(samples(), WHOLE, settings=msgspec.structs.replace(ON, **settings), **more) as c:
        assert (await read(c)).texts == {("text",): ANSWER}
        assert "return_token_ids" not in c.p[0].bodies[0]
        assert first_tokens(c) == 0


async def test_a_router_of_several_processes_tells_it_too() -> None:
    async with pd(samples(), WHOLE, processes=2) as c:
        for _ in range(3):
            assert (await read(c)).texts == {("text",): ANSWER}


def worker(context_tokens: int = 100) -> ListedEngine:
    return ListedEngine("w", "both", "http://w", context_tokens=context_tokens)  # type: ignore[arg-type]


def rule(body: dict[str, Any], answer: dict[str, Any], context_tokens: int = 100) -> Reader | None:
    """What a client reads of P's answer, if it may."""
    kind = BodyKind.CHAT if "messages" in body else BodyKind.COMPLETION
    found = FirstTokenRule(kind, body)
    assert not found.is_off
    said = found.told(msgspec.json.encode(answer), worker(), worker(context_tokens))
    if said is None:
        return None
    reader = Reader()
    reader.read(said.events)
    return reader


@pytest.mark.parametrize(
    ("more", "sampled"),
    [
        ({}, {"text": ""}), ({}, {"text": "a\ufffd"}), ({}, {"token_ids": [1, 2]}), ({}, {"token_ids": None}),
        ({"stop": "ab"}, {}), ({"stop": ["x", "a"]}, {}), ({"stop": "xyz"}, {"text": "wxy"}),
        ({"stop_token_ids": [0]}, {}),
        ({}, {"logprobs": msgspec.Raw(b"[\n]")}), ({"max_tokens": 1}, {"token_ids": [1, 2]}),
        ({}, {"finish": "abort"}), ({"max_tokens": 98}, {}), ({"max_tokens": 1, "stop": "ab"}, {}),
    ],
)  # fmt: skip
def test_what_d_might_tell_otherwise_is_not_told(more: dict[str, Any], sampled: dict[str, Any]) -> None:
    assert rule({**PLAIN, **more}, answer_of(PLAIN, **sampled)) is None


@pytest.mark.parametrize("text", [" a", "a\n", "<tool", "{"])
def test_of_a_chat_nothing_is_told_that_a_parser_might_read(text: str) -> None:
    assert rule(CHAT, answer_of(CHAT, text=text)) is None
    completion = rule(PLAIN, answer_of(PLAIN, text=text))
    assert completion is not None
    assert completion.texts == {("text",): text}


def test_a_prompt_that_leaves_room_for_one_token_is_ds() -> None:
    body = {"prompt": "abc", "stream": True}
    assert rule(body, answer_of(body), context_tokens=5) is not None
    assert rule(body, answer_of(body), context_tokens=4) is None
    assert rule({**body, "max_tokens": 1}, answer_of(body), context_tokens=4) is not None


@pytest.mark.parametrize("body", [PLAIN, CHAT])
def test_ids_log_probabilities_and_the_prompts_ids_are_told_as_d_tells_them(body: dict[str, Any]) -> None:
    wants = {**body, "return_token_ids": True, "logprobs": 1 if body is PLAIN else True}
    rows = {"token_logprobs": [-1.5]} if body is PLAIN else {"content": [{"token": "a", "logprob": -1.5}]}
    answer = answer_of(body, logprobs=rows, **({"prompt_token_ids": [5, 6]} if body is PLAIN else {}))
    reader = rule(wants, {**answer, "prompt_token_ids": [5, 6]} if body is CHAT else answer)
    assert reader is not None
    assert (reader.ids, reader.logprobs) == ([0], [-1.5])


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"choices": []}', msgspec.json.encode({**answer_of(PLAIN), "choices": []})]
)
def test_what_is_no_answer_is_not_told(answer: bytes) -> None:
    assert FirstTokenRule(BodyKind.COMPLETION, PLAIN).told(answer, worker(), worker()) is None


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]}, {"functions": [{}]}, {"max_tokens": True}, {"max_tokens": 0}, {"stop": [3]},
        {"stop": [""]}, {"stop": 3}, {"stream_options": "x"}, {"stream_options": {"include_usage": 1}},
        {"stop_token_ids": 3}, {"min_tokens": "x"}, {"max_tokens": None, "min_tokens": 2}, {"return_prompt_text": True},
    ],
)  # fmt: skip
def test_bodies_that_it_is_not_for(more: dict[str, Any]) -> None:
    assert FirstTokenRule(BodyKind.CHAT, {**CHAT, **more}).is_off
    assert not FirstTokenRule(BodyKind.CHAT, {**CHAT, "tools": [{}], "tool_choice": "none"}).is_off
