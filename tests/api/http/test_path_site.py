"""What a client may do to a worker's HTTP door: nothing is inflated for it, nothing of it is in the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvbaton.api.http.http_server import serving
from kvbaton.api.http.server_loop import run
from kvbaton.api.tokens import HEADER, guard, token
from kvbaton.engines.embedded.http_worker import worker_app
from tests.engines.embedded.test_server import BODY, FakeBackend

KEY = b"k" * 32
BOMB_BYTES = 8 << 20
SECRET = "Bearer sk-nobody-may-read-this-0123456789"
PLAIN = json.dumps(BODY).encode()


@asynccontextmanager
async def door(guarded: bool = True) -> AsyncIterator[str]:
    app = worker_app(FakeBackend())
    if guarded:
        app.guards.append(guard("p0", lambda: [KEY]))
    async with serving(app, "127.0.0.1", 0) as url:
        yield url


async def said(url: str, data: bytes) -> bytes:
    """All that is answered to these bytes, until the other side ends; the client has then ended too."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def post(body: bytes, *headers: str, chunked: bool = False, path: str = "/v1/completions") -> bytes:
    how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1:1", "Connection: close", how, *headers, "", ""]
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return "\r\n".join(lines).encode("latin-1") + sent


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def code_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


async def test_every_answer_of_a_worker_is_named_errors_in_their_body_too() -> None:
    mine, shown = "X-Request-Id: mine", f"{HEADER}: {token(KEY, 'p0')}"
    get = f"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{mine}\r\n\r\n".encode()
    async with door() as url:
        for status, data in (
            (200, get), (200, post(PLAIN, mine, shown)), (401, post(PLAIN, mine)), (400, post(b"{", mine, shown)),
            (404, post(b"", mine, shown, path="/none")), (405, post(b"", mine, shown, path="/v1/models")),
            (413, post(bytes(5 << 20), mine, shown)), (400, b"nonsense\r\n\r\n"),
        ):  # fmt: skip
            answer = await said(url, data)
            assert status_of(answer) == status, answer
            head, _, body = answer.partition(b"\r\n\r\n")
            name = head.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0].decode()
            assert name if data.startswith(b"nonsense") else name == "mine", answer
            assert status == 200 or json.loads(body)["error"]["request_id"] == name


BOMBS = {"gzip": gzip.compress(bytes(BOMB_BYTES), 6), "deflate": zlib.compress(bytes(BOMB_BYTES), 6)}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("shown", [False, True])
def test_a_body_that_would_be_inflated_is_refused_as_it_is(coding: str, chunked: bool, shown: bool) -> None:
    async def story() -> bytes:
        headers = [f"Content-Encoding: {coding}", *([f"{HEADER}: {token(KEY, 'p0')}"] if shown else [])]
        async with door() as url:
            return await said(url, post(BOMBS[coding], *headers, chunked=chunked))

    answer = run(story())
    assert (status_of(answer), code_of(answer)) == ((415, "encoded_body") if shown else (401, "not_the_router"))


