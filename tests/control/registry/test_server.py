"""The registry's server over real sockets: only the right workers are listed, whatever else comes to its port."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.control.registry import MemberState, RegistryGroup, RegistryServer, RegistrySettings, WorkerState
from kvbaton.control.registry import registry_messages as m
from kvbaton.protocol.ids import Incarnation, WorkerId

from ..rig import Post, cluster, costs_less, posted, until
from .town import CALM, HASTY, RINGS, ROUTER, Town, reg


@pytest.fixture
def town() -> Iterator[Town]:
    town = Town()
    with town.stack:
        yield town


def test_a_worker_that_dies_becomes_suspect_and_then_departs() -> None:
    town = Town(HASTY)
    with town.stack:
        d0 = town.worker(reg("d0"))
        with posted(dead := Post(RINGS["p0"], bind=None)):
            dead.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
            dead.control.send(ROUTER, m.encode(m.Register(reg("p0", 11))))
            until(lambda: any({e.worker: e.incarnation for e in seen} == {"p0": 11} for seen in d0.directories), dead)
        until(lambda: d0.departed == [("p0", 11)])
        states = [e.state for change in town.changes for e in change if e.registration.worker == "p0"]
        assert states[0] is WorkerState.READY and states[-1] is WorkerState.SUSPECT


def test_a_worker_cannot_register_under_another_name(town: Town) -> None:
    d0 = town.worker(reg("d0"))
    until(lambda: d0.client.state is MemberState.LISTED)
    with posted(spoofer := Post(RINGS["d1"], bind=None)):
        spoofer.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        spoofer.control.send(ROUTER, m.encode(m.Register(reg("p0", 66))))
        until(lambda: spoofer.inbox, spoofer)
        assert m.decode_from_registry(spoofer.inbox[0][1]) == m.RegistryRefused("worker: d1 registers as p0")
        spoofer.control.send(ROUTER, m.encode(m.Deregister(d0.registration.incarnation)))
        until(lambda: len(spoofer.inbox) == 2, spoofer)
    assert set(town.listed()) == {"d0"} and town.server.counters["bad_messages"] == 1


def test_bad_messages_are_counted_answered_with_the_field_and_skipped(town: Town) -> None:
    bad = [
        b"\xc1",
        b"GET / HTTP/1.1",
        m.encode(m.RegisteredReply(Incarnation(1))),
        m.encode(m.Register(msgspec.structs.replace(reg("d1"), control_endpoint="tcp://*:1"))),
        m.encode(m.Register(msgspec.structs.replace(reg("d1"), http_address="http://x:1"))),
    ]
    with posted(clumsy := Post(RINGS["d1"], bind=None)):
        clumsy.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        for frame in bad:
            clumsy.control.send(ROUTER, frame)
        until(lambda: len(clumsy.inbox) == len(bad), clumsy)
        answers = [m.decode_from_registry(frame) for _, frame in clumsy.inbox]
    details = [answer.detail for answer in answers if isinstance(answer, m.RegistryRefused)]
    assert len(details) == len(bad) == town.server.counters["bad_messages"]
    assert details[3].startswith("control_endpoint:") and details[4].startswith("http_address:")
    p0 = town.worker(reg("p0"))
    until(lambda: p0.client.state is MemberState.LISTED)


def test_noise_and_strangers_on_the_registrys_port_disturb_nobody(town: Town) -> None:
    host, port = town.server.endpoint.removeprefix("tcp://").rsplit(":", 1)
    stranger_ring = cluster("p0", "router")["p0"]
    with posted(stranger := Post(stranger_ring, bind=None)):
        stranger.control.set_peers({**stranger_ring.peers, ROUTER: RINGS["router"].public})
        stranger.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        stranger.control.send(ROUTER, m.encode(m.Register(reg("p0", 66))))
        for _ in range(5):
            with socket.create_connection((host, int(port))) as noise:
                noise.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: town.server._control.strangers >= 6)
        d0 = town.worker(reg("d0"))
        until(lambda: d0.client.state is MemberState.LISTED)
    assert set(town.listed()) == {"d0"}


def test_a_directory_that_was_lost_comes_with_the_answer_to_a_ping() -> None:
    town = Town(msgspec.structs.replace(CALM, settle_s=0.0))
    with town.stack, posted(p0 := Post(RINGS["p0"], bind=None)):
        p0.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        p0.control.send(ROUTER, m.encode(m.Register(reg("p0", 11))))
        until(lambda: len(p0.inbox) == 2, p0)
        answer, directory = (m.decode_from_registry(frame) for _, frame in p0.inbox)
        assert answer == m.RegisteredReply(Incarnation(11)) and isinstance(directory, m.Directory)
        p0.inbox.clear()
        p0.control.send(ROUTER, m.encode(m.Ping(Incarnation(11), directory.seen)))
        p0.control.send(ROUTER, m.encode(m.Ping(Incarnation(11), m.SeenWorkers(1, 1))))
        until(lambda: len(p0.inbox) == 3, p0)
        assert [m.decode_from_registry(frame) for _, frame in p0.inbox] == [answer, answer, directory]


def test_pings_of_one_that_has_seen_nothing_cost_one_directory_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a member may send come in one turn: each answered with the whole list, that would be gigabytes."""
    server = RegistryServer(RINGS["router"], settings=msgspec.structs.replace(CALM, settle_s=0.0))
    try:
        told = reg("p0")
        sent: list[bytes] = []
        pings = [(WorkerId("p0"), m.encode(m.Ping(told.incarnation, m.SeenWorkers())), RINGS["p0"].public)] * 256
        first = [(WorkerId("p0"), m.encode(m.Register(told)), RINGS["p0"].public)]
        rounds = [first, [], *([pings] * 20), [], []]
        monkeypatch.setattr(server._control, "hear", lambda: rounds.pop(0))
        monkeypatch.setattr(server._control, "address_of", lambda _: "127.0.0.1")
        monkeypatch.setattr(server._control, "send", lambda _, frame: bool(sent.append(frame)) or True)
        for turn in range(3):
            server._turn(time.monotonic())
            directories = [frame for frame in sent if isinstance(m.decode_from_registry(frame), m.Directory)]
            assert len(directories) == (1, 2, 2)[turn]
    finally:
        server.close()


