"""Streams that decode while something else happens, watched by a process of their own: nothing else is on its loop.

    python -m kvbaton_proof.gpu_test.gpu_watching      an `Order` as JSON on stdin; on stdout a line when all are
    under way, then what was seen, as JSON

Laws: moments are of the machine's monotonic clock, which all processes share. It is ended with whoever waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec

from kvbaton.processes.child_process import Program, end, start
from kvbaton_proof.gpu_test.gpu_client import Streamed, streamed

UNDER_WAY = 4  # tokens of every stream
BEGIN_S = 60.0
LINE_MAX = 1 << 26


class Order(msgspec.Struct, frozen=True):
    url: str
    prompts: list[list[int]]
    tokens: int


class Watch:
    """What the other process sees."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ended(self) -> list[Streamed]:
        """Wait for all streams to end; they have deadlines."""
        assert self._process.stdout is not None
        return msgspec.json.decode(await self._process.stdout.readline() or b"[]", type=list[Streamed])


@contextlib.asynccontextmanager
async def watching(order: Order) -> AsyncIterator[Watch]:
    """Streams that are under way by now; TimeoutError if they do not get there."""
    program = Program(
        "watching", "client", [sys.executable, "-m", "kvbaton_proof.gpu_test.gpu_watching"], stop=signal.SIGKILL
    )
    child = await start(program, None, stdout=asyncio.subprocess.PIPE, limit=LINE_MAX)
    process = child.process
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()
        await asyncio.wait_for(process.stdout.readline(), BEGIN_S)
        yield Watch(process)
    finally:
        await end([child])


async def _watched(order: Order) -> Sequence[Streamed]:
    waiting = dict.fromkeys(range(len(order.prompts)), UNDER_WAY)
    connections = aiohttp.TCPConnector(limit=0)

    def heard(number: int) -> None:
        if number in waiting:
            waiting[number] -= 1
            if not waiting[number]:
                del waiting[number]
                if not waiting:
                    print("begun", flush=True)

    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(number: int, prompt: list[int]) -> Streamed:
            return await streamed(session, order.url, prompt, tokens=order.tokens, heard=lambda: heard(number))

        found = await asyncio.gather(*(one(*each) for each in enumerate(order.prompts)))
    if waiting:  # some stream failed or was too short: nobody waits in vain
        print("begun", flush=True)
    return found


if __name__ == "__main__":
    seen = asyncio.run(_watched(msgspec.json.decode(sys.stdin.buffer.read(), type=Order)))
    sys.stdout.buffer.write(msgspec.json.encode(seen) + b"\n")
