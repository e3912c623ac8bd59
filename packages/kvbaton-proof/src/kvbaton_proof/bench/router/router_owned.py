"""kvbaton's router before a P and a D that have registered, so that it owns its streams, or does not.

python -m kvbaton_proof.bench.router.router_owned PORT PREFILL_URL DECODE_URL on|off
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import sys

from kvbaton.api.http.http_server import serving
from kvbaton.api.params import HistoryWay
from kvbaton.processes.operator_control import told_to_stop
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import router_app
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory
from kvbaton_proof.bench.router.router_backends import HOST


async def _serve(port: int, prefill: str, decode: str, *, owned: bool) -> None:
    way = HistoryWay.OUTPUT
    workers = [
        ListedEngine(WorkerId("p0"), "prefill", prefill, Incarnation(1), continues=way),
        ListedEngine(WorkerId("d0"), "decode", decode, Incarnation(2), continues=way),
        ListedEngine(WorkerId("d1"), "decode", decode, Incarnation(3), continues=way),
    ]
    settings = RouterSettings(streams_continue=owned)
    with told_to_stop() as stop:
        async with contextlib.AsyncExitStack() as stack:
            app = await stack.enter_async_context(
                router_app(StaticDirectory(workers), settings, secrets.token_bytes(32))
            )
            await stack.enter_async_context(serving(app, HOST, port))
            await stop.wait()


def main() -> int:
    import uvloop

    logging.getLogger("kvbaton.access").setLevel(logging.CRITICAL)
    gc.freeze()  # as `kvbaton router`
    gc.set_threshold(50_000, 20, 50)
    port, prefill, decode, owned = sys.argv[1:]
    uvloop.run(_serve(int(port), prefill, decode, owned=owned == "on"))
    return 0


if __name__ == "__main__":
    asyncio.set_event_loop_policy(None)
    raise SystemExit(main())