def test_an_identity_added_to_the_cluster_can_join_a_running_registry(town: Town) -> None:
    rings = cluster("d9")
    newcomer = msgspec.structs.replace(rings["d9"], peers={**RINGS["router"].peers, **rings["d9"].peers})
    town.server._control.set_peers(newcomer.peers)
    client = RegistryGroup(
        newcomer,
        [(ROUTER, town.server.endpoint)],
        reg("d9", 99),
        settings=CALM,
        on_directory=lambda *_: None,
        on_departed=lambda worker, incarnation: None,
    )
    client.start()
    town.stack.callback(client.close)
    until(lambda: "d9" in town.listed())
    assert town.server.workers()[0].public_key == newcomer.public


def test_idle_discovery_costs_next_to_nothing() -> None:
    town = Town(RegistrySettings())
    with town.stack:
        workers = [town.worker(reg(name)) for name in ("p0", "d0")]
        until(lambda: all(worker.sees() for worker in workers))
        assert costs_less(0.02, 1.0)


def test_a_callback_that_raises_costs_only_itself(town: Town) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of the owner")

    town.server.close()
    server = RegistryServer(RINGS["router"], settings=CALM, on_change=broken)
    server.start()
    town.stack.callback(server.close)
    client = RegistryGroup(
        RINGS["p0"], [(ROUTER, server.endpoint)], reg("p0"), on_directory=broken, on_departed=broken, settings=CALM
    )
    client.start()
    town.stack.callback(client.close)
    town.server = server
    d0 = town.worker(reg("d0"))
    until(lambda: client.clients[0].counters["callback_faults"] >= 1 and server.counters["callback_faults"] >= 1)
    d0.client.close()
    until(lambda: client.clients[0].counters["callback_faults"] >= 2)  # a directory, and one with a departure
    assert client.state is MemberState.LISTED and set(town.listed()) == {"p0"}
