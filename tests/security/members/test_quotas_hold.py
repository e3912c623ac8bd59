"""A peer with a good key that has gone bad: it floods, and the honest one beside it is served all the same."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.control import keyring
from kvbaton.control.addressing import ControlLimits
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.protocol.bounded import Buckets
from kvbaton.protocol.ids import WorkerId
from tests.control.rig import Post, cluster, exchange, posted, until
from tests.e2e.cluster import some_prompts
from tests.e2e.pair import Pair

pytestmark = pytest.mark.timeout(180)

HANDOFFS = 12
FRAMES_PER_S = 500.0
"""Far below the default, so that a flood is over it on any machine, and far above what a dozen handoffs need."""
SLOWER_MAX, SLACK_S = 10.0, 2.0
"""A handoff may take this many times as long as without the flood, and this much: the machine is shared."""

FLOOD = """
import sys
from kvbaton.control import keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.wire.codec import encode
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.wire.messages import Abandon, Renew
from kvbaton.protocol.ids import HandoffId, LeaseId
control = ZmqControl(keyring.load(sys.argv[1], "bad"), None)
control.set_directory({WorkerId("p0"): (sys.argv[2], "")})
me = PeerId(WorkerId("bad"), Incarnation(7))
frames = [encode(me, Incarnation(1), n, Renew(LeaseId(n), 1, (), False)) for n in range(16)] + [b"garbage" * 9]
print("floods", flush=True)
while True:
    for frame in frames:
        control.send(WorkerId("p0"), frame)
    control.receive()
"""


@contextlib.contextmanager
def flooding(directory: str, endpoint: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", FLOOD, directory, endpoint], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"floods\n"
        yield
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def test_an_honest_peers_handoffs_complete_beside_a_flood(tmp_path: Path) -> None:
    directory = str(tmp_path / "keys")
    keyring.mint(directory, ["p0", "d0", "bad"])
    prompts = some_prompts(2 * HANDOFFS, "flood")
    right = reference_answers(prompts, 4)
    workers = [
        EmbeddedWorker(
            WorkerOptions(name=name, role=role, keys=directory, registry="tcp://127.0.0.1:1", policy="fail"),  # type: ignore[arg-type]
            keyring.load(directory, name),
        )
        for name, role in (("p0", "prefill"), ("d0", "decode"))
    ]
    p, d = workers

    async def story() -> tuple[list[float], list[float]]:
        for worker in workers:
            worker.start()
        try:
            d.node.know({WorkerId("p0"): (p.node.control.endpoint, "")})
            both = Pair(p, d, keyring.load(directory, "p0").ticket_keys[0])
            calm = [await _timed(both, prompts[i], right[i], i) for i in range(HANDOFFS)]
            p.node.control._plane.quota = Buckets(FRAMES_PER_S, FRAMES_PER_S)
            with flooding(directory, p.node.control.endpoint):
                deadline = time.monotonic() + 30.0
                while not p.node.control.counters["over_quota"]:
                    assert time.monotonic() < deadline, "the flood did not reach the quota"
                    await asyncio.sleep(0.02)
                flooded = [await _timed(both, prompts[i], right[i], i) for i in range(HANDOFFS, 2 * HANDOFFS)]
            await both.at_rest()
            assert d.stats()["delivered_total"] == 2 * HANDOFFS
            return calm, flooded
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.stop)

    calm, flooded = asyncio.run(story())
    print(
        f"median {statistics.median(calm) * 1e3:.0f} ms calm, {statistics.median(flooded) * 1e3:.0f} ms flooded,"
        f" {p.node.control.counters['over_quota']} dropped"
    )
    assert p.node.loop.faults == d.node.loop.faults == 0
    assert statistics.median(flooded) <= SLOWER_MAX * statistics.median(calm) + SLACK_S, (calm, flooded)


async def _timed(both: Pair, prompt: str, right: str, number: int) -> float:
    begun = time.monotonic()
    assert await both.answer(prompt, ("pull", "stream")[number % 2], 4) == right
    return time.monotonic() - begun


LISTENER = """
import sys, time
from kvbaton.control import keyring
from kvbaton.control.addressing import ControlLimits
from kvbaton.control.zmq import ZmqControl
control = ZmqControl(keyring.load(sys.argv[1], "p0"), limits=ControlLimits(frames_queued_max=64))
print(control.endpoint, flush=True)
for said in ("reads nothing", "reads all"):
    seconds = float(sys.stdin.readline())
    while not control.counters["admitted"]:  # a busy machine takes seconds to start the other
        control._poll(50)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        control._poll(50)  # who knocks is let in; what it sends is left where it is
    print(said, flush=True)
