"""The parts of the NIXL data plane that need no nixl: its endpoint, its lists, and the law of its mover."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.jobs import CopyJob, Jobs, Rows
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, Direction, Spans, TransportEvent
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton.transports.nixl import nixl_agent
from kvbaton.transports.nixl.nixl_agent import (
    GRIDS_MAX,
    Agent,
    Grid,
    Indices,
    Life,
    Lists,
    NixlEndpoint,
    NixlError,
    NixlPlace,
    grid_of,
    load_bindings,
    merged,
    name_agent,
    pack,
    parse,
    this_life,
    without_empty,
)
from kvbaton.transports.nixl.nixl_mover import NixlLink, NixlMover
from kvbaton.transports.nixl.nixl_transport import (
    DEVICE_PARAMETERS,
    DEVICE_UCX,
    NixlConfig,
    NixlTransport,
    device_config,
)
from tests.transports.device.fake_gpu import FakeGpu

ME, PEER = (PeerId(WorkerId(name), Incarnation(7)) for name in ("me", "a.b-c"))
READ, WRITE = Direction.READ, Direction.WRITE
PLACES = {0: NixlPlace(1 << 20, 1 << 16)}
DEADLINE_S = 10.0


def endpoint(**changes: object) -> NixlEndpoint:
    agent = name_agent(PEER)
    metadata = b"nixlSerDes|Agent" + len(agent).to_bytes(8, "little") + agent.encode() + b"|and the rest"
    return msgspec.structs.replace(NixlEndpoint(PEER, agent, this_life(), PLACES, metadata), **changes)


class nixlRemoteDisconnectError(Exception):
    pass


class FakeAgent:
    """What `Agent` offers, with requests that end when the test says so."""

    def __init__(self) -> None:
        self.name = "me"
        self.handles = 0
        self.closed = False
        self.known: set[str] = set()
        self.prepared: list[Rows] = []
        self.devices: list[int | None] = []
        self.posted: list[int] = []
        self.ended: dict[int, Exception | None] = {}
        self.threads: set[str] = set()
        self.looks = 0

    def add_remote(self, metadata: bytes) -> str:
        self.known.add(metadata.decode())
        return ""

    def remove_remote(self, name: str) -> None:
        self.known.clear()

    def prepare(self, remote: str, table: Rows, device: int | None = None) -> int:
        self.prepared.append(table)
        self.devices.append(device)
        self.handles += 1
        return len(self.prepared)

    def drop_list(self, handle: int) -> None:
        self.handles -= 1

    def request(self, way: Direction, local: int, here: Indices, remote: int, there: Indices) -> int:
        self.handles += 1
        return len(self.posted)

    def post(self, request: int) -> bool:
        self.threads.add(threading.current_thread().name)
        self.posted.append(request)
        return False

    def is_over(self, request: int) -> bool:
        self.looks += 1
        found = self.ended.get(request, self)
        if isinstance(found, Exception):
            raise NixlError("status", found)
        return found is None

    def release(self, request: int) -> None:
        self.handles -= 1

    def close(self) -> None:
        self.closed = True


class Bench:
    """A mover on a fake agent."""

    def __init__(self, gpu: FakeGpu | None = None) -> None:
        self.agent = FakeAgent()
        self.jobs = Jobs(100)
        self.mover = NixlMover("mover", cast(Agent, self.agent), self.jobs, PLACES, 2, gpu)
        self.link = NixlLink(endpoint())
        self.events: list[TransportEvent] = []

    def start(self, number: int, direction: Direction = READ, link: NixlLink | None = None) -> CopyJob:
        job = self.jobs.accept(Copy(JobId(number), PEER, direction, 0, 0, spans()))
        assert job is not None
        job.parts.append(spans())
        self.mover.add(link or self.link, job)
        return job

    def posted(self, count: int) -> None:
        assert poll(lambda: len(self.agent.posted) == count, DEADLINE_S), self.agent.posted

    def told(self, *expected: TransportEvent) -> None:
        def all_there() -> bool:
            self.events += self.jobs.drain()
            return len(self.events) >= len(expected)

        poll(all_there, DEADLINE_S)
        assert [plain(event) for event in self.events] == list(expected)


def plain(event: TransportEvent) -> TransportEvent:
    return msgspec.structs.replace(event, detail="") if isinstance(event, CopyEnded) else event


def spans() -> Spans:
    return array("q", [0, 64, 64, 64, 0, 64])


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.agent.ended = dict.fromkeys(made.agent.posted)
    assert made.mover.stop(DEADLINE_S)
    assert made.agent.closed and made.agent.handles == 0


def test_without_nixl_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULES", ("nixl_that_nobody_has",))
    with pytest.raises(ImportError, match="pip install nixl"):
        load_bindings()


def test_importing_the_data_plane_does_not_import_nixl() -> None:
    loaded = "any(name.startswith('nixl') for name in sys.modules)"
    script = f"import sys, kvbaton.transports.nixl.nixl_transport; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_an_endpoint_survives_the_wire() -> None:
    there = endpoint()
    assert parse(PEER, pack(there)) == there


@pytest.mark.parametrize(
    "bad",
    [
        endpoint(owner=ME),
        endpoint(agent=name_agent(ME)),
        endpoint(agent=""),
        endpoint(metadata=b""),
        endpoint(metadata=endpoint().metadata),  # of another agent
        endpoint(places={256: PLACES[0]}),
        endpoint(places={-1: PLACES[0]}),
        endpoint(places={0: NixlPlace(0, 64)}),
        endpoint(places={0: NixlPlace(64, 0)}),
        endpoint(places={0: NixlPlace((1 << 63) - 64, 65)}),
        endpoint(places={0: NixlPlace(64, 64, 1 << 20)}),
    ],
)
def test_an_endpoint_that_names_what_it_may_not_is_refused(bad: NixlEndpoint) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        parse(PEER, pack(bad))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"nixl2" + pack(endpoint())[5:],
        pack(endpoint())[:-3],
        b"nixl1" + b"\x00" * 40,
        b"nixl1" + zlib.compress(b"\x93\x01\x02\x03"),
        b"nixl1" + zlib.compress(bytes(64 << 20)),
    ],
    ids=["empty", "version", "cut", "noise", "shape", "bomb"],
)
def test_nonsense_is_no_endpoint(bad: bytes) -> None:
    with pytest.raises(ValueError, match="not an endpoint of nixl"):
        parse(PEER, bad)


def life_of(pid: int) -> Life:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return Life(this_life().host, pid, int(stat.rpartition(")")[2].split()[19]))


def test_a_life_is_over_when_its_process_has_died_and_not_before() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = life_of(child.pid)
    assert not life.is_over() and not this_life().is_over()
    child.kill()
    assert poll(life.is_over, DEADLINE_S), "a zombie counts as dead"
    child.communicate()
    assert life.is_over()
    assert msgspec.structs.replace(this_life(), started=1).is_over(), "the number was given to another process"
    elsewhere = msgspec.structs.replace(life, host="elsewhere")
    assert not elsewhere.is_over(), "nothing is known about other hosts"


def column(*numbers: int) -> Rows:
    return np.array(numbers, np.int64)


def test_spans_of_one_size_on_one_grid_are_found_by_index() -> None:
    assert grid_of(0, 1000, column(3, 103, 53), column(50, 50, 50)) == Grid(0, 3, 50, 19)
    assert grid_of(0, 1000, column(3, 104), column(50, 50)) is None
    assert grid_of(0, 1000, column(0, 50), column(50, 49)) is None
    assert grid_of(0, 1 << 40, column(0, 1), column(1, 1)) is None, "NIXL counts in int32"


def test_empty_spans_are_left_out() -> None:
    assert without_empty(array("q", [0, 0, 8, 5, 5, 0, 8, 8, 1])).tolist() == [0, 0, 8, 8, 8, 1]
    assert without_empty(spans()) == spans()


def test_a_grid_is_prepared_once_and_other_spans_each_time() -> None:
    agent = FakeAgent()
    lists = Lists(cast(Agent, agent), "them", PLACES)
    even = lists.choose(0, column(64, 192, 128), column(64, 64, 64))
    odd = lists.choose(0, column(64, 192, 128), column(64, 60, 64))
    for _ in range(3):
        with lists.select(even, 0, 2) as (_handle, indices):
            assert indices.tolist() == [1, 3]
        with lists.select(odd, 1, 3) as (_handle, indices):
            assert indices.tolist() == [0, 1]
    strided, *rows = (table.tolist() for table in agent.prepared)
    assert strided == [[1 << 20, 64, 0, 64, 1024]]
    assert rows == [[[(1 << 20) + 192, 60, 0], [(1 << 20) + 128, 64, 0]]] * 3
    assert agent.handles == 1
    for size in range(1, 2 * GRIDS_MAX):
        with lists.select(lists.choose(0, column(0), column(size)), 0, 1):
            assert agent.handles <= GRIDS_MAX
    lists.clear()
    assert agent.handles == 0


def test_device_memory_is_named_with_its_device_on_either_side() -> None:
    agent = FakeAgent()
    lists = Lists(cast(Agent, agent), "them", {0: NixlPlace(1 << 20, 1 << 16, 3)})
    for offsets, sizes in ((column(64, 192), column(64, 64)), (column(64, 192), column(64, 60))):
        with lists.select(lists.choose(0, offsets, sizes), 0, 2):
            pass
    grid, rows = (table.tolist() for table in agent.prepared)
    assert grid == [[1 << 20, 64, 3, 64, 1024]] and [row[2] for row in rows] == [3, 3]
    assert agent.devices == [3, 3]
    lists.clear()


def test_spans_that_follow_each_other_on_both_sides_become_one() -> None:
    apart = array("q", [0, 0, 8, 8, 100, 8, 16, 108, 8, 64, 116, 8])  # the second follows here only, the last there
    assert merged(apart) == apart, "one of four is not worth another list"
    run = array("q", [0, 50, 8, 8, 58, 8, 16, 66, 4, 20, 70, 8, 100, 0, 8, 108, 8, 8])
    assert merged(run).tolist() == [0, 50, 28, 100, 0, 16]
    assert merged(array("q")) == array("q") and merged(run[:3]) == run[:3]


class Bindings:
    """As much of NIXL's bindings as registering and preparing take, with a note of what was asked."""

    DRAM_SEG, VRAM_SEG, NIXL_INIT_AGENT, NIXL_THREAD_SYNC_RW = "DRAM", "VRAM", "me", 0
    NIXL_READ, NIXL_WRITE = "READ", "WRITE"

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def nixlAgentConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def nixlAgent(self, name: str, config: object) -> Bindings:
        return self

    def createBackend(self, name: str, told: dict[str, str]) -> int:
        self.asked.append((name, told))
        return 1

    def nixlRegDList(self, kind: str, rows: list[tuple[int, int, int, str]]) -> tuple[object, ...]:
        return kind, rows

    nixlXferDList = nixlRegDList

    def registerMem(self, listed: tuple[object, ...], backend: list[int]) -> None:
        self.asked.append(listed)

    def prepXferDlist(self, who: str, *listed: object) -> int:
        self.asked.append((who, *listed[:-1]))
        return 1


