"""Requests that would go round, and heads that two readers take differently: each is refused where it comes in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvbaton.api.http.http_server import serving
from kvbaton.api.http.http_types import Request
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import Router, router_app
from kvbaton.router.flow.hops import HEADER, HOPS_MAX, Hops
from kvbaton.router.processes.router_parent import router_processes
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory
from tests.aiohttp_server import serving as fake_serving
from tests.engines.embedded.test_server import FakeBackend
from tests.router.fake_workers import KEY, QUICK, ChangingDirectory, FakeWorker, speak

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAIN = 6


def listed(*urls: str) -> list[ListedEngine]:
    """Of both roles each: an attacker may say so."""
    roles = ("prefill", "decode")
    return [
        ListedEngine(WorkerId(f"{role[0]}{n}"), role, url, Incarnation(5))  # type: ignore[arg-type]
        for n, url in enumerate(urls)
        for role in roles
    ]


class Counted:
    """How many requests a router was asked."""

    def __init__(self, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        admit = router.admit

        def counting(request: Request) -> None:
            self.count += 1
            admit(request)

        monkeypatch.setattr(router, "admit", counting)


@contextlib.asynccontextmanager
async def routers(monkeypatch: pytest.MonkeyPatch, count: int) -> AsyncIterator[tuple[list[str], list[Counted], Any]]:
    """So many, each with a list of workers that a test fills once all listen."""
    async with contextlib.AsyncExitStack() as stack:
        directories = [ChangingDirectory([]) for _ in range(count)]
        urls, counts = [], []
        for directory in directories:
            app = await stack.enter_async_context(router_app(directory, QUICK, KEY, lambda *_: None))
            counts.append(Counted(app, monkeypatch))
            urls.append(await stack.enter_async_context(serving(app, "127.0.0.1", 0)))
        yield urls, counts, directories


async def asked(url: str, path: str, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        body = BODY if path in ("/v1/completions", "/tokenize") else None
        async with session.request("POST" if body else "GET", url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)


@pytest.mark.parametrize("path", ["/openapi.json", "/v1/models", "/v1/completions", "/tokenize"])
async def test_a_router_that_is_listed_as_its_own_worker_asks_itself_nothing(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """`/openapi.json` became 7,617 requests."""
    async with routers(monkeypatch, 1) as ([url], [counted], [directory]):
        directory._workers = tuple(listed(url, url.replace("127.0.0.1", "localhost")))
        status, _ = await asked(url, path)
        assert status == 200 if path == "/openapi.json" else status >= 500
        assert counted.count == 1


@pytest.mark.parametrize("path", ["/openapi.json", "/v1/models", "/v1/completions", "/tokenize"])
async def test_two_routers_that_list_each_other_answer_a_request_that_comes_back_with_508(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with routers(monkeypatch, 2) as (urls, counts, directories):
        for directory, other in zip(directories, reversed(urls), strict=True):
            directory._workers = tuple(listed(other))
        await asked(urls[0], path)
        assert sum(each.count for each in counts) < 20


async def test_routers_in_a_row_are_let_through_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker("d0", speak)
    async with (
        fake_serving(worker.app(), "127.0.0.1", 0) as last,
        routers(monkeypatch, CHAIN) as (urls, _, directories),
    ):
        for directory, following in zip(directories, [*urls[1:], last], strict=True):
            directory._workers = (ListedEngine(WorkerId("d"), "decode", following, Incarnation(5)),)
        statuses = [(await asked(url, "/tokenize"))[0] for url in urls]
        assert statuses[-HOPS_MAX:] == [200] * HOPS_MAX and set(statuses[:-HOPS_MAX]) == {502}
        assert len(worker.headers[0].getall(HEADER)) == HOPS_MAX


async def test_what_has_passed_too_many_routers_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routers(monkeypatch, 1) as ([url], _, __):
        status, told = await asked(url, "/openapi.json", **{HEADER: ",".join(["a"] * HOPS_MAX)})
        assert (status, told["error"]["code"]) == (508, "request_loop")
        assert f"{HOPS_MAX} routers have passed this on" in told["error"]["message"]
        assert (await asked(url, "/openapi.json", **{HEADER: "a, b"}))[0] == 200


async def test_the_processes_of_one_router_are_one() -> None:
    directory = ChangingDirectory([])
    async with router_processes(2, "127.0.0.1", 0, directory, QUICK, KEY, lambda *_: None) as parent:
        directory._workers = tuple(listed(parent.url))
        async with asyncio.timeout(20):
            while (found := await asked(parent.url, "/tokenize"))[0] == 503:  # until it has heard of its workers
                await asyncio.sleep(0.05)
        assert found[0] == 502 and "this router's own" in found[1]["error"]["message"]


@pytest.mark.parametrize(
    ("host", "near", "far", "is_own"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", "127.0.0.7", True),
        ("0.0.0.0", "10.0.0.1", "10.0.0.1", True),
        ("::", "fe80::1", "fe80::1", True),
        ("0.0.0.0", "10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "127.0.0.1", "127.0.0.1", False),
    ],
)
def test_which_connections_lead_back(host: str, near: str, far: str, is_own: bool) -> None:
    hops = Hops()
    hops.listens((host, 8000))
    assert hops.is_own((near, 50_000), (far, 8000)) is is_own
    assert not hops.is_own((near, 50_000), (far, 8001))


# --- Host


async def head(url: str, *lines: str, version: str = "1.1") -> str:
    """The first line of the answer to these headers."""
    place, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(place, int(port))
    said = "".join(f"{line}\r\n" for line in (f"GET /health HTTP/{version}", *lines, ""))
    writer.write(said.encode())
    try:
        return (await reader.readline()).decode().split(" ")[1]
    finally:
        writer.close()


@pytest.mark.parametrize("door", ["router", "worker"])
async def test_a_request_names_one_host(door: str) -> None:
    """RFC 9112, 3.2: two and none were both answered."""
    async with contextlib.AsyncExitStack() as stack:
        if door == "worker":
            url = await stack.enter_async_context(serving(worker_app(FakeBackend()), "127.0.0.1", 0))
        else:
            directory = StaticDirectory([])
            app = await stack.enter_async_context(router_app(directory, QUICK, KEY, lambda *_: None))
            url = await stack.enter_async_context(serving(app, "127.0.0.1", 0))
        good = await head(url, "Host: a:80")
        assert good in ("200", "503")
        for lines in ((), ("Host: a", "Host: b"), ("Host: a", "Host: a"), ("Host: a, b",), ("Host: a b",)):
            assert await head(url, *lines) == "400", lines
        for line in ("Host: [::1]:80", "Host:", "Host: a.b"):
            assert await head(url, line) == good, line
        assert await head(url, version="1.0") == good
        assert await head(url, "Host: a", "Host: b", version="1.0") == "400"
