"""Registrations from anyone: the plain announcements and their list, and what the authenticated registry is told.

Any bytes, and any damage, are tried by the targets `plain` and `registry`, guided by coverage.
"""

from __future__ import annotations

import itertools
import time
import typing
from contextlib import suppress

import msgspec
import pytest
from fuzzing import (
    CASES_MIN,
    TIMEOUT_S,
    Family,
    damaged_text,
    dialable,
    host_port,
    hosts,
    packed,
    ports,
    text_edits,
    values,
)
from hypothesis import strategies as st
from laws import heard, told, understood
from targets_control import plainest_messages

from kvbaton.api.request_ids import RequestIdError, parse_address
from kvbaton.control.keyring import Keyring
from kvbaton.control.plain import AnnouncedWorker, Announcement, Fleet, PlainFault, PlainSettings
from kvbaton.control.plain.announcement_listener import PlainRoster
from kvbaton.control.plain.announcements import RANKS_MAX, payload_of
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry import statements
from kvbaton.control.signing import Signed
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.workers.directories import RANKS_LISTED_MAX, AnnouncedDirectory

pytestmark = pytest.mark.timeout(TIMEOUT_S)
plain = Family(examples=400)


def test_enough_cases_are_tried() -> None:
    assert plain.cases >= CASES_MIN


# --- plain announcements


def moriio(host: str, handshake: int, notify: int) -> str:
    return f"host:{host},handshake:{handshake},notify:{notify}"


http_addresses = st.builds(host_port, dialable, ports)
sizes = st.integers(1, RANKS_MAX)
announcements = st.builds(
    Announcement,
    st.sampled_from([Fleet.MORIIO_READ, Fleet.MORIIO_WRITE]),
    st.sampled_from("PD"),
    http_addresses,
    st.builds(moriio, dialable, ports, ports),
    sizes,
    sizes,
) | st.builds(Announcement, st.just(Fleet.P2P_NCCL), st.sampled_from("PD"), http_addresses, http_addresses)


@plain.fuzz(announcements, values)
def test_every_announcement_arrives_as_it_was(said: Announcement, more: object) -> None:
    assert heard(packed(told(said))) == said
    assert heard(packed({**told(said), "later": more})) == said


near_hosts = hosts | st.sampled_from(["a___b", "a..b", "127.1", "0x7f.1", "A"])
near_ports = ports | st.integers(65_530, 70_000)


@plain.fuzz(st.builds(host_port, near_hosts, near_ports) | st.builds(moriio, near_hosts, ports, near_ports), text_edits)
def test_an_address_that_is_listed_can_stand_in_a_request_id(address: str, damage: list[tuple[int, int, str]]) -> None:
    for text in (address, damaged_text(address, damage)):
        try:
            expected = str(parse_address(text))
        except RequestIdError:
            expected = None
        fields = {"type": "P", "http_address": "a:1", "zmq_address": text}
        for message in (fields, {**fields, "transfer_mode": "READ"}):
            found = heard(packed(message))
            assert found is None or found.zmq_address == expected


@plain.fuzz(st.lists(st.binary(max_size=2), max_size=4))
def test_any_frames(frames: list[bytes]) -> None:
    try:
        said = payload_of(frames)
    except PlainFault as fault:
        assert fault.field == "frames"
    else:
        assert frames in ([said], [b"", said])


few = st.builds(
    Announcement,
    st.sampled_from([*[Fleet.MORIIO_READ] * 8, *Fleet]),  # so that some lists grow full
    st.sampled_from("PD"),
    st.integers(1, 6).map("a:{}".format),
    st.integers(1, 2).map("a:{}".format),
    st.just(1),
    st.integers(1, 2),
)


@plain.fuzz(st.lists(few | st.floats(0.0, 8.0), max_size=40))
def test_the_list_stays_one_bounded_fleet_in_which_same_words_mean_the_same_life(events: list[object]) -> None:
    lives = itertools.count(1)
    now = 0.0
    roster = PlainRoster(PlainSettings(workers_max=4), lambda: Incarnation(next(lives)), now)
    before: tuple[AnnouncedWorker, ...] = ()
    revision = 0
    for event in events:
        if isinstance(event, Announcement):
            with suppress(PlainFault):
                roster.announce(event, now)
                assert any(entry.announcement == event and not entry.suspect for entry in roster.entries())
        else:
            now += typing.cast(float, event)
            roster.on_time(now)
        entries = roster.entries()
        assert len(entries) == len(roster) <= 4
        assert len({entry.announcement.fleet for entry in entries}) <= 1
        keys = [entry.announcement.key for entry in entries]
        assert keys == sorted(set(keys))
        assert (entries == before) == (roster.revision == revision)
        known = {entry.incarnation: entry.announcement for entry in before}
        assert all(known.get(entry.incarnation, entry.announcement) == entry.announcement for entry in entries)
        before, revision = entries, roster.revision
    now += 1000.0
    for _ in range(40):  # what it sleeps through it forgives; so in steps
        now += 0.5
        roster.on_time(now)
    assert roster.entries() == ()


