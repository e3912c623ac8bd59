"""`kvbaton registry --health`: `/health` and `/metrics` of a registry in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import aiohttp

from kvbaton.cli import registry
from kvbaton.control import keyring
from kvbaton.control.registry import Registration, RegistryServer, RosterEntry, WorkerState
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.metric_names import Where
from kvbaton.protocol.ids import Incarnation, WorkerId


def listed(name: str, role: str, draining: bool) -> RosterEntry:
    told = Registration(WorkerId(name), Incarnation(1), role, "127.0.0.1:2", "tcp://127.0.0.1:1")  # type: ignore[arg-type]
    return RosterEntry(told, "key", WorkerState.READY, draining)


def test_health_and_metrics_count_who_is_listed(tmp_path: Path) -> None:
    keyring.mint(tmp_path / "keys", ["router"])
    server = RegistryServer(keyring.load(tmp_path / "keys", "router"))
    server._workers = (listed("p0", "prefill", False), listed("p1", "prefill", True), listed("d0", "decode", False))

    async def asked() -> tuple[dict[str, object], list[str]]:
        args = argparse.Namespace(health="127.0.0.1:0", name="registry-a")
        async with registry._health(args, server) as url, aiohttp.ClientSession() as session:
            async with session.get(url) as answer:
                health = await answer.json()
            async with session.get(url.replace("/health", "/metrics")) as answer:
                return health, (await answer.text()).splitlines()

    try:
        health, page = asyncio.run(asked())
    finally:
        server.close()
    assert health["workers"] == {"prefill": {"ready": 1, "draining": 1}, "decode": {"ready": 1}}
    for line in (
        'kvbaton_registry_workers{role="prefill",state="ready"} 1',
        'kvbaton_registry_workers{role="prefill",state="draining"} 1',
        "kvbaton_registry_routers 0",
        "kvbaton_registry_complete 0",
        "kvbaton_connections_total 0",
    ):
        assert line in page
    shown = {line.partition("{")[0].partition(" ")[0] for line in page if not line.startswith("#")}
    assert shown == {metric.name for metric in metric_names.of(Where.REGISTRY)}
