"""The assembly of an engine's node: its orders of starting and stopping, what it tells of itself, and renewed keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from kvbaton.control import keyring as keys
from kvbaton.control.addressing import split_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.node.cluster_node import ClusterNode, EngineFacts, make_doorway, new_life
from kvbaton.node.node import Rank
from kvbaton.protocol.content import compat_digest
from kvbaton.protocol.events import Event
from kvbaton.protocol.ids import WorkerId
from tests.node.test_node_loop import BLOCKS, TOKENS, InstantStore, InstantTransport, layout
from tests.waiting import until


class Noting:
    """Parts of a node that note when they are started and closed."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.transport = NotedTransport(self.order)
        self.store = NotedStore(self.order)
        self.links = NotedLinks(self.order)


class NotedTransport(InstantTransport):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.order.append("loop starts")
        super().set_waker(waker)

    def close(self) -> None:
        self.order.append("transport closes")


class NotedStore(InstantStore):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order
        self.hang_s = 0.0
        self.closed_by: list[str] = []

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)
        time.sleep(self.hang_s)
        self.order.append("store closes")


class NotedLinks:
    def __init__(self, order: list[str]) -> None:
        self.order = order

    def start(self) -> None:
        self.order.append("links start")

    def stop(self, timeout_s: float) -> bool:
        self.order.append("links stop")
        return True

    def drain_progress(self) -> Sequence[Event]:
        return ()


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    keys.mint(tmp_path / "keys", ["p0", "d0"])
    return msgspec.structs.replace(keys.load(tmp_path / "keys", "p0"), directory="")


def facts() -> EngineFacts:
    return EngineFacts(
        me=new_life("p0"), role="prefill", blocks=8, layout=layout(), compat={"model": "m"}, model="x" * 300
    )


def made(keyring: Keyring, ranks: Sequence[Rank], **parts: object) -> ClusterNode:
    told = facts()
    return ClusterNode(told, keyring, ranks, make_doorway(told, keyring), **parts)  # type: ignore[arg-type]


def test_what_is_needed_starts_first_and_stops_last(keyring: Keyring) -> None:
    noting = Noting()
    node = made(keyring, [{"instant": noting.transport}], store=noting.store, links=noting.links)
    assert noting.order == [], "nothing runs before it is started"
    node.start()
    node.stop()
    assert noting.order == ["links start", "loop starts", "transport closes", "store closes", "links stop"]
    assert not node.loop.is_alive
    node.stop()


def test_a_store_is_ended_on_the_nodes_thread_and_one_that_hangs_is_not_waited_for(keyring: Keyring) -> None:
    noting = Noting()
    node = made(keyring, [{"instant": noting.transport}], store=noting.store)
    node.start()
    node.end_store()
    assert noting.store.closed_by == ["kvbaton-node"] and noting.order[-1] == "store closes"
    noting.store.hang_s = 1.0
    before = time.monotonic()
    node.end_store(0.05)
    assert time.monotonic() - before < 0.9
    noting.store.hang_s = 0.0
    node.stop()


def test_transports_that_one_rank_lacks_or_no_rank_has_are_not_offered(keyring: Keyring) -> None:
    two = layout()
    two = msgspec.structs.replace(two, ranks=two.ranks * 2)
    told = msgspec.structs.replace(facts(), layout=two)
    ranks = [{"instant": InstantTransport(), "other": InstantTransport()}, {"instant": InstantTransport()}]
    node = ClusterNode(told, keyring, ranks, make_doorway(told, keyring))
    assert node.transports == ("instant",) and node.doorway.config.ranks == 2
    node.stop()
    with pytest.raises(ValueError, match=r"ranks: got transports of 1; the layout has 2"):
        ClusterNode(told, keyring, ranks[:1], make_doorway(told, keyring))


def test_what_is_told_of_an_engine_is_what_it_is(keyring: Keyring) -> None:
    node = made(keyring, [{"instant": InstantTransport()}])
    told = node.registration("127.0.0.1:8000", ("pull",), stays=True)
    assert told.peer == node.peer and told.control_endpoint == node.address[0] and told.role == "prefill"
    assert told.compat_digest == compat_digest({"model": "m"}) and told.transports == ("instant",) and told.stays
    assert len(told.model) == 256, "longer names are cut, not refused"
    node.stop()


def test_peers_are_known_by_name_and_by_address_and_a_node_is_not_its_own_peer(keyring: Keyring) -> None:
    node = made(keyring, [{"instant": InstantTransport()}])
    node.know({WorkerId("d0"): ("tcp://127.0.0.1:7", ""), WorkerId("p0"): ("tcp://127.0.0.1:8", "")})
    assert node.book.at("127.0.0.1", 7) == "d0" and node.book.at(*split_endpoint(node.address[0])) == "p0"
    assert node.book.at("127.0.0.1", 8) is None, "where it listens itself, it knows best"
    assert node.control.send(WorkerId("d0"), b"x") and not node.control.send(WorkerId("p0"), b"x")
    node.stop()


def test_what_is_leased_is_held_until_its_lease_is_over(keyring: Keyring) -> None:
    node = made(keyring, [{"instant": InstantTransport()}])
    node.start()
    assert node.held().nothing
    node.doorway.grant(b"d" * 16, TOKENS, BLOCKS)
    until(lambda: node.held().leases == 1)
    node.stop()


def test_new_keys_reach_ledger_and_doorway_before_whoever_else_wants_them(keyring: Keyring) -> None:
    node = made(keyring, [{"instant": InstantTransport()}])
    new = msgspec.structs.replace(keyring, ticket_keys=(b"n" * 32, *keyring.ticket_keys))
    seen: list[tuple[bytes, ...]] = []
    node.on_keys.append(lambda _: seen.append(node.doorway.config.ticket_keys))
    node.start()
    node.loop.call(lambda: node.control.on_keys(new)).result(30)
    assert seen == [new.ticket_keys] and node.ledger.desk.identity.ticket_keys == new.ticket_keys
    assert node.keyring is new
    node.stop()
