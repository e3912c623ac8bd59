"""Data-parallel ranks behind one HTTP address: the router chooses among them and names them; one breaker for all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvbaton.api.http import http_server
from kvbaton.api.params import Mode
from kvbaton.control.keyring import data_parallel_name, engine_and_rank
from kvbaton.control.plain import AnnouncedWorker, Announcement, Fleet
from kvbaton.control.registry import Registration, RosterEntry, WorkerState
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.wire.ticket import unseal
from kvbaton.router.app import router_app
from kvbaton.router.flow import dialect_table
from kvbaton.router.policy import Pair
from kvbaton.router.processes.process_link import WorkerOutcome
from kvbaton.router.processes.router_child import ChildHealth
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.workers.available import AvailableWorkers
from kvbaton.router.workers.directories import RANKS_LISTED_MAX, AnnouncedDirectory, RegistryDirectory
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerListState
from kvbaton.router.workers.health import Health
from tests.aiohttp_server import serving
from tests.router.fake_workers import (
    KEY,
    QUICK,
    ChangingDirectory,
    Cluster,
    FakeWorker,
    Script,
    die,
    lease,
    only_first,
    speak,
    until,
)

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0}
RANK = "X-data-parallel-rank"


@contextlib.asynccontextmanager
async def ranked(
    p_size: int, d_size: int, *, p: Script = lease, d: Script = speak, settings: RouterSettings = QUICK
) -> AsyncIterator[Cluster]:
    """One server of each role, with that many ranks."""
    fakes = [FakeWorker("p0", p), FakeWorker("d0", d)]
    async with contextlib.AsyncExitStack() as stack:
        listed: list[ListedEngine] = []
        for fake, role, size in zip(fakes, ("prefill", "decode"), (p_size, d_size), strict=True):
            fake.url = await stack.enter_async_context(serving(fake.app(), "127.0.0.1", 0))
            listed += ranks_of(fake.name, role, fake.url, size)
        directory = ChangingDirectory(listed)
        discarded: list[tuple[str, str]] = []
        router = router_app(directory, settings, KEY, lambda who, ticket: discarded.append((who.name, ticket)))
        app = await stack.enter_async_context(router)
        url = await stack.enter_async_context(http_server.serving(app, "127.0.0.1", 0))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Cluster(url, session, fakes[:1], fakes[1:], app, directory, discarded)


def ranks_of(name: str, role: str, url: str, size: int) -> list[ListedEngine]:
    one = ListedEngine(WorkerId(name), role, url, Incarnation(7))  # type: ignore[arg-type]
    if size == 1:
        return [one]
    return [
        msgspec.structs.replace(
            one, name=data_parallel_name(name, rank), incarnation=Incarnation(10 + rank), dp_rank=rank, dp_size=size
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (2, 3)])
async def test_both_legs_name_the_ranks_that_were_chosen_and_all_are_in_turn(mode: str, sizes: tuple[int, int]) -> None:
    async with ranked(*sizes) as c:
        for _ in range(2 * sizes[0] * sizes[1]):
            status, answer, _ = await c.post(BODY, x_kvbaton_mode=mode, X_data_parallel_rank="7")
            assert (status, answer["choices"][0]["text"]) == (200, "ABC")
        named = [(p.getall(RANK, []), d.getall(RANK, [])) for p, d in zip(c.p[0].headers, c.d[0].headers, strict=True)]
        wanted = [[[str(rank)] for rank in range(size)] if size > 1 else [[]] for size in sizes]
        assert Counter((tuple(p), tuple(d)) for p, d in named) == {
            (tuple(p), tuple(d)): 2 for p in wanted[0] for d in wanted[1]
        }, "every pair of ranks twice; a client's own choice goes nowhere"
        if mode != "pull":
            tickets = [unseal(params["ticket"], [KEY], 0) for params in c.d[0].params]
            assert [[_rank(ticket.source), _rank(str(ticket.target))] for ticket in tickets] == [list(n) for n in named]


def _rank(name: str) -> list[str]:
    found = engine_and_rank(name)
    return [] if found is None else [str(found[1])]


async def test_a_response_between_ranks_is_pulled_since_vllm_reads_no_rank_for_it() -> None:
    body = {"model": "tiny", "input": "abc", "max_output_tokens": 4}
    async with ranked(2, 2, d=_response, settings=msgspec.structs.replace(QUICK, mode=Mode.STREAM)) as c:
        status, _, _ = await c.post(body, "/v1/responses")
        assert status == 200 and c.p[0].params[0]["mode"] == "pull"
        status, told, _ = await c.post(body, "/v1/responses", x_kvbaton_mode="push")
        assert status == 503 and "push" in told["error"]["message"]
    async with ranked(1, 1, d=_response, settings=msgspec.structs.replace(QUICK, mode=Mode.STREAM)) as c:
        assert (await c.post(body, "/v1/responses"))[0] == 200 and c.p[0].params[0]["mode"] == "stream"


async def _response(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
    return web.json_response({"id": "resp_1", "object": "response", "status": "completed", "output": []})


async def test_ranks_behind_one_address_break_together_are_probed_once_and_come_back_together() -> None:
    settings = msgspec.structs.replace(
        QUICK, breaker_failures=1, probe_min_s=0.02, suspect_s=0.01, prefill_retries=0, fallback=Fallback.LOCAL
    )
    async with ranked(3, 1, p=only_first(die, lease), settings=settings) as c:
        c.p[0].healthy = False
        assert (await c.post(BODY))[0] == 200, "by D alone"
        _, told = await c.get("/workers")
        assert [each["state"] for each in told["workers"]] == ["broken"] * 3 + ["serving"]
        await until(lambda: c.p[0].probes >= 2)
        numbers = await c.stats()
        assert numbers["breakers_opened_total"] == 1
        c.p[0].healthy = True
        async with contextlib.aclosing(_states(c)) as states:
            async for now in states:
                if "broken" not in now:
                    break
        assert c.p[0].probes < 40, "one probe a turn, not one for each rank"


async def _states(c: Cluster) -> AsyncIterator[list[str]]:
    while True:
        _, told = await c.get("/workers")
        yield [each["state"] for each in told["workers"]]


def test_a_member_of_another_name_does_not_share_a_standing_by_claiming_an_address() -> None:
    listed = ranks_of("p0", "prefill", "http://a", 2) + ranks_of("d9", "decode", "http://a", 2)
    roster = AvailableWorkers(StaticDirectory(listed), Health(2.0, 1, 1.0, 10.0))
    roster.view(0)
    roster.health.failed(listed[3].peer, 0)
    assert [worker.state for worker in roster.view(0).workers] == [WorkerListState.SERVING] * 2 + [
        WorkerListState.BROKEN
    ] * 2
    assert roster.health.due(2) == [listed[2].peer]
    roster.health.probed(listed[2].peer, answered=True, now=2)
    assert roster.view(2).workers[3].state is WorkerListState.SUSPECT
    roster.health.ok(listed[3].peer)
    assert not roster.health


def test_ranks_that_have_named_themselves_share_a_standing_too() -> None:
    ranks = ranks_of("pod-1", "prefill", "http://a", 2)
    tails = ("bcdfgh", "jklmnp")
    listed = [
        msgspec.structs.replace(each, name=WorkerId(f"{each.name}-{tail}"))
        for each, tail in zip(ranks, tails, strict=True)
    ]
    roster = AvailableWorkers(StaticDirectory(listed), Health(2.0, 1, 1.0, 10.0))
    roster.view(0)
    roster.health.failed(listed[1].peer, 0)
    assert [worker.state for worker in roster.view(0).workers] == [WorkerListState.BROKEN] * 2


def test_the_success_of_any_rank_is_told_to_the_routers_first_process() -> None:
    first, second = (PeerId(WorkerId(f"d.{rank}"), Incarnation(1)) for rank in range(2))
    told: list[WorkerOutcome] = []
    health = ChildHealth(told.append, 2.0, 3, 0.5, 15.0)
    health.keep({first, second}, {first: first, second: first})
    health.ok(second)
    assert not told, "nothing was held against it"
    health.failed(second, 0.0)
    health.ok(second)
    assert told == [WorkerOutcome(second, True), WorkerOutcome(second, False)]


def test_a_restart_of_the_ranks_forgets_their_standing() -> None:
    listed = ranks_of("p0", "prefill", "http://a", 2)
    directory = ChangingDirectory(listed)
    roster = AvailableWorkers(directory, Health(2.0, 1, 1.0, 10.0))
    roster.view(0)
    roster.health.failed(listed[1].peer, 0)
    directory._workers = tuple(
        msgspec.structs.replace(each, incarnation=Incarnation(each.incarnation + 50)) for each in listed
    )
    assert [worker.state for worker in roster.view(0).workers] == [WorkerListState.SERVING] * 2
    assert sorted(roster.departed()) == sorted(PeerId(each.name, each.incarnation) for each in listed)


def test_a_registered_rank_is_known_by_the_number_that_its_server_has_for_it() -> None:
    told = Registration(
        WorkerId("p0.dp5"), Incarnation(5), "prefill", "127.0.0.1:80", "tcp://127.0.0.1:1", dp_rank=1, dp_size=2
    )

    class Registry:
        def workers(self) -> tuple[RosterEntry, ...]:
            return (RosterEntry(told, "key", WorkerState.READY, False),)

    (worker,) = RegistryDirectory(Registry()).snapshot()  # type: ignore[arg-type]
    assert (worker.dp_rank, worker.dp_size) == (1, 2)


def announced(fleet: Fleet, role: str, port: int, dp_size: int) -> AnnouncedWorker:
    zmq = f"host:10.0.0.1,handshake:{port},notify:{port}"
    told = Announcement(fleet, role, f"10.0.0.1:{port}", zmq, dp_size=dp_size, tp_size=2)  # type: ignore[arg-type]
    return AnnouncedWorker(told, Incarnation(port))


class Listener:
    def __init__(self, *listed: AnnouncedWorker) -> None:
        self._listed = listed

    def workers(self) -> tuple[AnnouncedWorker, ...]:
        return self._listed


def test_mori_ios_ranks_are_chosen_where_p_writes_and_left_to_p_where_d_reads() -> None:
    for fleet, expected in ((Fleet.MORIIO_WRITE, [0, 1, 2]), (Fleet.MORIIO_READ, [0])):
        found = AnnouncedDirectory(Listener(announced(fleet, "P", 8100, 3))).snapshot()
        assert [worker.dp_rank for worker in found] == expected
        assert {worker.dp_size for worker in found} == {len(expected)}
        assert len({worker.name for worker in found}) == len(found)
    many = [announced(Fleet.MORIIO_WRITE, "P", 8100 + n, 65_536) for n in range(100)]
    assert len(AnnouncedDirectory(Listener(*many)).snapshot()) <= RANKS_LISTED_MAX


def test_mori_io_is_told_the_other_sides_ranks_on_each_leg() -> None:
    p = AnnouncedDirectory(Listener(announced(Fleet.MORIIO_WRITE, "P", 8100, 2))).snapshot()
    d = AnnouncedDirectory(Listener(announced(Fleet.MORIIO_WRITE, "D", 8200, 3))).snapshot()
    ask = dialect_table.ask(Pair(p[1], d[2]), Mode.PUSH, None)
    source, target = msgspec.json.decode(ask.source), msgspec.json.decode(ask.target or b"")
    own = ("remote_dp_rank", "remote_dp_size", "remote_dp_size_local", "remote_tp_size")
    assert [source[name] for name in own] == [2, 3, 3, 2]
    assert [target[name] for name in own] == [1, 2, 2, 2]
    (alone,) = AnnouncedDirectory(Listener(announced(Fleet.MORIIO_WRITE, "D", 8200, 1))).snapshot()
    source = msgspec.json.decode(dialect_table.ask(Pair(p[0], alone), Mode.PUSH, None).source)
    assert "remote_dp_rank" not in source and source["remote_dp_size"] == 1
