"""What can be asked over HTTP, all of it: the tables of `docs/security.md`, and nothing that administers anything.

Promise 5, and the class of CVE-2026-92972, 107204 to 107207: there is no path to register, drain, run or configure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.router.app import router_app
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.route_table import ROUTES, Treatment
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine
from kvbaton_proof.chaos.strangers import ADMIN
from tests.engines.embedded.test_server import FakeBackend

DOC = Path(__file__).parents[2] / "docs" / "security.md"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT")
"""Without OPTIONS, which every path answers with the methods that it has."""


class Nobody:
    """A list of workers without any."""

    def snapshot(self) -> tuple[ListedEngine, ...]:
        return ()


def listed(who: str) -> set[tuple[str, str]]:
    """(method, path) of the rows of one table."""
    table = DOC.read_text().split(f"<!-- http {who} -->")[1].split(f"<!-- /http {who} -->")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {(method, row[0]) for row in rows for method in row[1].split(", ")}


async def routed() -> set[tuple[str, str]]:
    """What the router's application answers, method by method."""
    async with router_app(Nobody(), RouterSettings(), pages=dashboard) as router:
        with pytest.raises(ApiError) as told:
            router.handler("GET", "/nowhere")
        listed = {word.rstrip(",") for word in told.value.message.split("there are ")[1].split(", more:")[0].split()}
        assert listed < set(router.paths) and "/dashboard" in listed, "what pages are made of is not told"
        return answered(router.handler, router.paths)


def answered(handler: Callable[[str, str], object], paths: Iterable[str]) -> set[tuple[str, str]]:
    """(method, path) of these paths, and of those that administer elsewhere, that have a handler."""
    found = set()
    for path in {*paths} | {each.decode().split()[1] for each in ADMIN}:
        for method in METHODS:
            try:
                handler(method, path)
            except ApiError as error:
                assert error.status in (403, 404, 405)
            else:
                found.add((method, path))
    return found


def test_the_routers_paths_are_those_of_the_table() -> None:
    assert asyncio.run(routed()) == listed("router")


def test_a_workers_paths_are_those_of_the_table() -> None:
    site = worker_app(FakeBackend())
    assert answered(site.handler, site.routes) == listed("worker")


def test_no_path_administers() -> None:
    """What is asked with more than GET computes an answer and changes nothing; draining takes the operator's key."""
    computes = {route.path for route in ROUTES if route.treatment in (Treatment.HANDED_OVER, Treatment.PASSED)}
    administers = {each.decode().split()[1] for each in ADMIN}
    for who in ("router", "worker"):
        asked = {path for method, path in listed(who) if method not in ("GET", "HEAD")}
        assert asked <= {*computes, "/ping"} and not asked & administers
