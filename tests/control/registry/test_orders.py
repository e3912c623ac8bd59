"""What the registry passes on to workers, over real sockets: an operator's order to drain, and tickets taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvbaton.control.addressing import ControlError
from kvbaton.control.registry import MemberState, OperatorLine, RegistryServer
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_server import DISCARDS_MAX
from kvbaton.protocol.ids import Incarnation, WorkerId

from ..rig import DEADLINE_S, Post, cluster, posted, until
from .town import CALM, RINGS, ROUTER, Town, Worker, reg

P0 = WorkerId("p0")


@pytest.fixture
def town() -> Iterator[Town]:
    town = Town()
    with town.stack:
        yield town


def line(town: Town) -> OperatorLine:
    return town.stack.enter_context(OperatorLine(RINGS["operator"], (ROUTER, town.server.endpoint)))


def listed(town: Town, name: str = "p0", life: int | None = None) -> Worker:
    worker = town.worker(reg(name, life))
    until(lambda: worker.client.state is MemberState.LISTED)
    return worker


def draining(town: Town) -> dict[str, bool]:
    return {entry.registration.worker: entry.draining for entry in town.server.workers()}


def orders(post: Post) -> list[m.DrainWorker]:
    heard = [m.decode_from_registry(frame) for _, frame in post.inbox]
    return [each for each in heard if isinstance(each, m.DrainWorker)]


def as_the_release_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry takes a look for a question about a drain."""
    genuine = RegistryServer._on_drain
    blind = lambda server, operator, message: genuine(server, operator, replace(message, look=False))  # noqa: E731
    monkeypatch.setattr(RegistryServer, "_on_drain", blind)


