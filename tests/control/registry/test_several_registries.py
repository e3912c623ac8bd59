"""Several registries, workers that are listed with each, and routers that read them, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from kvbaton.control.addressing import ControlError
from kvbaton.control.registry import (
    MemberState,
    OperatorLine,
    Registration,
    RegistryGroup,
    RegistryReaders,
    RegistryServer,
    RegistrySettings,
)
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry import registry_watchers as watching
from kvbaton.control.registry.registry_union import RegistryView
from kvbaton.control.registry.statements import OwnStatements
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

from ..rig import Post, cluster, posted, steady_bind, until
from .town import reg

RINGS = cluster("registry-a", "registry-b", "router-1", "router-2", "operator", "p0", "d0", "d1", signs=True)
QUICK = RegistrySettings(ping_s=0.03, suspect_s=1.0, evict_s=1.5, settle_s=0.3)
NAMES = (WorkerId("registry-a"), WorkerId("registry-b"))


class Member:
    """A worker that is listed with the registries it was given."""

    def __init__(self, registration: Registration, places: list[tuple[WorkerId, str]]) -> None:
        self.known: dict[str, int] = {}
        self.departed: list[str] = []
        self.drains = 0
        self.discards: list[str] = []
        self.shown: list[str] = []
        self.group = RegistryGroup(
            RINGS[registration.worker],
            places,
            registration,
            on_directory=lambda entries, _: setattr(self, "known", {e.worker: e.incarnation for e in entries}),
            on_departed=lambda worker, _: self.departed.append(worker),
            on_drain=self._drain,
            on_discard=self.discards.extend,
            report=registration.worker.encode,
            on_show=self.shown.extend,
            settings=QUICK,
        )
        self.group.start()

    def _drain(self) -> None:
        self.drains += 1
        self.group.drain()


class Country:
    """Two registries that come and go."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.binds = {name: steady_bind() for name in NAMES}
        self.servers: dict[str, RegistryServer] = {}
        self.reports: list[tuple[str, bytes]] = []
        for name in NAMES:
            self.open(name)

    def open(self, name: WorkerId, settings: RegistrySettings = QUICK) -> RegistryServer:
        server = self.servers[name] = RegistryServer(RINGS[name], self.binds[name], settings=settings)
        server.start()
        self.stack.callback(server.close)
        return server

    def places(self, *names: WorkerId) -> list[tuple[WorkerId, str]]:
        return [(name, self.binds[name]) for name in names or NAMES]

    def member(self, worker: str, life: int, *names: WorkerId) -> Member:
        member = Member(reg(worker, life), self.places(*names))
        self.stack.callback(member.group.close)
        return member

    def router(self, name: str = "router-1") -> RegistryReaders:
        heard = lambda worker, _, data: self.reports.append((worker, data))  # noqa: E731
        readers = RegistryReaders(RINGS[name], self.places(), settings=QUICK, on_report=heard)
        readers.start()
        self.stack.callback(readers.close)
        return readers


@pytest.fixture
def country() -> Iterator[Country]:
    country = Country()
    with country.stack:
        yield country


def listed(readers: RegistryReaders) -> dict[str, int]:
    return {entry.worker: entry.registration.incarnation for entry in readers.workers()}


def test_of_two_registries_the_one_that_knows_looks_says_how_a_worker_stands(country: Country) -> None:
    old = country.servers[NAMES[0]]
    genuine = old._on_drain
    blind = lambda operator, message: genuine(operator, msgspec.structs.replace(message, look=False))  # noqa: E731
    old._on_drain = blind  # type: ignore[method-assign]
    p0 = country.member("p0", 5)
    until(lambda: all(server.workers() for server in country.servers.values()))
    with OperatorLine(RINGS["operator"], country.places()) as line:
        until(lambda: (said := line.look(WorkerId("p0"), 5.0)) is not None and (said.state, said.held) == ("ready", ""))
        said = line.look(WorkerId("p9"), 5.0)
        assert said is not None and (said.state, said.workers) == ("unknown", ("p0",))
    assert not p0.drains and not any(entry.draining for entry in old.workers())


