"""The clusters of embedded engines that a bench starts: a router and engines, each a process of its own.

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
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

import kvbaton.local_cluster.vllm_engine as server_words
from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.local_cluster.embedded_cluster import ClusterPlan
from kvbaton.local_cluster.vllm_engine import (
    HOST,
    TINY_KINDS,
    TINY_SEED,
    ServerOptions,
    fetch,
    tiny_model,
)
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
from kvbaton_proof.bench.kit.cpu_meter import family
from kvbaton_proof.bench.kit.run_facts import AGGREGATED, SINGLE
from kvbaton_proof.bench.serve.contenders import LOCAL
from kvbaton_proof.bench.serve.site import REST_S, Site

DISAGGREGATED = "disaggregated"
_LOOK_S = 0.1
_WORKER = WorkerOptions(name="p0", role="prefill", keys="-", registry="tcp://127.0.0.1:1")


def site_of(target: str) -> str:
    """Which cluster a target is asked in."""
    return target if target in (AGGREGATED, SINGLE) else DISAGGREGATED


class EmbeddedSite(Site):
    """Embedded engines behind a router."""

    def __init__(self, name: str, url: str, children: list[Child], engines: Mapping[str, str]) -> None:
        super().__init__(name, url, tuple(engines))
        self._children = children
        self._urls = engines

    @property
    def hands_over(self) -> bool:
        return self.name == DISAGGREGATED

    def _pids(self) -> dict[str, list[int]]:
        return {
            group: [pid for child in self._children if (child.name == "router") == routes for pid in family(child.pid)]
            for group, routes in (("engines", False), ("router", True))
        }

    def _at(self, name: str) -> int:
        return next(at for at, child in enumerate(self._children) if child.name == name)

    async def kill(self, name: str) -> None:
        killed = self._children[self._at(name)]
        end_group(killed.pid)
        await killed.process.wait()
        self._children[self._at(name)] = await start(killed.program, killed.log)

    def signal(self, name: str, number: signal.Signals) -> None:
        for pid in family(self._children[self._at(name)].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def reset(self, name: str) -> bool:
        return False  # such an engine has no door for it

    async def revive(self) -> list[str]:
        told = self.dead()
        for name in [child.name for child in self._children if not child.is_alive]:
            await self.kill(name)
        return told

    async def whole(self, within_s: float, say: Say, stop: asyncio.Event) -> None:
        await _registered(self.url, self._children, within_s, say, stop)

    def commands(self) -> dict[str, str]:
        return {f"{self.name} {child.name}": child.command for child in self._children}

    def dead(self) -> list[str]:
        return [
            f"{self.name} {child.name} ended: {child.last_line()}" for child in self._children if not child.is_alive
        ]

    async def handed_over(self) -> int | None:
        total = 0
        for url in self._urls.values():
            try:
                total += msgspec.json.decode(await fetch(f"{url}/stats"), type=_Stats).delivered_total
            except (OSError, msgspec.DecodeError):
                return None
        return total

    async def come_to_rest(self, within_s: float = REST_S) -> tuple[str, ...]:
        until = time.monotonic() + within_s
        while True:
            holding = [line for name, url in self._urls.items() if (line := await _pins(name, url))]
            if not holding or time.monotonic() > until:
                return tuple(holding)
            await asyncio.sleep(_LOOK_S)


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
    model = tiny_model(python, args.shape if args.device == "cuda" else TINY_KINDS[0], TINY_SEED)
    given = {"kv_gib": args.kv_gib, "max_model_len": args.max_model_len}
    return ServerOptions(
        python=python, model=str(model), served_name="tiny", **{key: value for key, value in given.items() if value}
    )


def plan_of(name: str, args: argparse.Namespace) -> ClusterPlan:
    """The embedded engines of one cluster."""
    prefills, decodes = (args.prefill, args.decode) if name == DISAGGREGATED else (0, args.prefill + args.decode)
    if name == SINGLE:
        decodes = 1
    worker = msgspec.structs.replace(_WORKER, transport=args.transport, blocks=args.blocks or _WORKER.blocks)
    if args.lease_s is not None:
        worker = msgspec.structs.replace(worker, lease_s=args.lease_s)
    return ClusterPlan(
        prefills=prefills, decodes=decodes, tp_prefill=1, tp_decode=1, worker=worker, settings=RouterSettings()
    )  # fmt: skip


@contextlib.asynccontextmanager
async def standing(
    name: str, plan: ClusterPlan, router_args: Sequence[str], say: Say, stop: asyncio.Event
) -> AsyncIterator[EmbeddedSite]:
    """A cluster whose engines have all registered."""
    children: list[Child] = []
    with key_room() as directory:
        try:
            keyring.mint(directory / "keys", ["router", *plan.names()])
            port, registry_port = free_ports(2)
            members = [_router(name, port, registry_port, directory, router_args)]
            members += plan.members(str(directory / "keys"), f"tcp://{HOST}:{registry_port}")
            say(f"starting {name}: {' '.join(plan.names())}")
            for member in members:
                children.append(await start(member, directory / f"{member.name}.log"))
            url = f"http://{HOST}:{port}"
            engines = await _registered(url, children, plan.start_s, say, stop)
            yield EmbeddedSite(name, url, children, engines)
        finally:
            await end(children)


def _router(name: str, port: int, registry_port: int, directory: Path, more: Sequence[str]) -> Program:
    words = ["router", "--host", HOST, "--port", str(port), "--keys", str(directory / "keys")]
    words += ["--registry-port", str(registry_port), *more, *([] if name == DISAGGREGATED else LOCAL)]
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