class TestDrain:
    def test_a_worker_that_drains_itself_is_known_to_and_its_peers_still_reach_it(self, town: Town) -> None:
        p0, d0 = listed(town), listed(town, "d0")
        until(d0.sees)
        p0.client.drain()
        until(lambda: p0.client.is_known_to_drain)
        assert draining(town) == {"d0": False, "p0": True}
        assert d0.sees() == {"p0": p0.registration.incarnation} and not d0.departed
        assert p0.drains == 0, "nobody told it to"

    def test_an_order_marks_the_worker_reaches_it_and_is_followed_until_it_is_gone(self, town: Town) -> None:
        p0, asking = listed(town, life=11), line(town)
        said = asking.drain(P0, 0, DEADLINE_S)
        assert said == m.DrainState(P0, "draining", 11)
        assert draining(town) == {"p0": True}, "before the worker has said anything"
        until(lambda: p0.drains)
        p0.client.tell_held("3 leases")
        p0.client.drain()
        until(lambda: p0.client.is_known_to_drain)
        until(lambda: (state := asking.drain(P0, 11, DEADLINE_S)) is not None and state.held == "3 leases")
        heard = p0.drains
        p0.client.close()
        until(lambda: asking.drain(P0, 11, DEADLINE_S) == m.DrainState(P0, "gone", 11))
        assert p0.drains == heard, "it is told no more once it says so itself"

    def test_an_order_that_was_lost_comes_with_the_answer_to_a_ping(self, town: Town) -> None:
        with posted(p0 := Post(RINGS["p0"], bind=None)):
            p0.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
            p0.control.send(ROUTER, m.encode(m.Register(reg("p0", 11))))
            until(lambda: draining(town), p0)
            line(town).drain(P0, 0, DEADLINE_S)
            for _ in range(2):
                p0.inbox.clear()
                p0.control.send(ROUTER, m.encode(m.Ping(Incarnation(11), m.SeenWorkers())))
                until(lambda: any((each.worker, each.incarnation) == (P0, 11) for each in orders(p0)), p0)

    def test_an_unknown_worker_is_named_with_those_that_are_known(self) -> None:
        town = Town(msgspec.structs.replace(CALM, settle_s=60.0))
        with town.stack:
            listed(town), listed(town, "d0")
            said = line(town).drain(WorkerId("p9"), 0, DEADLINE_S)
        assert said is not None
        assert (said.worker, said.state, said.workers) == ("p9", "unknown", ("d0", "p0"))
        assert "restarted" in said.held, "it may yet come back"

    def test_a_look_drains_nobody_also_where_the_registry_knows_no_look(
        self, town: Town, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listed(town)
        said = line(town).look(P0, DEADLINE_S)
        assert said is not None and (said.state, said.role) == ("ready", "both")
        as_the_release_before(monkeypatch)
        said = line(town).look(P0, DEADLINE_S)
        assert said is not None and (said.role, said.state) == ("", "gone")
        assert draining(town) == {"p0": False}

    @pytest.mark.parametrize("knows_looks", [True, False])
    def test_a_late_answer_to_a_look_is_none_to_a_drain(
        self, knows_looks: bool, town: Town, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listed(town, life=11)
        if not knows_looks:
            as_the_release_before(monkeypatch)
        genuine = RegistryServer._on_drain
        late: list[m.DrainState] = []

        def twice(server: RegistryServer, operator: WorkerId, message: m.DrainWorker) -> list[Any]:
            said = genuine(server, operator, message)
            late.extend([said[0][1]] if message.look else [])  # type: ignore[list-item]
            return said if message.look else [(operator, each) for each in late] + said

        monkeypatch.setattr(RegistryServer, "_on_drain", twice)
        asking = line(town)
        assert asking.look(P0, DEADLINE_S) is not None
        assert asking.drain(P0, 0, DEADLINE_S) == m.DrainState(P0, "draining", 11)

    def test_no_worker_can_have_another_drained(self, town: Town) -> None:
        listed(town)
        with posted(rogue := Post(RINGS["d1"], bind=None)):
            rogue.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
            rogue.control.send(ROUTER, m.encode(m.DrainWorker(P0)))
            until(lambda: rogue.inbox, rogue)
            answer = m.decode_from_registry(rogue.inbox[0][1])
        assert isinstance(answer, m.RegistryRefused) and answer.detail.startswith("drain: the key of d1 is for both")
        assert draining(town) == {"p0": False} and town.server.counters["bad_messages"] == 1
        with pytest.raises(ControlError, match="d1 is no operator"):
            OperatorLine(RINGS["d1"], (ROUTER, town.server.endpoint))

    def test_no_operator_can_register_as_a_worker(self, town: Town) -> None:
        with posted(odd := Post(RINGS["operator"], bind=None)):
            odd.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
            odd.control.send(ROUTER, m.encode(m.Register(reg("operator", 5))))
            until(lambda: odd.inbox, odd)
            answer = m.decode_from_registry(odd.inbox[0][1])
        assert isinstance(answer, m.RegistryRefused) and answer.detail.startswith(
            "register: the key of operator is for operator"
        )
        assert draining(town) == {}

    def test_a_registry_that_does_not_know_the_operator_gives_no_answer(self, town: Town) -> None:
        stranger = cluster("operator")["operator"]
        ring = msgspec.structs.replace(stranger, peers={**RINGS["router"].peers, **stranger.peers})
        with OperatorLine(ring, (ROUTER, town.server.endpoint)) as asking:
            assert asking.drain(P0, 0, 0.3) is None

    @pytest.mark.parametrize(
        ("registry", "said"),
        [((ROUTER, "http://x"), "registry:"), ((WorkerId("r2"), "tcp://127.0.0.1:1"), "r2: not in the key directory")],
    )
    def test_a_line_that_cannot_be_is_refused_with_the_next_step(
        self, registry: tuple[WorkerId, str], said: str
    ) -> None:
        with pytest.raises(ControlError, match=said):
            OperatorLine(RINGS["operator"], registry)


class TestDiscard:
    def test_tickets_reach_the_worker_that_gave_them_and_nobody_else(self, town: Town) -> None:
        p0, d0 = listed(town, life=11), listed(town, "d0")
        tickets = [f"ticket {number}" for number in range(3 * m.TICKETS_MAX + 1)]
        assert town.server.discard(P0, Incarnation(11), tickets) == len(tickets)
        until(lambda: p0.discards == tickets)
        assert d0.discards == [] and town.server.counters["discards_dropped"] == 0

    def test_another_life_and_one_that_is_gone_are_told_nothing(self, town: Town) -> None:
        p0 = listed(town, life=11)
        town.server.discard(P0, Incarnation(10), ["of an earlier life"])
        town.server.discard(WorkerId("d1"), Incarnation(1), ["of nobody"])
        town.server.discard(P0, Incarnation(11), ["mine"])
        until(lambda: p0.discards)
        assert p0.discards == ["mine"]

    def test_a_worker_in_a_new_life_ignores_what_was_meant_for_the_old_one(self, town: Town) -> None:
        p0 = listed(town, life=11)
        with posted(fake := Post(RINGS["router"])):
            lonely = Worker(fake.control.endpoint, reg("d0", 22), town.settings)
            town.stack.callback(lonely.client.close)
            until(lambda: fake.inbox, fake)
            for life in (21, 22):
                fake.control.send(WorkerId("d0"), m.encode(m.DiscardTickets(Incarnation(life), (f"of {life}",))))
                fake.control.send(WorkerId("d0"), m.encode(m.DrainWorker(WorkerId("d0"), life)))
            until(lambda: lonely.drains, fake)
            assert lonely.discards == ["of 22"] and lonely.drains == 1
            assert lonely.client.clients[0].counters["orders_late"] == 2
        assert p0.discards == []

    def test_what_is_too_much_or_too_long_is_dropped_and_counted(self, town: Town) -> None:
        town.server.close()
        quiet = town.open_server()
        quiet.close()  # nobody takes anything out of the queue any more
        assert quiet.discard(P0, Incarnation(11), ["x" * 1025, "good"]) == 1
        assert quiet.discard(P0, Incarnation(11), ["x"] * (DISCARDS_MAX + 5)) == DISCARDS_MAX - 1
        assert quiet.discard(P0, Incarnation(11), ["x"]) == 0
        assert quiet.counters["discards_dropped"] == 1 + 6 + 1

    def test_discarding_is_safe_from_many_threads(self, town: Town) -> None:
        p0 = listed(town, life=11)
        names = [[f"{thread}.{number}" for number in range(200)] for thread in range(4)]
        threads = [
            threading.Thread(
                target=lambda each: [town.server.discard(P0, Incarnation(11), [t]) for t in each], args=(n,)
            )
            for n in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(p0.discards) == 800)
        assert sorted(p0.discards) == sorted(name for each in names for name in each)
