"""Ids that embed addresses: what a router builds, what vLLM makes of it, and what a stranger may send instead."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvbaton.api.request_ids import (
    REQUEST_ID_CHARS_MAX,
    Addresses,
    HostPort,
    MoriioAddress,
    PeerAddress,
    RequestIdError,
    build,
    parse,
    parse_address,
    transfer_hex,
)

HEX = "0123456789abcdef" * 2
P = MoriioAddress("10.0.0.1", 6301, 61005)
D = MoriioAddress("10.0.0.2", 6302, 61006)
ID = (
    "___prefill_addr_host:10.0.0.1,handshake:6301,notify:61005"
    f"___decode_addr_host:10.0.0.2,handshake:6302,notify:61006_{HEX}"
)

hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def refused(request_id: str) -> str:
    """The field that a refusal names."""
    with pytest.raises(RequestIdError) as caught:
        parse(request_id)
    assert str(caught.value).startswith(caught.value.field + ":") and len(str(caught.value)) < 1200
    return caught.value.field


def test_the_id_is_exactly_the_one_that_vllm_router_builds() -> None:
    assert build(P, D, HEX) == ID
    assert parse(ID) == Addresses(P, D, HEX)


@pytest.mark.parametrize(
    ("decorated", "prompt", "number", "sample"),
    [
        (f"cmpl-{ID}-0-deadbeef", 0, 0, 0),
        (f"cmpl-{ID}-3-12345678", 3, 0, 0),
        (f"cmpl-{ID}-3", 3, 0, 0),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1
        (f"chatcmpl-{ID}-12345678", 0, 0, 0),  # decimal, and yet the random tail
        (f"chatcmpl-{ID}_1-deadbeef", 0, 1, 0),  # MoRI-IO's own pattern loses this one, and the engine with it
        (f"generate-tokens-{ID}-deadbeef", 0, 0, 0),
        (f"resp_{ID}_2", 0, 2, 0),
        (f"5_cmpl-{ID}-1-deadbeef", 1, 0, 5),
    ],
)
def test_the_ids_of_vllm_0_32(decorated: str, prompt: int, number: int, sample: int) -> None:
    assert parse(decorated) == Addresses(P, D, HEX, prompt, number, sample)


def test_p_and_d_agree_although_vllm_gave_each_its_own_tail() -> None:
    assert parse(f"cmpl-{ID}-0-00000000") == parse(f"cmpl-{ID}-0-ffffffff")


@unhurried
@given(st.text(max_size=1100))
@example("")
@example("cmpl-" + HEX + "-0-deadbeef")
@example("x" * 100_000)
@example("_prefill_addr_ ___decode_addr")
def test_an_id_without_addresses_is_none(text: str) -> None:
    if "___prefill_addr_" not in text and "___decode_addr_" not in text:
        assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (ID.replace("___prefill_addr_", "___prefill_addr_h:1___prefill_addr_"), "request_id"),
        (ID.replace("___decode_addr_", "___decode_addr_h:1___decode_addr_"), "request_id"),
        (f"{ID}{ID}", "request_id"),
        (f"___prefill_addr_{P}_{HEX}", "request_id"),
        (f"___decode_addr_{D}_{HEX}", "request_id"),
        (f"___decode_addr_{D}___prefill_addr_{P}_{HEX}", "request_id"),
        (ID.replace("___prefill_addr_", "___prefill_addr___prefill_addr_"), "prefix"),  # sharing an underscore
        (ID.replace("___decode_addr_", "___decode_addr___decode_addr_"), "prefill.notify"),
        (f"{ID}_{HEX}", "decode.notify"),
        (f"{ID}-{HEX}", "unique"),
        (ID + "x" * REQUEST_ID_CHARS_MAX, "request_id"),
    ],
)
def test_an_id_that_could_be_read_in_two_ways_is_refused(text: str, field: str) -> None:
    assert refused(text) == field


@pytest.mark.parametrize(
    "end", ["", HEX.upper(), HEX[:-1], HEX + "0", "01234567-89ab-cdef-0123-456789abcdef", HEX + "\n", HEX + "-0-dead"]
)
def test_the_hex_is_32_lowercase_digits_at_the_end(end: str) -> None:
    assert refused(ID.removesuffix(HEX) + end) == "unique"


@pytest.mark.parametrize(
    "behind", ["-", "-00", "-deadbee", "_", "-0-1", "--1", "-12345678-deadbeef", "-0-deadbeef-0", " "]
)
def test_what_vllm_does_not_append_is_refused(behind: str) -> None:
    assert refused(ID + behind) == "unique"


@pytest.mark.parametrize("before", ["x", "http://", "5__", "-1_", "5-", "CMPL-", "cmpl-\n", "a" * 33 + "-", "00_"])
def test_what_vllm_does_not_prepend_is_refused(before: str) -> None:
    assert refused(before + ID) == "prefix"


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("", ""),
        ("10.0.0.1", ""),
        ("host:10.0.0.1,handshake:1", ""),
        ("host:10.0.0.1,notify:1,handshake:1", ""),
        ("host:10.0.0.1,handshake:1,notify:1,more:1", ""),
        ("host:,handshake:1,notify:1", ".host"),
        ("host:a b,handshake:1,notify:1", ".host"),
        ("host:a___b,handshake:1,notify:1", ".host"),
        ("host:10.0.0.1,handshake:0,notify:1", ".handshake"),
        ("host:10.0.0.1,handshake:65536,notify:1", ".handshake"),
        ("host:10.0.0.1,handshake:1,notify:01", ".notify"),
        ("host:10.0.0.1,handshake:1,notify:١", ".notify"),
        ("host:fe80::1%eth0,handshake:1,notify:1", ".host"),
        ("host:[10.0.0.1],handshake:1,notify:1", ".host"),
        ("host:[::1,handshake:1,notify:1", ".host"),
        ("::1:80", ".host"),
        ("127.1:80", ".host"),
        ("2130706433:80", ".host"),
        ("0x7f.0x1:80", ".host"),
        ("010.0.0.1:80", ".host"),
        ("tcp://10.0.0.1:80", ".host"),
        ("user@host:80", ".host"),
        ("10.0.0.1:", ".port"),
        ("10.0.0.1:-1", ".port"),
        ("10.0.0.1:99999", ".port"),
    ],
)
def test_a_malformed_address_is_refused_by_its_part(address: str, part: str) -> None:
    assert refused(f"___prefill_addr_{address}___decode_addr_{D}_{HEX}") == "prefill" + part
    assert refused(f"___prefill_addr_{P}___decode_addr_{address}_{HEX}") == "decode" + part


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:::1,handshake:3,notify:4", MoriioAddress("::1", 3, 4)),
        ("host:[::1],handshake:3,notify:4", MoriioAddress("::1", 3, 4)),
        ("host:2001:DB8:0::1,handshake:3,notify:4", MoriioAddress("2001:db8::1", 3, 4)),
        ("host:Node-7.local,handshake:3,notify:4", MoriioAddress("node-7.local", 3, 4)),
        ("[::1]:80", HostPort("::1", 80)),
        ("10.0.0.1:80", HostPort("10.0.0.1", 80)),
        ("LocalHost:80", HostPort("localhost", 80)),
    ],
)
def test_hosts_are_brought_to_one_form(text: str, address: PeerAddress) -> None:
    assert parse_address(text) == address
    found = parse(f"___prefill_addr_{text}___decode_addr_{text}_{HEX}-1")
    assert found == Addresses(address, address, HEX, 1)


def test_mori_io_is_given_ipv6_without_brackets_and_a_host_with_port_with_them() -> None:
    assert str(MoriioAddress("::1", 3, 4)) == "host:::1,handshake:3,notify:4"
    assert str(HostPort("::1", 80)) == "[::1]:80"


@pytest.mark.parametrize(
    ("prefill", "unique", "field"),
    [
        (P, HEX.upper(), "unique"),
        (P, "", "unique"),
        (MoriioAddress("a,b", 1, 2), HEX, "prefill"),
        (MoriioAddress("a", 0, 2), HEX, "prefill.handshake"),
        (HostPort("a___decode_addr_b", 2), HEX, "prefill.host"),
        (HostPort("a", 70000), HEX, "prefill.port"),
    ],
)
def test_what_could_not_be_read_back_is_not_built(prefill: PeerAddress, unique: str, field: str) -> None:
    with pytest.raises(RequestIdError) as caught:
        build(prefill, D, unique)
    assert caught.value.field == field


@unhurried
@given(hexes)
def test_every_form_of_a_transfer_id_gives_the_same_hex(digits: str) -> None:
    dashed = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    assert {transfer_hex(f"{mark}{text}") for mark in ("tx-", "tx") for text in (digits, dashed)} == {digits}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tx-",
        "tx",
        f"tx--{HEX}",
        HEX,
        f"tx-{HEX}0",
        f"tx-{HEX.upper()}",
        f"tx-{HEX}\n",
        f"sidecar-{HEX}",
        "tx-" + "-" * 36,
    ],
)
def test_other_transfer_ids_have_no_hex(text: str) -> None:
    assert transfer_hex(text) is None


def test_the_longest_addresses_fit() -> None:
    longest = MoriioAddress("a" * 253, 65535, 65535)
    assert parse(f"9999999_generate-tokens-{build(longest, longest, HEX)}-9999999_9999999-deadbeef") is not None
