"""Workers, operators and a registry that sign, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.control.registry import OperatorLine, RegistryServer, statements
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_group import RegistryGroup
from kvbaton.control.registry.statements import FRESH_S, MemberState, OwnStatements
from kvbaton.protocol.ids import Incarnation, WorkerId

from ..rig import DEADLINE_S, Post, cluster, posted, until
from .town import CALM, ROUTER, reg

RINGS = cluster("router", "operator", "p0", "d0", signs=True)
P0 = WorkerId("p0")


class Scene:
    def __init__(self) -> None:
        self.server = RegistryServer(RINGS["router"], settings=CALM)
        self.server.start()
        self.drains = 0
        self.clients: list[RegistryGroup] = []

    def client(self, told: m.Registration) -> RegistryGroup:
        client = RegistryGroup(
            RINGS[told.worker], [(ROUTER, self.server.endpoint)], told, on_directory=lambda *_: None,
            on_departed=lambda *_: None, on_drain=self._drain, settings=CALM,
        )  # fmt: skip
        client.start()
        self.clients.append(client)
        return client

    def _drain(self) -> None:
        self.drains += 1

    def listed(self) -> dict[str, int]:
        return {entry.worker: entry.registration.incarnation for entry in self.server.workers()}

    def answer(self, post: Post, message: m.ToRegistry) -> m.FromRegistry | m.ToOperator:
        post.inbox.clear()
        post.control.set_directory({ROUTER: (self.server.endpoint, RINGS["router"].public)})
        post.control.send(ROUTER, m.encode(message))
        until(lambda: post.inbox, post)
        frame = post.inbox[0][1]
        return m.decode_to_operator(frame) if b"drain_state" in frame[:64] else m.decode_from_registry(frame)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    try:
        yield scene
    finally:
        for client in scene.clients:
            client.close()
        scene.server.close()


def test_a_worker_that_could_sign_and_does_not_is_refused_with_the_next_step(scene: Scene) -> None:
    told = reg("p0", 1)
    ahead = OwnStatements(RINGS["p0"], lambda: time.time() + FRESH_S + 60)
    with posted(p0 := Post(RINGS["p0"], bind=None)):
        for message, expected in (
            (m.Register(told), "signed: missing"),
            (m.Register(told, OwnStatements(RINGS["d0"]).of(told)[1]), "signed: not by the key of p0"),
            (m.Register(told, OwnStatements(RINGS["p0"]).of(told, left=True)[1]), "of a life that is over"),
            (m.Register(*ahead.of(told)), "set the clocks"),
        ):
            said = scene.answer(p0, message)
            assert isinstance(said, m.RegistryRefused) and expected in said.detail
        other = OwnStatements(RINGS["p0"]).of(reg("p0", 2, port=7))[1]
        assert isinstance(scene.answer(p0, m.Register(told, other)), m.RegisteredReply)
    assert scene.server.workers()[0].registration.control_endpoint == "tcp://127.0.0.1:7", "the signed words count"


def test_a_worker_whose_clock_was_set_back_numbers_itself_above(scene: Scene) -> None:
    born = time.time()
    before = scene.client(msgspec.structs.replace(reg("p0", 1), born=born))
    until(lambda: scene.listed() == {"p0": 1})
    before.close()
    scene.client(msgspec.structs.replace(reg("p0", 2), born=born - 100))
    until(lambda: scene.listed() == {"p0": 2})
    assert scene.server.workers()[0].registration.born > born


def test_a_registration_that_is_only_signed_anew_is_no_news(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.control.registry.statements.RESIGN_S", 0.05)
    client = scene.client(reg("p0", 1))
    until(lambda: client.state is MemberState.LISTED and scene.server.is_complete)
    roster, first = scene.server._roster, scene.server._roster.newest(P0)
    revision = roster.revision
    until(lambda: roster.newest(P0) != first)
    assert roster.revision == revision and scene.listed() == {"p0": 1}


def test_a_worker_drains_for_a_signed_order_and_for_no_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    client = scene.client(reg("p0", 7))
    until(lambda: client.state is MemberState.LISTED)
    by_a_worker = statements.drain_order(RINGS["d0"], P0, Incarnation(7))
    another_life = statements.drain_order(RINGS["operator"], P0, Incarnation(6))
    lies = [m.DrainWorker(P0, 7, order) for order in (None, by_a_worker, another_life)]
    due = scene.server._watchers.due  # asked on the server's thread, as its sockets are
    monkeypatch.setattr(
        scene.server._watchers, "due", lambda now: [*due(now), *((P0, lies.pop()) for _ in range(len(lies)))]
    )
    until(lambda: client.clients[0].counters["orders_unsigned"] == 3)
    assert not scene.drains
    with OperatorLine(RINGS["operator"], (ROUTER, scene.server.endpoint)) as line:
        said = line.drain(P0, 0, DEADLINE_S)
    assert said is not None and (said.state, said.incarnation) == ("draining", 7)
    until(lambda: scene.drains >= 1)
    assert scene.server.workers()[0].draining


def test_an_order_that_is_not_signed_is_only_a_question(scene: Scene) -> None:
    client = scene.client(reg("p0", 7))
    until(lambda: client.state is MemberState.LISTED)
    with posted(operator := Post(RINGS["operator"], bind=None)):
        said = scene.answer(operator, m.DrainWorker(P0))
        assert isinstance(said, m.DrainState) and said.incarnation == 7
        refused = scene.answer(operator, m.DrainWorker(P0, 7))
        assert isinstance(refused, m.RegistryRefused) and "order: not signed by operator" in refused.detail
    assert not scene.server.workers()[0].draining and not scene.drains


def test_a_life_that_was_closed_leaves_its_word_for_readers(scene: Scene) -> None:
    client = scene.client(reg("p0", 7))
    until(lambda: client.state is MemberState.LISTED)
    client.close()
    until(lambda: not scene.listed())
    words = [statements.verified(each, RINGS["p0"].signer.public) for each in scene.server._roster.roster().ended]
    assert [(each.peer.incarnation, each.left) for each in words] == [(7, True)]
