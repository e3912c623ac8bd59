"""Unauthenticated peers at every port: the fault of that name, and the measurements of `tests/security`.

Laws: bounded in sockets and in time: when a call returns, every connection that it made is closed. An unauthenticated
peer is never admitted; if one is, the count says so under "let in".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence

import zmq.asyncio

from kvbaton_proof.chaos.strangers_ports import Place
from kvbaton_proof.chaos.strangers_visits import KINDS, LET_IN, UNREACHED, Guest, Kind

AT_ONCE_MAX = 64
VISIT_S = 2.0
"""The longest that one visit takes; those that only hold a connection take all of it."""
DIALS_AT_ONCE_MAX = 64
CONNECT_S = 5.0

__all__ = ["KINDS", "LET_IN", "crowd", "visit"]


async def visit(
    ports: Sequence[Place],
    seconds: float,
    rng: random.Random,
    *,
    public_keys: Sequence[str] = (),
    kinds: Sequence[Kind] = KINDS,
    at_once: int = AT_ONCE_MAX,
) -> Counter[str]:
    """Visit every port in turn, in every way, for so long. Counts "visits", each kind, and each outcome.

    `public_keys` are those of the servers: public, so that a stranger may know them.
    """
    counts: Counter[str] = Counter()
    until = asyncio.get_running_loop().time() + seconds
    places = itertools.cycle([place for place in ports for _ in kinds])
    ways = itertools.cycle(kinds)

    async def come() -> None:
        while (now := asyncio.get_running_loop().time()) < until:
            kind = next(ways)
            ends = min(until, now + rng.uniform(0.1, 1.0) * VISIT_S)
            outcome = await kind.visit(Guest(next(places), ends, rng, context, public_keys))
            counts.update(("visits", kind.name, outcome))
            if outcome == LET_IN:
                counts[f"{LET_IN}: {kind.name}"] += 1
            if outcome == UNREACHED:
                await asyncio.sleep(0.05)  # a port that is closed for the moment is not worth a busy loop

    if not ports:
        return counts
    with zmq.asyncio.Context() as context:
        await asyncio.gather(*(come() for _ in range(at_once)))
    return counts


@contextlib.asynccontextmanager
async def crowd(ports: Sequence[Place], each: int, said: Iterable[bytes] = (b"",)) -> AsyncIterator[int]:
    """`each` connections to every port, held while the context lasts; gives how many there are.

    Of what is `said`, each connection says one, in turn, and then nothing. Who is turned away does not come again.
    """
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(DIALS_AT_ONCE_MAX)
    words = itertools.cycle(said)
    held: list[socket.socket] = []

    async def come(place: Place) -> None:
        if place[0][:1] in ("\0", "/"):
            sock, address = socket.socket(socket.AF_UNIX), place[0]
        else:
            sock, address = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET), place  # type: ignore[assignment]
        held.append(sock)
        sock.setblocking(False)
        async with room:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await loop.sock_connect(sock, address)
                    await loop.sock_sendall(sock, next(words))

    try:
        await asyncio.gather(*(come(place) for place in ports for _ in range(each)))
        yield len(held)
    finally:
        for sock in held:
            sock.close()
