"""The router's front: bad bodies, headers, joined answers, what operators see, and an unmodified OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from kvbaton.api.params import Mode
from tests.router.fake_workers import QUICK, FakeWorker, cluster, hang, only_first, refuse, say, speak, until

BODY = {"prompt": "abc", "max_tokens": 4}
MODES = ("pull", "stream", "push")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        ({"max_tokens": 4}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({**BODY, "max_tokens": -1}, "max_tokens"),
        ({**BODY, "max_tokens": "4"}, "max_tokens"),
        ({**BODY, "max_tokens": True}, "max_tokens"),
        ({**BODY, "n": 0}, "n"),
        ({**BODY, "prompt": ["a"] * 5, "n": 100}, "n"),
        ({**BODY, "stream": "yes"}, "stream"),
        ({**BODY, "temperature": "hot"}, "temperature"),
        ({**BODY, "stop": [""]}, "stop"),
        ({**BODY, "kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
async def test_a_malformed_body_is_refused_by_field_and_no_worker_is_asked(body: Any, param: str) -> None:
    async with cluster() as c:
        status, answer, _ = await c.post(body)
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
        assert answer["error"]["message"].startswith(param)
        assert c.p[0].bodies == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
async def test_malformed_messages_are_refused_by_place(messages: Any, param: str) -> None:
    async with cluster() as c:
        status, answer, _ = await c.post({"messages": messages}, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, param)


async def test_odd_requests_get_errors_in_openais_form() -> None:
    async with cluster(settings=msgspec.structs.replace(QUICK, body_bytes_max=1000)) as c:
        status, answer, _ = await c.post({"prompt": "x" * 2000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        status, answer, _ = await c.post(BODY, "/v1/nowhere")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        status, answer = await c.get("/v1/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        status, answer, _ = await c.post(BODY, x_kvbaton_mode="pigeon")
        assert (status, answer["error"]["param"]) == (400, "x-kvbaton-mode")
        assert "pull, stream, push" in answer["error"]["message"]


async def test_a_body_that_does_not_come_to_its_end_times_out() -> None:
    async with cluster(settings=msgspec.structs.replace(QUICK, body_s=0.1)) as c:
        port = int(c.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_mode_that_the_operator_does_not_allow_is_refused() -> None:
    async with cluster(settings=msgspec.structs.replace(QUICK, modes_allowed=(Mode.PULL,))) as c:
        assert (await c.post(BODY, x_kvbaton_mode="push"))[0] == 400
        assert (await c.post(BODY, x_kvbaton_mode="pull"))[0] == 200


@pytest.mark.parametrize("mode", MODES)
async def test_headers_reach_both_legs_and_the_request_id_comes_back(mode: str) -> None:
    async with cluster() as c:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        sent = {"traceparent": trace, "tracestate": "a=b", "X-Request-Id": "mine"}
        _, _, headers = await c.post(BODY, x_kvbaton_mode=mode, Cookie="no", Authorization="Bearer s", **sent)
        assert headers["X-Request-Id"] == "mine"
        for worker in (*c.p, *c.d):
            assert {name: worker.headers[0].get(name) for name in sent} == sent
            assert not [name for name in ("Cookie", "Authorization") if name in worker.headers[0]]


async def test_a_whole_answer_is_passed_on_byte_by_byte_unless_it_holds_transfer_params() -> None:
    odd = b'{"choices": [{"text": "say \\"kv_transfer_params\\": x"}],   "x": -1.1920928955078125e-07}'
    async with cluster(1, [say(odd)]) as c, c.session.post(f"{c.url}/v1/completions", json=BODY) as response:
        assert await response.read() == odd
        assert response.headers["Content-Length"] == str(len(odd))
    leaky = b'{"choices": [], "kv_transfer_params": {"ticket": "secret"}}'
    async with cluster(1, [say(leaky)]) as c:
        assert (await c.post(BODY))[1] == {"choices": []}


@pytest.mark.parametrize("mode", MODES)
async def test_several_prompts_and_choices_are_so_many_handoffs_and_one_answer(mode: str) -> None:
    async with cluster(2, 2) as c:
        body = {"prompt": ["ab", "cd"], "n": 2, "seed": 7, "best_of": 2}
        status, answer, _ = await c.post(body, x_kvbaton_mode=mode, X_Request_Id="r")
        assert status == 200
        texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
        assert texts == [(0, "AB+7"), (1, "AB+8"), (2, "CD+7"), (3, "CD+8")]
        assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 16, "total_tokens": 26}
        asked = [body for worker in c.d for body in worker.bodies]
        assert all("n" not in body and "best_of" not in body for body in asked)
        assert len({body["kv_transfer_params"]["ticket"] for body in asked}) == 4
        ids = sorted(head["X-Request-Id"] for worker in c.d for head in worker.headers)
        assert ids == ["r-0", "r-1", "r-2", "r-3"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_several_streams_become_one_with_one_id_and_one_end(mode: str, chat: bool) -> None:
    async with cluster(2, 2) as c:
        asked: dict[str, Any] = {"n": 2, "seed": 1, "stream_options": {"include_usage": True}}
        if chat:
            asked["messages"] = [{"role": "user", "content": "xyz"}]
        else:
            asked["prompt"] = ["xyz", "w"]
        path = "/v1/chat/completions" if chat else "/v1/completions"
        *chunks, usage, done = await c.events(asked, path, x_kvbaton_mode=mode)
        texts = dict.fromkeys(range(2 if chat else 4), "")
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
        expected = ["XYZ+1", "XYZ+2"] if chat else ["XYZ+1", "XYZ+2", "W+1", "W+2"]
        assert list(texts.values()) == expected
        assert done == "[DONE]"
        assert usage["usage"]["prompt_tokens"] == (5 if chat else 10)
        assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_part_that_fails_before_the_first_byte_fails_the_whole_and_closes_the_others(stream: bool) -> None:
    async with cluster(1, [only_first(hang, refuse(400, "prompt: too long"))]) as c:
        status, answer, _ = await c.post({"prompt": ["a", "b"], "stream": stream})
        assert (status, answer["error"]["message"]) == (400, "prompt: too long")
        await until(lambda: c.d[0].aborted == 1)


async def test_one_part_that_breaks_in_mid_stream_ends_the_joined_stream_with_an_error() -> None:
    async def garbage(worker: FakeWorker, request: Any, body: dict[str, Any]) -> Any:
        if body["prompt"] == "a":
            return await speak(worker, request, body)
        return await say(b"data: {odd}\n\ndata: [DONE]\n\n", "text/event-stream")(worker, request, body)

    async with (
        cluster(1, [garbage]) as c,
        c.session.post(f"{c.url}/v1/completions", json={"prompt": ["a", "b"], "stream": True}) as response,
    ):
        text = await response.text()
        assert "not JSON" in text
        assert "[DONE]" not in text


async def test_operators_see_workers_pairs_and_numbers() -> None:
    async with cluster(2, 1) as c:
        await c.post(BODY)
        await c.post({"prompt": 5})
        status, health = await c.get("/health")
        assert (status, health["pairs"]) == (200, {"pull": 2, "stream": 2, "push": 2})
        _, listed = await c.get("/workers")
        assert [worker["name"] for worker in listed["workers"]] == ["p0", "p1", "d0"]
        _, stats = await c.get("/stats")
        assert stats["ends_total"] == {"ok": 1, "invalid_value": 1}
        assert (stats["tries_total"], stats["in_flight"]) == ({"pull": 1}, 0)
        _, models = await c.get("/v1/models")
        assert models["data"][0]["id"] == "tiny"
        async with c.session.get(f"{c.url}/metrics") as response:
            text = await response.text()
        assert "# TYPE kvbaton_router_tries_total counter" in text
        assert 'kvbaton_router_tries_total{mode="pull"} 1' in text
        assert 'kvbaton_router_responses_total{status="4xx"} 1' in text
        assert 'kvbaton_router_pairs{mode="pull"} 2' in text


async def test_models_without_a_worker_are_unavailable() -> None:
    async with cluster(0, 0) as c:
        assert (await c.get("/v1/models"))[0] == 503


async def test_hundreds_of_streams_at_once_all_end_well() -> None:
    async with cluster(2, 2) as c:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(number: int) -> bool:
                body = {"prompt": f"p{number}", "stream": number % 2 == 0}
                headers = {"x-kvbaton-mode": MODES[number % 3]}
                async with session.post(f"{c.url}/v1/completions", json=body, headers=headers) as response:
                    text = await response.text()
                return response.status == 200 and (number % 2 == 1 or text.endswith("data: [DONE]\n\n"))

            assert all(await asyncio.gather(*(one(number) for number in range(300))))
        assert (await c.get("/stats"))[1]["in_flight"] == 0


@contextlib.asynccontextmanager
async def openai_client(**how: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with cluster(**{"prefills": 2, "decodes": 2, **how}) as c:
        client = openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="k", max_retries=0)
        async with client:
            yield client


async def test_the_openai_client_raises_for_refusals_and_for_streams_that_break() -> None:
    async with openai_client() as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="tiny", prompt="a", max_tokens=-5)
    breaking = say(b'data: {"choices": []}\n\n', "text/event-stream")
    async with openai_client(prefills=1, decodes=[breaking]) as client:
        with pytest.raises(openai.APIError, match="mid-stream"):
            async for _ in await client.completions.create(model="tiny", prompt="a", stream=True):
                pass


async def test_a_raw_body_in_utf8_reaches_d_unchanged() -> None:
    async with cluster() as c:
        body = json.dumps({"prompt": "žluťoučký 🐎", "x": 1e-7}, ensure_ascii=False).encode()
        assert (await c.post(body))[0] == 200
        assert c.d[0].bodies[0]["prompt"] == "žluťoučký 🐎"
        assert c.d[0].bodies[0]["x"] == 1e-7
