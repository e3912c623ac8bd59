"""Request ids and addresses from anyone: a refusal or a value that says the same when it is built again."""

from __future__ import annotations

import time

import msgspec
import pytest
from fuzzing import CASES_MIN, TIMEOUT_S, Family, damaged_text, hosts, ports, text_edits
from hypothesis import strategies as st
from laws import D_MARK, HEX, P_MARK, bounded, looked_at

from kvbaton.api.request_ids import (
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

pytestmark = pytest.mark.timeout(TIMEOUT_S)
request_ids = Family(examples=500)

peers: st.SearchStrategy[PeerAddress] = st.builds(MoriioAddress, hosts, ports, ports) | st.builds(
    HostPort, hosts, ports
)
hexes = st.text(HEX, min_size=32, max_size=32)
tails = st.text(HEX, min_size=8, max_size=8)
indexes = st.none() | st.integers(0, 9_999_999)
words = st.sampled_from(["", "cmpl-", "chatcmpl-", "generate-tokens-", "resp_", "some-later-endpoint-"])


def test_enough_cases_are_tried() -> None:
    assert request_ids.cases >= CASES_MIN


def decorated(
    built: str, sample: int | None, word: str, prompt: int | None, number: int | None, tail: str | None
) -> str:
    """What vLLM makes of an id."""
    text = f"{'' if sample is None else f'{sample}_'}{word}{built}"
    text += f"{'' if prompt is None else f'-{prompt}'}{'' if number is None else f'_{number}'}"
    return text + ("" if tail is None else f"-{tail}")


@request_ids.fuzz(peers, peers, hexes, indexes, words, indexes, indexes, st.none() | tails)
def test_what_is_built_is_read_back_whatever_vllm_puts_around_it(
    prefill: PeerAddress,
    decode: PeerAddress,
    unique: str,
    sample: int | None,
    word: str,
    prompt: int | None,
    number: int | None,
    tail: str | None,
) -> None:
    built = build(prefill, decode, unique)
    assert parse(built) == Addresses(prefill, decode, unique)
    expected = Addresses(prefill, decode, unique, prompt or 0, number or 0, sample or 0)
    assert parse(decorated(built, sample, word, prompt, number, tail)) == expected


@request_ids.fuzz(peers, text_edits)
def test_every_address_is_read_back_and_a_damaged_one_is_refused_or_another(
    address: PeerAddress, damage: list[tuple[int, int, str]]
) -> None:
    assert parse_address(str(address)) == address
    assert parse_address(str(address).upper().replace("HOST:", "host:").replace("HANDSHAKE", "handshake").replace(
        "NOTIFY", "notify"
    )) == address  # fmt: skip
    looked_at(damaged_text(str(address), damage))
    looked_at(str(msgspec.structs.replace(address, **{address.__struct_fields__[-1]: 65_536 + len(damage)})))


anyone = st.text(max_size=12) | hosts
anything = st.integers(-(1 << 40), 1 << 40)


@request_ids.fuzz(
    st.builds(MoriioAddress, anyone, anything | ports, anything | ports)
    | st.builds(HostPort, anyone, anything | ports),
    peers,
    hexes | st.text(max_size=40),
)
def test_what_could_not_be_read_back_is_not_built(odd: PeerAddress, good: PeerAddress, unique: str) -> None:
    for prefill, decode in ((odd, good), (good, odd)):
        try:
            built = build(prefill, decode, unique)
        except RequestIdError as error:
            bounded(error)
        else:
            found = parse(built)
            assert found is not None
            assert (found.prefill, found.decode) == (parse_address(str(prefill)), parse_address(str(decode)))


@request_ids.fuzz(hexes, text_edits)
def test_both_forms_of_a_transfer_id_give_the_same_hex_and_damaged_ones_none_or_hex(
    digits: str, damage: list[tuple[int, int, str]]
) -> None:
    dashed = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    for text in (f"tx-{digits}", f"tx-{dashed}"):
        assert transfer_hex(text) == digits
        looked_at(damaged_text(text, damage))


@pytest.mark.parametrize("unit", ["a", "a.", "-", "_", "0", "f", ":", "::", "[", "1.", "0x", ",", P_MARK, D_MARK, "ü"])
def test_long_input_takes_time_in_proportion(unit: str) -> None:
    long = unit * (400_000 // len(unit))
    began = time.process_time()
    for text in (
        long,
        f"{long}:80",
        f"[{long}]:80",
        f"a:{long}",
        f"host:{long},handshake:1,notify:1",
        f"host:a,handshake:{long},notify:{long}",
        f"{P_MARK}a:1{D_MARK}{long}_{HEX * 2}",
        f"{P_MARK}{long}{D_MARK}a:1_{HEX * 2}",
        f"{long}{P_MARK}a:1{D_MARK}a:1_{HEX * 2}",
        f"tx-{long}",
    ):
        looked_at(text)
    assert time.process_time() - began < 4.0  # milliseconds; hours if it grew with the square


@pytest.mark.parametrize("unit", ["a", "-", "_", "0", "f", "a-", "0_", "-0", "_" + HEX * 2, ":", "."])
def test_the_longest_ids_that_are_read_take_time_in_proportion(unit: str) -> None:
    pad = unit * (900 // len(unit))
    began = time.process_time()
    for text in (f"{pad}{P_MARK}a:1{D_MARK}a:1_{HEX * 2}", f"{P_MARK}{pad}{D_MARK}a:1_{HEX * 2}"):
        looked_at(text)
    looked_at(f"{P_MARK}a:1{D_MARK}a:1_{HEX * 2}{pad}")
    looked_at(f"{P_MARK}a:1{D_MARK}{pad}_{HEX * 2}")
    assert time.process_time() - began < 1.0
