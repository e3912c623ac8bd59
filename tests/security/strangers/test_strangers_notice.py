"""The strangers themselves: one that is let in is counted, and what they hold ends with the call.

A guard is tested by breaking what it guards: servers here let everybody in.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from aiohttp import web

from kvbaton.testing.transport_harness import poll
from kvbaton_proof.chaos.strangers import KINDS, LET_IN, Place, crowd, family, is_local, listening, visit
from tests.aiohttp_server import serving

BY_NAME = {kind.name: kind for kind in KINDS}


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def open_router(curve: bool) -> Iterator[tuple[Place, str]]:
    """A ZMQ socket that answers whoever speaks; with `curve` encrypted, but with nobody at the gate."""
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    if curve:
        socket.curve_server, socket.curve_secretkey = True, secret
    port = socket.bind_to_random_port("tcp://127.0.0.1", 12000, 32000)
    ended = threading.Event()

    def echo() -> None:
        while not ended.is_set():
            if socket.poll(20):
                socket.send_multipart(socket.recv_multipart())
        socket.close()

    thread = threading.Thread(target=echo)
    thread.start()
    try:
        yield ("127.0.0.1", port), public.decode()
    finally:
        ended.set()
        thread.join(10)
        context.term()


def visited(place: Place, kind: str, keys: tuple[str, ...] = ()) -> Counter[str]:
    return asyncio.run(visit([place], 0.5, random.Random(1), public_keys=keys, kinds=[BY_NAME[kind]], at_once=2))


def is_let_in(place: Place, kind: str, keys: tuple[str, ...] = ()) -> bool:
    """Sooner or later: on a busy machine half a second may be too short for one visit."""
    return poll(lambda: visited(place, kind, keys)[f"{LET_IN}: {kind}"] > 0, 30.0)


def test_a_socket_without_keys_is_noticed() -> None:
    with open_router(curve=False) as (place, _):
        assert is_let_in(place, "plain-zmq")
        assert visited(place, "curve")[LET_IN] == 0


def test_a_gate_that_nobody_keeps_is_noticed() -> None:
    with open_router(curve=True) as (place, key):
        assert is_let_in(place, "curve", (key,))
        assert visited(place, "curve")[LET_IN] == 0, "without the server's key there is no handshake at all"
        assert visited(place, "plain-zmq")[LET_IN] == 0


def test_an_administrators_path_is_noticed_and_no_connection_outlives_the_call() -> None:
    async def yes(_: web.Request) -> web.Response:
        return web.json_response({})

    async def story() -> Counter[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", yes)
        async with serving(app, "127.0.0.1", 0) as url:
            place = ("127.0.0.1", int(url.rpartition(":")[2]))
            assert place in listening(family(os.getpid())) and is_local(place)
            counts = await visit([place], 0.5, random.Random(2), at_once=8)
            async with asyncio.timeout(30):
                while not counts[f"{LET_IN}: http"]:  # on a busy machine half a second may be too short
                    counts += await visit([place], 0.3, random.Random(3), kinds=[BY_NAME["http"]], at_once=2)
            async with crowd([place], 20, (b"", b"GET")) as held:
                assert held == 20
            return counts

    gc.collect()  # what earlier tests left
    before = fds()
    counts = asyncio.run(story())
    assert counts["visits"] == sum(counts[kind.name] for kind in KINDS)
    assert poll(lambda: fds() <= before, 30.0)  # a thread of an earlier test may have a file open for a moment


def test_a_port_that_is_closed_is_unreached_and_costs_no_busy_loop() -> None:
    seen: list[Counter[str]] = []

    def unreached() -> bool:
        """Sooner or later: a busy machine may take longer than that for the first visit."""
        seen.append(asyncio.run(visit([("127.0.0.1", 1)], 0.3, random.Random(4), at_once=4)))
        return seen[-1]["unreached"] > 0

    assert poll(unreached, 30.0)
    assert all(counts["visits"] < 400 for counts in seen)
    assert asyncio.run(visit([], 10.0, random.Random(5))) == Counter()


def test_wide_addresses_are_not_local() -> None:
    assert not is_local(("0.0.0.0", 1)) and not is_local(("::", 1)) and not is_local(("10.0.0.1", 1))
    assert is_local(("::1", 1)) and is_local(("\0name", 0)) and is_local(("/run/x", 0))
