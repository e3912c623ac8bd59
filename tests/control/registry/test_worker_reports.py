"""Reports that workers send through the registry and questions that go back, over real sockets, and on virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvbaton.control.registry import MemberState, RegistryGroup, RegistryServer, RegistrySettings
from kvbaton.control.registry import registry_client as client_module
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistryRoster
from kvbaton.control.registry.registry_watchers import QUESTIONS_MAX, REPORTS_BURST_MAX, REPORTS_PER_S_MAX, Reports
from kvbaton.control.registry.statements import Member
from kvbaton.observe.flight.flight_records import REPORT_BYTES_MAX
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.wire.codec import FRAME_BYTES_MAX

from ..rig import Post, posted, until
from .town import CALM, RINGS, ROUTER, Town, reg

P0 = WorkerId("p0")


class ReportTown(Town):
    """A registry that takes reports."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, bytes]] = []
        super().__init__()

    def open_server(self, bind: str = "tcp://127.0.0.1:0") -> RegistryServer:
        self.server = RegistryServer(RINGS["router"], bind, settings=self.settings, on_report=self._hear)
        self.server.start()
        self.stack.callback(self.server.close)
        return self.server

    def _hear(self, worker: WorkerId, incarnation: Incarnation, data: bytes) -> None:
        self.heard.append((worker, incarnation, data))
        if data == b"bad":
            raise ValueError("no report")

    def reporter(
        self, life: int, make: Callable[[], bytes | None], on_show: Callable[..., None] = lambda _: None
    ) -> RegistryGroup:
        client = RegistryGroup(
            RINGS["p0"], [(ROUTER, self.server.endpoint)], reg("p0", life), on_directory=lambda *_: None,
            on_departed=lambda *_: None, settings=self.settings, report=make, on_show=on_show,
        )  # fmt: skip
        self.stack.callback(client.close)
        client.start()
        return client


@pytest.fixture
def town() -> Iterator[ReportTown]:
    town = ReportTown()
    with town.stack:
        yield town


class TestOverSockets:
    def test_a_listed_worker_reports_under_the_name_that_its_key_proves(self, town: ReportTown) -> None:
        town.reporter(41, lambda: b"all is well")
        until(lambda: town.heard)
        assert town.heard[0] == ("p0", 41, b"all is well")
        assert town.server.counters["reports"] >= 1

    def test_a_question_reaches_the_worker_and_is_answered_at_once(
        self, town: ReportTown, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "REPORT_S", 3600.0)
        asked: list[str] = []
        town.reporter(42, lambda: ",".join(asked).encode(), asked.extend)
        until(lambda: town.heard)
        assert town.server.show(P0, Incarnation(42), ["one", "x" * 999])
        until(lambda: len(town.heard) == 2)
        assert asked == ["one", "x" * m.FIELD_CHARS_MAX]
        assert town.heard[1][2].startswith(b"one,xxx")

    def test_another_life_and_a_stranger_are_not_asked(self, town: ReportTown) -> None:
        town.reporter(43, lambda: b"here")
        until(lambda: town.heard)
        assert not town.server.show(P0, Incarnation(44), ["one"])
        assert not town.server.show(WorkerId("nobody"), Incarnation(43), ["one"])

    def test_nothing_to_tell_too_much_to_tell_and_a_fault_cost_the_report_alone(self, town: ReportTown) -> None:
        told = iter([None, b"x" * (m.REPORT_BYTES_MAX + 1)])

        def make() -> bytes | None:
            return next(told)  # StopIteration from the third on

        client = town.reporter(45, make)
        until(lambda: client.clients[0].counters["callback_faults"])
        assert client.clients[0].counters["reports_too_long"] == 1
        assert client.state is MemberState.LISTED
        assert town.heard == []

    def test_the_longest_report_passes_and_one_that_cannot_be_taken_costs_itself(self, town: ReportTown) -> None:
        long = b"x" * m.REPORT_BYTES_MAX
        told = iter([b"bad", long])
        client = town.reporter(46, lambda: next(told, None))
        until(lambda: len(town.heard) == 2)
        assert town.heard[1][2] == long
        assert town.server.counters["callback_faults"] == 1
        assert client.state is MemberState.LISTED

    def test_who_reports_too_often_is_cut_short_and_stays_listed(self, town: ReportTown) -> None:
        with posted(p0 := Post(RINGS["p0"], bind=None)):
            p0.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
            p0.control.send(ROUTER, m.encode(m.Register(reg("p0", 47))))
            for _ in range(200):
                p0.control.send(ROUTER, m.encode(m.WorkerReport(Incarnation(47), b"again")))
            p0.control.send(ROUTER, m.encode(m.Ping(Incarnation(47), m.SeenWorkers())))
            count = town.server.counters
            until(lambda: count["reports"] + count["reports_over_rate"] == 200, p0)
            assert count["reports"] < 200
            until(lambda: sum(m.decode_from_registry(f).__class__ is m.RegisteredReply for _, f in p0.inbox) == 2, p0)

    def test_an_operator_and_a_worker_that_is_not_listed_report_nothing(self, town: ReportTown) -> None:
        with posted(odd := Post(RINGS["operator"], bind=None), d0 := Post(RINGS["d0"], bind=None)):
            for each in (odd, d0):
                each.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
                each.control.send(ROUTER, m.encode(m.WorkerReport(Incarnation(1), b"hello")))
            until(lambda: odd.inbox, odd, d0)
            until(lambda: town.server.counters["reports_late"], odd, d0)
            assert isinstance(m.decode_from_registry(odd.inbox[0][1]), m.RegistryRefused)
            assert not d0.inbox, "an unlisted worker's report is no question"
            assert town.heard == []


