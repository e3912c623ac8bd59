"""The router against clients that mean harm: none steers a worker, none costs another client its answer.

Law under test: whatever a client sends is answered, or refused with a 4xx that names what is wrong. No worker is blamed
for it, and no worker is told by a client where KV comes from.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api.bodies import NESTING_MAX
from kvbaton.api.params import Mode
from kvbaton.router.router_settings import Fallback
from tests.router.fake_workers import QUICK, Cluster, FakeWorker, cluster, until

COMPLETION = "/v1/completions"
ENDPOINTS: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/responses": {"input": "abc"},
}
ADDRESSED = f"___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.9:2_{'0' * 32}"


async def talk(_: FakeWorker, __: web.Request, body: dict[str, Any]) -> web.Response:
    """A decode worker that answers whatever it is asked."""
    return web.json_response({"id": "x", "choices": [{"index": 0, "text": "hi"}]})


async def exchange(c: Cluster, data: bytes) -> bytes:
    """Say exactly this, and hear all until the connection is closed."""
    found = re.fullmatch(r"http://(.+):(\d+)", c.url)
    assert found is not None
    reader, writer = await asyncio.open_connection(found[1], int(found[2]))
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def raw_post(body: bytes, *headers: bytes, target: bytes = b"/v1/completions") -> bytes:
    lines = [
        b"POST %b HTTP/1.1" % target,
        b"Host: x",
        b"Connection: close",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join((*lines, b"", body))


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def unharmed(c: Cluster) -> None:
    """Others are served, by workers whom nobody blames, and nothing is left under way."""
    status, _, _ = await c.post({"prompt": "abc"})
    assert status == 200
    _, shown = await c.get("/workers")
    assert {worker["state"] for worker in shown["workers"]} == {"serving"}
    assert [worker["tokens_under_way"] for worker in shown["workers"]] == [0] * len(shown["workers"])
    assert (await c.stats())["leg_failures_total"] == {}


# --- bodies


SHAPES = {
    "list": lambda depth: b"[" * depth + b"]" * depth,
    "object": lambda depth: b'{"a":' * depth + b"1" + b"}" * depth,
}
FIELDS = [
    (COMPLETION, b'{"prompt":"a","foo":%b}'),
    (COMPLETION, b'{"prompt":["a","b"],"n":2,"foo":%b}'),
    (COMPLETION, b'{"prompt":"a","model":%b}'),
    (COMPLETION, b'{"prompt":%b}'),
    (COMPLETION, b'{"prompt":"a","stream":true,"stop":%b}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[%b]}]}'),
    ("/v1/chat/completions", b'{"messages":[%b]}'),
    ("/v1/responses", b'{"input":[{"type":"x","content":%b}]}'),
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_body_nested_at_any_depth_is_answered_or_refused(shape: str) -> None:
    """Near the recursion limit what could be read cannot be written again: neither side may die of it."""
    depths = [*range(NESTING_MAX - 5, NESTING_MAX + 3), *range(955, 1001, 3), 100_000]

    settings = msgspec.structs.replace(QUICK, policy="prefix")
    async with cluster(1, [talk], settings=settings) as c:
        for path, form in FIELDS:
            for depth in depths:
                status, answer, _ = await c.post(form % SHAPES[shape](depth), path)
                assert status in ((200, 400) if depth < NESTING_MAX else (400,)), (form, depth, answer)
                if status == 400:
                    assert answer["error"]["code"] in ("invalid_json", "invalid_value")
        await unharmed(c)


async def test_many_brackets_side_by_side_are_not_deep() -> None:
    async with cluster(1, [talk]) as c:
        status, _, _ = await c.post({"prompt": "abc", "foo": [[]] * 1000, "bar": "[{" * 1000})
        assert status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","foo":1e999}',
        b'{"prompt":"a","foo":' + b"9" * 5000 + b"}",
        b'{"prompt":"a","foo":NaN}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\udc00\\ud800"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"a\x00"}',
        b'\x00{"prompt":"a"}',
        b'{"prompt":"a"}\x00',
        b'{"prompt":"a"}{"prompt":"b"}',
        b'\xef\xbb\xbf{"prompt":"a"}',
        b"",
        b" ",
        b"\x1f\x8b\x08\x00\x00",
    ],
)
async def test_what_is_not_json_is_refused_and_no_worker_sees_it(body: bytes) -> None:
    async with cluster(1, [talk]) as c:
        status, answer, _ = await c.post(body)
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert c.p[0].raw == c.d[0].raw == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_odd_values_of_any_field_are_answered_or_refused(path: str) -> None:
    odd: list[Any] = [None, True, 0, -1, 10**30, -(10**30), 1.5, "", "x", "\x00", [], [1], {}, {"a": None}]
    names = [
        *("model", "n", "best_of", "use_beam_search", "max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("min_tokens", "seed", "stop", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "stream_options"),
        *("tools", "cache_salt", "request_id", "vllm_xargs", "kv_transfer_params", "previous_response_id", "foo"),
        *("prompt", "messages", "input", "instructions", "store", "background", "include", "metadata"),
    ]

    settings = msgspec.structs.replace(QUICK, policy="prefix", disagg_min_tokens=1)
    async with cluster(1, [talk], settings=settings) as c:
        for name in names:
            for value in odd:
                status, answer, _ = await c.post({**ENDPOINTS[path], name: value}, path)
                assert status in (200, 400), (name, value, answer)
        await unharmed(c)


async def test_a_length_that_no_endpoint_checks_leaves_no_load_behind() -> None:
    """A negative one, given back among others, would count against a worker for ever."""
    gate = asyncio.Event()

    async def held(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("hold"):
            await gate.wait()
        return await talk(worker, request, body)

    async with cluster(1, [held]) as c:
        odd = {"prompt": "abc", "max_completion_tokens": -(10**9), "hold": True}
        first = asyncio.create_task(c.post(odd))
        await until(lambda: c.d[0].bodies)
        _, shown = await c.get("/workers")
        assert all(0 <= worker["tokens_under_way"] < 1000 for worker in shown["workers"])
        assert (await c.post({"prompt": "abc"}))[0] == 200
        gate.set()
        assert (await first)[0] == 200
        await unharmed(c)


# --- who says where KV comes from


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true}}',
        b'{"prompt":"a","kv\\u005ftransfer_params":{"do_remote_prefill":true}}',
        b'{"prompt":"a","\\u006bv_transfer_params":[]}',
        b'{"prompt":"a","kv_transfer_params":null,"kv_transfer_params":{"do_remote_prefill":true}}',
        b'{"prompt":"a","kv_transfer_params":false}',
        b'{"prompt":"a","kv_transfer_params":0}',
        b'{"prompt":"a","kv_transfer_params":""}',
        b'{"prompt":"a","vllm_xargs":{"kv_transfer_params":"x"}}',
        b'{"prompt":"a","vllm_xargs":{"kv\\u005ftransfer_params":"x"}}',
        b'{"prompt":"a","vllm_xargs":{"ec_transfer_params":"x"}}',
    ],
)
@pytest.mark.parametrize("more", [b"", b',"prompt_logprobs":1', b',"n":2'], ids=["pair", "alone", "several"])
async def test_no_client_sets_the_parameters_of_a_handoff(body: bytes, more: bytes) -> None:
    async with cluster(1, [talk]) as c:
        status, answer, _ = await c.post(body[:-1] + more + b"}")
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        assert "_transfer_params" in answer["error"]["param"]
        assert c.p[0].raw == c.d[0].raw == []


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
@pytest.mark.parametrize("more", [b"", b',"prompt_logprobs":1', b',"n":2'], ids=["pair", "alone", "several"])
async def test_a_null_that_hides_parameters_before_it_takes_them_along(mode: str, more: bytes) -> None:
    evil = b'{"kv_transfer_params":{"evil":1},"prompt":"a","kv\\u005ftransfer_params":null' + more + b"}"
    async with cluster(1, [talk]) as c:
        status, _, _ = await c.post(evil, x_kvbaton_mode=mode)
        assert status == 200
        for data in (*c.p[0].raw, *c.d[0].raw):
            assert b"evil" not in data
            names = [name for name, _ in json.loads(data, object_pairs_hook=list)]
            assert names.count("kv_transfer_params") == (0 if b"logprobs" in more else 1)


@pytest.mark.parametrize("given", [ADDRESSED, f"cmpl-{ADDRESSED}-0", "___decode_addr_", "a___prefill_addr_b"])
@pytest.mark.parametrize("alone", [True, False])
async def test_no_client_names_addresses_in_a_request_id(given: str, alone: bool) -> None:
    """Workers of other systems dial what they find there."""
    settings = msgspec.structs.replace(QUICK, fallback=Fallback.LOCAL)
    async with cluster(0 if alone else 1, [talk], settings=settings) as c:
        status, _, headers = await c.post({"prompt": "abc"}, x_request_id=given)
        assert status == 200
        told = c.d[0].headers[0].getall("X-Request-Id")
        assert len(told) == 1 and "_addr_" not in told[0]
        assert headers["X-Request-Id"] == told[0]
        for path, body in ENDPOINTS.items():
            status, answer, _ = await c.post({**body, "request_id": given}, path)
            assert (status, answer["error"]["param"]) == (400, "request_id")


# --- headers and targets


async def test_headers_of_one_connection_end_here_and_an_id_is_told_once() -> None:
    async with cluster(1, [talk]) as c:
        data = raw_post(
            b'{"prompt":"abc"}',
            b"X-Request-Id: first",
            b"X-REQUEST-ID: second",
            b"Connection: X-Secret, x-request-id ,authorization",
            b"X-Secret: 1",
            b"Authorization: Bearer 1",
            b"X-Kept: \xe9\t1",
            b"TE: trailers",
            b"Proxy-Authorization: Basic x",
            b"Keep-Alive: timeout=1",
            b"Trailer: X-T",
            b"Cookie: a=b",
            b"Content-Type: text/plain",
            b"Content-Type: application/x-evil",
        )
        answer = await exchange(c, data)
        assert status_of(answer) == 200
        assert answer.count(b"X-Request-Id: first\r\n") == 1
        for worker in (c.p[0], c.d[0]):
            headers = worker.headers[0]
            assert headers.getall("X-Request-Id") == ["first"]
            assert headers.getall("Content-Type") == ["application/json"]
            assert len(headers.getall("Content-Length")) == len(headers.getall("Host")) == 1
            assert "X-Kept" in headers and "gzip" not in headers.get("Accept-Encoding", "")
            for gone in (
                "X-Secret",
                "Authorization",
                "TE",
                "Proxy-Authorization",
                "Keep-Alive",
                "Trailer",
                "Cookie",
            ):
                assert gone not in headers


@pytest.mark.parametrize(
    "line",
    [
        b"X-A: 1\rX-Evil: 1",
        b"X-A: 1\nX-Evil: 1",
        b"X-A: 1\r\n X-Evil: 1",
        b"X-A: 1\x00",
        b"X-A\x00: 1",
        b"X-A : 1",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Content-Length: 0",
    ],
)
async def test_no_header_smuggles_another_or_a_second_request(line: bytes) -> None:
    inner = raw_post(b'{"prompt":"evil"}')
    async with cluster(1, [talk]) as c:
        answer = await exchange(c, raw_post(b'{"prompt":"abc"}', line) + inner)
        assert status_of(answer) == 400 and len(re.findall(rb"HTTP/1.1 [0-9]", answer)) == 1
        assert c.p[0].raw == c.d[0].raw == []


async def test_trailers_and_a_body_behind_an_upgrade_are_neither_headers_nor_requests() -> None:
    async with cluster(1, [talk]) as c:
        chunked = (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'10\r\n{"prompt":"abc"}\r\n0\r\nX-Evil: 1\r\nX-Request-Id: evil\r\n\r\n'
        )
        upgrade = raw_post(b'{"prompt":"def"}', b"Connection: upgrade", b"Upgrade: h2c", b"X-Kept: 1")
        answer = await exchange(c, chunked + upgrade)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert [body["prompt"] for body in c.d[0].bodies] == ["abc", "def"]
        for headers in (*c.p[0].headers, *c.d[0].headers):
            assert "X-Evil" not in headers and headers["X-Request-Id"] != "evil" and "Upgrade" not in headers
        assert c.d[0].headers[1]["X-Kept"] == "1"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://10.0.0.9/v1/completions", 200),
        (b"http://10.0.0.9:99999/v1/completions?x=http://y/", 200),
        (b"/v1/completions?a=/../b", 200),
        (b"//v1/completions", 404),
        (b"/v1//completions", 404),
        (b"/v1/./completions", 404),
        (b"/v1/x/../completions", 404),
        (b"/v1/%63ompletions", 404),
        (b"/v1/completions/", 404),
        (b"/v1/completions%00", 404),
        (b"/v1/completions;a", 404),
        (b"/V1/completions", 404),
        (b"http://10.0.0.9", 404),
        (b"/" + b"x" * 10_000, 404),
        (b"*", 404),
        (b"/workers", 405),
    ],
)
async def test_a_path_is_one_of_the_routers_or_nothing(target: bytes, status: int) -> None:
    async with cluster(1, [talk]) as c:
        answer = await exchange(c, raw_post(b'{"prompt":"abc"}', target=target))
        assert status_of(answer) == status
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Content-Type: application/json" in head
        if status != 200:
            error = json.loads(body)["error"]
            assert error["code"] == {404: "not_found", 405: "method_not_allowed"}[status]
            assert len(error["message"]) < 1000
        assert c.d[0].paths == [COMPLETION] * (status == 200)


@pytest.mark.parametrize("given", ["", "x" * 1025, "a b", "\xe9", "a\tb"])
async def test_an_odd_request_id_is_replaced(given: str) -> None:
    async with cluster(1, [talk]) as c:
        answer = await exchange(c, raw_post(b'{"prompt":"abc"}', b"X-Request-Id: " + given.encode("latin-1")))
        assert status_of(answer) == 200
        assert re.search(rb"\r\nX-Request-Id: [0-9a-f]{32}\r\n", answer)


@pytest.mark.parametrize("given", ["pull\xe9", "PULL", "", "x" * 5000, "pull,push"])
async def test_an_odd_mode_is_refused_briefly(given: str) -> None:
    assert given not in list(Mode)
    async with cluster(1, [talk]) as c:
        answer = await exchange(c, raw_post(b'{"prompt":"abc"}', b"X-Kvbaton-Mode: " + given.encode("latin-1")))
        assert status_of(answer) == 400 and len(answer) < 1000
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "x-kvbaton-mode"
