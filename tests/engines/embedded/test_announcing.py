"""A worker is announced once its registry lists it, as the dialect wants it, and no more once it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvbaton.control.addressing import ControlError
from kvbaton.engines.embedded.embedded_worker import Herald, announcement
from kvbaton.engines.embedded.worker_options import WorkerOptions

QUIET_S = 0.3


def options(**more: Any) -> WorkerOptions:
    base = {"name": "p0", "role": "prefill", "keys": "k", "registry": "tcp://h:1", "announce_to": "127.0.0.1:9"}
    return WorkerOptions(**{**base, **more})


@pytest.mark.parametrize(
    ("dialect", "role", "said"),
    [
        ("moriio-read", "prefill", {"type": "P", "transfer_mode": "READ"}),
        ("moriio-write", "decode", {"type": "D", "transfer_mode": "WRITE"}),
    ],
)
def test_moriio_names_the_control_socket_twice(dialect: str, role: str, said: dict[str, str]) -> None:
    made = announcement(options(announce_as=dialect, role=role, tp=2), "127.0.0.1:80", "tcp://[::1]:7100")
    assert msgspec.msgpack.decode(made.payload) == {
        **said, "http_address": "127.0.0.1:80", "zmq_address": "host:::1,handshake:7100,notify:7100",
        "tp_size": 2, "dp_size": 1,
    }  # fmt: skip


def test_p2p_nccl_names_it_once_and_speaks_under_that_name() -> None:
    made = announcement(options(announce_as="p2p-nccl"), "127.0.0.1:80", "tcp://127.0.0.1:7100")
    assert msgspec.msgpack.decode(made.payload) == {
        "type": "P", "http_address": "127.0.0.1:80", "zmq_address": "127.0.0.1:7100",
    }  # fmt: skip
    assert made.identity == b"127.0.0.1:7100"


def test_a_control_socket_that_peers_cannot_dial_is_not_announced() -> None:
    with pytest.raises(ControlError, match="cannot be dialled"):
        announcement(options(), "127.0.0.1:80", "tcp://0.0.0.0:7100")


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, zmq.asyncio.Socket]]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    try:
        port = socket.bind_to_random_port("tcp://127.0.0.1", 12000, 32000)
        yield f"127.0.0.1:{port}", socket
    finally:
        socket.close(linger=0)
        context.term()


async def hears(socket: zmq.asyncio.Socket, within_s: float) -> bool:
    return bool(await socket.poll(within_s * 1000))


async def test_it_is_announced_from_when_it_is_listed_until_it_stops() -> None:
    async with listening() as (router, socket):
        listed = False
        herald = Herald(router, announcement(options(), "127.0.0.1:80", "tcp://127.0.0.1:7100"))
        begins = asyncio.create_task(herald.announce_when(lambda: listed))
        assert not await hears(socket, QUIET_S)
        listed = True
        await begins
        for _ in range(2):
            assert await hears(socket, 10.0)
            assert msgspec.msgpack.decode((await socket.recv_multipart())[1])["type"] == "P"
        herald.stop()
        while await hears(socket, 1.5):  # longer than an interval: one that goes on is heard without end
            await socket.recv_multipart()
        herald.stop()


async def test_one_that_is_stopped_before_it_is_listed_is_never_announced() -> None:
    async with listening() as (router, socket):
        herald = Herald(router, announcement(options(), "127.0.0.1:80", "tcp://127.0.0.1:7100"))
        herald.stop()
        await herald.announce_when(lambda: True)
        assert not await hears(socket, QUIET_S)
