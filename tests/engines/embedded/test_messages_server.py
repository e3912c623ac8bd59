"""`/v1/messages` at a worker's door, in Anthropic's form: whole, as events, refusals, handoffs; and models' cards."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
import pytest

from kvbaton.api import sse
from kvbaton.api.http.http_server import serving
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.backend import EngineBackend, EngineThread
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig
from kvbaton.engines.embedded.http_worker import RefusedError, worker_app
from tests.engines.embedded.test_server import Door, door

PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hey"}]}


async def told(d: Door, body: dict[str, Any]) -> tuple[list[dict[str, Any]], bytes]:
    """The events of a stream, each named by its type; and the bytes."""
    async with d.session.post(d.url + PATH, json={**body, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, sse.CONTENT_TYPE)
        data = await response.read()
    events = []
    for each in data.decode().removesuffix("\n\n").split("\n\n"):
        name, payload = each.split("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events, data


async def test_a_message_is_answered_whole_and_as_the_events_that_build_it() -> None:
    async with door() as d:
        status, whole = await d.post(BODY, PATH)
        assert status == 200 and whole["id"].startswith("msg_")
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
        assert whole["content"] == [{"type": "text", "text": "HEY!"}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
        usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 4}
        assert whole["usage"] == {"input_tokens": 5, **usage}, "those that were cached apart"
        events, data = await told(d, BODY)
        assert [event["type"] for event in events] == [
            "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        begun = events[0]["message"]
        assert (begun["content"], begun["stop_reason"], begun["usage"]["input_tokens"]) == ([], None, 6)
        assert "".join(event["delta"]["text"] for event in events[2:6]) == "HEY!"
        assert events[7]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert events[7]["usage"] == whole["usage"]
        relay = sse.Relay()
        assert relay.feed(data) == data and relay.ended and sse.token_chunks(data) == 4


async def test_a_stop_text_is_named() -> None:
    async with door() as d:
        body = {**BODY, "stop_sequences": ["Y", "!"]}
        _, whole = await d.post(body, PATH)
        assert whole["content"][0]["text"] == "HE"
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "Y")
        events, _ = await told(d, body)
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "Y"}


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({"system": "s"}, [("system", "s"), ("user", "hey")]),
        (
            {"system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]},
            [("system", "st"), ("user", "hey")],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}],
                    },
                    {"role": "assistant", "content": "a"},
                ]
            },
            [("user", "u"), ("assistant", "a")],
        ),
    ],
)
async def test_the_prompt_is_that_of_a_chat_and_its_length_is_told(
    fields: dict[str, Any], turns: list[tuple[str, str]]
) -> None:
    async with door() as d:
        body = {**BODY, **fields}
        status, _ = await d.post(body, PATH)
        prompt = tuple(tokenizer.encode_chat(turns))
        assert status == 200 and d.backend.requests[0].prompt == prompt
        del body["max_tokens"]
        assert await d.post(body, f"{PATH}/count_tokens") == (200, {"input_tokens": len(prompt)})


async def test_a_handoff_is_parsed_at_the_door_and_its_params_come_back_at_top_level() -> None:
    async with door() as d:
        body = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "mode": "pull"}}
        status, answer = await d.post(body, PATH)
        assert (status, answer["kv_transfer_params"]) == (200, {"ticket": "t", "do_remote_prefill": True})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"kv_transfer_params": {"do_remote_decode": True}}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 63}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"stop": "x"}, "stop"),
        ({"top_k": 5}, "top_k"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_field_in_anthropics_form(change: dict[str, Any], param: str) -> None:
    async with door() as d:
        status, answer = await d.post({**BODY, **change}, PATH)
        assert (status, answer["type"], answer["error"]["param"]) == (400, "error", param)
        assert d.backend.requests == []


async def test_what_fails_in_mid_stream_is_an_error_event() -> None:
    async with door() as d:
        d.backend.fail_at = (1, RefusedError("broken", "the engine died", "died"))
        events, data = await told(d, BODY)
        assert (events[-1]["type"], events[-1]["error"]["message"]) == ("error", "the engine died")
        relay = sse.Relay()
        relay.feed(data)
        assert relay.ended


async def test_the_embedded_engine_says_the_same_in_a_message_as_in_a_chat() -> None:
    thread = EngineThread(Engine(EngineConfig(cache=CacheConfig(blocks=256))))
    thread.start()
    try:
        app = worker_app(EngineBackend(thread, None, dict))
        async with serving(app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
            asked = {"messages": BODY["messages"], "max_tokens": 12, "temperature": 0}
            said = []
            for path in ("/v1/chat/completions", PATH):
                async with session.post(url + path, json=asked) as response:
                    said.append(await response.json())
        chat, message = said
        assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"] != ""
    finally:
        thread.stop()


async def test_a_models_card_says_since_when_it_is_served() -> None:
    before = int(time.time())
    async with door() as d:
        cards = []
        for _ in range(2):
            async with d.session.get(f"{d.url}/v1/models") as response:
                cards.append((await response.json())["data"][0])
        assert type(cards[0]["created"]) is int and before <= cards[0]["created"] <= time.time()
        assert cards[0] == cards[1], "it does not change while it is served"


async def test_a_path_that_is_not_there_is_told_with_those_that_are() -> None:
    async with door() as d:
        status, answer = await d.post({}, "/v1/embeddings")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models"):
            assert path in answer["error"]["message"]