@pytest.mark.parametrize("header", ["Content-Encoding: identity", "Content-Encoding: ", "X-Other: gzip"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_plain_body_is_answered(header: str, chunked: bool) -> None:
    async def story() -> bytes:
        async with door(guarded=False) as url:
            return await said(url, post(PLAIN, header, chunked=chunked))

    assert status_of(run(story())) == 200


def test_an_expectation_that_nobody_understands_is_refused_in_json_and_not_repeated() -> None:
    async def story() -> bytes:
        async with door(guarded=False) as url:
            return await said(url, post(PLAIN, f"Expect: {SECRET}"))

    answer = run(story())
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (status_of(answer), error["param"]) == (417, "Expect")
    assert f"X-Request-Id: {error['request_id']}\r\n".encode() in answer
    assert SECRET.encode() not in answer


HOSTILE = {
    "a header of 64 KiB": post(PLAIN, f"Authorization: {SECRET}{'x' * (64 << 10)}"),
    "a header without end": f"POST / HTTP/1.1\r\nAuthorization: {SECRET}{'x' * (64 << 10)}".encode(),
    "headers without number": post(PLAIN, *(f"Authorization: {SECRET}" for _ in range(1000))),
    "a path of 64 KiB": post(PLAIN, path=f"/{SECRET.replace(' ', '/')}{'x' * (64 << 10)}"),
    "a bare line feed": post(PLAIN, f"Authorization: {SECRET}\n\nX: y"),
    "a NUL": post(PLAIN, f"Authorization: {SECRET}\0"),
    "a name with blanks": post(PLAIN, f"Authorization Authorization : {SECRET}"),
    "a name of odd letters": post(PLAIN, f"Authörization: {SECRET}"),
    "a method of odd letters": post(PLAIN).replace(b"POST", SECRET.replace(" ", "").encode(), 1),
    "a version of its own": post(PLAIN, f"Authorization: {SECRET}").replace(b"HTTP/1.1", b"HTTP/9.9", 1),
    "an odd target": post(PLAIN, f"Authorization: {SECRET}", path="http://[::1/%zz"),
    "a length of letters": post(PLAIN, f"Authorization: {SECRET}").replace(b"Length: ", SECRET.encode(), 1),
    "two lengths": post(PLAIN, f"Authorization: {SECRET}", "Content-Length: 7"),
    "a length and chunks": post(PLAIN, f"Authorization: {SECRET}", "Transfer-Encoding: chunked"),
    "a chunk of odd size": post(PLAIN, chunked=True).replace(b"\r\n\r\n", b"\r\n\r\n" + SECRET.encode(), 1),
    "a chunk that is longer": post(PLAIN, chunked=True).replace(PLAIN, PLAIN + SECRET.encode(), 1),
    "an odd trailer": post(PLAIN, chunked=True).replace(b"0\r\n\r\n", b"0\r\n" + SECRET.encode() + b"\r\n\r\n"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET.encode(),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SECRET.encode(),
    "an upgrade": post(PLAIN, "Upgrade: websocket", f"Authorization: {SECRET}"),
    "an expectation": post(PLAIN, f"Expect: {SECRET}"),
    "an odd host": post(PLAIN, f"Host: {SECRET}"),
    "a bomb that is none": post(SECRET.encode(), "Content-Encoding: gzip"),
    "a bad one after a good one": post(PLAIN).replace(b"Connection: close\r\n", b"", 1)
    + post(PLAIN, f"Authorization: {SECRET}{'x' * (64 << 10)}"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("path", ["", "/health"])
def test_nothing_that_a_client_sends_is_in_the_log(what: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    data = HOSTILE[what].replace(b"/v1/completions", path.encode()) if path else HOSTILE[what]

    async def story() -> None:
        async with door() as url:
            host, _, port = url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            writer.write_eof()  # so that what waits for more sees that there is none
            try:
                answer = await asyncio.wait_for(reader.read(), 30)
                assert SECRET.encode() not in answer
            except ConnectionError:
                pass
            writer.close()

    with caplog.at_level(logging.INFO):
        run(story())
    assert not [record for record in caplog.records if record.exc_info], "no traceback"
    assert SECRET.partition("-")[2] not in caplog.text and "xxxxxxxx" not in caplog.text
    own = [record.getMessage() for record in caplog.records if record.name.startswith("kvbaton.api")]
    assert sum(map(len, own)) < 400


def test_a_client_that_goes_on_gets_a_few_lines_and_a_number(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> str:
        async with door() as url:
            for _ in range(40):
                assert status_of(await said(url, HOSTILE["a header of 64 KiB"])) == 431
            return (await said(url, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).decode()

    with caplog.at_level(logging.DEBUG):
        told = run(story())
    lines = [record for record in caplog.records if "[http-malformed]" in record.getMessage()]
    assert 1 <= len(lines) <= 12
    assert 'kvbaton_http_malformed_total{worker="p0"} 40' in told


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:2", "http://127.0.0.1:1.evil"])
def test_a_web_page_elsewhere_cannot_ask_a_worker(path: str, origin: str) -> None:
    """A worker on loopback has no guard, and the browsers of that machine reach it."""

    async def story() -> bytes:
        async with door(guarded=False) as url:
            return await said(url, post(PLAIN, f"Origin: {origin}", "Content-Type: text/plain", path=path))

    answer = run(story())
    assert (status_of(answer), code_of(answer)) == (403, "foreign_origin")
    assert b"access-control" not in answer.lower()


def test_who_names_its_own_origin_or_none_is_answered_by_a_worker() -> None:
    async def story() -> list[int]:
        async with door(guarded=False) as url:
            headers = [
                ["Origin: http://127.0.0.1:1"],
                [],
                ["Origin: HTTP://127.0.0.1:1", "Sec-Fetch-Site: same-origin"],
            ]
            return [status_of(await said(url, post(PLAIN, *each, "Content-Type: text/plain"))) for each in headers]

    assert run(story()) == [200, 200, 200]