def test_memory_of_a_device_is_registered_and_described_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = Bindings()
    monkeypatch.setattr(nixl_agent, "load_bindings", lambda: bindings)
    transport = NixlTransport(ME, device_config(2), FakeGpu(2))
    transport.register(0, DeviceMemory(4096, 64, 2))
    asked, told = bindings.asked[0]
    assert (asked, told) == (
        "UCX",
        {"engine_config": ",".join(f"{key}={value}" for key, value in DEVICE_UCX.items()), **DEVICE_PARAMETERS},
    )
    assert bindings.asked[1] == ("VRAM", [(4096, 64, 2, "")])
    for wrong in (DeviceMemory(4096, 64, 1), memoryview(bytearray(8))):
        with pytest.raises(ValueError, match="region 1"):
            transport.register(1, wrong)
    agent = Agent("me", {})
    table = np.array([[4096, 64, 2]])
    agent.prepare("them", table, 2)
    agent.prepare("", np.array([[4096, 64, 0, 64, 8]]))
    (_, rows), strided = bindings.asked[3:]
    assert rows == ("VRAM", table) and strided[:2] == ("me", "DRAM")
    transport.close()


def test_what_nixl_says_of_a_lost_device_is_not_believed() -> None:
    gpu = FakeGpu()
    bench = Bench(gpu)
    for number in range(2):
        bench.start(number)
    bench.posted(2)
    bench.agent.ended[0] = None
    bench.told(CopyEnded(JobId(0)))
    gpu.refusals["wait"] = CudaError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    bench.agent.ended[1] = None
    bench.told(CopyEnded(JobId(0)), CopyEnded(JobId(1), Reason.TRANSFER_FAILED))
    assert bench.mover.stop(DEADLINE_S)


