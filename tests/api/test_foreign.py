"""What routers of other systems send becomes what ours would have sent, or one refusal."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvbaton.api.params import (
    TICKETS_MAX,
    ForeignLookup,
    Mode,
    TransferParams,
    one_of,
    pair_params,
    tickets_in,
    together,
    translated,
)
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import unseal

KEY = b"k" * 32
HEX = "0123456789abcdef" * 2
P_AT, D_AT = "host:10.0.0.1,handshake:7100,notify:7100", "host:fd00::2,handshake:7200,notify:7200"
BOOK = {("10.0.0.1", 7100): WorkerId("p0"), ("fd00::2", 7200): WorkerId("d0")}
ID = f"___prefill_addr_{P_AT}___decode_addr_{D_AT}_{HEX}"
COMMON: dict[str, Any] = {"transfer_id": f"tx-{HEX}", "remote_block_ids": None, "remote_engine_id": None, "odd": [1]}
TO_P = {**COMMON, "do_remote_decode": True, "do_remote_prefill": False, "remote_dp_size": 1, "remote_tp_size": 4}
TO_D = {**COMMON, "do_remote_decode": False, "do_remote_prefill": True, "remote_dp_size": 1, "remote_tp_size": 2}


def lookup(me: str, mode: Mode = Mode.PUSH) -> ForeignLookup:
    return ForeignLookup(mode, tuple(Mode), WorkerId(me), KEY, 60.0, lambda host, port: BOOK.get((host, port)))


def handoff(params: TransferParams | None) -> tuple[str, str, str]:
    assert params is not None and params.ticket is not None and params.mode is Mode.PUSH
    ticket = unseal(params.ticket, [KEY], time.time())
    return ticket.handoff, ticket.source, ticket.target


@pytest.mark.parametrize("index", [0, 1, 255])
def test_p_and_d_make_the_same_handoff_of_the_same_part(index: int) -> None:
    source, target = translated(ID, TO_P, lookup("p0"), index), translated(ID, TO_D, lookup("d0"), index)
    assert handoff(source) == handoff(target) == (f"{HEX}.{index}", "p0", "d0")
    assert source is not None and source.do_remote_decode and not source.do_remote_prefill
    assert target is not None and target.do_remote_prefill and not target.do_remote_decode


def test_a_part_is_counted_on_from_the_one_that_the_id_names() -> None:
    assert handoff(translated(f"cmpl-{ID}-3", TO_P, lookup("p0"), 2))[0] == f"{HEX}.5"
    with pytest.raises(ProtocolError, match="too many"):
        translated(ID, TO_P, lookup("p0"), 256)


@pytest.mark.parametrize(
    ("request_id", "params", "mode"),
    [
        (ID, {**TO_D, "ticket": "t"}, Mode.PUSH),
        (ID, TO_P, Mode.PULL),
        (ID, {"do_remote_decode": True}, Mode.PUSH),
        ("cmpl-plain", TO_P, Mode.PUSH),
    ],
)
def test_what_needs_no_translation_passes(request_id: str, params: dict[str, Any], mode: Mode) -> None:
    """P's own answer on its way to D, a worker that reads, another router's format, an id without addresses."""
    assert translated(request_id, params, lookup("p0", mode)) is None


@pytest.mark.parametrize(
    ("request_id", "params", "me", "reason", "named"),
    [
        (ID.replace("10.0.0.1", "10.0.0.9"), TO_D, "d0", Reason.PEER_UNKNOWN, "prefill address host:10.0.0.9,"),
        (ID.replace("fd00::2", "fd00::9"), TO_P, "p0", Reason.PEER_UNKNOWN, "decode address host:fd00::9,"),
        (ID, TO_P, "p1", Reason.PEER_UNKNOWN, "it is for p0 and d0, this is p1"),
        (ID, TO_P, "d0", Reason.PEER_UNKNOWN, "it is for p0 and d0, this is d0"),
        (ID, {**TO_P, "transfer_id": "tx-1"}, "p0", Reason.BAD_MESSAGE, "kv_transfer_params.transfer_id"),
        (ID.replace(":7100", ":71000"), TO_P, "p0", Reason.BAD_MESSAGE, "request id: prefill.handshake"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    request_id: str, params: dict[str, Any], me: str, reason: Reason, named: str
) -> None:
    with pytest.raises(ProtocolError) as refusal:
        translated(request_id, params, lookup(me))
    assert refusal.value.reason is reason and named in refusal.value.detail


def test_tickets_of_several_parts_travel_together_and_part_again() -> None:
    answers = [{"do_remote_prefill": True, "mode": "pull", "ticket": text} for text in ("a", "b", "c")]
    told = together(answers)
    assert told is not None and told["ticket"] == "a"
    assert [one_of({**told, "remote_dp_size": 1}, n, 3)["ticket"] for n in range(3)] == ["a", "b", "c"]
    assert together([answers[0], None]) is None, "a part without KV to hand over leaves all to D"
    assert one_of(answers[0], 0, 1) is answers[0]


@pytest.mark.parametrize("tickets", ["ab", {}, [], ["a"], ["a", "b", "c"]])
def test_tickets_that_do_not_fit_the_request_are_refused(tickets: object) -> None:
    with pytest.raises(ProtocolError, match=r"kv_transfer_params\.tickets: expected a list of 2"):
        one_of({"do_remote_prefill": True, "tickets": tickets}, 0, 2)


def test_the_tickets_of_parameters_that_were_refused_are_found_within_bounds() -> None:
    asked = {"do_remote_prefill": True, "ticket": "t"}
    assert tickets_in(asked) == ["t"]
    assert tickets_in({**asked, "tickets": ["t", "u", None, {}]}) == ["t", "u"]
    assert len(tickets_in({**asked, "tickets": [str(n) for n in range(10_000)]})) == TICKETS_MAX + 1
    for nobody_s in (None, "t", ["t"], {"ticket": "t"}, {**asked, "do_remote_prefill": 1}, {**asked, "ticket": 5}):
        assert tickets_in(nobody_s) == []


# --- P and D by name


def named(me: str) -> ForeignLookup:
    return ForeignLookup(Mode.PULL, tuple(Mode), WorkerId(me), KEY, 60.0, lambda host, port: None, named_pairs=True)


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.PUSH])
def test_p_and_d_make_the_same_handoff_of_their_names(mode: Mode) -> None:
    to_p, to_d = pair_params(mode, HEX, "p0", "d0")
    source, target = translated("cmpl-1", to_p, named("p0")), translated("cmpl-2", to_d, named("d0"))
    assert source is not None and source.do_remote_decode and source.mode is mode
    assert target is not None and target.do_remote_prefill and target.mode is mode
    for params in (source, target):
        ticket = unseal(params.ticket or "", [KEY], time.time())
        assert (ticket.handoff, ticket.source, ticket.target) == (f"{HEX}.0", "p0", "d0")


def test_names_are_nothing_to_an_engine_that_was_not_started_for_them() -> None:
    assert translated("cmpl-1", pair_params(Mode.PUSH, HEX, "p0", "d0")[1], lookup("d0")) is None
    assert translated("cmpl-1", {**pair_params(Mode.PUSH, HEX, "p0", "d0")[1], "ticket": "t"}, named("d0")) is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"pair": ["p0"]}, "pair"),
        ({"pair": ["p0", 5]}, "pair"),
        ({"pair": ["p0", "../d0"]}, "pair"),
        ({"pair": {"p0": "d0"}}, "pair"),
        ({"pair": ["p0", "d1"]}, "it is for p0 and d1, this is d0"),
        ({"do_remote_prefill": 1}, "it is for p0 and d0, this is d0"),
        ({"transfer_id": "tx-5"}, "transfer_id"),
        ({"transfer_id": [1]}, "transfer_id"),
        ({"mode": "pull"}, "mode"),
        ({"mode": ["push"]}, "mode"),
        ({"mode": None}, "mode"),
    ],
)
def test_names_that_cannot_be_meant_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        translated("cmpl-1", {**pair_params(Mode.PUSH, HEX, "p0", "d0")[1], **wrong}, named("d0"))
