"""A promise is what a member with a valid key cannot break either: no number of its is without bounds (rule 25)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.control.registry import registry_messages as registry
from kvbaton.protocol.wire import codec
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Envelope, FoldedHello, FoldedWelcome
from kvbaton.protocol.wire.ticket import Ticket
from kvbaton.store import tcp_backend, tcp_connection
from kvbaton.transports.checksum import checksum_transport
from kvbaton.transports.cuda import cuda_listener
from kvbaton.transports.local import region_listener
from kvbaton.transports.mooncake import mooncake_engine
from kvbaton.transports.nixl import nixl_agent
from kvbaton.transports.shm import shm_transport
from kvbaton.transports.staged import staged_listener
from kvbaton.transports.tcp import tcp_transport
from tests.wire_numbers import numbers_in, put

ROOTS: dict[str, Any] = {
    "a message": m.Message,
    "a message of version 1": codec.MESSAGES,
    "an envelope": Envelope,
    "a folded Hello": FoldedHello,
    "a folded Welcome": FoldedWelcome,
    "a ticket": Ticket,
    "a word to the registry": registry.ToRegistry,
    "a word of the registry": registry.FromRegistry,
    "an answer to an operator": registry.ToOperator,
    "a request to a store": tcp_backend.Dial,
    "a reply of a store": tcp_backend.Invited,
    "an item on a store's line": tcp_connection.Item,
    "an endpoint of tcp": tcp_transport.TcpEndpoint,
    "an endpoint of staged": staged_listener.StagedEndpoint,
    "slots of staged": staged_listener.StagedHello,
    "an endpoint of shm": shm_transport.ShmEndpoint,
    "a region of shm": region_listener.SocketPlace,
    "an endpoint of cuda": cuda_listener.CudaEndpoint,
    "regions of cuda": cuda_listener.Shared,
    "an endpoint of mooncake": mooncake_engine.MooncakeEndpoint,
    "an endpoint of nixl": nixl_agent.NixlEndpoint,
    "an endpoint of sums": checksum_transport.SumEndpoint,
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_every_number_that_a_member_can_say_has_a_floor_and_a_ceiling(root: Any) -> None:
    assert [number.path for number in numbers_in(root) if not number.is_bounded] == []


def test_the_walk_finds_numbers_wherever_they_are() -> None:
    paths = {number.path for number in numbers_in(m.Message)}
    assert {
        ("Granted", "ttl_s"),
        ("Ready", "start", 0),
        ("Ready", "progress", 0, "blocks_ahead"),
        ("Hello", "card", "layout", "ranks", 0, "shares", 0, "places", 0, "offset"),
        ("Hello", "card", "layout", "groups", 0, "cells", 0, "bytes"),
    } <= paths
    assert len(paths) > 90
    assert {number.path for number in numbers_in(tcp_transport.TcpEndpoint)} >= {("regions", -1), ("regions", 0)}


def test_a_number_is_put_where_it_is_said() -> None:
    said = put(m.Renewed(1, 2, 3.0, 4), ("ttl_s",), 5e-324)  # type: ignore[arg-type]
    assert said == [14, 1, 2, 5e-324, 4]
    assert put(m.Joined(()), ("endpoints", 0), 1) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300, 5e-324])
def test_a_ticket_is_good_until_a_time_that_can_come(value: float) -> None:
    """Signed or not: a key in the wrong hands makes no ticket that outlasts it, and none that no clock can judge."""
    body = msgspec.msgpack.encode(("0" * 32 + ".0", "p", value))
    if value == 5e-324:
        assert msgspec.msgpack.decode(body, type=Ticket).expires_unix_s == value, "long ago, and said to have expired"
        return
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=Ticket)
