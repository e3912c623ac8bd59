"""Without keys nobody is served on anything but loopback: a worker's HTTP door, and plain discovery."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest

from kvbaton.api.http.http_server import serving as http_serving
from kvbaton.api.tokens import HEADER, OPEN_PATHS, guard, token
from kvbaton.cli.main import main
from kvbaton.control import keyring
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import router_app
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory
from tests.aiohttp_server import serving
from tests.engines.embedded.test_server import FakeBackend

OLD, NEW = b"o" * 32, b"n" * 32
BASE = {"name": "p0", "role": "prefill", "keys": "keys", "registry": "tcp://127.0.0.1:7700"}


@pytest.mark.parametrize(
    ("host", "access", "guarded"),
    [
        ("127.0.0.1", "auto", False), ("127.0.0.1", "keys", True), ("127.0.0.1", "open", False),
        ("0.0.0.0", "auto", True), ("10.1.2.3", "auto", True), ("::", "auto", True), ("10.1.2.3", "open", False),
    ],
)  # fmt: skip
def test_elsewhere_than_on_loopback_a_workers_door_is_guarded_unless_told_otherwise(
    host: str, access: str, guarded: bool
) -> None:
    assert WorkerOptions(**BASE, http_host=host, http_access=access).http_is_guarded is guarded  # type: ignore[arg-type]


def test_a_router_that_cannot_show_a_token_needs_an_open_door() -> None:
    with pytest.raises(ValueError, match="http_access: got 'auto', expected open: another system's router"):
        WorkerOptions(**BASE, http_host="10.1.2.3", announce_to="10.1.2.4:1")  # type: ignore[arg-type]
    WorkerOptions(**BASE, http_host="10.1.2.3", announce_to="10.1.2.4:1", http_access="open")  # type: ignore[arg-type]


async def test_a_guarded_door_answers_its_router_and_tells_others_what_to_do() -> None:
    held = [OLD]

    app = worker_app(FakeBackend())
    app.guards.append(guard("p0", lambda: held))
    async with http_serving(app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:

        async def asked(path: str, shown: str | None) -> int:
            headers = {} if shown is None else {HEADER: shown}
            async with session.get(f"{url}{path}", headers=headers) as response:
                if response.status == 401:
                    said = (await response.json())["error"]
                    assert said["code"] == "not_the_router" and "to the cluster's router" in said["message"]
                return response.status

        for path in ("/v1/models", "/nowhere"):
            assert [await asked(path, shown) for shown in (None, "", "guess", token(OLD, "p1"))] == [401] * 4
            assert await asked(path, token(OLD, "p0")) == (200 if path == "/v1/models" else 404)
        for path in ("completions", "chat/completions", "responses"):
            async with session.post(f"{url}/v1/{path}", data=b"{}") as response:
                assert response.status == 401
        assert [await asked(path, None) for path in sorted(OPEN_PATHS)] == [200] * 3, "for monitoring"
        held[:] = [NEW, OLD]
        assert [await asked("/v1/models", token(key, "p0")) for key in (OLD, NEW)] == [200, 200], "while it is rotated"
        held[:] = [NEW]
        assert [await asked("/v1/models", token(key, "p0")) for key in (OLD, NEW)] == [401, 200]


def test_the_router_shows_its_token_to_registered_workers_and_to_nobody_else() -> None:
    seen: dict[str, list[str | None]] = {"own": [], "static": [], "foreign": []}

    async def story() -> None:
        async def heard(request: aiohttp.web.Request) -> aiohttp.web.Response:
            seen[request.path.split("/")[1]].append(request.headers.get(HEADER))
            return aiohttp.web.json_response({"object": "list", "data": []})

        app = aiohttp.web.Application()
        app.router.add_route("*", "/{tail:.*}", heard)
        async with serving(app, "127.0.0.1", 0) as url:
            workers = [
                ListedEngine(WorkerId("own"), "decode", f"{url}/own", Incarnation(5)),
                ListedEngine(WorkerId("static"), "decode", f"{url}/static"),
                ListedEngine(WorkerId("foreign"), "decode", f"{url}/foreign", Incarnation(6), dialect="moriio"),
            ]
            for worker in workers:
                directory = StaticDirectory([worker])
                async with (
                    router_app(directory, RouterSettings(), OLD) as router,
                    http_serving(router, "127.0.0.1", 0) as front,
                    aiohttp.ClientSession() as session,
                ):
                    async with session.get(f"{front}/v1/models"):
                        pass
                    router.set_ticket_key(NEW)
                    async with session.get(f"{front}/v1/models"):
                        pass

    asyncio.run(story())
    assert seen["own"] and set(seen["own"]) <= {token(OLD, "own"), token(NEW, "own")}
    assert seen["static"] and set(seen["static"]) == {None}
    assert seen["foreign"] and set(seen["foreign"]) == {None}


def test_plain_discovery_is_opened_wide_only_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--plain-discovery", "0.0.0.0:0", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "is not loopback and announcements have no keys" in err and "--keys DIR), or give --plain-open" in err


def test_a_router_without_keys_has_no_registry_and_a_worker_without_keys_does_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--name", "p0", "--role", "prefill", "--registry", "tcp://127.0.0.1:1", "--keys", str(tmp_path)]
    status = main(["worker", *words])
    assert status == 2 and "no key directory; mint one" in capsys.readouterr().err
    keyring.mint(tmp_path / "keys", ["router"])
    status = main(["store", "--keys", str(tmp_path / "keys"), "--port", "0"])
    assert status == 2 and "store.json is missing; add that identity" in capsys.readouterr().err
