"""The Mooncake back end on the real thing: contract, and master and owner stopped, killed and restarted.

Needs the library: `make planes-env`. Every case ends with no pin left.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from mooncake.store import MooncakeDistributedStore
from mooncake_processes import Master, Owner

from kvbaton.control.keyring import Keyring
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.ranks.store_trust import trust_of
from kvbaton.store.interface import Backend
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.testing.store_case import NOTHING, StoreCase, blank, data, engine, names, values
from kvbaton.testing.store_contract import check_store
from kvbaton.testing.transport_harness import poll

pytestmark = pytest.mark.library("mooncake")

DEADLINE_S = 40.0


class Somewhere(Protocol):
    address: str


class MooncakeHarness:
    offers = frozenset[str]()  # the library has threads of its own, which are not quite idle

    def __init__(self, master: Somewhere) -> None:
        self.master = master
        self._admin: Any = None

    def backend(self) -> Backend:
        return MooncakeBackend(MooncakeSettings(master=self.master.address))

    def reset(self) -> None:
        if self._admin is None:  # kept: closing one takes a second
            self._admin = MooncakeDistributedStore()
            assert self._admin.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", self.master.address) == 0
        self._admin.remove_all(True)

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()


@pytest.fixture
def master(request: pytest.FixtureRequest) -> Iterator[Master]:
    master = Master(client_ttl_s=getattr(request, "param", 60))
    yield master
    master.kill()


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    owner = Owner(master)
    yield owner
    owner.kill()


@pytest.fixture(scope="module")
def harness() -> Iterator[MooncakeHarness]:
    master = Master(client_ttl_s=60)  # nobody dies here, and a busy machine may be silent for seconds
    owner = Owner(master)
    harness = MooncakeHarness(master)
    yield harness
    harness.close()
    owner.kill()
    master.kill()


def nobody_at(port: socket.socket) -> Somewhere:
    """An address that refuses connections, and that nobody else takes meanwhile."""
    port.bind(("127.0.0.1", 0))
    return SimpleNamespace(address=f"127.0.0.1:{port.getsockname()[1]}")


CASES = [case for case in check_store.cases if not case.needs]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mooncake_keeps_the_contract(harness: MooncakeHarness, case: StoreCase) -> None:
    case(harness)


def test_what_another_process_put_is_got_here(master: Master, owner: Owner) -> None:
    with engine(MooncakeHarness(master)) as d:
        d.store.set_trust(trust_of(Keyring(WorkerId("d"), "", "", {}, ())).trust)
        assert owner.put(7, 3) == 7
        into = blank(7)
        assert d.end(d.get(names(7, 3), into)).count == 7
        assert data(into) == data(values(7, 3))


def test_an_engine_starts_and_serves_without_a_master() -> None:
    with socket.socket() as nobody, engine(MooncakeHarness(nobody_at(nobody))) as p:
        begun = time.monotonic()
        for _ in range(10):
            assert p.end(p.put(names(3), values(3))).reason is Reason.STORE_FAILED
            assert p.end(p.lookup(names(3))).count == 0
        assert time.monotonic() - begun < DEADLINE_S
        p.pins.check()


def test_a_master_killed_before_a_put_leaves_no_pin(master: Master, owner: Owner) -> None:
    with engine(MooncakeHarness(master)) as p:
        p.kept(names(3), values(3))
        master.child.kill()
        master.child.wait(DEADLINE_S)
        for seed in range(1, 6):
            end = p.end(p.put(names(3, seed), values(3)))
            assert end.reason in (Reason.STORE_FAILED, Reason.TRANSFER_TIMEOUT)
        into = blank(3)
        assert p.end(p.get(names(3), into)).count == 0
        assert data(into) == [NOTHING] * 3
        p.pins.check()


@pytest.mark.parametrize("what", ["exists", "put", "get"])
def test_a_master_killed_during_a_call_leaves_no_pin(master: Master, owner: Owner, what: str) -> None:
    """Stopped first, so that the call is surely inside when the master dies."""
    with engine(MooncakeHarness(master)) as p:
        p.kept(names(3), values(3))
        calls = p.faulty.calls[what]
        if what == "put":
            p.faulty.hangs.add("put")  # let the check pass, and stop the master before the put goes on
        else:
            master.stop()
        order = p.get(names(3), blank(3)) if what == "get" else p.put(names(9, 1), values(9))
        assert poll(lambda: p.faulty.calls[what] > calls, DEADLINE_S)
        if what == "put":
            master.stop()
            p.faulty.go_on()
        master.child.kill()
        master.child.wait(DEADLINE_S)
        assert p.end(order).reason in (Reason.STORE_FAILED, Reason.TRANSFER_TIMEOUT)
        p.pins.check()


def test_a_stopped_master_costs_a_time_out_and_then_nothing_and_comes_back(master: Master, owner: Owner) -> None:
    with engine(MooncakeHarness(master), call_timeout_s=0.5, retry_s_max=1.0) as p:
        p.kept(names(3), values(3))
        master.stop()
        assert p.end(p.put(names(3, 1), values(3), 3.0)).reason in (Reason.TRANSFER_TIMEOUT, Reason.STORE_FAILED)
        p.pins.check()
        master.resume()
        assert poll(lambda: p.end(p.put(names(3, 1), values(3))).reason is None, DEADLINE_S), "it did not come back"


@pytest.mark.parametrize("master", [2], indirect=True, ids=["quick"])
def test_a_killed_owner_is_misses_and_no_pin_is_left(master: Master, owner: Owner) -> None:
    with engine(MooncakeHarness(master)) as p:
        p.kept(names(3), values(3))
        owner.child.kill()
        owner.child.wait(DEADLINE_S)
        into = blank(3)
        end = p.end(p.get(names(3), into))
        assert end.count == 0
        assert data(into) == [NOTHING] * 3
        assert p.end(p.put(names(9, 1), values(9))).reason is not None
        p.pins.check()
        assert poll(lambda: p.end(p.lookup(names(3))).count == 0, DEADLINE_S), "its values are said to be there still"


def test_a_stopped_owner_ends_the_get_in_time_and_late_bytes_reach_no_engine(master: Master, owner: Owner) -> None:
    with engine(MooncakeHarness(master), call_timeout_s=1.0, retry_s_max=1.0) as p:
        p.kept(names(3), values(3))
        assert poll(lambda: not p.store.stuck, DEADLINE_S), "a call from before, on a busy machine"
        p.kept(names(3), values(3))
        owner.stop()
        into = blank(3)
        end = p.end(p.get(names(3), into))
        assert (end.count, end.reason) == (0, Reason.TRANSFER_TIMEOUT)
        assert p.store.stuck == 1
        owner.resume()
        assert poll(lambda: not p.store.stuck, DEADLINE_S), "the call did not come back"
        assert data(into) == [NOTHING] * 3, "bytes landed after the end"
        p.pins.check()


def test_a_restarted_master_is_used_again(master: Master, owner: Owner) -> None:
    with engine(MooncakeHarness(master), retry_s_max=1.0) as p:
        p.kept(names(3), values(3))
        master.child.kill()
        master.child.wait(DEADLINE_S)
        assert p.end(p.lookup(names(3))).count == 0
        again = Master(master.port, client_ttl_s=60)
        try:
            assert poll(lambda: p.end(p.put(names(3), values(3))).reason is None, DEADLINE_S), "never used again"
            into = blank(3)
            assert p.end(p.get(names(3), into)).count == 3
            assert data(into) == data(values(3))
        finally:
            again.kill()
