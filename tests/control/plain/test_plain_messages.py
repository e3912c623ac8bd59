"""The plain announcements: what each field may be, and that a fault names it."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.control.plain import Announcement, Fleet, PlainFault
from kvbaton.control.plain.announcements import MESSAGE_BYTES_MAX, NESTING_MAX, decode, is_nested_within
from kvbaton.control.plain.announcer import p2p_nccl_registration, registration

HTTP = "127.0.0.1:8100"
ZMQ = "host:127.0.0.1,handshake:6301,notify:61005"
MORIIO = {"type": "P", "http_address": HTTP, "zmq_address": ZMQ, "transfer_mode": "READ"}
P2P = {"type": "D", "http_address": HTTP, "zmq_address": "127.0.0.1:21001"}


def fault(payload: object) -> PlainFault:
    with pytest.raises(PlainFault) as caught:
        decode(payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload))
    assert str(caught.value).startswith(f"{caught.value.field}: ") and len(str(caught.value)) < 300
    return caught.value


def test_what_our_workers_send_is_understood() -> None:
    said = registration("P", HTTP, ZMQ, transfer_mode="READ", tp_size=2, dp_size=4).payload
    assert decode(said) == Announcement(Fleet.MORIIO_READ, "P", HTTP, ZMQ, dp_size=4, tp_size=2)
    said = registration("D", "[::1]:80", "host:::1,handshake:1,notify:2", transfer_mode="WRITE").payload
    assert decode(said) == Announcement(Fleet.MORIIO_WRITE, "D", "[::1]:80", "host:::1,handshake:1,notify:2")
    said = p2p_nccl_registration("D", HTTP, "[::1]:21001").payload
    assert decode(said) == Announcement(Fleet.P2P_NCCL, "D", HTTP, "[::1]:21001")


def test_sizes_are_optional_and_unknown_keys_pass() -> None:
    more = {**MORIIO, "later": {"nested": [1, {"two": None}]}, "model": "x"}
    assert decode(msgspec.msgpack.encode(more)) == Announcement(Fleet.MORIIO_READ, "P", HTTP, ZMQ, 1, 1)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("Node-7.Example:80", "node-7.example:80"),
        ("[2001:DB8:0::1]:80", "[2001:db8::1]:80"),
        ("a_b:1", "a_b:1"),
        ("node.7a:65535", "node.7a:65535"),
        (f"{'a' * 63}.{'b' * 63}:1", f"{'a' * 63}.{'b' * 63}:1"),
    ],
)
def test_addresses_are_brought_to_one_form(given: str, canonical: str) -> None:
    found = decode(msgspec.msgpack.encode({**P2P, "http_address": given, "zmq_address": given}))
    assert (found.http_address, found.zmq_address) == (canonical, canonical)


def test_mori_ios_ipv6_stands_bare_whether_it_came_in_brackets_or_not() -> None:
    for host in ("::1", "[::1]", "0:0::1"):
        told = {**MORIIO, "zmq_address": f"host:{host},handshake:1,notify:2"}
        assert decode(msgspec.msgpack.encode(told)).zmq_address == "host:::1,handshake:1,notify:2"


@pytest.mark.parametrize("missing", ["type", "http_address", "zmq_address"])
@pytest.mark.parametrize("message", [MORIIO, P2P])
def test_a_missing_field_is_named(message: dict[str, str], missing: str) -> None:
    rest = {field: value for field, value in message.items() if field != missing}
    assert str(fault(rest)) == f"{missing}: missing"


@pytest.mark.parametrize("field", ["type", "http_address", "zmq_address", "transfer_mode"])
@pytest.mark.parametrize("value", [None, 1, True, 1.5, b"P", ["P"], {"P": 1}, ""])
def test_a_text_of_another_type_is_refused(field: str, value: object) -> None:
    assert fault({**MORIIO, field: value}).field == field


@pytest.mark.parametrize("field", ["dp_size", "tp_size"])
@pytest.mark.parametrize("value", [None, True, False, 1.0, "1", 0, -1, 65_537, 1 << 63, [1]])
@pytest.mark.parametrize("message", [MORIIO, P2P])
def test_a_size_is_a_whole_number_within_its_bounds(message: dict[str, str], field: str, value: object) -> None:
    assert fault({**message, field: value}).field == field
    assert getattr(decode(msgspec.msgpack.encode({**message, field: 65_536})), field) == 65_536


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("127.0.0.1", ""),
        ("http://127.0.0.1:80", ""),
        ("127.0.0.1:80/v1", ""),
        ("::1:80", ".host"),
        ("::1", ".host"),
        ("[::1:80", ".host"),
        ("[127.0.0.1]:80", ".host"),
        ("[fe80::1%eth0]:80", ".host"),
        ("127.1:80", ".host"),
        ("2130706433:80", ".host"),
        ("0x7f.0x1:80", ".host"),
        ("010.0.0.1:80", ".host"),
        ("0.0.0.0:80", ".host"),
        ("[::]:80", ".host"),
        ("224.0.0.1:80", ".host"),
        ("[ff02::1]:80", ".host"),
        (":80", ".host"),
        ("user@host:80", ".host"),
        ("a b:80", ".host"),
        ("a..b:80", ".host"),
        ("a.:80", ".host"),
        ("-a:80", ".host"),
        ("a-:80", ".host"),
        ("*:80", ".host"),
        ("höst:80", ".host"),
        ("a___b:80", ".host"),
        (f"{'a' * 64}:80", ".host"),
        (f"{'a.' * 126}aa:80", ".host"),
        ("host:", ".port"),
        ("host:0", ".port"),
        ("host:080", ".port"),
        ("host:65536", ".port"),
        ("host:-1", ".port"),
        ("host:٣", ".port"),
        ("host:80\n", ".port"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_by_its_part(address: str, part: str) -> None:
    assert fault({**MORIIO, "http_address": address}).field == f"http_address{part}"
    assert fault({**P2P, "zmq_address": address}).field == f"zmq_address{part}"


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("127.0.0.1:6301", ""),
        ("host:127.0.0.1,notify:1,handshake:1", ""),
        ("host:127.0.0.1,handshake:1,notify:1,more:1", ""),
        ("host:,handshake:1,notify:1", ".host"),
        ("host:0.0.0.0,handshake:1,notify:1", ".host"),
        ("host:127.0.0.1,handshake:0,notify:1", ".handshake"),
        ("host:127.0.0.1,handshake:1,notify:x", ".notify"),
    ],
)
def test_mori_ios_address_is_refused_by_its_part(address: str, part: str) -> None:
    assert fault({**MORIIO, "zmq_address": address}).field == f"zmq_address{part}"


@pytest.mark.parametrize("mode", ["read", "Write", "PULL"])
def test_a_transfer_mode_is_upper_case_and_the_fault_says_so(mode: str) -> None:
    found = fault({**MORIIO, "transfer_mode": mode})
    assert found.field == "transfer_mode"
    assert mode in str(found) and "READ or WRITE" in str(found) and "lower case is refused" in str(found)


@pytest.mark.parametrize("role", ["p", "PD", "prefill"])
def test_a_type_is_p_or_d(role: str) -> None:
    assert fault({**MORIIO, "type": role}).field == "type"


def test_mori_ios_address_needs_a_mode() -> None:
    rest = {field: value for field, value in MORIIO.items() if field != "transfer_mode"}
    assert fault(rest).field == "transfer_mode"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x80\x80",
        msgspec.msgpack.encode(MORIIO)[:-1],
        msgspec.msgpack.encode(MORIIO) + b"\x00",
        msgspec.json.encode(MORIIO),
        b"\x81\xa4type" + b"\x91" * 4000,  # nested deeper than anyone reads
        b"\x81\xa1x" + b"\x81\x01" * 2000 + b"\x01",
        b"\xdf\xff\xff\xff\xff",  # a map that says it has four thousand million entries
        msgspec.msgpack.encode({**MORIIO, "pad": "x" * MESSAGE_BYTES_MAX}),
        [MORIIO],
        {1: 2},
        None,
        7,
        "P",
    ],
)
def test_what_is_no_map_of_moderate_size_is_refused(payload: object) -> None:
    assert fault(payload).field == "message"


def wrapped(value: object, depth: int) -> object:
    for level in range(depth):
        value = {"k": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize("kind", [1, -1, 300, 1 << 40, 0.5, None, True, "x" * 40, "x" * 300, b"b" * 300, b"b", []])
def test_depth_is_counted_alike_whatever_lies_beside(kind: object) -> None:
    """The message itself is one map. Beside values of every size on the wire, none of which is taken for a list."""
    for depth, well in ((NESTING_MAX - 1, True), (NESTING_MAX, False)):
        payload = msgspec.msgpack.encode({**MORIIO, "more": kind, "all": [kind] * 20, "deep": wrapped(kind, depth)})
        inner = 1 if kind == [] else 0  # a list itself
        assert is_nested_within(payload, NESTING_MAX + inner) is well
    shallow = {**MORIIO, "more": wrapped(kind, NESTING_MAX - 2)}
    assert decode(msgspec.msgpack.encode(shallow)) == decode(msgspec.msgpack.encode(MORIIO))


def test_text_that_is_not_utf_8_is_refused_by_its_field() -> None:
    damaged = msgspec.msgpack.encode(MORIIO).replace(b"127.0.0.1:8100", b"127.0.0.1:81\xff\xfe")
    assert fault(damaged).field == "http_address"


def test_a_fault_shows_no_control_characters_and_not_much() -> None:
    text = str(fault({**MORIIO, "http_address": "\x1b[2J\n" + "ü" * 900 + ":80"}))
    assert text.isprintable() and text.isascii()
