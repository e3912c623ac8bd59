"""Paths that one worker answers by itself: sent on as they came, by the same bounds, and steered by no client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvbaton.router.route_table import Treatment, of
from tests.router.fake_workers import (
    QUICK,
    FakeWorker,
    Script,
    begin_then,
    cluster,
    die,
    event,
    hang,
    lease,
    refuse,
    say,
    speak,
)

TOKENS = {"tokens": [1, 2, 3], "count": 3}
PASSED = [route for route in of(Treatment.PASSED) if route.methods == ("POST",) and not route.is_form]
TOKENIZE = {"prompt": "abc", "add_special_tokens": False}


def tokenizer(**headers: str) -> Script:
    async def script(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response(TOKENS, headers=headers)

    return script


async def test_every_such_path_reaches_a_d_as_it_came_and_its_answer_the_client() -> None:
    async with cluster(1, [tokenizer(Set_Cookie="a=b", Openai_Model="x")]) as c:
        d = c.d[0]
        for number, route in enumerate(PASSED):
            body = b'{ "input" : "ab\\u00e9", "n":%d }' % number
            status, answer, headers = await c.post(body, route.path, X_Request_Id=f"r{number}", Cookie="k=v")
            assert (status, answer, d.paths[-1], d.raw[-1]) == (200, TOKENS, route.path, body), route.path
            assert headers["X-Request-Id"] == d.headers[-1]["X-Request-Id"] == f"r{number}"
            assert d.headers[-1]["Content-Type"] == "application/json"
            assert "Set-Cookie" not in headers and "Cookie" not in d.headers[-1]
        d.pages["/tokenizer_info"] = {"chat_template": "x"}
        assert await c.get("/tokenizer_info") == (200, {"chat_template": "x"})
        assert not c.p[0].paths, "P is for prompts"
        numbers = await c.stats()
        assert numbers["in_flight"] == 0 and numbers["ends_total"] == {"ok": len(PASSED) + 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"ec_transfer_params": {}}, "ec_transfer_params"),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": {"ticket": "x"}}}}, "kv_transfer_params"),
        ({"texts": [[{"a": [{"ec_transfer_params": 1}]}]]}, "ec_transfer_params"),
        (b'{"a": {"\\u006bv_transfer_params": {}}}', "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"request_id": "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_" + "0" * 32}, "request_id"),
        (b"[1]", "body"),
        (b"{", "body"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "body"),
    ],
)
async def test_no_client_steers_a_worker_and_no_odd_body_reaches_one(body: Any, param: str) -> None:
    async with cluster(1, [tokenizer()]) as c:
        for path in ("/tokenize", "/inference/v1/generate", "/invocations"):
            status, answer, _ = await c.post(body, path)
            assert (status, answer["error"]["param"]) == (400, param), path
        assert not c.d[0].paths
        assert (await c.post({"a": {"kv_transfer_params": None}, "b": "kv_transfer_params"}, "/tokenize"))[0] == 200


def form(*parts: tuple[str, bytes]) -> tuple[bytes, str]:
    body = b"".join(b"--x\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (n.encode(), v) for n, v in parts)
    return body + b"--x--\r\n", "multipart/form-data; boundary=x"


async def test_speech_is_passed_as_a_form_and_what_could_steer_is_not() -> None:
    async with cluster(1, [tokenizer()]) as c:
        sound = bytes(range(256)) * 40
        body, kind = form(("name=\"file\"; filename*=UTF-8''a.wav", sound), ('name="model"', b"tiny"))
        assert (await c.post(body, "/v1/audio/transcriptions", Content_Type=kind))[0] == 200
        assert c.d[0].raw[-1] == body and c.d[0].headers[-1]["Content-Type"] == kind
        for name in ('name="vllm_xargs"', "name*=utf-8''vllm%5Fxa%72gs", 'name*0="vllm_x"; name*1="args"'):
            odd, _ = form((name, b'{"kv_transfer_params": 1}'))
            status, answer, _ = await c.post(odd, "/v1/audio/translations", Content_Type=kind)
            assert (status, answer["error"]["param"]) == (400, "body"), name
        status, answer, _ = await c.post(b"{}", "/v1/audio/translations", Content_Type="application/json")
        assert (status, answer["error"]["code"]) == (415, "wrong_type")
        hidden, _ = form(('name="vllm_+AHg-args"', b'{"kv\\u005ftransfer_params": "x"}'))  # vllm_xargs in UTF-7
        for more in ("; charset=utf-7", '; charset="UTF-7"', "; charset*0=utf; charset*1=-7", "; a=b"):
            status, answer, _ = await c.post(hidden, "/v1/audio/transcriptions", Content_Type=kind + more)
            assert (status, answer["error"]["code"]) == (415, "wrong_type"), more
        assert len(c.d[0].raw) == 1
        for usual in (
            'multipart/form-data; boundary="x"; charset=utf-8',
            "Multipart/Form-Data;charset=UTF-8;boundary=x",
            "multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW",
        ):
            assert (await c.post(body, "/v1/audio/transcriptions", Content_Type=usual))[0] == 200, usual


IN_TURN = msgspec.structs.replace(QUICK, policy="round-robin", suspect_s=30)


async def test_a_worker_that_fails_is_asked_no_more_and_another_answers() -> None:
    for script, asked in ((die, 1), (refuse(500), 1), (refuse(503), 2)):
        async with cluster(1, [script, tokenizer()], settings=IN_TURN) as c:
            assert [(await c.post(TOKENIZE, "/tokenize"))[:2] for _ in range(4)] == [(200, TOKENS)] * 4
            assert len(c.d[0].paths) == asked, "who failed is asked last from then on; who is full is alive"
            assert (await c.stats())["in_flight"] == 0
    async with cluster(1, [die], settings=msgspec.structs.replace(QUICK, decode_retries=0)) as c:
        status, answer, _ = await c.post(TOKENIZE, "/tokenize")
        assert (status, answer["error"]["code"]) == (502, "worker_died")
        assert (await c.stats())["leg_failures_total"] == {"decode:worker_died": 1}
    async with cluster(1, [hang], settings=msgspec.structs.replace(QUICK, first_byte_s=0.1, decode_retries=0)) as c:
        assert (await c.post(TOKENIZE, "/tokenize"))[0] == 504
    async with cluster([tokenizer()], 0) as c:
        assert (await c.post(TOKENIZE, "/tokenize"))[:2] == (200, TOKENS), "P has the same model"
    async with cluster(0, 0) as c:
        status, answer, headers = await c.post(TOKENIZE, "/tokenize")
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_worker", "1")


async def test_no_worker_puts_a_page_on_the_routers_address() -> None:
    async with cluster(1, [say(b"<script>", "text/html")]) as c:
        async with c.session.post(c.url + "/tokenize", data=b"{}") as got:
            assert (got.status, await got.read()) == (200, b"<script>")
            kind = got.content_type, got.headers["X-Content-Type-Options"]
        assert kind == ("application/octet-stream", "nosniff")


async def test_a_workers_refusal_is_the_clients_and_of_a_path_that_it_has_not_in_words() -> None:
    async def nothing(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async with cluster(1, [nothing, nothing]) as c:
        status, answer, _ = await c.post({"input": "x"}, "/v1/embeddings")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        assert "/v1/embeddings" in answer["error"]["message"] and "Not Found" in answer["error"]["message"]
        assert len(c.d[0].paths) + len(c.d[1].paths) == 1, "another would say the same"
    async with cluster(1, [refuse(422, "too long")]) as c:
        status, answer, _ = await c.post({"input": "x"}, "/score")
        assert (status, answer["error"]["message"]) == (422, "too long")


async def test_a_stream_is_passed_as_it_comes_and_one_that_breaks_ends_with_an_error() -> None:
    async def cut(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.abort()

    async def done(_: web.Request, response: web.StreamResponse) -> None:
        await response.write(b"data: [DONE]\n\n")

    first = event({"choices": [{"token_ids": [1]}]})
    async with cluster(1, [begin_then(done, first)]) as c:
        assert (await c.events({"token_ids": [1]}, "/inference/v1/generate"))[-1] == "[DONE]"
        assert (await c.stats())["in_flight"] == 0
    async with cluster(1, [begin_then(cut, first)]) as c:
        told = await c.events({"token_ids": [1]}, "/inference/v1/generate")
        assert told[-1]["error"]["code"] == "worker_died" and "[DONE]" not in told
        assert (await c.stats())["ends_total"] == {"worker_died": 1}


async def test_the_bounds_hold_for_these_paths_too() -> None:
    tight = msgspec.structs.replace(QUICK, in_flight_max=1, body_bytes_max=2000)
    async with cluster(1, [hang], settings=tight) as c:
        waiting = asyncio.create_task(c.post(TOKENIZE, "/tokenize"))
        while not c.d[0].paths:
            await asyncio.sleep(0.002)
        status, answer, _ = await c.post(TOKENIZE, "/detokenize")
        assert (status, answer["error"]["code"]) == (429, "full")
        status, answer, _ = await c.post({"prompt": "x" * 3000}, "/tokenize")
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        status, answer, _ = await c.post(TOKENIZE, "/tokenize", Origin="https://evil.example")
        assert (status, answer["error"]["code"]) == (403, "foreign_origin")
        waiting.cancel()
        while not c.d[0].aborted:
            await asyncio.sleep(0.002)
        c.app.draining.set()
        assert (await c.post(TOKENIZE, "/tokenize"))[0] == 503


async def test_what_the_router_answers_by_itself() -> None:
    async with cluster() as c:
        d = c.d[0]
        for worker in (*c.p, *c.d):
            worker.pages["/version"] = {"version": "0.32.0"}
        assert (await c.get("/version"))[1]["version"] == "0.32.0"
        assert (await c.get("/load")) == (200, {"server_load": 0})
        for method in ("GET", "POST"):
            async with c.session.request(method, c.url + "/ping") as response:
                assert response.status == 200
        _, told = await c.get("/openapi.json")
        assert told["paths"]["/tokenize"]["post"]["summary"] and "/sleep" not in told["paths"]
        for worker in (*c.p, *c.d):
            worker.pages["/openapi.json"] = {
                "openapi": "3.1.0",
                "paths": {"/tokenize": {"post": {"summary": "theirs"}}, "/sleep": {"post": {}}, "/x": {"get": {}}},
                "components": {"schemas": {"A": {}}},
            }
        _, told = await c.get("/openapi.json")
        assert told["paths"]["/tokenize"] == {"post": {"summary": "theirs"}}
        assert not {"/sleep", "/x"} & set(told["paths"]) and told["components"] == {"schemas": {"A": {}}}
        assert told["info"]["title"] == "kvbaton router" and "/workers" in told["paths"]
        for worker in (*c.p, *c.d):
            worker.pages = {"/version": ["x"], "/openapi.json": {"paths": [1], "openapi": 7}}
        assert (await c.get("/version"))[1]["version"] == "unknown"
        assert "/v1/messages" in (await c.get("/openapi.json"))[1]["paths"]
        assert not d.bodies


async def test_invocations_go_where_their_fields_belong() -> None:
    async with cluster([lease], [speak]) as c:
        status, answer, _ = await c.post({"prompt": "abc", "max_tokens": 4}, "/invocations")
        assert (status, answer["choices"][0]["text"], c.p[0].paths) == (200, "ABC", ["/v1/completions"])
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert (await c.events(chat, "/invocations"))[-1] == "[DONE]"
        assert c.p[0].paths[-1] == c.d[0].paths[-1] == "/v1/chat/completions"
        status, answer, _ = await c.post({"prompt": "x", "kv_transfer_params": {}}, "/invocations")
        assert status == 400
    async with cluster(1, [tokenizer()]) as c:
        assert (await c.post({"input": "x"}, "/invocations"))[:2] == (200, TOKENS)
        assert c.d[0].paths == ["/invocations"] and not c.p[0].paths


# --- /v1/messages

MESSAGES = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["x"]}
ANSWER = {"id": "m", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "HI"}]}


async def anthropic(_: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A D that speaks as vLLM's /v1/messages does."""
    if not body.get("stream"):
        return web.json_response({**ANSWER, "kv_transfer_params": {"secret": 1}})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for value in (
        {"type": "message_start", "message": ANSWER},
        {"type": "content_block_delta"},
        {"type": "message_stop"},
    ):
        await response.write(typed(value))
    return response