def test_without_a_device_its_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="a device is counted from 0"):
        NixlConfig(device=-1)


def test_transfers_are_posted_by_the_mover_alone_and_never_more_than_the_window(bench: Bench) -> None:
    for number in range(3):
        bench.start(number)
    bench.posted(2)
    assert bench.agent.threads == {"mover"}
    bench.agent.ended[0] = None
    bench.told(CopyEnded(JobId(0)))
    bench.posted(3)


def test_what_was_given_up_rests_when_nixl_says_so(bench: Bench) -> None:
    job = bench.start(1)
    bench.posted(1)
    bench.jobs.abandon(job, Reason.CANCELLED)
    bench.told(CopyEnded(JobId(1), Reason.CANCELLED, at_rest=False))
    looks = bench.agent.looks
    assert poll(lambda: bench.agent.looks > looks + 3, DEADLINE_S), "nobody looks after it"
    bench.told(CopyEnded(JobId(1), Reason.CANCELLED, at_rest=False))
    bench.agent.ended[0] = None
    bench.told(CopyEnded(JobId(1), Reason.CANCELLED, at_rest=False), CopyRested(JobId(1)))


def test_a_lost_connection_ends_its_reads_at_rest_and_what_waits_as_well(bench: Bench) -> None:
    for number in range(3):
        bench.start(number)
    bench.posted(2)
    failed = [CopyEnded(JobId(number), Reason.UNREACHABLE) for number in (2, 0, 1)]
    bench.agent.ended[0] = nixlRemoteDisconnectError()
    bench.told(*failed[:2])
    bench.agent.ended[1] = KeyError("NIXL has forgotten that agent by now")
    bench.told(*failed)
    bench.start(4)
    bench.posted(3)


