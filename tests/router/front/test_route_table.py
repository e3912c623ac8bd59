"""Every path of a vLLM server has its place in the router, and the docs say which."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.router.app import router_app
from kvbaton.router.route_table import BY_PATH, ROUTES, ServerRoute, Treatment, of
from kvbaton.router.workers.directory import StaticDirectory
from tests.router.fake_workers import QUICK, cluster

RECORDED = Path(__file__).with_name("vllm_routes.txt")
"""Methods and paths of vLLM 0.33's server; tests/vllm/installed/test_route_table.py holds it to the installed."""
DOC = Path(__file__).parents[3] / "docs" / "router.md"


def recorded() -> set[tuple[str, str]]:
    return {tuple(line.split()) for line in RECORDED.read_text().splitlines()}  # type: ignore[misc]


def test_no_path_of_vllms_server_is_missing_and_none_is_there_twice() -> None:
    named = {(method, route.path) for route in ROUTES for method in route.methods}
    assert recorded() - named == set() and named - recorded() == set()
    assert len(BY_PATH) == len(ROUTES) and len(recorded()) > 80


async def test_the_router_does_with_each_path_what_the_table_says() -> None:
    async with router_app(StaticDirectory([]), QUICK) as app:
        for route in ROUTES:
            for method in route.methods:
                if route.treatment is Treatment.REFUSED:
                    with pytest.raises(ApiError) as told:
                        app.handler(method, route.path.replace("{", "").replace("}", ""))
                    assert (told.value.status, told.value.code) == (403, "not_here")
                    assert route.note in told.value.message
                else:
                    assert app.handler(method, route.path)
        served = {route.path for route in ROUTES if route.treatment is not Treatment.REFUSED}
        assert served <= set(app.paths)


async def test_a_refused_path_is_refused_whatever_the_method_and_no_worker_hears_of_it() -> None:
    async with cluster() as c:
        for path in ("/sleep", "/v1/responses/resp_1", "/adapters/x", "/collective_rpc", "/server_info?x=1"):
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                async with c.session.request(method, c.url + path) as response:
                    assert response.status == 403, (method, path)
                    assert (await response.json())["error"]["code"] == "not_here"
        assert (await c.get("/v1/responses/a/b/cancel"))[0] == 404
        assert not c.d[0].paths and not c.p[0].paths


def test_the_docs_have_the_table() -> None:
    told = DOC.read_text().split("<!-- routes -->")[1].split("<!-- /routes -->")[0].strip()
    assert told == table()


def table() -> str:
    """As docs/router.md has it: paths of one kind and note are one row."""
    lines = ["| path | | what for, or why not |", "|---|---|---|"]
    rows: dict[tuple[str, Treatment], list[ServerRoute]] = {}
    for treatment in Treatment:
        for route in of(treatment):
            rows.setdefault((route.note, treatment), []).append(route)
    for (note, treatment), routes in rows.items():
        paths = ", ".join(f"`{' or '.join(route.methods)} {route.path}`" for route in routes)
        lines.append(f"| {paths} | {treatment.value} | {note} |")
    return "\n".join(lines)