def typed(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\n".encode() + event(value)


async def stream_of(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.post(f"{url}/v1/messages", json={**MESSAGES, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        return [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_messages_are_handed_over(mode: str) -> None:
    async with cluster([lease], [anthropic]) as c:
        status, answer, _ = await c.post(MESSAGES, "/v1/messages", X_Kvbaton_Mode=mode)
        assert (status, answer) == (200, ANSWER), "what is between the workers is not the client's"
        p, d = c.p[0].bodies[0], c.d[0].bodies[0]
        assert (p["max_tokens"], p["stream"], p["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
        assert "stop_sequences" not in p and p["messages"] == MESSAGES["messages"]
        assert {**d, "kv_transfer_params": 0} == {**MESSAGES, "kv_transfer_params": 0}
        assert c.p[0].paths == c.d[0].paths == ["/v1/messages"]
        events = await stream_of(c.session, c.url)
        assert [each["type"] for each in events] == ["message_start", "content_block_delta", "message_stop"]


async def test_errors_of_messages_have_anthropics_form_at_each_stage() -> None:
    async def cut(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(typed({"type": "content_block_delta"}))
        assert request.transport is not None
        request.transport.abort()

    start = typed({"type": "message_start", "message": ANSWER})

    async def told(_: web.Request, response: web.StreamResponse) -> None:
        await response.write(typed({"type": "error", "error": {"type": "internal_error", "message": "no"}}))

    async with cluster(1, [refuse(400)]) as c:
        for asked in (MESSAGES, b"[]"):
            status, answer, _ = await c.post(asked, "/v1/messages/count_tokens")
            assert (status, answer["type"]) == (400, "error") and answer["error"]["message"]
    async with cluster(1, [begin_then(cut, start)]) as c:
        for odd in (
            {**MESSAGES, "max_tokens": None},
            {**MESSAGES, "kv_transfer_params": {}},
            {**MESSAGES, "system": 1},
        ):
            status, answer, _ = await c.post(odd, "/v1/messages")
            assert (status, answer["type"]) == (400, "error") and answer["error"]["message"]
        events = await stream_of(c.session, c.url)
        assert [each["type"] for each in events] == ["message_start", "content_block_delta", "error"]
        assert events[-1]["error"]["code"] == "worker_died"
    async with cluster(1, [begin_then(told, start), anthropic], settings=IN_TURN) as c:
        for _ in range(2):
            assert (await stream_of(c.session, c.url))[-1]["type"] == "message_stop", "no token had come: another D"
    async with cluster(1, [begin_then(told, start)]) as c:
        status, answer, _ = await c.post({**MESSAGES, "stream": True}, "/v1/messages")
        assert (status, answer["type"]) == (502, "error")