def test_a_worker_that_one_of_two_lists_is_known_and_its_end_there_is_its_end(country: Country) -> None:
    a, _ = NAMES
    p0, d0 = country.member("p0", 1), country.member("d0", 2, a)
    router = country.router()
    until(lambda: p0.known == {"d0": 2} and listed(router) == {"p0": 1, "d0": 2})
    until(lambda: all(server.is_complete for server in country.servers.values()))
    assert p0.known == {"d0": 2} and not p0.departed
    d0.group.close()
    until(lambda: p0.departed == ["d0"] and listed(router) == {"p0": 1})


def test_reports_and_orders_go_through_the_registries(country: Country) -> None:
    p0 = country.member("p0", 1)
    router = country.router()
    assert not router.show(WorkerId("d0"), Incarnation(2), ("x",))  # nothing has come from it
    until(lambda: ("p0", b"p0") in country.reports)
    until(lambda: router.answering == 2 and p0.group.state is MemberState.LISTED)
    assert router.show(WorkerId("p0"), Incarnation(1), ("x" * 999,)) and not router.show(
        WorkerId("p0"), Incarnation(9), ("x",)
    )
    assert router.discard(WorkerId("p0"), Incarnation(1), ["ticket", "t" * 99_999]) == 1
    assert router.discard(WorkerId("p0"), Incarnation(9), ["of another life"]) == 0
    until(lambda: "x" * 256 in p0.shown and "ticket" in p0.discards)
    assert set(p0.discards) == {"ticket"}


