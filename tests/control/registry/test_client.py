"""The worker's end over real sockets: it knows the others, and goes on knowing them when the registry is away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.control.addressing import ControlError
from kvbaton.control.registry import (
    DirectoryEntry,
    MemberState,
    Registration,
    RegistryGroup,
    addresses,
)
from kvbaton.protocol.ids import Incarnation, WorkerId

from ..rig import STALL_S, Post, posted, until
from .town import CALM, RINGS, Town, Worker, reg


@pytest.fixture
def town() -> Iterator[Town]:
    town = Town()
    with town.stack:
        yield town


def _pings_unanswered(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_workers_that_register_see_each_other_with_address_key_life_and_role(town: Town) -> None:
    p0, d0 = town.worker(reg("p0", 11, 5001)), town.worker(reg("d0", 12, 5002))
    until(lambda: p0.sees() == {"d0": 12} and d0.sees() == {"p0": 11})
    assert d0.directories[-1] == (
        DirectoryEntry(WorkerId("p0"), Incarnation(11), "both", "tcp://127.0.0.1:5001", RINGS["p0"].public),
    )
    assert town.listed() == {"p0": (11, "ready"), "d0": (12, "ready")}
    assert [entry.registration for entry in town.server.workers()] == [d0.registration, p0.registration]
    assert p0.client.state is MemberState.LISTED


def test_a_worker_that_leaves_is_gone_for_all_at_once(town: Town) -> None:
    p0, d0 = town.worker(reg("p0", 11)), town.worker(reg("d0"))
    until(lambda: d0.sees() == {"p0": 11})
    assert p0.client.close()
    until(lambda: d0.departed == [("p0", 11)] and d0.sees() == {})
    assert set(town.listed()) == {"d0"}


def test_a_worker_that_leaves_before_it_was_answered_is_not_listed_for_long(town: Town) -> None:
    for _ in range(5):
        p0 = town.worker(reg("p0"))
        until(lambda: town.changes and town.changes[-1])
        assert p0.client.close()
        until(lambda: town.listed() == {})


def test_a_worker_that_restarts_replaces_its_old_life_at_once(town: Town) -> None:
    old, d0 = town.worker(reg("p0", 11)), town.worker(reg("d0"))
    until(lambda: d0.sees() == {"p0": 11})
    new = town.worker(reg("p0", 12))
    until(lambda: d0.sees() == {"p0": 12} and d0.departed == [("p0", 11)])
    until(lambda: old.client.state is MemberState.SUPERSEDED)
    assert town.listed()["p0"] == (12, "ready")
    new.client.close()
    until(lambda: town.listed().get("p0") == (11, "ready"))


def test_a_worker_that_begins_another_life_in_the_same_process_says_so(town: Town) -> None:
    p0, d0 = town.worker(reg("p0", 11)), town.worker(reg("d0"))
    until(lambda: d0.sees() == {"p0": 11})
    p0.client.update(msgspec.structs.replace(p0.registration, incarnation=Incarnation(12)))
    until(lambda: d0.sees() == {"p0": 12} and d0.departed == [("p0", 11)])


def test_when_the_registry_is_away_the_last_directory_stands_and_when_it_returns_nobody_departs(town: Town) -> None:
    p0, d0 = town.worker(reg("p0", 11)), town.worker(reg("d0", 12))
    until(lambda: p0.sees() == {"d0": 12} and d0.sees() == {"p0": 11})
    endpoint = town.server.endpoint
    town.server.close()
    until(lambda: _pings_unanswered(endpoint))
    assert d0.sees() == {"p0": 11} and d0.departed == []
    town.settings = msgspec.structs.replace(town.settings, settle_s=8.0)  # reconnecting takes up to a second
    town.open_server(endpoint)
    opened_at = time.monotonic()
    until(lambda: town.listed() == {"p0": (11, "ready"), "d0": (12, "ready")})
    until(lambda: time.monotonic() - opened_at > 8.1)
    d1 = town.worker(reg("d1", 13))
    until(lambda: d0.sees() == {"p0": 11, "d1": 13} and d1.sees() == {"p0": 11, "d0": 12})
    assert p0.departed == d0.departed == []


def test_a_peer_that_died_while_the_registry_was_away_departs_when_the_registry_has_settled(town: Town) -> None:
    p0, d0 = town.worker(reg("p0", 11)), town.worker(reg("d0", 12))
    until(lambda: d0.sees() == {"p0": 11})
    endpoint = town.server.endpoint
    town.server.close()
    p0.client.close()
    town.open_server(endpoint)
    until(lambda: d0.departed == [("p0", 11)] and d0.sees() == {})


def test_a_worker_may_start_before_its_registry(town: Town) -> None:
    endpoint = town.server.endpoint
    town.server.close()
    p0 = town.worker(reg("p0", 11))
    assert p0.client.state is MemberState.JOINING
    town.open_server(endpoint)
    until(lambda: p0.client.state is MemberState.LISTED)


def test_closing_a_client_is_bounded_when_the_registry_is_away(town: Town) -> None:
    p0 = town.worker(reg("p0"))
    until(lambda: p0.client.state is MemberState.LISTED)
    town.server.close()
    start = time.monotonic()
    assert p0.client.close() and p0.client.close()
    assert time.monotonic() - start < STALL_S


def test_a_client_with_the_wrong_name_key_or_address_says_so_at_once() -> None:
    def make(ring: str, registry: tuple[str, str], registration: Registration) -> None:
        RegistryGroup(
            RINGS[ring],
            [(WorkerId(registry[0]), registry[1])],
            registration,
            on_directory=lambda *_: None,
            on_departed=lambda worker, incarnation: None,
        )

    good = ("router", "tcp://127.0.0.1:5")
    with pytest.raises(ControlError, match=r"these are p0's keys; load those of d0"):
        make("p0", good, reg("d0"))
    with pytest.raises(ControlError, match=r"nobody: not in the key directory"):
        make("p0", ("nobody", good[1]), reg("p0"))
    with pytest.raises(ControlError, match=r"registry address: .* is not tcp://"):
        make("p0", ("router", "127.0.0.1:5"), reg("p0"))
    with pytest.raises(ControlError, match=r"registration: http_address"):
        make("p0", good, msgspec.structs.replace(reg("p0"), http_address="http://x"))


def test_a_registry_that_does_not_answer_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvbaton.control.registry.registry_client.SILENCE_S", 0.05)
    with socket.socket() as deaf:  # takes connections and says nothing
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        endpoint = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        p0 = Worker(endpoint, reg("p0"), CALM)
        until(lambda: "has not answered" in caplog.text)
        time.sleep(0.2)
        p0.client.close()
    said = [record.getMessage() for record in caplog.records if "has not answered" in record.getMessage()]
    assert len(said) == 1
    assert endpoint in said[0]


def test_what_discovery_tells_is_enough_to_talk(town: Town) -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        for post in (p0, d0):
            port = int(post.control.endpoint.rsplit(":", 1)[1])
            worker = town.worker(reg(post.name, port=port))
            last = worker
        until(last.sees)
        d0.control.set_directory(addresses(last.directories[-1]))
        d0.send(p0, b"hello")
        until(lambda: p0.inbox == [("d0", b"hello")], p0, d0)
