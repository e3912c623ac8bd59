"""Who announced itself, on virtual time."""

from __future__ import annotations

import itertools

import pytest

from kvbaton.control.plain import AnnouncedWorker, Announcement, Fleet, PlainFault, PlainSettings
from kvbaton.control.plain.announcement_listener import WORKERS_MAX, PlainRoster
from kvbaton.control.plain.announcements import Role
from kvbaton.protocol.ids import Incarnation

READ, WRITE, P2P = Fleet.MORIIO_READ, Fleet.MORIIO_WRITE, Fleet.P2P_NCCL


def said(port: int, fleet: Fleet = READ, *, role: Role = "P", zmq: int = 1, tp: int = 1, dp: int = 1) -> Announcement:
    return Announcement(fleet, role, f"10.0.0.1:{port}", f"10.0.0.1:{zmq}", dp, tp)


class Desk:
    """A roster, a clock that ticks as the listener's does, and those who announce themselves every three seconds."""

    def __init__(self, settings: PlainSettings | None = None) -> None:
        self.now = 100.0
        lives = itertools.count(1)
        self.roster = PlainRoster(settings or PlainSettings(), lambda: Incarnation(next(lives)), self.now)
        self.talking: list[Announcement] = []
        self.gone: list[AnnouncedWorker] = []

    def say(self, announcement: Announcement) -> bool:
        return self.roster.announce(announcement, self.now)

    def refused(self, announcement: Announcement) -> PlainFault:
        with pytest.raises(PlainFault) as caught:
            self.say(announcement)
        return caught.value

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            if self.now % 3 == 0:
                for announcement in self.talking:
                    self.say(announcement)
            self.gone += self.roster.on_time(self.now)

    def lives(self) -> dict[str, tuple[int, bool]]:
        return {
            f"{entry.announcement.role}{entry.announcement.http_address.rpartition(':')[2]}": (
                entry.incarnation,
                entry.suspect,
            )
            for entry in self.roster.entries()
        }


# --- silence


def test_one_that_goes_on_talking_stays_and_nothing_changes() -> None:
    desk = Desk()
    desk.talking = [said(1)]
    assert desk.say(said(1))
    revision = desk.roster.revision
    desk.run(100)
    assert desk.lives() == {"P1": (1, False)} and desk.roster.revision == revision


def test_two_missed_make_suspect_and_fifteen_seconds_gone() -> None:
    desk = Desk()
    desk.say(said(1))
    desk.run(6.5)
    assert desk.lives() == {"P1": (1, False)}
    desk.run(0.5)
    assert desk.lives() == {"P1": (1, True)} and desk.roster.revision == 2
    desk.run(7.5)
    assert desk.lives() == {"P1": (1, True)} and desk.gone == []
    desk.run(0.5)
    assert desk.lives() == {} and [entry.announcement for entry in desk.gone] == [said(1)]
    assert desk.roster.revision == 3


def test_a_suspect_that_talks_is_back_at_once_in_the_same_life() -> None:
    desk = Desk()
    desk.say(said(1))
    desk.run(14.5)
    assert desk.lives() == {"P1": (1, True)}
    assert not desk.say(said(1))
    assert desk.lives() == {"P1": (1, False)}


def test_one_that_was_gone_comes_back_in_another_life() -> None:
    desk = Desk()
    desk.say(said(1))
    desk.run(15)
    assert desk.say(said(1))
    assert desk.lives() == {"P1": (2, False)}


def test_what_we_slept_through_is_nobodys_silence() -> None:
    desk = Desk()
    desk.say(said(1))
    desk.run(5)
    desk.now += 60
    assert desk.roster.on_time(desk.now) == () and desk.lives() == {"P1": (1, False)}
    desk.run(1)  # five before, one that may have been waiting, one after
    assert desk.lives() == {"P1": (1, True)}


def test_we_look_often_enough_to_know_that_we_slept_and_not_at_all_when_nobody_is_there() -> None:
    desk = Desk(PlainSettings(suspect_s=2.0, evict_s=3.0))
    assert desk.roster.next_deadline() is None
    desk.say(said(1))
    assert desk.roster.next_deadline() == desk.now + 0.25
    desk.roster.on_time(desk.now + 0.25)
    assert desk.roster.next_deadline() == desk.now + 0.5


# --- restarts