class TestMixedReleases:
    """Frames as the release before wrote and read them: no field `reports`, no tags `report` and `show`."""

    def test_a_worker_of_the_release_before_is_neither_asked_nor_disturbed(self, town: ReportTown) -> None:
        class OldRegistered(msgspec.Struct, tag="registered"):
            incarnation: int
            draining: bool = False

        old = msgspec.msgpack.Decoder(tuple[int, OldRegistered])
        body = msgspec.to_builtins(m.Register(reg("p0", 51)))
        with posted(p0 := Post(RINGS["p0"], bind=None)):
            p0.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
            p0.control.send(ROUTER, msgspec.msgpack.encode((1, body)))
            until(lambda: p0.inbox, p0)
            assert not town.server.show(P0, Incarnation(51), ["one"])
            p0.control.send(ROUTER, m.encode(m.Ping(Incarnation(51), m.SeenWorkers())))
            until(lambda: len(p0.inbox) >= 2, p0)
            assert old.decode(p0.inbox[0][1]) == (1, OldRegistered(51))
            tags = {msgspec.msgpack.decode(frame)[1]["type"] for _, frame in p0.inbox}
            assert tags <= {"registered", "directory"}

    def test_a_registry_of_the_release_before_is_sent_no_report(self) -> None:
        def refuses() -> bytes:
            raise AssertionError("nobody asked for a report")

        heard: list[str] = []
        with posted(fake := Post(RINGS["router"])):
            client = RegistryGroup(
                RINGS["p0"], [(ROUTER, fake.control.endpoint)], reg("p0", 52), on_directory=lambda *_: None,
                on_departed=lambda *_: None, settings=CALM, report=refuses,
            )  # fmt: skip
            client.start()
            try:
                while heard.count("ping") < 5:
                    until(lambda: fake.inbox, fake)
                    for sender, frame in fake.inbox:
                        heard.append(msgspec.msgpack.decode(frame)[1]["type"])
                        answer = {"type": "registered", "incarnation": 52, "draining": False}
                        fake.control.send(sender, msgspec.msgpack.encode((1, answer)))
                    fake.inbox.clear()
            finally:
                client.close()
        assert set(heard) == {"register", "ping"}
        assert client.clients[0].counters["callback_faults"] == 0


class TestMember:
    def test_it_reports_while_listed_by_a_registry_that_takes_reports(self) -> None:
        member = Member(reg("p0", 61), RegistrySettings(), 0.0)
        life = Incarnation(61)
        assert not member.may_report
        member.on_message(m.RegisteredReply(life, reports=True), 0.0)
        assert member.may_report
        member.on_message(m.RegisteredReply(life), 0.0)  # another registry came to its place
        assert not member.may_report
        member.on_message(m.RegisteredReply(life, reports=True), 0.0)
        member.on_message(m.Superseded(life), 0.0)
        assert not member.may_report

    def test_it_reports_nothing_to_a_registry_that_does_not_answer(self) -> None:
        """What is told to nobody is lost; it is told when the registry is there again."""
        member = Member(reg("p0", 62), RegistrySettings(), 0.0)
        life = Incarnation(62)
        member.on_message(m.RegisteredReply(life, reports=True), 0.0)
        assert isinstance(member.on_time(100.0), m.Ping)
        assert not member.may_report, "until that is answered"
        member.on_message(m.RegisteredReply(life, reports=True), 100.1)
        assert member.may_report


