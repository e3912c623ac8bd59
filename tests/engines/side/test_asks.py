"""Whatever a client sends as kv_transfer_params becomes a type, nothing, or one refusal that names the field."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.api.params import Mode
from kvbaton.engines.side.asks import ForeignLookup, ParamsSource, Target, ask_of
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import unseal

KEY = b"k" * 32
HEX = "0123456789abcdef" * 2
P_AT, D_AT = "host:10.0.0.1,handshake:7100,notify:7100", "host:10.0.0.2,handshake:7200,notify:7200"
BOOK = {("10.0.0.1", 7100): WorkerId("p0"), ("10.0.0.2", 7200): WorkerId("d0")}
PLAIN_ID = "cmpl-abc-0-12345678"


def lookup(me: str = "d0", mode: Mode = Mode.PULL, modes: tuple[Mode, ...] = tuple(Mode)) -> ForeignLookup:
    return ForeignLookup(mode, modes, WorkerId(me), KEY, 60.0, lambda host, port: BOOK.get((host, port)))


def request(params: object, request_id: str = PLAIN_ID) -> Any:
    return SimpleNamespace(kv_transfer_params=params, request_id=request_id)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}, {"other": 1}])
def test_nothing_is_asked(params: object) -> None:
    assert ask_of(request(params), lookup()) is None


def test_both_sides_of_both_ways_of_asking() -> None:
    assert ask_of(request({"do_remote_decode": True}), lookup()) == ParamsSource(Mode.PULL)
    assert ask_of(request({"do_remote_prefill": True, "ticket": "t"}), lookup()) == Target(Mode.PULL, "t")
    assert ask_of(request({"do_remote_decode": True, "mode": "push", "ticket": "t"}), lookup()) == ParamsSource(
        Mode.PUSH, "t"
    )
    asked = {"do_remote_prefill": True, "mode": "stream", "ticket": "t", "remote_block_ids": [[1]], "remote_host": "x"}
    assert ask_of(request(asked), lookup()) == Target(Mode.STREAM, "t"), "other systems' fields pass unread"


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ([1], "kv_transfer_params: got list"),
        ("x", "kv_transfer_params: got str"),
        ({"do_remote_prefill": True}, "ticket"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"do_remote_prefill": True, "do_remote_decode": True, "ticket": "t"}, "exclude each other"),
        ({"do_remote_prefill": True, "ticket": 5}, "ticket"),
        ({"do_remote_prefill": True, "ticket": "t" * 5000}, "ticket"),
        ({"do_remote_decode": True, "mode": "push"}, "ticket"),
        ({"do_remote_decode": True, "mode": 5}, "mode"),
    ],
)
def test_what_is_wrong_is_refused_by_name(params: object, named: str) -> None:
    with pytest.raises(ProtocolError) as refusal:
        ask_of(request(params), lookup())
    assert refusal.value.reason is Reason.BAD_MESSAGE and named in refusal.value.detail


def test_a_mode_that_this_engine_does_not_serve_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not serve push"):
        ask_of(request({"do_remote_decode": True, "mode": "push", "ticket": "t"}), lookup(modes=(Mode.PULL,)))


class TestMoriio:
    """Both legs at once, with a transfer id and addresses in the request id, and no ticket."""

    ID = f"cmpl-___prefill_addr_{P_AT}___decode_addr_{D_AT}_{HEX}-3-12345678"
    PARAMS: ClassVar[dict[str, Any]] = {"transfer_id": f"tx-{HEX}", "remote_block_ids": None, "remote_engine_id": None}

    def test_p_and_d_come_to_the_same_handoff(self) -> None:
        source = ask_of(request({**self.PARAMS, "do_remote_decode": True}, self.ID), lookup("p0", Mode.PUSH))
        target = ask_of(request({**self.PARAMS, "do_remote_prefill": True}, self.ID), lookup("d0", Mode.PUSH))
        assert isinstance(source, ParamsSource) and isinstance(target, Target) and source.ticket is not None
        tickets = [unseal(text, [KEY], time.time()) for text in (source.ticket, target.ticket)]
        assert {(ticket.handoff, ticket.source, ticket.target) for ticket in tickets} == {(f"{HEX}.3", "p0", "d0")}

    def test_each_of_n_answers_is_a_handoff_of_its_own(self) -> None:
        asked = [
            ask_of(request({**self.PARAMS, "do_remote_decode": True}, f"{n}_{self.ID}"), lookup("p0", Mode.PUSH))
            for n in (0, 1)
        ]
        handoffs = {
            unseal(ask.ticket or "", [KEY], time.time()).handoff for ask in asked if isinstance(ask, ParamsSource)
        }
        assert handoffs == {f"{HEX}.3", f"{HEX}.259"}

    def test_in_read_mode_p_gives_the_ticket_itself(self) -> None:
        found = ask_of(request({**self.PARAMS, "do_remote_decode": True}, self.ID), lookup("p0", Mode.PULL))
        assert found == ParamsSource(Mode.PULL)

    def test_an_address_that_nobody_has_costs_that_request(self) -> None:
        strange = self.ID.replace("10.0.0.1", "169.254.169.254")
        with pytest.raises(ProtocolError) as refusal:
            ask_of(request({**self.PARAMS, "do_remote_prefill": True}, strange), lookup("d0", Mode.PUSH))
        assert refusal.value.reason is Reason.PEER_UNKNOWN

    @pytest.mark.parametrize("change", [{"transfer_id": "tx-zz"}, {"transfer_id": ""}])
    def test_a_malformed_transfer_id_is_refused(self, change: dict[str, str]) -> None:
        with pytest.raises(ProtocolError, match="transfer_id"):
            ask_of(request({**self.PARAMS, **change, "do_remote_prefill": True}, self.ID), lookup("d0", Mode.PUSH))

    def test_an_id_for_others_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="it is for p0 and d0, this is d9"):
            ask_of(request({**self.PARAMS, "do_remote_prefill": True}, self.ID), lookup("d9", Mode.PUSH))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(["do_remote_decode", "do_remote_prefill", "mode", "ticket", "transfer_id", "remote_engine_id"])


@settings(deadline=None)  # a busy machine is not a failure
@given(
    st.dictionaries(fields | st.text(max_size=4), json_values, max_size=6), st.text(max_size=80), st.sampled_from(Mode)
)
def test_nothing_but_a_protocol_error_is_ever_raised(params: dict[str, Any], request_id: str, mode: Mode) -> None:
    try:
        found = ask_of(request(params, request_id), lookup(mode=mode))
    except ProtocolError:
        return
    assert found is None or isinstance(found, ParamsSource | Target)