@pytest.mark.parametrize("later", [said(1, zmq=2), said(1, tp=2), said(1, dp=2)])
def test_other_words_at_the_same_address_are_another_life_at_once(later: Announcement) -> None:
    desk = Desk()
    desk.say(said(1))
    desk.say(said(2))
    assert desk.say(later)
    assert desk.lives() == {"P1": (3, False), "P2": (2, False)}
    assert [entry.announcement for entry in desk.roster.entries()] == [later, said(2)]


def test_p_and_d_at_one_address_are_two_workers() -> None:
    desk = Desk()
    desk.say(said(1))
    desk.say(said(1, role="D"))
    assert desk.lives() == {"D1": (2, False), "P1": (1, False)}


def test_entries_are_ordered_by_role_and_address() -> None:
    desk = Desk()
    for port, role in ((3, "P"), (1, "P"), (2, "D")):
        desk.say(said(port, role=role))  # type: ignore[arg-type]
    assert list(desk.lives()) == ["D2", "P1", "P3"]


# --- one fleet at a time


@pytest.mark.parametrize(
    ("there", "newcomer", "values"),
    [
        (READ, WRITE, ("got WRITE", "announce READ")),
        (WRITE, READ, ("got READ", "announce WRITE")),
        (READ, P2P, ("got none (P2pNccl)", "announce READ")),
        (P2P, WRITE, ("got WRITE", "announce none (P2pNccl)")),
    ],
)
def test_who_differs_is_refused_alone_with_both_values(there: Fleet, newcomer: Fleet, values: tuple[str, str]) -> None:
    desk = Desk()
    desk.say(said(1, there))
    fault = desk.refused(said(2, newcomer))
    assert fault.field == "transfer_mode" and all(value in str(fault) for value in values)
    assert desk.say(said(3, there))
    assert desk.lives() == {"P1": (1, False), "P3": (2, False)}


def test_another_size_of_tensor_parallelism_is_no_reason_to_refuse() -> None:
    desk = Desk()
    assert desk.say(said(1, tp=1)) and desk.say(said(2, tp=8))


def test_a_mode_ends_with_its_last_worker() -> None:
    desk = Desk()
    desk.say(said(1, WRITE))
    desk.run(14.5)
    assert desk.refused(said(2, READ)).field == "transfer_mode"  # a suspect still counts
    desk.run(0.5)
    assert desk.say(said(2, READ))
    assert desk.refused(said(1, WRITE)).field == "transfer_mode"


def test_the_only_worker_may_change_its_mode() -> None:
    desk = Desk()
    desk.say(said(1, READ))
    assert desk.say(said(1, WRITE))
    assert [entry.announcement.fleet for entry in desk.roster.entries()] == [WRITE]


def test_one_of_several_that_changes_its_mode_is_refused_and_its_old_entry_goes() -> None:
    desk = Desk()
    desk.say(said(1, READ))
    desk.say(said(2, READ))
    assert desk.refused(said(1, WRITE)).field == "transfer_mode"
    assert desk.lives() == {"P2": (2, False)}
    assert desk.say(said(1, READ)) and desk.lives()["P1"] == (3, False)


@pytest.mark.parametrize("fleet", list(Fleet))
def test_a_router_started_for_one_fleet_refuses_the_others_from_the_first_on(fleet: Fleet) -> None:
    desk = Desk(PlainSettings(fleet=fleet))
    for other in Fleet:
        if other is not fleet:
            assert "was started for" in str(desk.refused(said(1, other)))
    assert desk.say(said(1, fleet))


# --- bounds


def test_at_the_bound_newcomers_are_refused_and_those_listed_stay() -> None:
    desk = Desk(PlainSettings(workers_max=2))
    desk.say(said(1))
    desk.say(said(2))
    fault = desk.refused(said(3))
    assert fault.field == "workers" and "2 are listed" in str(fault)
    assert not desk.say(said(1)) and desk.say(said(2, zmq=9))
    assert list(desk.lives()) == ["P1", "P2"] and len(desk.roster) == 2


def test_thousands_who_come_once_leave_nothing_behind() -> None:
    desk = Desk()
    refused = 0
    for port in range(5000):
        try:
            desk.say(said(port))
        except PlainFault:
            refused += 1
    assert len(desk.roster) == WORKERS_MAX and refused == 5000 - WORKERS_MAX
    desk.run(15)
    assert len(desk.roster) == 0 and desk.roster.entries() == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"suspect_s": 0.0},
        {"suspect_s": 15.0},
        {"evict_s": float("inf")},
        {"evict_s": float("nan")},
        {"workers_max": 0},
        {"workers_max": WORKERS_MAX + 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PlainSettings(**wrong)  # type: ignore[arg-type]
