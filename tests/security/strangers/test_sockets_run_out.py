"""Connections that nobody needs: a worker with few descriptors is served on, or at least lives and serves again.

Promises 2 to 4, and the class of CVE-2026-94624: whoever can make a server hold sockets must not be able to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvbaton.control import keyring
from kvbaton.control.registry import RegistryServer
from kvbaton_proof.chaos.strangers import Place, crowd, listening
from tests.e2e.cluster import wait_for
from tests.security.strangers.besieged import protocol_of, use_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DESCRIPTORS = 160
MANY = 300
SOON_S = 40.0
"""Less than silent connections are kept where there is room for them (75 s)."""


class Poor:
    """A worker that may have few descriptors."""

    def __init__(self, directory: Path) -> None:
        keyring.mint(directory / "keys", ["router", "w0"])
        self.registry = RegistryServer(keyring.load(directory / "keys", "router"))
        self.registry.start()
        self.log = directory / "log"
        words = ["worker", "--name", "w0", "--role", "both", "--keys", str(directory / "keys")]
        with self.log.open("wb") as out:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "kvbaton.cli.main", *words, "--registry", self.registry.endpoint],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        resource.prlimit(self.child.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        self.url = wait_for(lambda: re.search(r" serves (http://\S+)", self.log.read_text()), 60.0, self.log)[1]

    def place(self, protocol: str) -> Place:
        return next(place for place in listening([self.child.pid]) if protocol_of(place) == protocol)

    async def ask(self) -> int:
        """The status of an honest request on a connection of its own."""
        body = {"prompt": "abc", "max_tokens": 4}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
            session.post(f"{self.url}/v1/completions", json=body) as response,
        ):
            return response.status

    def close(self) -> int:
        self.child.send_signal(signal.SIGHUP)
        try:
            return self.child.wait(20)
        finally:
            self.child.kill()
            self.registry.close()


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poor]:
    made = Poor(tmp_path_factory.mktemp("poor"))
    try:
        yield made
    finally:
        code = made.close()
    assert code == 0, made.log.read_text()


def test_silent_connections_to_a_workers_http_take_no_clients_place(poor: Poor) -> None:
    async def story() -> list[int]:
        async with crowd([poor.place("http")], MANY):
            async with asyncio.timeout(SOON_S):  # a burst is counted together, a moment after it came
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        return [await poor.ask() for _ in range(3)]

    assert asyncio.run(story()) == [200, 200, 200]
    until(lambda: use_of(poor.child.pid).fds < DESCRIPTORS // 2)


def test_a_worker_whose_descriptors_ran_out_lives_and_serves_again(poor: Poor) -> None:
    """The control port cannot tell a peer from a stranger before its handshake; it gives each ten seconds."""

    async def story() -> int:
        async with crowd([poor.place("zmtp")], MANY):
            return use_of(poor.child.pid).fds

    asyncio.run(story())
    until(lambda: use_of(poor.child.pid).fds < DESCRIPTORS // 2)
    assert poor.child.poll() is None
    assert asyncio.run(poor.ask()) == 200
    until(lambda: [str(entry.registration.worker) for entry in poor.registry.workers()] == ["w0"])
