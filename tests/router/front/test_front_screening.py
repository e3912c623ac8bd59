"""What may come in at the router's door and what goes out of it, besides bodies: encodings, origins, headers of D."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.observe.flight.dumps import Dumps
from tests.router.fake_workers import QUICK, FakeWorker, cluster

BODY = {"prompt": "abc", "max_tokens": 4}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PLAIN = {"Content_Type": "text/plain"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1", "file://", "http://127.0.0.1:1"]
)
async def test_a_web_page_of_another_site_is_refused_before_anybody_is_asked(path: str, origin: str) -> None:
    async with cluster() as c:
        status, answer, headers = await c.post(BODY, path, Origin=origin, **PLAIN)
        assert (status, answer["error"]["code"]) == (403, "foreign_origin")
        assert "Access-Control-Allow-Origin" not in headers
        assert not c.p[0].bodies and not c.d[0].bodies


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_browsers_word_that_a_page_is_of_another_site_is_enough(site: str) -> None:
    async with cluster() as c:
        assert (await c.post(BODY, Sec_Fetch_Site=site, **PLAIN))[0] == 403
        assert (await c.post(BODY, Origin=c.url, Sec_Fetch_Site=site, **PLAIN))[0] == 403
        assert not c.p[0].bodies


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/x-www-form-urlencoded"])
async def test_clients_without_an_origin_and_pages_of_the_router_itself_are_answered(kind: str) -> None:
    async with cluster() as c:
        assert (await c.post(BODY, Content_Type=kind))[0] == 200
        assert (await c.post(BODY, Content_Type=kind, Origin=c.url, Sec_Fetch_Site="same-origin"))[0] == 200
        host = c.url.removeprefix("http://")
        assert (await c.post(BODY, Content_Type=kind, Origin=f"https://{host}"))[0] == 200, "TLS ended before it"
        assert not {"Origin", "Sec-Fetch-Site", "Referer"} & set(c.d[0].headers[-1]), "a worker is no part of it"


async def test_a_page_that_the_operator_names_may_ask() -> None:
    allowed = msgspec.structs.replace(QUICK, origins_allowed=("https://chat.example",))
    async with cluster(settings=allowed) as c:
        asked = {"Origin": "https://Chat.example", "Sec_Fetch_Site": "cross-site"}
        assert (await c.post(BODY, **asked))[0] == 200
        assert (await c.post(BODY, Origin="https://chat.example.evil"))[0] == 403


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "**", "ftp://x", ""])
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="origins_allowed: got"):
        msgspec.structs.replace(QUICK, origins_allowed=(origin,))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"])
async def test_a_compressed_body_is_refused_and_reaches_no_worker(coding: str) -> None:
    async with cluster() as c:
        for data in (gzip.compress(bytes(1 << 20)), b'{"prompt": "abc", "max_tokens": 4}'):
            status, answer, _ = await c.post(data, Content_Encoding=coding)
            assert (status, answer["error"]["code"]) == (415, "encoded_body")
        assert not c.p[0].bodies and not c.d[0].bodies
        assert (await c.post(BODY, Content_Encoding="identity"))[0] == 200


ODD = {
    "Keep-Alive": "timeout=5", "Proxy-Authenticate": "Basic", "Proxy-Connection": "close", "TE": "gzip",
    "Trailer": "X", "Upgrade": "h2c", "Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true",
    "Set-Cookie": "a=b", "Server": "d", "Via": "d", "Date": "yesterday", "Cache-Control": "public", "Age": "1",
    "X-Request-Id": "other", "X-Kvbaton-Pair": "p9/d9", "X-Accel-Redirect": "/etc/passwd", "X-Powered-By": "d",
    "Location": "http://evil.example", "Refresh": "0", "Link": "<x>", "Alt-Svc": "h3", "WWW-Authenticate": "Basic",
    "Strict-Transport-Security": "max-age=1", "Content-Security-Policy": "none", "Clear-Site-Data": "*",
    "Content-Disposition": "attachment", "X-Content-Type-Options": "sniff", "X-Kvbaton-Token": "secret",
}  # fmt: skip
USEFUL = {"OpenAI-Processing-Ms": "5", "X-RateLimit-Remaining-Tokens": "7"}


@pytest.mark.parametrize("stream", [False, True])
async def test_of_ds_headers_only_those_of_the_api_reach_the_client(stream: bool) -> None:
    async def marked(_: FakeWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        if not stream:
            return web.json_response({"choices": []}, headers={**ODD, **USEFUL})
        response = web.StreamResponse(headers={**ODD, **USEFUL, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
        return response

    async with cluster(1, [marked]) as c:
        got = await c.session.post(f"{c.url}/v1/completions", json={**BODY, "stream": stream})
        assert got.status == 200 and await got.read()
        own = {"content-type", "content-length", "transfer-encoding", "x-request-id", "cache-control"}
        assert {name.lower() for name in got.headers} - own == {name.lower() for name in USEFUL}
        assert got.headers["X-Request-Id"] != "other" and got.headers.get("Cache-Control") != "public"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_worker_compressed_unasked_reaches_no_client(stream: bool) -> None:
    """A client inflates what it gets: a worker must not choose how much that is."""

    async def bomb(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "text/event-stream" if stream else "text/json"}
        return web.Response(body=gzip.compress(b'data: {"choices": []}\n\ndata: [DONE]\n\n'), headers=headers)

    async with cluster(1, [bomb]) as c:
        status, answer, headers = await c.post({**BODY, "stream": stream})
        assert (status, answer["error"]["code"]) == (502, "bad_answer")
        assert "Content-Encoding" not in headers


SAID = "prompt: token id 987654, at most 511; it began 'Once upon a midnight dreary'"
WORDS = ("987654", "midnight", "dreary", "Once")


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("shape", ["error", "text", "code", "event"])
async def test_nothing_of_a_prompt_that_a_worker_quotes_is_in_a_record(
    status: int, side: str, shape: str, tmp_path: Path
) -> None:
    """The client reads what the worker said; the file on the router's disk has who answered what status."""

    async def quoting(_: FakeWorker, request: web.Request, __: dict[str, Any]) -> web.Response:
        if shape == "text":
            return web.Response(status=status, text=SAID)
        error = {"message": SAID, "type": "BadRequestError", "code": "midnight_dreary" if shape == "code" else status}
        if shape == "event" and side == "decode":
            return web.Response(body=b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        return web.json_response({"error": error}, status=status)

    workers = ([quoting], 1) if side == "prefill" else (1, [quoting])
    async with cluster(*workers, settings=msgspec.structs.replace(QUICK, prefill_retries=0)) as c:
        dumps = Dumps(tmp_path, "router", c.app.gathering.records)
        c.app.gathering.on_flight.append(dumps.on_flight)
        told, _, _ = await c.post({**BODY, "stream": shape == "event"})
        assert told >= 400
        dumps.ask()
        await asyncio.to_thread(dumps.close)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert f"{side} worker {side[0]}0 answered" in written
    assert not [word for word in WORDS if word in written]
