from __future__ import annotations

import msgspec
import pytest

from kvbaton.control.registry import DirectoryEntry, Registration, addresses
from kvbaton.control.registry import registry_messages as m
from kvbaton.protocol.ids import Incarnation, WorkerId

from ..rig import cluster

KEY = cluster("p0")["p0"].public
LIFE = Incarnation(2**63 - 1)
GOOD = Registration(
    WorkerId("p0"), LIFE, "prefill", "127.0.0.1:8000", "tcp://127.0.0.1:5000", ("pull",), ("shm",), "ab", 2
)
ENTRY = DirectoryEntry(WorkerId("p0"), Incarnation(7), "both", "tcp://[::1]:5", KEY)


def _changed(**fields: object) -> bytes:
    """A Register frame with some fields replaced, as any program could send it."""
    body = msgspec.to_builtins(m.Register(GOOD))
    body["registration"].update(fields)
    return msgspec.msgpack.encode((m.VERSION, body))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker", "../p0"),
        ("worker", 7),
        ("worker", "x" * 65),
        ("incarnation", 0),
        ("incarnation", -1),
        ("incarnation", 2**63),
        ("incarnation", "1"),
        ("role", "P"),
        ("http_address", "http://127.0.0.1:8000"),
        ("http_address", "x" * 300),
        ("http_address", None),
        ("control_endpoint", "tcp://*:5000"),
        ("control_endpoint", "tcp://0.0.0.0:5000"),
        ("control_endpoint", "ipc:///tmp/socket"),
        ("control_endpoint", "tcp://some-host:5000"),
        ("modes", ["pull"] * 17),
        ("modes", "pull"),
        ("transports", ["x" * 65]),
        ("compat_digest", "x" * 65),
        ("tp_size", 0),
        ("tp_size", 4096),
        ("model", "x" * 257),
        ("host", "x" * 257),
        ("draining", "yes"),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(m.RegistryFault, match=field):
        m.decode_to_registry(_changed(**{field: value}))


def test_a_field_that_this_version_does_not_know_passes() -> None:
    message = m.decode_to_registry(_changed(colour="blue"))
    assert message == m.Register(GOOD)


def test_a_release_that_knows_nothing_of_draining_is_understood_and_understands() -> None:
    body = msgspec.to_builtins(m.Register(GOOD))
    for field in ("host", "draining"):
        del body["registration"][field]
    assert m.decode_to_registry(msgspec.msgpack.encode((m.VERSION, body))) == m.Register(GOOD)
    answer = {"type": "registered", "incarnation": 1}
    assert m.decode_from_registry(msgspec.msgpack.encode((m.VERSION, answer))) == m.RegisteredReply(Incarnation(1))


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"type": "drain", "worker": "../p0"}, "worker"),
        ({"type": "drain", "worker": "x" * 65}, "worker"),
        ({"type": "drain", "worker": "p0", "incarnation": -1}, "incarnation"),
        ({"type": "ping", "incarnation": 1, "seen": {}, "held": "x" * 257}, "held"),
    ],
)
def test_an_order_out_of_bounds_is_refused_by_name(frame: dict[str, object], field: str) -> None:
    with pytest.raises(m.RegistryFault, match=field):
        m.decode_to_registry(msgspec.msgpack.encode((m.VERSION, frame)))


def test_discards_are_bounded_in_number_and_length() -> None:
    m.decode_from_registry(m.encode(m.DiscardTickets(Incarnation(1), ("x",) * m.TICKETS_MAX)))
    for tickets in (("x",) * (m.TICKETS_MAX + 1), ("x" * 1025,)):
        with pytest.raises(m.RegistryFault, match="tickets"):
            m.decode_from_registry(m.encode(m.DiscardTickets(Incarnation(1), tickets)))


def test_what_the_registry_tells_an_operator_arrives_as_it_was() -> None:
    for message in (m.DrainState(WorkerId("p0"), "unknown", workers=("d0",)), m.RegistryRefused("why")):
        assert m.decode_to_operator(m.encode(message)) == message
    with pytest.raises(m.RegistryFault):
        m.decode_to_operator(m.encode(m.RegisteredReply(Incarnation(1))))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(m.RegistryFault, match="version: got 2"):
        m.decode_to_registry(msgspec.msgpack.encode((2, {})))


@pytest.mark.parametrize("field", ["worker", "incarnation", "control_endpoint", "public_key"])
def test_a_worker_checks_what_the_registry_says_too(field: str) -> None:
    body = msgspec.to_builtins(m.Directory(m.SeenWorkers(1, 2), True, (ENTRY,)), builtin_types=(bytes,))
    body["entries"][0][field] = 0 if field == "incarnation" else "no good"
    with pytest.raises(m.RegistryFault, match=field):
        m.decode_from_registry(msgspec.msgpack.encode((m.VERSION, body)))


def test_a_directory_becomes_addresses_to_dial() -> None:
    assert addresses([ENTRY]) == {"p0": ("tcp://[::1]:5", KEY)}


def test_what_ends_on_an_operators_screen_is_printable() -> None:
    ping = m.Ping(Incarnation(1), m.SeenWorkers(), "2 requests\x1b[2J")
    with pytest.raises(m.RegistryFault, match="held"):
        m.decode_to_registry(m.encode(ping))