class TestReports:
    """On virtual time."""

    def listed(self) -> tuple[RegistryRoster, Reports, Counter[str], list[bytes]]:
        roster = RegistryRoster(RegistrySettings(), 1, 0.0)
        roster.register(reg("p0", 71), "key", 0.0)
        heard: list[bytes] = []
        counters: Counter[str] = Counter()
        return roster, Reports(roster, lambda _, __, data: heard.append(data), counters), counters, heard

    def test_reports_are_no_sign_of_life(self) -> None:
        roster, reports, _, heard = self.listed()
        now = 0.0
        while roster.is_listed(P0):
            now += 0.5
            assert now < 60
            reports.take(P0, m.WorkerReport(Incarnation(71), b"x"), now)
            roster.on_time(now)
        assert now == pytest.approx(RegistrySettings().evict_s)
        assert heard

    def test_a_worker_has_so_many_at_once_and_so_many_a_second(self) -> None:
        _, reports, counters, heard = self.listed()
        for _ in range(100):
            reports.take(P0, m.WorkerReport(Incarnation(71), b"x"), 0.0)
        assert len(heard) == REPORTS_BURST_MAX
        for tick in range(1, 11):
            for _ in range(100):
                reports.take(P0, m.WorkerReport(Incarnation(71), b"x"), tick * 0.1)
        assert len(heard) == REPORTS_BURST_MAX + REPORTS_PER_S_MAX
        assert counters["reports_over_rate"] == 1100 - len(heard)

    def test_a_life_that_is_not_listed_is_not_heard(self) -> None:
        _, reports, counters, heard = self.listed()
        reports.take(P0, m.WorkerReport(Incarnation(72), b"x"), 0.0)
        reports.take(WorkerId("d0"), m.WorkerReport(Incarnation(71), b"x"), 0.0)
        assert (heard, counters["reports_late"]) == ([], 2)

    def test_questions_are_bounded_and_go_to_whoever_is_still_there(self) -> None:
        roster, reports, _, _ = self.listed()
        peer = PeerId(P0, Incarnation(71))
        assert not reports.ask(peer, ["early"]), "it has not reported"
        reports.take(P0, m.WorkerReport(Incarnation(71), b"x"), 0.0)
        assert reports.ask(peer, [str(number) for number in range(500)])
        ((worker, shown),) = reports.questions()
        assert (worker, len(shown.ids)) == ("p0", m.SHOWN_MAX)
        assert m.decode_from_registry(m.encode(shown)) == shown
        assert [reports.ask(peer, ["x"]) for _ in range(QUESTIONS_MAX + 1)][-2:] == [True, False]
        roster.deregister(P0, Incarnation(71))
        assert list(reports.questions()) == []

    def test_a_registry_that_nobody_listens_to_takes_none(self) -> None:
        roster, _, counters, _ = self.listed()
        deaf = Reports(roster, None, counters)
        assert not deaf.taken
        deaf.take(P0, m.WorkerReport(Incarnation(71), b"x"), 0.0)
        assert counters["reports_late"] == 1


def test_a_report_fits_into_a_frame_and_both_sides_mean_the_same_bound() -> None:
    assert m.REPORT_BYTES_MAX == REPORT_BYTES_MAX < FRAME_BYTES_MAX


@pytest.mark.parametrize("message", [m.WorkerReport(Incarnation(1), b"\x00\xff"), m.WorkerReport(Incarnation(1), b"")])
def test_a_report_arrives_as_it_was(message: m.WorkerReport) -> None:
    assert m.decode_to_registry(m.encode(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        {"type": "report", "incarnation": 1, "data": b"x" * (m.REPORT_BYTES_MAX + 1)},
        {"type": "report", "incarnation": 0, "data": b""},
        {"type": "report", "incarnation": 1, "data": "text"},
        {"type": "report", "incarnation": 1},
    ],
)
def test_a_report_beyond_its_bounds_is_a_fault(body: dict[str, object]) -> None:
    with pytest.raises(m.RegistryFault):
        m.decode_to_registry(msgspec.msgpack.encode((1, body)))


@pytest.mark.parametrize("ids", [["x"] * (m.SHOWN_MAX + 1), ["x" * (m.FIELD_CHARS_MAX + 1)], [7], "x"])
def test_a_question_beyond_its_bounds_is_a_fault(ids: object) -> None:
    with pytest.raises(m.RegistryFault):
        m.decode_from_registry(msgspec.msgpack.encode((1, {"type": "show", "incarnation": 1, "ids": ids})))
