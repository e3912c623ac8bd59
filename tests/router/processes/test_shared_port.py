"""A port that several processes accept on: a burst is taken at once, and by all of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

import pytest

from kvbaton.api.http.http_server import HttpServer
from kvbaton.router.processes.shared_counts import CONNECTIONS, OPEN, SharedCounts
from kvbaton.router.processes.shared_port import SLACK, SharedPort, bound


class Door:
    """Where connections go."""

    def __init__(self) -> None:
        self.crowd: list[asyncio.Protocol] = []

    def connection(self) -> asyncio.Protocol:
        self.crowd.append(asyncio.Protocol())
        return self.crowd[-1]


@pytest.mark.parametrize(
    ("others", "waiting", "taken"),
    [(None, 40, 40), (0, 40, 1), (16, 40, 16 + 16 // SLACK + 1), (16, 10, 10)],
    ids=["alone", "both begin", "both have some", "few come"],
)
async def test_a_burst_is_taken_in_one_turn_until_another_has_fewer(
    others: int | None, waiting: int, taken: int
) -> None:
    counts = SharedCounts.made(2, 0)
    row = counts.row(1)
    row[OPEN], row[CONNECTIONS] = (0, 0) if others is None else (1, others)
    (listener,) = await bound("127.0.0.1", 0)
    with contextlib.ExitStack() as held:
        held.callback(counts.close)
        held.enter_context(listener)
        for _ in range(waiting):
            held.enter_context(socket.create_connection(listener.getsockname()))
        door: Any = Door()
        port = SharedPort(cast(HttpServer, door), [listener], counts, 0)
        port._knocked(listener)
        assert len(port._opening) == counts.row(0)[CONNECTIONS] == taken
        port.close()
        await asyncio.wait(port._opening)
        assert len(door.crowd) == taken
