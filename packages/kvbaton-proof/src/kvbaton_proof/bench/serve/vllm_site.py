"""A contender's vLLM servers and what stands before them, as a site of a bench: measured, hurt, and whole again.

Law: the servers are those of `rig.servers`. With places for engines all clusters are started at once; a machine of few
cores starts one engine in a minute, and none of eight at once, so there one cluster is started after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.control.key_room import KEYS, key_room
from kvbaton.local_cluster.vllm_engine import ServerOptions, fetch
from kvbaton.observe.metrics.exposition import figures
from kvbaton.processes.child_process import STOP_S, Say
from kvbaton.processes.operator_control import unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.serve.site import REST_S, Site
from kvbaton_proof.rig import meters, servers
from kvbaton_proof.rig.connectors import CONNECTORS, NOTHING, Device
from kvbaton_proof.rig.server import EngineError
from kvbaton_proof.rig.servers import ROUTER, Group, Spec

START_S, START_EACH_S = 240.0, 60.0
LOOK_S = 0.5
RESET_S = 10.0


class VllmSite(Site):
    """Real vLLM."""

    def __init__(self, name: str, group: Group, session: aiohttp.ClientSession) -> None:
        super().__init__(name, group.url, tuple(group.workers))
        self._group = group
        self._session = session
        self._connector = CONNECTORS.get(group.spec.connector, NOTHING)

    @property
    def hands_over(self) -> bool:
        return not self._connector.is_alone

    def _pids(self) -> dict[str, list[int]]:
        own = {name: engine.pids() for name, engine in self._group.engines.items()}
        workers = [pid for name in self.engines for pid in own[name]]
        return {"engines": workers, "router": own.get(ROUTER, [])}

    async def kill(self, name: str) -> None:
        engine = self._group.engines[name]
        await asyncio.to_thread(engine.kill)
        engine.start()

    def signal(self, name: str, number: signal.Signals) -> None:
        self._group.engines[name].send(number)

    async def reset(self, name: str) -> bool:
        url = f"{self._group.engines[name].url}/reset_prefix_cache"
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError, AttributeError):
            async with asyncio.timeout(RESET_S), self._session.post(url) as answer:
                body = await answer.json(content_type=None)
                return answer.status == 200 and body.get("success", True) is not False
        return False

    async def revive(self) -> list[str]:
        told = self.dead()
        for engine in self._group.engines.values():
            if not engine.is_alive:
                await asyncio.to_thread(engine.kill)  # what is left of it
                engine.start()
        return told

    async def whole(self, within_s: float, say: Say, stop: asyncio.Event) -> None:
        group, deadline = self._group, time.monotonic() + within_s

        async def serve() -> None:
            await asyncio.gather(*(engine.ready(self._session, within_s) for engine in group.workers.values()))
            while group.registry and not await self._all_registered():
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.name}: not all engines have registered again")
                await asyncio.sleep(LOOK_S)
            if ROUTER in group.engines:
                await group.router.ready(self._session, max(LOOK_S, deadline - time.monotonic()))

        try:
            await unless_stopped(
                servers.with_news(serve(), lambda s: say(f"{self.name}: whole again? {s:.0f} s")), stop
            )
        except EngineError as error:
            raise CommandError(str(error)) from None

    async def _all_registered(self) -> bool:
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, TypeError):
            listed = msgspec.json.decode(await fetch(f"{self.url}/workers"))["workers"]
            return {each["name"] for each in listed} >= set(self.engines)
        return False

    def commands(self) -> dict[str, str]:
        lines = self._group.commands()
        return {f"{self.name} {name}": line for name, line in zip(self._group.engines, lines, strict=True)}

    def dead(self) -> list[str]:
        return [
            f"{self.name} {name} ended: {servers.last_words(engine.log)}"
            for name, engine in self._group.engines.items()
            if not engine.is_alive
        ]

    async def handed_over(self) -> int | None:
        if self._connector.is_alone or not self._connector.handed:
            return None
        total = 0
        for name in self.engines:
            try:
                told = figures(await fetch(f"{self._group.engines[name].url}/metrics"))
            except OSError:
                return None
            total += 0 if name.startswith("p") else meters.handed(told, self._connector.name)
        return total

    async def come_to_rest(self, within_s: float = REST_S) -> tuple[str, ...]:
        urls = {name: self._group.engines[name].url for name in self.engines}
        return (await meters.come_to_rest(urls, fetch, within_s)).holding


@contextlib.asynccontextmanager
async def standing(
    specs: Sequence[Spec], server: ServerOptions, device: Device, problems: list[str], say: Say, stop: asyncio.Event
) -> AsyncIterator[dict[str, VllmSite]]:
    """Clusters by name whose engines all serve; `problems` gets why another one does not, with what it said last.
    CommandError if none does."""
    count = sum(spec.prefillers + spec.decoders for spec in specs)
    with key_room() as directory:
        site = servers.Site(
            device,
            server.python,
            directory / KEYS,
            directory,
            {specs[0].model: Path(server.model)},
            server.kv_gib,
            STOP_S,
        )
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            say(f"starting {', '.join(spec.name for spec in specs)}")
            starting = servers.standing(site, specs, session, say, START_S + START_EACH_S * count)
            groups = await unless_stopped(stack.enter_async_context(starting), stop)
            down = [f"{name}: {group.problem}" for name, group in groups.items() if not group.is_up]
            sites = {name: VllmSite(name, group, session) for name, group in groups.items() if group.is_up}
            if not sites:
                raise CommandError(down[0])
            problems += down
            await asyncio.gather(*(each.whole(START_S, say, stop) for each in sites.values()))
            yield sites
