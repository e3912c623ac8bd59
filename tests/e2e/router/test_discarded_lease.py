"""A worker process with a lease that nobody reads: the router gives it back, and a drain waits for it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.api.params import FIELD, LEASE_FOR_PULL
from kvbaton.control import keyring
from kvbaton.control.registry import RegistryServer
from kvbaton.protocol.ids import HandoffId, Incarnation, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from tests.e2e import warm_workers
from tests.e2e.cluster import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LEASE_S = 300.0
"""Nothing here waits for it."""
P0 = WorkerId("p0")


class Prefiller:
    """One P process, and its registry in this one."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.keyring = self._mint(directory)
        self.server = RegistryServer(self.keyring)
        self.server.start()
        self.log = directory / "p0.log"
        words = ["worker", "--name", "p0", "--role", "prefill", "--keys", str(directory / "keys")]
        more = ["--registry", self.server.endpoint, "--lease-s", str(LEASE_S), *flags]
        self.process = warm_workers.start([*warm_workers.MAIN, *words, *more], self.log)

    @staticmethod
    def _mint(directory: Path) -> keyring.Keyring:
        keyring.mint(directory / "keys", ["router", "operator", "p0", "d0"])
        return keyring.load(directory / "keys", "router")

    @property
    def life(self) -> Incarnation:
        (entry,) = self.server.workers()
        return entry.registration.incarnation

    @property
    def url(self) -> str:
        found = wait_for(lambda: re.search(r"serves (http://\S+)", self.log.read_text()), 60.0, self.log)
        return str(found[1])

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as answer:
            return dict(json.loads(answer.read()))

    def prefill(self, prompt: str) -> str:
        """Compute a prompt for somebody to read; returns the ticket."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, FIELD: LEASE_FOR_PULL}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.loads(answer.read())[FIELD]["ticket"])

    def discard(self, *tickets: str) -> None:
        assert self.server.discard(P0, self.life, tickets) == len(tickets)

    def health(self) -> int:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{self.url}/health", timeout=10):
            return 200
        return 503


@contextlib.contextmanager
def prefiller(directory: Path, *flags: str) -> Iterator[Prefiller]:
    made = Prefiller(directory, *flags)
    try:
        wait_for(made.server.workers, 60.0, made.log)
        yield made
    finally:
        made.process.kill()
        made.process.wait(10)
        made.server.close()


def test_a_ticket_that_the_router_takes_back_costs_no_pin_until_its_lease_runs_out(tmp_path: Path) -> None:
    with prefiller(tmp_path) as p:
        first, second = p.prefill("a prompt that nobody will read"), p.prefill("and one that somebody may read")
        wait_for(lambda: p.stats()["leases"] == 2 and p.stats()["pins"] > 0, 20.0, p.log)  # books lag behind answers
        forged = seal(Ticket(_handoff(1), P0, time.time() + 60, p.life), b"z" * 32)
        of_another = seal(Ticket(_handoff(2), WorkerId("d0"), time.time() + 60), p.keyring.ticket_keys[0])
        p.discard(forged, "no ticket at all", of_another, first)
        wait_for(lambda: p.stats()["leases"] == 1, 20.0, p.log)
        p.discard(second, first)
        wait_for(lambda: p.stats()["pins"] == 0, 20.0, p.log)
        assert p.stats()["leases"] == 0 and p.stats()["faults_total"] == 0


def test_a_drain_waits_for_the_lease_and_ends_with_it(tmp_path: Path) -> None:
    with prefiller(tmp_path, "--drain-s", "1000") as p:
        ticket = p.prefill("a prompt that somebody may read")
        p.process.send_signal(signal.SIGTERM)
        wait_for(lambda: p.server.workers()[0].draining, 20.0, p.log)
        assert p.health() == 503 and p.stats()["draining"] == 1, "whoever balances by health sees it too"
        late = p.prefill("a prompt of a request that was on its way")
        wait_for(lambda: p.stats()["leases"] == 2, 20.0, p.log)  # books lag behind answers
        assert p.process.poll() is None
        p.discard(ticket, late)
        assert p.process.wait(30) == 0
        wait_for(lambda: p.server.workers() == (), 20.0, p.log)  # its goodbye may be on its way yet


def test_in_the_second_half_of_the_time_new_requests_are_sent_elsewhere_and_at_its_end_it_goes(tmp_path: Path) -> None:
    with prefiller(tmp_path, "--drain-s", "10") as p:
        p.prefill("a prompt that nobody will read")
        p.process.send_signal(signal.SIGTERM)
        refused = wait_for(lambda: _refusal(p), 20.0, p.log)
        assert (refused.code, refused.headers["Retry-After"]) == (503, "1")
        assert p.process.wait(30) == 0
        assert re.search(r"stopped with \d+ leases? left", p.log.read_text())


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with prefiller(tmp_path, "--drain-s", "1000") as p:
        p.prefill("a prompt that nobody will read")
        p.process.send_signal(signal.SIGTERM)
        wait_for(lambda: p.server.workers()[0].draining, 20.0, p.log)
        p.process.send_signal(signal.SIGTERM)
        assert p.process.wait(30) == 0


def _handoff(number: int) -> HandoffId:
    return handoff_id(f"{number:032x}")  # type: ignore[arg-type]


def _refusal(p: Prefiller) -> urllib.error.HTTPError | None:
    try:
        p.prefill("one more")
    except urllib.error.HTTPError as error:
        return error
    return None
