"""`/v1/responses` at a worker's door: an unmodified `openai` client, prompts equal to a chat's, refusals, handoffs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from kvbaton.api import sse
from kvbaton.api.http.http_server import serving
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.backend import EngineBackend, EngineThread
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig
from kvbaton.engines.embedded.http_worker import RefusedError, worker_app
from tests.engines.embedded.test_server import Door, door
from tests.waiting import soon

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "ab", "max_output_tokens": 3, "temperature": 0}


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


async def raw_stream(d: Door, body: dict[str, Any]) -> bytes:
    async with d.session.post(d.url + PATH, json={**body, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, sse.CONTENT_TYPE)
        return await response.read()


async def test_an_unmodified_openai_client_gets_a_response_whole_and_as_a_stream() -> None:
    async with door() as d, client_of(d.url) as client:
        whole = await client.responses.create(model="tiny", input="hey", max_output_tokens=4)
        assert (whole.output_text, whole.status, whole.object) == ("HEY!", "incomplete", "response")
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        tokens = (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens)
        assert tokens == (6, 4, 10)
        assert whole.usage.input_tokens_details.cached_tokens == 1
        stream = await client.responses.create(model="tiny", input="hey", max_output_tokens=4, stream=True)
        events = [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert deltas == ["H", "E", "Y", "!"]
        assert events[-1].type == "response.incomplete"
        kept = {"id", "created_at", "output"}
        assert events[-1].response.model_dump(exclude=kept) == whole.model_dump(exclude=kept)
        assert events[-1].response.output_text == "HEY!"
        assert d.backend.aborted == 0


async def test_the_clients_own_stream_helper_finds_the_final_response() -> None:
    async with door() as d, client_of(d.url) as client:
        extra = {"stop": "!"}  # so that the answer is complete, not cut at its limit
        async with client.responses.stream(model="tiny", input="hey", extra_body=extra) as stream:
            final = await stream.get_final_response()
        assert (final.output_text, final.status) == ("HEY", "completed")
        await soon(lambda: d.backend.aborted == 1)  # the stop text ended it


async def test_a_stream_consists_of_named_and_numbered_events_and_has_no_done() -> None:
    async with door() as d:
        data = await raw_stream(d, BODY)
        names = [line[7:].decode() for line in data.splitlines() if line.startswith(b"event: ")]
        assert names == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            *["response.output_text.delta"] * 3, "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.incomplete",
        ]  # fmt: skip
        assert b"[DONE]" not in data
        relay = sse.Relay()
        assert relay.feed(data) == data
        assert relay.ended


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({"input": "u"}, [("user", "u")]),
        ({"input": "u", "instructions": "s"}, [("system", "s"), ("user", "u")]),
        ({"input": "u", "instructions": ""}, [("user", "u")]),
        (
            {
                "instructions": "s",
                "input": [
                    {"role": "developer", "content": "d"},
                    {"role": "user", "content": [{"type": "input_text", "text": "u"}, {"type": "text", "text": "v"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                ],
            },
            [("system", "s"), ("system", "d"), ("user", "uv"), ("assistant", "a")],
        ),
    ],
)
async def test_the_prompt_is_that_of_a_chat(fields: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    async with door() as d:
        status, _ = await d.post({**BODY, **fields}, PATH)
        chat = {"messages": [{"role": role, "content": text} for role, text in turns], "max_tokens": 3}
        await d.post(chat, "/v1/chat/completions")
        as_response, as_chat = d.backend.requests
        assert status == 200
        assert as_response.prompt == as_chat.prompt == tuple(tokenizer.encode_chat(turns))


async def test_sampling_reaches_the_backend_and_the_limit_has_a_default() -> None:
    async with door() as d:
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        body = {**BODY, "seed": 4, "ignore_eos": True, "include": include, "top_logprobs": 2, "cache_salt": "s"}
        _, answer = await d.post(body, PATH)
        request = d.backend.requests[0]
        assert (request.max_tokens, request.temperature, request.seed) == (3, 0.0, 4)
        assert (request.ignore_eos, request.logprobs, request.cache_salt) == (True, 2, "s")
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert [(each["token"], len(each["top_logprobs"])) for each in logprobs] == [("A", 2), ("B", 2), ("!", 2)]
        await d.post({"input": "a", "top_logprobs": 2}, PATH)
        request = d.backend.requests[1]
        assert (request.max_tokens, request.temperature, request.logprobs) == (60, 1.0, None)


async def test_a_handoff_is_parsed_at_the_door_and_its_params_come_back_at_top_level() -> None:
    async with door() as d:
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "mode": "pull"}
        body = {**BODY, "max_output_tokens": 1, "store": False, "stream": False, "kv_transfer_params": asked}
        status, answer = await d.post(body, PATH)
        assert (status, answer["kv_transfer_params"]) == (200, {"ticket": "t", "do_remote_prefill": True})
        handoff = d.backend.requests[0].handoff
        assert handoff is not None
        assert handoff.do_remote_decode
        _, alone = await d.post(BODY, PATH)
        assert "kv_transfer_params" not in alone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"kv_transfer_params": {"do_remote_decode": True}}, "max_output_tokens"),
        ({"kv_transfer_params": {"do_remote_decode": True}, "stream": True}, "stream"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.ticket"),
        ({"input": "x" * 64}, "input"),
        ({"max_output_tokens": 63}, "input"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_p": 0.5}, "top_p"),
        ({"n": 2}, "n"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"background": True}, "background"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_field_and_reaches_no_engine(
    change: dict[str, Any], param: str
) -> None:
    async with door() as d:
        status, answer = await d.post({**BODY, **change}, PATH)
        assert (status, answer["error"]["param"]) == (400, param)
        assert d.backend.requests == []


async def test_values_that_ask_for_nothing_pass() -> None:
    async with door() as d:
        neutral = {
            "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "truncation": "disabled",
            "top_p": 1, "store": True, "background": False, "reasoning": None, "metadata": {"a": "b"},
        }  # fmt: skip
        status, answer = await d.post({**BODY, **neutral}, PATH)
        assert (status, answer["store"], answer["metadata"]) == (200, False, {"a": "b"})


async def test_a_refusal_before_the_first_token_is_a_status_and_one_after_it_the_clients_exception() -> None:
    async with door() as d, client_of(d.url) as client:
        d.backend.fail_at = (0, RefusedError("handoff", "P is gone", "peer_gone"))
        with pytest.raises(openai.InternalServerError, match="P is gone"):
            await client.responses.create(model="tiny", input="hey", stream=True)
        d.backend.fail_at = (1, RefusedError("broken", "the engine died", "died"))
        stream = await client.responses.create(model="tiny", input="hey", stream=True)
        seen = []
        with pytest.raises(openai.APIError, match="the engine died"):
            async for event in stream:
                seen.append(event.type)
        assert seen[-1] == "response.output_text.delta"
        relay = sse.Relay()
        data = relay.feed(await raw_stream(d, BODY))
        assert relay.ended
        last = data.rsplit(b"\n\n", 2)[1]
        assert last.startswith(b'event: error\ndata: {"type":"error","sequence_number":5,"code":"died"')


async def test_a_bug_in_mid_stream_is_told_as_an_error_event_too() -> None:
    async with door() as d:
        d.backend.fail_at = (1, RuntimeError("secret"))
        data = await raw_stream(d, BODY)
        assert b'event: error\ndata: {"type":"error","sequence_number":5,"code":"internal"' in data
        assert b"secret" not in data


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_aborts_its_request(stream: bool) -> None:
    async with door() as d:
        d.backend.wait_at = 1
        call = asyncio.create_task(d.post({**BODY, "stream": stream}, PATH))
        await soon(lambda: len(d.backend.requests) == 1)
        call.cancel()
        await soon(lambda: d.backend.aborted == 1)


async def test_the_embedded_engine_says_the_same_in_a_response_as_in_a_chat() -> None:
    thread = EngineThread(Engine(EngineConfig(cache=CacheConfig(blocks=256))))
    thread.start()
    try:
        backend = EngineBackend(thread, None, dict)
        model = backend.models()[0].id
        async with serving(worker_app(backend), "127.0.0.1", 0) as url, client_of(url) as client:
            messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
            chat = await client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
            same: Any = {"input": "why?", "instructions": "be brief", "max_output_tokens": 12, "temperature": 0}
            whole = await client.responses.create(model=model, **same)
            stream = await client.responses.create(model=model, stream=True, **same)
            parts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        text = chat.choices[0].message.content
        assert text
        assert whole.output_text == "".join(parts) == text
    finally:
        thread.stop()
