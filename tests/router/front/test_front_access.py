"""Who may ask the router: API keys on every path, web pages of other origins, and what workers are shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvbaton.api.http.http_types import Request
from kvbaton.cli.arguments import Parser
from kvbaton.cli.flags import router_access
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.front_access import OPEN_PATHS, ApiKeys, KeyFileError, read_keys
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.route_table import ROUTES, Treatment
from kvbaton.router.router_settings import OperatorPages
from tests.router.fake_workers import QUICK, Cluster, FakeWorker, cluster, speak

KEY, OTHER = "sk-one-0123456789", "sk-two-0123456789"
OPERATOR = "op-one-0123456789"
BODY = {"prompt": "abc", "max_tokens": 4}
PAGE = "https://chat.example"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


WRONG: list[dict[str, str]] = [
    {},
    bearer(KEY[:-1]),
    bearer(KEY + "x"),
    bearer(""),
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"x-api-key": "no"},
    {"Authorization": f"Bearer {KEY}", "x-api-key": OTHER},
]


async def test_without_a_good_key_nothing_is_answered_but_what_monitoring_reads() -> None:
    async with cluster(access={"secrets": FrontSecrets(keys=(KEY, OTHER))}) as c:
        paths = [(method, route.path) for route in ROUTES for method in route.methods]
        far = {"X-Forwarded-For": "192.0.2.1"}  # else this would be an operator on the router's own machine
        for method, path in [*paths, ("GET", "/workers"), ("GET", "/stats"), ("GET", "/none")]:
            for headers in WRONG if path == "/v1/completions" else WRONG[:2]:
                async with c.session.request(method, c.url + path, headers={**headers, **far}, data=b"{}") as got:
                    if path in OPEN_PATHS:
                        assert got.status in (200, 404), path  # the workers have no /version
                        continue
                    assert got.status == 401, (method, path, headers)
                    assert got.headers["WWW-Authenticate"] == "Bearer"
                    error = (await got.json())["error"]
                    assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
                    assert not any(word in error["message"] for word in (KEY, OTHER))
        for headers in ({}, bearer(KEY), bearer(OTHER)):  # a client's key opens no operators' page
            async with c.session.get(c.url + "/flights", headers={**headers, **far}) as got:
                assert (got.status, (await got.json())["error"]["code"]) == (403, "operators_only")
        assert not c.p[0].bodies and not c.d[0].bodies
        for headers in (bearer(KEY), bearer(OTHER), {"x-api-key": KEY}, {"authorization": f"bearer  {KEY}"}):
            async with c.session.post(c.url + "/v1/completions", json=BODY, headers=headers) as got:
                assert got.status == 200
        refused = [route.path for route in ROUTES if route.treatment is Treatment.REFUSED]
        async with c.session.post(c.url + refused[-1], headers=bearer(KEY)) as got:
            assert got.status == 403
        assert (await c.get("/stats"))[0] == 200, "an operator on the router's own machine"


async def seen(c: Cluster, path: str, key: str = "", name: str = "") -> int:
    """The status of a page that is opened from elsewhere, by a name."""
    shown = {name: key} if name else bearer(key) if key else {}
    headers = {"X-Forwarded-For": "192.0.2.1", "Host": "router.example", **shown}
    async with c.session.get(c.url + path, headers=headers) as got:
        assert got.status != 403 or (await got.json())["error"]["code"] == "operators_only"
        return got.status


@pytest.mark.parametrize("processes", [1, 2])
async def test_an_operators_key_opens_operators_pages_from_elsewhere_and_no_prompt(processes: int) -> None:
    secrets = FrontSecrets(keys=(KEY,), operator_keys=(OPERATOR,))
    pages = {"pages": dashboard} if processes == 1 else {}
    async with cluster(processes=processes, access={"secrets": secrets, **pages}) as c:
        for path in ("/flights", "/dashboard/state"):
            for key, status in (("", 403), (KEY, 403), (OPERATOR[:-1], 403), (OPERATOR, 200)):
                assert await seen(c, path, key) == await seen(c, path, key, "x-api-key") == status, (path, key)
        for path in ("/workers", "/stats"):
            assert [await seen(c, path, key) for key in ("", KEY, OPERATOR)] == [401, 200, 200]
        for path in ("/dashboard", "/dashboard/app.js", "/dashboard/reasons"):
            assert await seen(c, path) == 200, "what is the same everywhere, and asks for the key"
        async with c.session.post(c.url + "/v1/completions", json=BODY, headers=bearer(OPERATOR)) as got:
            assert got.status == 401
    async with cluster(access={"secrets": FrontSecrets(keys=(KEY,)), "pages": dashboard}) as c:
        for path in ("/flights", "/dashboard", "/dashboard/app.js", "/dashboard/state"):
            assert await seen(c, path, KEY) == 403, "where there is no such key, nothing is shown"
    off = msgspec.structs.replace(QUICK, operator_pages=OperatorPages.OFF)
    async with cluster(settings=off, access={"secrets": secrets, "pages": dashboard}) as c:
        assert await seen(c, "/dashboard", OPERATOR) == 403


def test_a_key_of_both_lists_is_a_clients(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="a client's too"):
        FrontSecrets(keys=(KEY,), operator_keys=(OPERATOR, KEY)).check()
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text(KEY)
    operators.write_text(OPERATOR)
    keys = FrontSecrets(key_file=str(clients), operator_key_file=str(operators)).front_keys()
    assert keys.is_operator(request(authorization=f"Bearer {OPERATOR}"))
    assert not keys.is_operator(request(authorization=f"Bearer {KEY}")) and not keys.is_operator(request())
    operators.write_text(f"{KEY}\n{OTHER}")
    keys.refresh()
    assert not keys.is_operator(request(authorization=f"Bearer {KEY}")), "added to the file while it runs"
    assert keys.is_operator(request(authorization=f"Bearer {OTHER}"))
    assert not keys.is_operator(request(authorization=f"Bearer {OPERATOR}"))
    begun_later = FrontSecrets(key_file=str(clients), operator_key_file=str(operators)).front_keys()
    assert not begun_later.is_operator(request(authorization=f"Bearer {KEY}")), "a process that is started again"


def test_an_operators_key_is_taken_back_by_emptying_its_file_and_a_clients_is_not(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    operators = FrontSecrets(operator_key_file=str(file)).front_keys()
    clients = FrontSecrets(key_file=str(file)).front_keys()
    shown = request(authorization=f"Bearer {KEY}")
    assert operators.is_operator(shown)
    file.write_text("# none\n")
    operators.refresh()
    clients.refresh()
    assert not operators.is_operator(shown), "no key opens nothing"
    assert clients.clients.is_good(KEY.encode()), "and without clients' keys everybody might ask"
    with pytest.raises(KeyFileError, match="0 keys"):
        FrontSecrets(operator_key_file=str(file)).check()


async def test_every_process_of_a_router_asks_for_the_key() -> None:
    async with cluster(processes=2, access={"secrets": FrontSecrets(keys=(KEY,))}) as c:
        for _ in range(4):  # connections of their own, so that both processes are asked
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
                async with session.post(c.url + "/v1/completions", json=BODY, headers=bearer(OTHER)) as got:
                    assert got.status == 401
                async with session.post(c.url + "/v1/completions", json=BODY, headers=bearer(KEY)) as got:
                    assert got.status == 200


@pytest.mark.parametrize(
    ("secrets", "passes", "shown"),
    [
        (FrontSecrets(keys=(KEY,)), False, None),
        (FrontSecrets(keys=(KEY,)), True, f"Bearer {KEY}"),
        (FrontSecrets(), False, None),
        (FrontSecrets(), True, f"Bearer {KEY}"),
        (FrontSecrets(worker_key=OTHER), False, f"Bearer {OTHER}"),
        (FrontSecrets(keys=(KEY,), worker_key=OTHER), False, f"Bearer {OTHER}"),
    ],
)
async def test_what_workers_are_shown(secrets: FrontSecrets, passes: bool, shown: str | None) -> None:
    settings = msgspec.structs.replace(QUICK, passes_authorization=passes)
    async with cluster(access={"secrets": secrets}, settings=settings) as c:
        for path in ("/v1/completions", "/tokenize"):
            async with c.session.post(c.url + path, json=BODY, headers={**bearer(KEY), "X-A": "b"}) as got:
                assert got.status == 200
        for worker in (*c.p, *c.d):
            worker.pages["/version"] = {"version": "1"}
        async with c.session.get(c.url + "/version", headers=bearer(KEY)) as got:
            assert got.status == 200
        told = [headers.get("Authorization") for worker in (*c.p, *c.d) for headers in worker.headers]
        assert len(told) == 4 and set(told) == {shown}


async def test_a_key_that_workers_do_not_take_is_no_fault_of_the_client() -> None:
    async def closed(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response({"error": "Unauthorized"}, status=401)

    async with cluster([closed], [closed], access={"secrets": FrontSecrets(worker_key=OTHER)}) as c:
        for path in ("/v1/completions", "/tokenize"):
            status, answer, _ = await c.post(BODY, path)
            assert (status, answer["error"]["code"]) == (502, "worker_failed")
            assert "--worker-api-key-file" in answer["error"]["message"] and OTHER not in str(answer)
    async with cluster(1, [closed]) as c:
        assert (await c.post(BODY, "/tokenize"))[0] == 401, "the worker asks the client"
    async with cluster(
        1, [speak], access={"secrets": FrontSecrets(worker_key=OTHER)}, dialect="moriio", address="10.0.0.1:{port}"
    ) as c:
        await c.post(BODY, "/tokenize")
        assert "Authorization" not in c.d[0].headers[0], "whoever announced itself may be anybody"


async def test_a_page_of_an_origin_that_is_named_may_ask_and_read_and_others_may_not() -> None:
    settings = msgspec.structs.replace(QUICK, origins_allowed=(PAGE,), cors_headers=("content-type", "x-a"))
    async with cluster(settings=settings, access={"secrets": FrontSecrets(keys=(KEY,))}) as c:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}

        async def preflight(path: str = "/v1/completions", **more: str) -> tuple[int, Any]:
            headers = {**asked, **{name.replace("_", "-"): value for name, value in more.items()}}
            async with c.session.options(c.url + path, headers=headers) as got:
                return got.status, got.headers

        status, headers = await preflight(Access_Control_Request_Headers="X-A, content-type")
        assert (status, headers["Access-Control-Allow-Origin"], headers["Content-Length"]) == (200, PAGE, "0")
        assert headers["Access-Control-Allow-Headers"] == "X-A, content-type" and headers["Vary"] == "Origin"
        assert headers["Access-Control-Allow-Methods"] == headers["Allow"] == "POST, OPTIONS"
        assert "Access-Control-Allow-Credentials" not in headers
        for odd in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Access_Control_Request_Method": "DELETE"},
            {"Access_Control_Request_Headers": "x-a, x-evil"},
            {"Access_Control_Request_Headers": "x-a, b ad"},
        ):
            status, headers = await preflight(**odd)
            assert status == 403
            assert odd.get("Origin") is None or "Access-Control-Allow-Origin" not in headers
        assert (await preflight("/none"))[0] == 404 and (await preflight("/sleep"))[0] == 403
        async with c.session.options(c.url + "/health") as got:
            assert (got.status, got.headers["Allow"]) == (200, "GET, HEAD, OPTIONS")
        told = []
        for stream in (False, True):
            body = {**BODY, "stream": stream}
            async with c.session.post(
                c.url + "/v1/completions", json=body, headers={**bearer(KEY), "Origin": PAGE}
            ) as got:
                told.append((got.status, got.headers.get("Access-Control-Allow-Origin")))
        async with c.session.post(c.url + "/v1/completions", json=BODY, headers={"Origin": PAGE}) as got:
            told.append((got.status, got.headers.get("Access-Control-Allow-Origin")))
        assert told == [(200, PAGE), (200, PAGE), (401, PAGE)], "a page can read why it was refused"
        async with c.session.get(c.url + "/health", headers={"Origin": "https://evil.example"}) as got:
            assert "Access-Control-Allow-Origin" not in got.headers


async def test_any_page_may_ask_where_the_operator_says_so_but_never_with_credentials() -> None:
    any_page = msgspec.structs.replace(QUICK, origins_allowed=("*",))
    async with cluster(settings=any_page) as c:
        status, _, headers = await c.post(BODY, Origin="null")
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "*")
    settings = msgspec.structs.replace(QUICK, origins_allowed=(PAGE,), cors_credentials=True)
    async with cluster(settings=settings) as c, c.session.get(c.url + "/health", headers={"Origin": PAGE}) as got:
        assert got.headers["Access-Control-Allow-Credentials"] == "true"
    with pytest.raises(ValueError, match="cors_credentials: not with origin"):
        msgspec.structs.replace(QUICK, origins_allowed=("*",), cors_credentials=True)


async def test_no_page_of_another_origin_reads_what_operators_see_on_the_routers_own_machine() -> None:
    settings = msgspec.structs.replace(QUICK, origins_allowed=("*",))
    async with cluster(settings=settings, access={"secrets": FrontSecrets(keys=(KEY,))}) as c:
        for path in ("/workers", "/stats", "/flights"):
            told = []
            for more in ({}, {"Origin": c.url}, {"Origin": PAGE}, {"Origin": "null"}):
                async with c.session.get(c.url + path, headers=more) as got:
                    told.append(got.status)
            assert told == ([200, 200, 403, 403] if path == "/flights" else [200, 200, 401, 401]), path
    named = msgspec.structs.replace(QUICK, origins_allowed=(PAGE,))
    async with cluster(settings=named) as c, c.session.get(c.url + "/flights", headers={"Origin": PAGE}) as got:
        assert (got.status, (await got.json())["error"]["code"]) == (403, "operators_only")


def request(**headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request("POST", "/v1/completions", named, b"")


def test_a_file_of_keys_is_read_again_and_one_that_is_broken_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n")
    keys = ApiKeys(file=str(file))
    assert keys and keys.is_good(KEY.encode()) and not keys.refresh()
    file.write_text(f"{OTHER}\n# none\n")
    assert keys.refresh() and keys.is_good(OTHER.encode()) and not keys.is_good(KEY.encode())
    for broken in ("", "short", f"{KEY} bl\u00e4h-0123456789"):
        file.write_text(broken)
        os.utime(file, ns=(1, len(broken)))
        with pytest.raises(KeyFileError) as told:
            keys.refresh()
        assert KEY not in str(told.value)
        assert keys.is_good(OTHER.encode()) and not keys.refresh(), "told once, and the keys of before stay"
    file.unlink()
    with pytest.raises(KeyFileError):
        keys.refresh()
    assert keys.is_good(OTHER.encode())
    assert not ApiKeys() and not ApiKeys().is_good(b"")


@pytest.mark.parametrize("text", ["", "#", "seven77", "k" * 513, "\n".join(f"key-{n:08}" for n in range(1025))])
def test_keys_that_cannot_be_meant_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(KeyFileError) as told:
        read_keys(text, "FILE")
    assert "FILE" in str(told.value) and "k" * 20 not in str(told.value)


def parsed(*words: str) -> Any:
    parser = Parser()
    router_access.add_arguments(parser.add_argument_group("x"))
    return parser.parse_args(words)


def test_flags_say_which_of_them_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n{OTHER}\n")
    for words, said in (
        (("--tls-cert", "x"), "--tls-key"),
        (("--tls-key", "x"), "--tls-cert"),
        (("--tls-cert", str(file), "--tls-key", str(file)), "--tls-cert"),
        (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "none.pem: cannot be read"),
        (("--api-key-file", "none"), "--api-key-file: none: cannot be read"),
        (("--api-key", "short"), "--api-key: key 1"),
        (("--worker-api-key-file", str(file)), "--worker-api-key-file"),
        (("--operator-key-file", "none"), "--operator-key-file: none: cannot be read"),
        (("--operator-key-file", str(file), "--api-key-file", str(file)), "--operator-key-file: .* a client's too"),
    ):
        with pytest.raises(CommandError, match=said):
            router_access.secrets_of(parsed(*words), {})
    found = router_access.secrets_of(parsed("--api-key-file", str(file)), {"KVBATON_API_KEY": "from-the-environment"})
    assert found.keys is not None and found.tls is None
    for key in (KEY, OTHER, "from-the-environment"):
        found.client_keys().check(request(authorization=f"Bearer {key}"))
    operators = router_access.secrets_of(parsed("--operator-key-file", str(file)), {"KVBATON_OPERATOR_KEY": OPERATOR})
    assert all(operators.front_keys().is_operator(request(x_api_key=key)) for key in (KEY, OTHER, OPERATOR))
    both = router_access.secrets_of(parsed(), {"KVBATON_WORKER_API_KEY": KEY})
    assert both.worker_key == KEY and not both.keys and KEY not in repr(both)
    with pytest.raises(CommandError, match="--pass-authorization"):
        router_access.secrets_of(parsed("--pass-authorization"), {"KVBATON_WORKER_API_KEY": KEY})
    args = parsed(
        "--allowed-origins", '["https://A.example", "*"]', "--allow-method", "post", "--allowed-headers", '["*"]'
    )
    assert router_access.cors_of(args)["origins_allowed"] == ("https://a.example", "*")
    assert (router_access.cors_of(args)["cors_methods"], router_access.cors_of(args)["cors_headers"]) == (("POST",), ())
    args.allow_credentials = True
    with pytest.raises(CommandError, match="--allow-credentials"):
        router_access.cors_of(args)
    for words in (
        ("--allow-origin", "x"),
        ("--allow-origin", "[1]"),
        ("--allow-method", "P T"),
        ("--allow-header", "a:"),
    ):
        with pytest.raises(SystemExit):
            parsed(*words)
