"""A router of two processes: one to clients and operators; a process that is killed loses what it had and no more."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.api.http.http_types import Answer, Events, Handler, Request
from kvbaton.observe.metrics.exposition import figures
from kvbaton.processes import child_process
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import Incarnation
from kvbaton.protocol.wire.ticket import unseal
from kvbaton.router.processes import router_parent, router_process
from kvbaton.router.processes.router_child import PAGES_MAX
from kvbaton.router.processes.router_parent import RouterParent
from kvbaton.router.processes.shared_counts import IN_FLIGHT
from tests.router.fake_workers import KEY, QUICK, Cluster, after, cluster, die, lease, speak, until

BODY = {"prompt": "abc", "max_tokens": 4}


@contextlib.asynccontextmanager
async def two(*scripts: Any, **more: Any) -> AsyncIterator[tuple[Cluster, RouterParent]]:
    """A cluster whose client makes a connection for each request, so that both processes are asked."""
    async with cluster(*scripts, processes=2, **more) as c:
        await c.session.close()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
            c.session = session
            yield c, c.app


def served(parent: RouterParent) -> list[int]:
    """Requests that each process has answered, as it told last."""
    return [each.figures[1].counters.get("ends", {}).get("ok", 0) for each in parent.processes]


def talk(number: int, *more: str) -> dict[str, Any]:
    """One of several conversations, at its first turn or later."""
    return {"messages": [{"role": "user", "content": said} for said in (f"talk {number}", *more)], "max_tokens": 4}


async def cpu_s(c: Cluster) -> float:
    """CPU seconds of all processes of the router, as a scrape shows them."""
    async with c.session.get(c.url + "/metrics") as response:
        return figures(await response.text())["process_cpu_seconds_total"]


async def under_way(parent: RouterParent, count: int) -> None:
    await until(lambda: parent._counts.total(IN_FLIGHT) == count)


async def test_clients_and_operators_see_one_router() -> None:
    settings = msgspec.structs.replace(QUICK, in_flight_max=6)
    gate = asyncio.Event()
    gate.set()
    async with two([lease], [after(gate, speak)], settings=settings) as (c, parent):
        # every request counts once, whichever process has it
        count = 0
        while count < 12 or not all(served(parent)):
            status, answer, _ = await c.post(BODY, x_request_id=f"name-{count}")
            assert (status, answer["choices"][0]["text"]) == (200, "ABC")
            await c.stats()
            count += 1
        assert (await c.events(BODY, x_kvbaton_mode="stream"))[-1] == "[DONE]"
        assert (await c.post({"prompt": 5}))[0] == 400
        told = [await c.stats() for _ in range(4)]
        assert all(each == told[0] for each in told)
        assert told[0]["ends_total"] == {"ok": count + 1, "invalid_value": 1}
        assert told[0]["responses_total"] == {"2xx": count + 1, "4xx": 1} and told[0]["processes"] == 2
        assert told[0]["tries_total"] == {"pull": count, "stream": 1} and told[0]["in_flight"] == 0
        assert sum(served(parent)) == count + 1
        async with c.session.get(c.url + "/metrics") as response:
            shown = figures(await response.text())
        assert shown['kvbaton_router_requests_total{outcome="ok"}'] == count + 1
        assert shown['kvbaton_router_worker_asked_total{role="prefill",worker="p0"}'] == count + 1
        assert shown["kvbaton_router_request_seconds_count"] == count + 1
        assert shown["kvbaton_router_first_byte_seconds_count"] == 1 and shown["kvbaton_router_processes"] == 2
        used = [each.figures[1].process for each in parent.processes]
        assert shown["process_cpu_seconds_total"] > sum(each.cpu_s for each in used) > 0
        assert shown["process_resident_memory_bytes"] > sum(each.resident_bytes for each in used) > 0
        assert shown["process_open_fds"] >= max(each.open_files for each in used) > 0
        assert shown["python_gc_collections_total"] > 0
        _, flights = await c.get("/flights?last=50")
        seen = {journey["request"] for journey in flights["journeys"]}
        assert {f"name-{number}" for number in range(count - 12, count)} <= seen
        for path in ("/workers", "/health"):
            assert len({json.dumps(await c.get(path)) for _ in range(4)}) == 1
        assert (await c.get("/dashboard/state"))[0] == 200 and (await c.get("/v1/models"))[0] == 200

        # bounds are of both together, and so is the load that they see
        gate.clear()
        asking = [asyncio.create_task(c.post(BODY)) for _ in range(6)]
        await under_way(parent, 6)
        assert {(await c.post(BODY))[0] for _ in range(4)} == {429}
        loads = [(await c.get("/workers"))[1]["workers"][1]["tokens_under_way"] for _ in range(4)]
        assert set(loads) == {6 * (1 + 4)}
        _, flights = await c.get("/flights?last=50")
        assert sum(not journey.get("end") for journey in flights["journeys"]) == 6
        gate.set()
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
        assert {each["tokens_under_way"] for each in (await c.get("/workers"))[1]["workers"]} == {0}

        # a new key, and a worker that leaves, are known to both
        parent.set_ticket_key(b"n" * 32)
        await asyncio.sleep(0.1)
        first = len(c.d[0].bodies)
        for _ in range(4):
            await c.post(BODY, x_kvbaton_mode="stream")
        for params in c.d[0].params[first:]:
            assert unseal(params["ticket"], [b"n" * 32], time.time())
            with pytest.raises(ProtocolError):
                unseal(params["ticket"], [KEY], time.time())
        c.directory.lose("d0")
        await asyncio.sleep(0.1)
        assert {(await c.post(BODY))[0] for _ in range(4)} == {503}


async def test_figures_are_of_now_though_nobody_asks_for_a_page() -> None:
    """Who counts takes them once a second: they stood still until a page was asked for, and then they jumped."""
    gate = asyncio.Event()
    gate.set()
    async with two([lease], [after(gate, speak)]) as (c, parent):
        for _ in range(6):
            await c.post(BODY)
        await until(lambda: parent.stats.as_numbers()["responses_total"] == {"2xx": 6})
        gate.clear()
        asking = [asyncio.create_task(c.events(BODY, x_kvbaton_mode="stream")) for _ in range(4)]
        await under_way(parent, 4)
        assert parent.stats.as_numbers()["in_flight"] == 4
        await until(lambda: parent.stats.as_numbers()["waiting"] == 4)
        now = (await c.get("/dashboard/state"))[1]["now"]
        assert (now["in_flight"], now["waiting"]) == (4, 4)
        gate.set()
        await asyncio.gather(*asking)
        assert parent.stats.as_numbers()["in_flight"] == 0
        await until(lambda: not parent.stats.as_numbers()["waiting"])


async def test_a_process_that_is_killed_takes_its_own_requests_with_it_and_comes_back() -> None:
    """What it knew of conversations is known to the others, who may be asked for the next turn."""
    gate = asyncio.Event()
    gate.set()
    settings, life = msgspec.structs.replace(QUICK, turn_s=60.0), Incarnation(1)
    async with two([lease], [after(gate, speak)], settings=settings, incarnation=life) as (c, parent):
        talks = 0
        while talks < 4 or not all(served(parent)):
            assert (await c.post(talk(talks), "/v1/chat/completions"))[0] == 200
            talks += 1
            assert (await c.stats())["turns_total"] == {"noted": talks}
        used_s = await cpu_s(c)
        gate.clear()
        asking: list[asyncio.Task[Any]] = []
        while min(parent._counts.each(IN_FLIGHT)) < 2:
            asking.append(asyncio.create_task(c.post(BODY)))
            await under_way(parent, len(asking))
        killed = parent.processes[0]
        assert killed.child is not None
        had = parent._counts.each(IN_FLIGHT)
        os.kill(killed.child.pid, signal.SIGKILL)
        await under_way(parent, had[1])
        loads = [(await c.get("/workers"))[1]["workers"][1]["tokens_under_way"] for _ in range(2)]
        assert set(loads) == {had[1] * (1 + 4)}, "what it had under way is nobody's load"
        gate.set()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(end, aiohttp.ClientError) for end in ends) == had[0] > 0
        assert sum(isinstance(end, tuple) and end[0] == 200 for end in ends) == had[1] > 0
        assert {(await c.post(BODY))[0] for _ in range(4)} == {200}, "the other serves meanwhile"
        first = len(c.p[0].bodies)
        for number in range(talks):
            assert (await c.post(talk(number, "an answer", "more"), "/v1/chat/completions"))[0] == 200
        assert all("turn" in params for params in c.p[0].params[first:]), "of each conversation, whoever noted it"
        await until(lambda: all(each.ready.is_set() for each in parent.processes), 60)
        assert {(await c.post(BODY))[0] for _ in range(8)} == {200}
        told = await c.stats()
        assert (told["processes"], told["process_restarts_total"]) == (2, 1)
        assert told["ends_total"] == {"ok": had[1] + 12 + 2 * talks} and told["in_flight"] == 0
        assert told["turns_total"] == {"noted": 2 * talks, "offered": talks}
        assert await cpu_s(c) >= used_s, "a counter: what the killed one had used stays counted"


async def test_a_process_that_hangs_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel goes on giving it connections, which nobody would ever answer."""
    async with two([lease], [speak]) as (c, parent):
        monkeypatch.setattr(router_parent, "SILENT_S", 2)
        hung = parent.processes[0]
        before = hung.child
        assert before is not None
        os.kill(before.pid, signal.SIGSTOP)
        await until(lambda: hung.child is not before, 60)
        assert before.process.returncode == -signal.SIGKILL
        await until(lambda: all(each.ready.is_set() for each in parent.processes), 60)
        monkeypatch.undo()
        assert {(await c.post(BODY))[0] for _ in range(8)} == {200}