count = 0
while found := control.receive():
    count += len(found)
control.close()
print(count, flush=True)
"""
FILL = """
import sys
from kvbaton.control import keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import WorkerId
control = ZmqControl(keyring.load(sys.argv[1], "bad"), None)
control.set_directory({WorkerId("p0"): (sys.argv[2], "")})
while not control.counters["lost"]:
    control.send(WorkerId("p0"), b"x" * 200)
print("full", flush=True)
while True:
    control.send(WorkerId("p0"), b"x" * 200)
"""
HEARTBEAT_S = 3.0
"""More than one of those that kvbaton once had."""
UNREAD_BYTES = 64 << 10
"""Which the kernel keeps for a process only when all queues above it are full: of frames more than those hold."""


def unread(port: int) -> int:
    """What the kernel keeps for whoever listens at a port of loopback, the most of any connection."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return max(
        (int(row[4].partition(":")[2], 16) for row in rows if int(row[1].partition(":")[2], 16) == port), default=0
    )


def test_a_peer_that_dies_while_all_queues_from_it_are_full_ends_nobody_else(tmp_path: Path) -> None:
    """Promise 4. With heartbeats of libzmq's the next one after the reset met an assertion: the process was gone."""
    directory = str(tmp_path / "keys")
    keyring.mint(directory, ["p0", "bad"])
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    p0 = subprocess.Popen([sys.executable, "-c", LISTENER, directory], **piped)  # type: ignore[call-overload]
    try:
        endpoint = p0.stdout.readline().strip()
        bad = subprocess.Popen([sys.executable, "-c", FILL, directory, endpoint], stdout=subprocess.PIPE, text=True)
        try:
            p0.stdin.write("2\n")
            p0.stdin.flush()
            assert bad.stdout is not None and bad.stdout.readline() == "full\n"
            assert p0.stdout.readline() == "reads nothing\n"
            until(lambda: unread(int(endpoint.rpartition(":")[2])) > UNREAD_BYTES)  # however late "bad" is
        finally:
            bad.kill()
            bad.communicate()
        said, _ = p0.communicate(f"{HEARTBEAT_S}\n", timeout=60)
        assert p0.returncode == 0
        what, count = said.split("\n", 1)
        assert what == "reads all" and int(count) >= 32
    finally:
        p0.kill()
        p0.communicate()


RINGS = cluster("p0", "d0", "bad")


def test_what_is_over_the_quota_is_dropped_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    p0 = Post(RINGS["p0"], limits=ControlLimits(frames_per_s_max=0.001, frames_burst_max=5.0))
    d0, bad = Post(RINGS["d0"], None), Post(RINGS["bad"], None)
    with posted(p0, d0, bad):
        d0.knows(p0), bad.knows(p0)
        for number in range(20):
            bad.send(p0, b"%d" % number)
        until(lambda: p0.control.counters["over_quota"] == 15, p0, bad)
        assert [frame for _, frame in p0.inbox] == [b"%d" % number for number in range(5)]
        exchange(d0, p0)  # whose quota is its own
    said = [record.getMessage() for record in caplog.records if record.name == "kvbaton.control.sockets"]
    assert said == ["[peer-flooding] bad sends over 0.001 frames a second; more is dropped"]


def test_what_comes_on_a_connection_that_we_dialled_is_counted_too() -> None:
    d0 = Post(RINGS["d0"], limits=ControlLimits(frames_per_s_max=0.001, frames_burst_max=5.0))
    p0 = Post(RINGS["p0"])
    with posted(p0, d0):
        d0.knows(p0)
        d0.send(p0, b"hello")
        until(lambda: p0.inbox, p0, d0)
        for number in range(9):
            p0.send(d0, b"%d" % number)
        until(lambda: d0.control.counters["over_quota"] == 4, p0, d0)
        assert len(d0.inbox) == 5
