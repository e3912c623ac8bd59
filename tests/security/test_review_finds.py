"""What a review of keys, tokens and crowds found: each would have cost honest clients or peers something."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http import http_server, http_types
from kvbaton.api.http.http_types import Request
from kvbaton.api.tokens import HEADER, guard, is_good, token
from kvbaton.control import key_files, key_room, keyring
from kvbaton.control.keyring import Following
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import router_app
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory
from tests.aiohttp_server import serving
from tests.router.fake_workers import QUICK, FakeWorker, lease, speak

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def minted(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "keys", ["router", "p0", "d0"])
    return tmp_path / "keys"


def guarded(name: str, key: bytes) -> Middleware:
    """The guard of a worker before a scripted one."""
    check = guard(name, lambda: [key])

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        try:
            check(Request(request.method, request.path, headers, b""))
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        return await handler(request)

    return middleware


async def test_a_worker_that_does_not_take_the_routers_token_costs_no_client_an_answer() -> None:
    async with contextlib.AsyncExitStack() as stack:
        listed = []
        for name, script, key in (("p0", lease, KEY), ("d0", speak, OTHER), ("d1", speak, KEY)):
            app = FakeWorker(name, script).app()
            app.middlewares.append(guarded(name, key))
            url = await stack.enter_async_context(serving(app, "127.0.0.1", 0))
            listed.append(ListedEngine(WorkerId(name), "prefill" if name == "p0" else "decode", url, Incarnation(5)))
        router = await stack.enter_async_context(router_app(StaticDirectory(listed), QUICK, KEY))
        front = await stack.enter_async_context(http_server.serving(router, "127.0.0.1", 0))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for shown in [""] * 6 + ["a client's own"] * 2:
            headers = {HEADER: shown} if shown else {}
            async with session.post(f"{front}/v1/completions", json={"prompt": "abc"}, headers=headers) as answer:
                assert answer.status == 200, await answer.text()


def test_a_token_may_hold_any_bytes() -> None:
    assert not is_good(b"\xff\xfe".decode("utf-8", "surrogateescape"), [KEY], "p0")
    assert is_good(token(KEY, "p0"), [OTHER, KEY], "p0")


def test_a_worker_waits_longer_for_a_reader_than_a_router_does() -> None:
    assert RouterSettings().deadline_s < http_types.UNREAD_STREAM_S


@pytest.mark.parametrize("broken", ["emptied", "finished before the restart"])
def test_a_directory_that_does_not_know_its_own_process_changes_nothing(minted: Path, broken: str) -> None:
    followed = Following(keyring.load(minted, "p0"), 0.0)
    followed.look(0.0)
    if broken == "emptied":
        for path in (minted / "public").iterdir():
            path.unlink()
    else:
        key_room.rotate(minted, "p0")
        key_room.finish(minted, "p0")
    assert followed.look(2.0) is None and set(followed.keyring.peers) == {"router", "p0", "d0"}


def test_a_directory_on_a_file_system_that_is_away_holds_nobody_up(
    minted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = ZmqControl(keyring.load(minted, "p0"))
    back = threading.Event()
    monkeypatch.setattr(key_files, "stamp", lambda _: back.wait(60))
    began = time.monotonic()
    try:
        control.hear()
        control.wait(0.01)
        control.close()
        assert time.monotonic() - began < 20
    finally:
        back.set()
