"""The registry's list on virtual time."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.control.registry import Registration, RegistrySettings, WorkerState
from kvbaton.control.registry.registry_roster import RegistryRoster, Standing
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

SETTINGS = RegistrySettings(ping_s=1.0, suspect_s=3.0, evict_s=8.0, settle_s=8.0)


def reg(worker: str, incarnation: int = 1, port: int = 5000) -> Registration:
    endpoint = f"tcp://127.0.0.1:{port}"
    return Registration(WorkerId(worker), Incarnation(incarnation), "both", "127.0.0.1:80", endpoint)


class Desk:
    """A roster and a clock that ticks as the server's does."""

    def __init__(self, settings: RegistrySettings = SETTINGS) -> None:
        self.now = 100.0
        self.roster = RegistryRoster(settings, 1, self.now)
        self.pinging: dict[str, int] = {}

    def register(self, worker: str, incarnation: int = 1, *, pings: bool = False) -> Standing:
        if pings:
            self.pinging[worker] = incarnation
        return self.roster.register(reg(worker, incarnation), f"key of {worker}", self.now)

    def ping(self, worker: str, incarnation: int = 1) -> Standing:
        return self.roster.ping(WorkerId(worker), Incarnation(incarnation), self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker, incarnation in self.pinging.items():
                self.ping(worker, incarnation)
            self.roster.on_time(self.now)

    def listed(self) -> dict[str, tuple[int, WorkerState]]:
        return {e.registration.worker: (e.registration.incarnation, e.state) for e in self.roster.entries()}


def test_a_worker_that_pings_stays() -> None:
    desk = Desk()
    assert desk.register("p0", pings=True) is Standing.LISTED
    desk.run(100)
    assert desk.listed() == {"p0": (1, WorkerState.READY)}


def test_silence_makes_suspect_then_gone() -> None:
    desk = Desk()
    desk.register("p0")
    desk.run(2.5)
    assert desk.listed() == {"p0": (1, WorkerState.READY)}
    desk.run(0.5)
    assert desk.listed() == {"p0": (1, WorkerState.SUSPECT)}
    desk.run(4.5)
    assert desk.listed() == {"p0": (1, WorkerState.SUSPECT)}
    desk.run(0.5)
    assert desk.listed() == {}
    assert desk.ping("p0") is Standing.UNKNOWN


def test_a_suspect_that_pings_is_ready_again_and_the_workers_need_not_know() -> None:
    desk = Desk()
    desk.register("p0")
    seen = desk.roster.seen
    desk.run(4)
    revision = desk.roster.revision
    assert desk.ping("p0") is Standing.LISTED
    assert desk.listed() == {"p0": (1, WorkerState.READY)}
    assert desk.roster.revision == revision + 1 and desk.roster.seen == seen


def test_a_new_life_replaces_the_old_at_once() -> None:
    desk = Desk()
    desk.register("p0", 1)
    seen = desk.roster.seen
    assert desk.register("p0", 2) is Standing.LISTED
    assert desk.listed() == {"p0": (2, WorkerState.READY)}
    assert desk.roster.seen.version > seen.version


def test_a_replaced_life_neither_comes_back_nor_keeps_alive_nor_takes_away_its_successor() -> None:
    desk = Desk()
    desk.register("p0", 1)
    desk.register("p0", 2, pings=True)
    assert desk.register("p0", 1) is Standing.SUPERSEDED
    assert desk.ping("p0", 1) is Standing.SUPERSEDED
    desk.roster.deregister(WorkerId("p0"), Incarnation(1))
    assert desk.listed() == {"p0": (2, WorkerState.READY)}


def test_a_replaced_life_may_return_when_its_successor_has_left() -> None:
    desk = Desk()
    desk.register("p0", 1)
    desk.register("p0", 2)
    desk.roster.deregister(WorkerId("p0"), Incarnation(2))
    assert desk.ping("p0", 1) is Standing.UNKNOWN
    assert desk.register("p0", 1) is Standing.LISTED


def test_registering_again_without_a_change_is_no_news() -> None:
    desk = Desk()
    desk.register("p0")
    seen, revision = desk.roster.seen, desk.roster.revision
    assert desk.register("p0") is Standing.LISTED
    assert (desk.roster.seen, desk.roster.revision) == (seen, revision)


def test_registering_again_with_another_address_is_news() -> None:
    desk = Desk()
    desk.register("p0")
    seen = desk.roster.seen
    desk.roster.register(reg("p0", port=6000), "key", desk.now)
    assert desk.roster.seen != seen
    assert desk.roster.directory().entries[0].control_endpoint == "tcp://127.0.0.1:6000"


def test_a_full_roster_refuses_newcomers_but_not_those_it_has() -> None:
    desk = Desk(msgspec.structs.replace(SETTINGS, workers_max=2))
    desk.register("p0")
    desk.register("p1")
    assert desk.register("p2") is Standing.FULL
    assert desk.register("p1", 2) is Standing.LISTED
    assert set(desk.listed()) == {"p0", "p1"}


def test_what_the_registry_slept_through_is_nobodys_silence() -> None:
    desk = Desk()
    desk.register("p0", pings=True)
    desk.run(5)
    desk.now += 3600  # the host was suspended
    desk.roster.on_time(desk.now)
    assert desk.listed() == {"p0": (1, WorkerState.READY)}
    desk.pinging.clear()
    desk.run(8)
    assert desk.listed() == {}


def test_the_directory_of_a_young_registry_is_not_complete_and_names_who_left() -> None:
    desk = Desk()
    desk.register("p0", pings=True)
    desk.register("d0")
    desk.roster.deregister(WorkerId("d0"), Incarnation(1))
    young = desk.roster.directory()
    assert not young.complete and young.gone == (PeerId(WorkerId("d0"), Incarnation(1)),)
    desk.run(8)
    old = desk.roster.directory()
    assert old.complete and old.gone == ()
    assert old.seen.version > young.seen.version


def test_one_who_left_and_came_back_in_the_same_life_is_not_gone() -> None:
    desk = Desk()
    desk.register("d0")
    desk.roster.deregister(WorkerId("d0"), Incarnation(1))
    desk.register("d0")
    assert desk.roster.directory().gone == ()


def test_the_directory_carries_the_keys_that_were_proven() -> None:
    desk = Desk()
    desk.register("p0")
    assert [entry.public_key for entry in desk.roster.directory().entries] == ["key of p0"]


def test_it_asks_to_be_called_often_enough_to_tell_sleep_from_silence() -> None:
    desk = Desk()
    desk.run(3)
    assert desk.roster.next_deadline() - desk.now <= SETTINGS.ping_s / 2


@pytest.mark.parametrize(
    ("field", "value"), [("ping_s", 0), ("suspect_s", 0.5), ("evict_s", 2.0), ("workers_max", 0), ("settle_s", -1)]
)
def test_settings_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        msgspec.structs.replace(SETTINGS, **{field: value})