async def test_a_worker_that_fails_is_judged_once_for_all_processes() -> None:
    settings = msgspec.structs.replace(QUICK, breaker_failures=4, suspect_s=30.0, probe_min_s=0.2, probe_max_s=0.2)
    async with two([lease], [die, speak], settings=settings) as (c, _):
        c.d[0].healthy = False
        for _ in range(12):
            assert (await c.post(BODY))[0] == 200
        assert len(c.d[0].bodies) <= 2, "one failure makes it the last choice of both"
        states = {each["name"]: each["state"] for each in (await c.get("/workers"))[1]["workers"]}
        assert states["d0"] == "suspect"
        c.directory.lose("d1")
        await asyncio.sleep(0.1)
        for _ in range(16):
            await c.post(BODY)
        assert len(c.d[0].bodies) <= 6, "four failures of any process open the breaker of both, within milliseconds"
        assert (await c.stats())["breakers_opened_total"] == 1
        probed = c.d[0].probes
        await until(lambda: c.d[0].probes >= probed + 2)
        c.d[0].healthy, c.d[0].script = True, speak
        async with asyncio.timeout(20):
            while (await c.post(BODY))[0] != 200:
                await asyncio.sleep(0.05)
        assert {(await c.post(BODY))[0] for _ in range(6)} == {200}


