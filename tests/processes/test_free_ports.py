"""Ports for processes that bind them later."""

from __future__ import annotations

import random
import socket
from typing import Any

from kvbaton.processes.child_process import PORTS, free_ports


class Offering(random.Random):
    """Chooses one port twice before it goes on by chance."""

    def __init__(self, port: int) -> None:
        super().__init__(4)
        self._first = [port, port]

    def choice(self, seq: Any) -> Any:
        return self._first.pop() if self._first else super().choice(seq)


def test_ports_are_free_different_and_outside_of_those_that_connections_get() -> None:
    found = free_ports(20, rng=random.Random(4))
    assert len(set(found)) == 20 and all(port in PORTS for port in found)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port not in free_ports(3, rng=Offering(port))
    assert free_ports(2, rng=Offering(port)).count(port) <= 1


def test_on_an_address_that_this_host_does_not_have_every_port_is_free() -> None:
    assert len(free_ports(2, "192.0.2.1")) == 2