class Listening:
    def __init__(self, said: list[Announcement]) -> None:
        self._listed = tuple(AnnouncedWorker(one, Incarnation(1)) for one in said)

    def workers(self) -> tuple[AnnouncedWorker, ...]:
        return self._listed


@plain.fuzz(st.lists(announcements, min_size=1, max_size=6, unique_by=lambda said: said.key))
def test_every_list_is_one_of_workers_with_distinct_names(said: list[Announcement]) -> None:
    found = AnnouncedDirectory(Listening(said)).snapshot()
    most = RANKS_LISTED_MAX // len(said)
    ranks = [min(one.dp_size, most) if one.fleet is Fleet.MORIIO_WRITE else 1 for one in said]  # both legs name theirs
    assert len({worker.name for worker in found}) == len(found) == sum(ranks)
    told = zip(said, ranks, strict=True)
    assert [worker.address for worker in found] == [one.zmq_address for one, count in told for _ in range(count)]


# --- the authenticated registry


def test_every_message_of_the_registry_arrives_as_it_was() -> None:
    """One of each kind, with which the target `registry` begins: it tries whatever else a decoder takes."""
    said = list(plainest_messages())
    assert {"register", "ping", "directory"} <= {str(type(message).__struct_config__.tag) for _, message in said}
    for decoder, message in said:
        assert decoder(m.encode(message)) == message  # type: ignore[arg-type]


# --- long input


LONG = 200_000
LONGEST = [
    b"\x91" * LONG,
    b"\x81\xa1x" * LONG,
    b"\xdf\xff\xff\xff\xff" + b"\x01" * LONG,
    b"\xdd\xff\xff\xff\xff" + b"\x90" * LONG,
    b"\xc6\x7f\xff\xff\xff" + b"x" * LONG,
    packed({"type": "P", "http_address": "a." * LONG + ":1", "zmq_address": "a:1"}),
    packed([m.VERSION, {"type": "register", "registration": {"worker": "a" * LONG}}]),
    packed([m.VERSION, {"type": "directory", "entries": [{}] * LONG}]),
    packed([m.VERSION, {"type": "refused", "detail": ":" * LONG}]),
    packed([m.VERSION, {"type": "x" * LONG}]),
]


@pytest.mark.parametrize("payload", LONGEST, ids=range(len(LONGEST)))
def test_long_input_takes_time_in_proportion(payload: bytes) -> None:
    began = time.process_time()
    heard(payload)
    understood(payload)
    assert time.process_time() - began < 2.0  # milliseconds; hours if it grew with the square


@pytest.mark.parametrize("unit", ["a", "a.", "a-", "-", ".", ":", "::", "[", "1.", "0x", "_", ",", "ü"])
def test_the_longest_addresses_that_fit_take_time_in_proportion(unit: str) -> None:
    text = (unit * 4000)[:3800]
    began = time.process_time()
    for address in (text, f"{text}:1", f"[{text}]:1", f"host:{text},handshake:1,notify:1", f"a:{text}"):
        for field_name in ("http_address", "zmq_address"):
            heard(packed({"type": "P", "http_address": "a:1", "zmq_address": "a:1", field_name: address}))
    assert time.process_time() - began < 2.0


@plain.fuzz(st.binary(max_size=200) | st.builds(msgspec.msgpack.encode, values))
def test_signed_bytes_are_a_statement_or_a_fault_and_an_order_or_none(said: bytes) -> None:
    signed = Signed(said, b"s" * 64)
    with suppress(m.RegistryFault):
        statements.read(signed)
        raise AssertionError("random bytes were a statement")
    assert not statements.is_ordered(Keyring(WorkerId("p0"), "", "", {}, ()), signed, WorkerId("p0"), 1)
