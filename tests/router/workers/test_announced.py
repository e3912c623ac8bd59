"""Workers that announced themselves in the router's form, and several directories as one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbaton.api.params import Mode
from kvbaton.api.request_ids import parse_address
from kvbaton.control.plain import AnnouncedWorker, Announcement, Fleet
from kvbaton.protocol.ids import Incarnation, WorkerId, is_worker_id
from kvbaton.router.workers.directories import AnnouncedDirectory, Directories, worker_name
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerListState

ZMQ = "host:10.0.0.1,handshake:6301,notify:61005"


class Listener:
    def __init__(self, *listed: AnnouncedWorker) -> None:
        self.listed = listed

    def workers(self) -> tuple[AnnouncedWorker, ...]:
        return self.listed


def said(http: str, role: str = "P") -> Announcement:
    return Announcement(Fleet.MORIIO_READ, role, http, ZMQ)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fleet", "zmq", "mode", "dialect", "alone"),
    [
        (Fleet.MORIIO_READ, ZMQ, Mode.PULL, "moriio", (False, True)),  # D, P
        (Fleet.MORIIO_WRITE, ZMQ, Mode.PUSH, "moriio", (True, True)),
        (Fleet.P2P_NCCL, "10.0.0.1:21001", Mode.PULL, "p2p_nccl", (False, False)),
    ],
)
def test_an_announced_worker_keeps_what_the_router_needs_of_it(
    fleet: Fleet, zmq: str, mode: Mode, dialect: str, alone: tuple[bool, bool]
) -> None:
    prefill = AnnouncedWorker(Announcement(fleet, "P", "10.0.0.1:8100", zmq, tp_size=4), Incarnation(7))
    decode = AnnouncedWorker(Announcement(fleet, "D", "[::1]:8200", zmq), Incarnation(8), suspect=True)
    assert AnnouncedDirectory(Listener(decode, prefill)).snapshot() == (
        ListedEngine(
            WorkerId("D-___1_-8200"), "decode", "http://[::1]:8200", Incarnation(8), (mode,),
            state=WorkerListState.SUSPECT, dialect=dialect, address=zmq, computes_alone=alone[0],
        ),
        ListedEngine(
            WorkerId("P-10.0.0.1-8100"), "prefill", "http://10.0.0.1:8100", Incarnation(7), (mode,),
            dialect=dialect, address=zmq, tp_size=4, computes_alone=alone[1],
        ),
    )  # fmt: skip


def test_an_address_can_stand_in_a_request_id() -> None:
    told = Announcement(Fleet.MORIIO_READ, "P", "[::1]:80", "host:::1,handshake:1,notify:2")
    (worker,) = AnnouncedDirectory(Listener(AnnouncedWorker(told, Incarnation(1)))).snapshot()
    assert str(parse_address(worker.address)) == worker.address == told.zmq_address


def test_the_snapshot_is_the_same_object_until_the_list_changes() -> None:
    listener = Listener(AnnouncedWorker(said("10.0.0.1:1"), Incarnation(1)))
    directory = AnnouncedDirectory(listener)
    before = directory.snapshot()
    assert directory.snapshot() is before
    listener.listed = (AnnouncedWorker(said("10.0.0.1:1"), Incarnation(2)),)
    assert directory.snapshot() != before and directory.snapshot() is directory.snapshot()


def test_names_are_legal_and_no_two_workers_share_one() -> None:
    long = "a" * 60
    hosts = [
        "10.0.0.1", "a", "a-1", "a-1-2", "fe80__1", "fe80--1", "[fe80::1]", "[::1]", "[1::]", "[fe80::1:1]", long,
        f"{long}.b", f"{long}.c", f"{long}-b", "[2001:db8:1111:2222:3333:4444:5555:6666]",
    ]  # fmt: skip
    keys = [said(f"{host}:{port}", role) for host in hosts for port in (1, 2, 12, 65535) for role in "PD"]
    names = [worker_name(key) for key in keys]
    assert all(map(is_worker_id, names))
    assert len(set(names)) == len(keys)
    assert names == [worker_name(key) for key in keys]  # of the address alone
    assert worker_name(said("10.0.0.1:8100")) == "P-10.0.0.1-8100"


# --- several as one


class Part:
    """A directory that says what it is told to say, in a new list each time."""

    def __init__(self, *workers: ListedEngine) -> None:
        self.listed = list(workers)

    def snapshot(self) -> Sequence[ListedEngine]:
        return list(self.listed)


def worker(name: str, url: str = "", life: int = 0) -> ListedEngine:
    return ListedEngine(WorkerId(name), "both", url or f"http://{name}", Incarnation(life))


def names(directories: Directories) -> list[str]:
    return [found.name for found in directories.snapshot()]


def test_each_part_stands_in_its_order_one_after_the_other() -> None:
    parts = StaticDirectory([worker("z"), worker("b")]), Part(worker("y"), worker("a"))
    assert names(Directories(*parts)) == ["z", "b", "y", "a"]
    assert names(Directories(*reversed(parts))) == ["y", "a", "z", "b"]
    assert Directories().snapshot() == () and names(Directories(StaticDirectory([]))) == []


def test_all_is_the_same_object_while_no_part_changes() -> None:
    part, other = Part(worker("a")), Part(worker("b"))
    directories = Directories(part, other)
    before = directories.snapshot()
    assert directories.snapshot() is before
    other.listed.append(worker("c"))
    assert directories.snapshot() is not before and directories.snapshot() is directories.snapshot()
    other.listed[1] = worker("c", life=2)
    assert [found.incarnation for found in directories.snapshot()] == [0, 0, 2]


def test_who_comes_from_an_earlier_part_is_not_displaced_by_name_or_by_url() -> None:
    first = Part(worker("a", "http://1", 1))
    second = Part(worker("a", "http://2", 2), worker("b", "http://1"), worker("c", "http://3"))
    directories = Directories(first, second)
    assert directories.snapshot() == (worker("a", "http://1", 1), worker("c", "http://3"))
    first.listed.clear()
    assert names(directories) == ["a", "b", "c"]
    first.listed.append(worker("a", "http://1", 1))
    assert names(directories) == ["a", "c"]


def test_within_a_part_p_and_d_may_share_a_url() -> None:
    both = Listener(
        AnnouncedWorker(said("10.0.0.1:1", "D"), Incarnation(1)),
        AnnouncedWorker(said("10.0.0.1:1", "P"), Incarnation(2)),
    )
    assert names(Directories(StaticDirectory([worker("x")]), AnnouncedDirectory(both))) == [
        "x",
        "D-10.0.0.1-1",
        "P-10.0.0.1-1",
    ]