def test_a_read_that_failed_otherwise_is_not_at_rest(bench: Bench) -> None:
    bench.start(1)
    bench.posted(1)
    bench.agent.ended[0] = KeyError("some other error")
    bench.told(CopyEnded(JobId(1), Reason.UNREACHABLE, at_rest=False))


def test_a_write_on_a_lost_connection_rests_only_when_the_peer_is_known_to_be_dead(bench: Bench) -> None:
    bench.start(1, WRITE)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mortal = NixlLink(endpoint(life=life_of(child.pid)))
    bench.start(2, WRITE, mortal)
    bench.posted(2)
    ends = [CopyEnded(JobId(number), Reason.UNREACHABLE, at_rest=False) for number in (1, 2)]
    for request in (0, 1):  # one after the other: the mover may be looking at the second right now
        bench.agent.ended[request] = nixlRemoteDisconnectError()
        bench.told(*ends[: request + 1])
    child.kill()
    child.communicate()
    bench.told(*ends, CopyRested(JobId(2)))


def test_a_retired_peer_is_forgotten_when_nothing_is_under_way_with_it(bench: Bench) -> None:
    bench.start(1)
    bench.posted(1)
    bench.mover.retire(bench.link)
    looks = bench.agent.looks
    assert poll(lambda: bench.agent.looks > looks + 3, DEADLINE_S)
    assert bench.agent.known
    bench.agent.ended[0] = None
    assert poll(lambda: not bench.agent.known, DEADLINE_S)


def test_nobody_looks_when_nothing_is_under_way(bench: Bench) -> None:
    bench.start(1)
    bench.posted(1)
    bench.agent.ended[0] = None
    bench.told(CopyEnded(JobId(1)))
    assert poll(lambda: bench.mover._patience() is None, DEADLINE_S), "it would wake without a reason"