@contextlib.asynccontextmanager
async def both_starting_again(parent: RouterParent, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """While it lasts both processes are there anew, and the parent has no link to them yet; afterwards they serve."""
    gate, spawned = asyncio.Event(), 0

    async def slow(*args: Any, **more: Any) -> Any:
        nonlocal spawned
        child = await child_process.start(*args, **more)
        spawned += 1
        await gate.wait()
        return child

    monkeypatch.setattr(router_process, "start", slow)
    for each in parent.processes:
        assert each.child is not None
        os.kill(each.child.pid, signal.SIGKILL)
    await until(lambda: spawned == 2, 60)
    yield
    gate.set()
    await until(lambda: all(each.ready.is_set() for each in parent.processes), 60)


async def test_what_changes_while_a_process_starts_is_known_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two([lease], [speak, speak]) as (c, parent):
        async with both_starting_again(parent, monkeypatch):
            parent.set_ticket_key(b"n" * 32)
            c.directory.lose("d0")
            await asyncio.sleep(0.1)
        for _ in range(4):
            assert (await c.post(BODY, x_kvbaton_mode="stream"))[0] == 200
        assert not c.d[0].bodies and len(c.d[1].bodies) == 4
        for params in c.d[1].params:
            assert unseal(params["ticket"], [b"n" * 32], time.time())
        async with both_starting_again(parent, monkeypatch):
            assert await parent.drained(5)
        assert {(await c.post(BODY))[0] for _ in range(4)} == {503}, "a router that stops takes nothing new"


def waiting_for(gate: asyncio.Event, seen: list[str], handler: Handler) -> Handler:
    async def slow(request: Request) -> Answer | Events:
        seen.append(request.path)
        await gate.wait()
        return await handler(request)

    return slow


async def asked(c: Cluster, path: str) -> asyncio.StreamWriter:
    """A question whose answer is not waited for."""
    host, _, port = c.url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX: {'x' * 8000}\r\n\r\n".encode())
    return writer


async def test_questions_of_operators_who_have_gone_do_not_pile_up() -> None:
    async with two([lease], [speak]) as (c, parent):
        gate, seen = asyncio.Event(), list[str]()
        parent.pages["/health"] = waiting_for(gate, seen, parent.pages["/health"])
        for _ in range(3 * 2 * PAGES_MAX):
            writer = await asked(c, "/health")
            await asyncio.sleep(0.002)
            writer.transport.abort()
        await asyncio.sleep(0.2)
        assert 0 < len(seen) <= 2 * PAGES_MAX, "each holds the headers of its request in the first process"
        assert {(await c.get("/health"))[0] for _ in range(4)} == {503}
        gate.set()
        await asyncio.sleep(0.2)
        assert {(await c.get("/health"))[0] for _ in range(4)} == {200}


async def test_what_a_process_that_died_had_asked_for_is_nobody_elses_answer() -> None:
    async with two([lease], [speak]) as (c, parent):
        before, after_it, seen = asyncio.Event(), asyncio.Event(), list[str]()
        for path, gate in (("/flights", before), ("/health", after_it)):
            parent.pages[path] = waiting_for(gate, seen, parent.pages[path])
        lost = [await asked(c, "/flights") for _ in range(8)]
        await until(lambda: len(seen) == 8)
        for each in parent.processes:
            assert each.child is not None
            os.kill(each.child.pid, signal.SIGKILL)
        await until(lambda: not any(each.ready.is_set() for each in parent.processes))
        await until(lambda: all(each.ready.is_set() for each in parent.processes), 60)
        asking = [asyncio.create_task(c.get("/health")) for _ in range(8)]
        await until(lambda: len(seen) == 16)
        before.set()
        await asyncio.sleep(0.2)
        after_it.set()
        assert [answer.get("status") for _, answer in await asyncio.gather(*asking)] == ["ok"] * 8
        for writer in lost:
            writer.close()


async def test_it_ends_in_order_when_told_and_leaves_nobody_when_killed() -> None:
    gate = asyncio.Event()
    async with cluster([lease], [after(gate, speak)]) as c:
        told, killed = await asyncio.gather(started(c), started(c))
        ours = {pid for each in (told, killed) for pid in each.children}
        assert len(ours) == 4
        asking = [asyncio.create_task(each.post()) for each in (told, killed)]
        await until(lambda: len(c.d[0].bodies) == 2)
        killed.process.kill()
        with pytest.raises(aiohttp.ClientError):
            await asking[1]
        told.process.terminate()
        async with asyncio.timeout(20):
            while (await told.get("/health"))[1]["status"] != "draining":
                await asyncio.sleep(0.02)
        assert (await told.post())[0] == 503
        gate.set()
        assert (await asking[0])[0] == 200, "what was under way is finished"
        assert await told.process.wait() == 0
        await until(lambda: not ours & set(children()))


class Started:
    """`kvbaton router --processes 2`."""

    def __init__(self, process: asyncio.subprocess.Process, c: Cluster, url: str) -> None:
        self.process = process
        self.children = [pid for pid, parent in children().items() if parent == process.pid]
        self.post = functools.partial(Cluster.post, Cluster(url, c.session, [], [], None, c.directory, []), BODY)
        self.get = functools.partial(Cluster.get, Cluster(url, c.session, [], [], None, c.directory, []))


async def started(c: Cluster) -> Started:
    words = ["--port", "0", "--processes", "2", "--json", "--prefill-url", c.p[0].url, "--decode-url", c.d[0].url]
    argv = [sys.executable, "-m", "kvbaton.cli.main", "router", *words]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    said = json.loads(await process.stdout.readline())
    assert said["processes"] == 2
    return Started(process, c, said["url"])


def children() -> dict[int, int]:
    """Router processes that are there, with the parent of each."""
    found = {}
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, IndexError):
            if b"kvbaton.router.processes.router_child" in place.read_bytes().split(b"\0"):
                stat = (place.parent / "stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z":
                    found[int(place.parent.name)] = int(stat[1])
    return found
