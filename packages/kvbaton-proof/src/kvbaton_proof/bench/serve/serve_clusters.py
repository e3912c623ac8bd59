"""The clusters that `kvbaton bench serve` starts: a router and engines, each a process of its own, measured beside.

    pull, stream, push   N prefill and M decode engines; the mode goes along with each request
    aggregated           N + M engines, all of them decode engines without a partner: each computes prompt and answer
    single               one such engine

Laws: all stand behind the same router program, and engines differ in nothing but their role. Those that are not
measured stand idle. Whatever was started is gone after the context, by its id and with what it started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

import kvbaton.local_cluster.vllm_engine as server_words
from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.local_cluster.embedded_cluster import ClusterPlan, Startable, places
from kvbaton.local_cluster.vllm_engine import (
    HOST,
    TINY_KINDS,
    TINY_SEED,
    ServerOptions,
    VllmHandoff,
    VllmPlan,
    fetch,
    tiny_model,
)
from kvbaton.observe.metrics.exposition import figures
from kvbaton.processes.child_process import (
    GUARD,
    KVBATON_ARGV,
    Child,
    Program,
    Say,
    end,
    end_group,
    free_ports,
    ready,
    start,
)
from kvbaton.router.router_settings import RouterSettings
from kvbaton_proof.bench.kit import cpu_meter
from kvbaton_proof.bench.kit.cpu_meter import Cpu, family
from kvbaton_proof.bench.kit.run_facts import AGGREGATED, SINGLE
from kvbaton_proof.bench.serve.serve_parts import Used
from kvbaton_proof.rig import meters

DISAGGREGATED = "disaggregated"
REST_S = 30.0
_LOOK_S = 0.1
_ROUTER_S = 900.0  # of a request in the router: here a request's own time-out counts
_WORKER = WorkerOptions(name="p0", role="prefill", keys="-", registry="tcp://127.0.0.1:1")


def site_of(target: str) -> str:
    """Which cluster a target is asked in."""
    return target if target in (AGGREGATED, SINGLE) else DISAGGREGATED


class Site:
    """A cluster that serves, and what can be read of it."""

    def __init__(self, name: str, url: str, children: list[Child], engines: Mapping[str, str], vllm: bool) -> None:
        self.name = name
        self.url = url
        self._children = children
        self.engines = tuple(engines)
        self._engines = engines  # URL by name
        self._vllm = vllm
        self._watched = {
            "engines": tuple(pid for child in children if child.name != "router" for pid in family(child.pid)),
            "router": tuple(pid for child in children if child.name == "router" for pid in family(child.pid)),
            "client": (os.getpid(),),
        }

    async def kill(self, name: str) -> None:
        """`kill -9` of an engine and of what it started; it is started again at once."""
        at = next(at for at, child in enumerate(self._children) if child.name == name)
        killed = self._children[at]
        end_group(killed.pid)
        await killed.process.wait()
        self._children[at] = await start(killed.program, killed.log)

    async def whole(self, within_s: float, say: Say, stop: asyncio.Event) -> None:
        """Wait until every engine serves."""
        await _registered(self.url, self._children, within_s, say, stop)

    def commands(self) -> dict[str, str]:
        return {f"{self.name} {child.name}": child.command for child in self._children}

    def dead(self) -> list[str]:
        return [
            f"{self.name} {child.name} ended: {child.last_line()}" for child in self._children if not child.is_alive
        ]

    def cpu(self) -> Cpu:
        return cpu_meter.read(self._watched)

    async def handed_over(self) -> int | None:
        """Handoffs delivered so far, as the engines count them."""
        total = 0
        for url in self._engines.values():
            try:
                if self._vllm:
                    ends = meters.ends(figures(await fetch(f"{url}/metrics")))
                    total += ends.get(meters.DELIVERED, 0)
                else:
                    total += msgspec.json.decode(await fetch(f"{url}/stats"), type=_Stats).delivered_total
            except (OSError, msgspec.DecodeError):
                return None
        return total

    async def come_to_rest(self, within_s: float = REST_S) -> tuple[str, ...]:
        """What engines still hold after this long; nothing if all is free."""
        if self._vllm:
            return (await meters.come_to_rest(self._engines, fetch, within_s)).holding
        until = time.monotonic() + within_s
        while True:
            holding = [line for name, url in self._engines.items() if (line := await _pins(name, url))]
            if not holding or time.monotonic() > until:
                return tuple(holding)
            await asyncio.sleep(_LOOK_S)

    async def used(self, before: Cpu, handed_over: int | None, *, hands_over: bool, rest_s: float = REST_S) -> Used:
        """What was used since then. Waits for the engines to come to rest, which is not counted."""
        spent = before.until(self.cpu())
        held = await self.come_to_rest(rest_s)
        after = await self.handed_over()
        known = hands_over and after is not None and handed_over is not None
        return Used(
            handed_over=(after or 0) - (handed_over or 0) if known else None,
            engine_cpu_s=round(spent.used["engines"], 3), router_cpu_s=round(spent.used["router"], 3),
            others_cores=round(spent.others_cores, 3), held=held,
        )  # fmt: skip


class _Stats(msgspec.Struct):
    delivered_total: int
    pins: int = 0


async def _pins(name: str, url: str) -> str:
    try:
        pins = msgspec.json.decode(await fetch(f"{url}/stats"), type=_Stats).pins
    except (OSError, msgspec.DecodeError) as error:
        return f"{name} does not tell what it holds: {error}"
    return f"{name} has {pins} blocks pinned" if pins else ""


def server_of(args: argparse.Namespace) -> ServerOptions | None:
    """What vLLM servers share, with a tiny model that is made now if need be; None for embedded engines."""
    if args.engine != "vllm":
        return None
    python = server_words.find_python(args.vllm_python)
    model = tiny_model(python, TINY_KINDS[0], TINY_SEED)
    given = {"kv_gib": args.kv_gib, "max_model_len": args.max_model_len}
    return ServerOptions(
        python=python, model=str(model), served_name="tiny", **{key: value for key, value in given.items() if value}
    )


def plan_of(name: str, args: argparse.Namespace, server: ServerOptions | None) -> Startable:
    """The engines of one cluster."""
    prefills, decodes = (args.prefill, args.decode) if name == DISAGGREGATED else (0, args.prefill + args.decode)
    if name == SINGLE:
        decodes = 1
    if server is not None:
        handoff = VllmHandoff(name="-", keys="-", registry="-", http_address="-", transport=args.transport)
        where = tuple(places(prefills, decodes, 1, 1))
        return VllmPlan(places=where, server=server, handoff=handoff, settings=RouterSettings())
    worker = msgspec.structs.replace(_WORKER, transport=args.transport, blocks=args.blocks or _WORKER.blocks)
    return ClusterPlan(
        prefills=prefills, decodes=decodes, tp_prefill=1, tp_decode=1, worker=worker, settings=RouterSettings()
    )  # fmt: skip


@contextlib.asynccontextmanager
async def standing(name: str, plan: Startable, say: Say, stop: asyncio.Event, *, vllm: bool) -> AsyncIterator[Site]:
    """A cluster whose engines have all registered."""
    children: list[Child] = []
    with key_room() as directory:
        try:
            keyring.mint(directory / "keys", ["router", *plan.names()])
            port, registry_port = free_ports(2)
            members = [_router(name, port, registry_port, directory)]
            members += plan.members(str(directory / "keys"), f"tcp://{HOST}:{registry_port}")
            say(f"starting {name}: {' '.join(plan.names())}")
            for member in members:
                children.append(await start(member, directory / f"{member.name}.log"))
            url = f"http://{HOST}:{port}"
            engines = await _registered(url, children, plan.start_s, say, stop)
            yield Site(name, url, children, engines, vllm)
        finally:
            await end(children)


def _router(name: str, port: int, registry_port: int, directory: Path) -> Program:
    words = ["router", "--host", HOST, "--port", str(port), "--keys", str(directory / "keys")]
    words += ["--registry-port", str(registry_port), "--deadline-s", str(_ROUTER_S), "--first-byte-s", str(_ROUTER_S)]
    words += ["--fallback", "strict" if name == DISAGGREGATED else "local"]
    argv = [*KVBATON_ARGV, *words]
    return Program("router", "router", [*GUARD, *argv], server_words.shown(argv, {}))


class _Worker(msgspec.Struct):
    name: str
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


async def _registered(
    url: str, children: Sequence[Child], within_s: float, say: Say, stop: asyncio.Event
) -> dict[str, str]:
    """URL by name of all engines, once the router knows them and says that it can serve."""
    wanted = {child.name for child in children} - {"router"}
    here: dict[str, str] = {}

    async def missing() -> set[str]:
        with contextlib.suppress(msgspec.DecodeError):
            workers = msgspec.json.decode(await fetch(f"{url}/workers"), type=_Workers).workers
            here.clear()
            here.update({each.name: each.url for each in workers})
        if here.keys() >= wanted:
            await fetch(f"{url}/health")
        return wanted - here.keys()

    await ready(missing, children, within_s, say, stop=stop)
    return here