def test_a_question_goes_through_the_registry_that_has_reports(
    country: Country, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one lists the worker sooner, has no report of its yet, and would not ask it."""
    readers = RegistryReaders(RINGS["router-1"], country.places(), settings=QUICK)  # told by hand what it hears
    asked: list[tuple[int, m.FromRouter]] = []
    for number, reader in enumerate(readers.readers):
        monkeypatch.setattr(reader, "order", lambda order, number=number: asked.append((number, order)) or True)
    told, signed = OwnStatements(RINGS["p0"]).of(reg("p0", 1))
    entry = m.RosterEntry(told, RINGS["p0"].public, m.WorkerState.READY, signed=signed)
    listing = RegistryView((entry,), complete=True)
    first, second = readers.readers
    second.line._on_view(listing)
    first._on_report(WorkerId("p0"), Incarnation(1), b"p0")
    assert readers.show(WorkerId("p0"), Incarnation(1), ("x",))
    assert readers.discard(WorkerId("p0"), Incarnation(1), ["t"]) == 1
    assert asked == [
        (0, m.ShowFor(WorkerId("p0"), Incarnation(1), ("x",))),
        (1, m.DiscardFor(WorkerId("p0"), Incarnation(1), ("t",))),
    ]
    for reader in readers.readers:
        reader.line._on_view(RegistryView((), complete=True))
    assert not readers.show(WorkerId("p0"), Incarnation(1), ("x",))
    readers.close()


def test_a_drain_is_ordered_at_any_and_known_when_all_that_answer_know_it(country: Country) -> None:
    a, b = NAMES
    p0 = country.member("p0", 1)
    router = country.router()
    until(lambda: all(server.workers() for server in country.servers.values()))
    until(lambda: all(client.answers for client in p0.group.clients))  # one that has not yet is not waited for
    with OperatorLine(RINGS["operator"], (a, country.binds[a])) as line:
        said = line.drain(WorkerId("p0"), 0, 5.0)
    assert said is not None and said.state == "draining" and said.incarnation == 1
    until(lambda: p0.group.is_known_to_drain and p0.drains >= 1)
    assert all(server.workers()[0].draining for server in country.servers.values())
    until(lambda: [entry.draining for entry in router.workers()] == [True])
    with OperatorLine(RINGS["operator"], country.places()) as both:
        until(lambda: all(server.is_complete for server in country.servers.values()))
        assert both.drain(WorkerId("d9"), 0, 5.0) == m.DrainState(WorkerId("d9"), "unknown", workers=("p0",))
        country.servers[b].close()
        p0.group.close()
        until(lambda: country.servers[a].workers() == ())
        answer = both.drain(WorkerId("p0"), 1, 2.0)
        assert answer is not None and answer.state in ("gone", "draining")  # b may have been asked before it went
        until(lambda: (again := both.drain(WorkerId("p0"), 1, 1.0)) is not None and again.state == "gone")


def test_only_a_routers_key_reads(country: Country) -> None:
    with pytest.raises(ControlError, match="the key of p0 is for both, and only a router's may read"):
        RegistryReaders(RINGS["p0"], country.places())
    a = NAMES[0]
    asked: list[m.ToRegistry] = [
        m.Watch(m.SeenWorkers()),
        m.DiscardFor(WorkerId("d0"), Incarnation(2), ("t",)),
        m.ShowFor(WorkerId("d0"), Incarnation(2), ()),
    ]
    d0 = country.member("d0", 2)
    until(lambda: len(country.servers[a].workers()) == 1)
    for name in ("p0", "operator"):
        with posted(liar := Post(RINGS[name], bind=None)):
            liar.control.set_directory({a: (country.binds[a], RINGS[a].public)})
            for message in asked:
                liar.control.send(a, m.encode(message))
            until(lambda liar=liar: len(liar.inbox) == len(asked), liar)
            refused = [m.decode_to_router(frame) for _, frame in liar.inbox]
            assert all(isinstance(each, m.RegistryRefused) and "watch: the key" in each.detail for each in refused)
    assert country.servers[a].readers == 0 and not d0.discards and not d0.shown


class TestWatchers:
    """The bounds of what a registry keeps and sends for routers, on virtual time."""

    def made(self) -> tuple[watching.RegistryRoster, watching.RosterWatchers]:
        roster = watching.RegistryRoster(RegistrySettings(), 7, 0.0)
        for number in range(100):
            roster.register(reg(f"p{number}", number + 1), "key", 0.0)
        return roster, watching.RosterWatchers(roster, watching.Counter())

    def test_one_roster_at_a_time_and_so_many_reports_ahead(self) -> None:
        roster, watchers = self.made()
        router = WorkerId("router")
        assert watchers.watch(router, m.Watch(m.SeenWorkers()), 0.0) is None
        for _ in range(3):
            for number in range(100):
                watchers.take_report(WorkerId(f"p{number}"), Incarnation(number + 1), b"r" * 10)
        sent = [message for _, message in watchers.due(0.0)]
        assert isinstance(sent[0], m.Roster) and len(sent) == 1 + watching.REPORTS_AHEAD_MAX
        roster.deregister(WorkerId("p0"), Incarnation(1))
        assert not list(watchers.due(1.0))  # it has not said that the first came
        assert watchers.watch(router, m.Watch(sent[0].seen, 64), 1.1) is None
        sent = [message for _, message in watchers.due(1.1)]
        assert isinstance(sent[0], m.Roster) and PeerId(WorkerId("p0"), Incarnation(1)) in sent[0].left
        assert len(sent) == 1 + 36  # the newest of each that it had not had
        assert watchers.watch(router, m.Watch(roster.watched, 10**9), 1.2) == m.Watching(roster.watched)

    def test_memory_and_routers_are_bounded_and_silent_ones_forgotten(self) -> None:
        _, watchers = self.made()
        for number in range(watching.WATCHERS_MAX):
            assert watchers.watch(WorkerId(f"router-{number}"), m.Watch(m.SeenWorkers()), 0.0) is None
        refused = watchers.watch(WorkerId("router-x"), m.Watch(m.SeenWorkers()), 0.0)
        assert isinstance(refused, m.RegistryRefused)
        for number in range(100):
            for _ in range(2):
                watchers.take_report(WorkerId(f"p{number}"), Incarnation(number + 1), b"r" * (1 << 20))
        assert watchers._bytes == watching.REPORT_BYTES_KEPT_MAX == 64 * len(watchers._reports) << 20 >> 6
        list(watchers.due(100.0))
        assert len(watchers) == 0 and not watchers._reports and watchers._bytes == 0


def test_a_worker_without_http_is_told_so_on_the_wire() -> None:
    inside = msgspec.structs.replace(reg("p0", 1), http_address="")
    assert m.decode_to_registry(m.encode(m.Register(inside))) == m.Register(inside)
    with pytest.raises(m.RegistryFault, match="born"):
        m.decode_to_registry(m.encode(m.Register(msgspec.structs.replace(inside, born=float("nan")))))
