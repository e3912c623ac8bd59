"""A harness whose far side is another process, so that it can be stopped (SIGSTOP) and killed (SIGKILL).

The process is kept from pair to pair and replaced only when it was killed. The far side's memory is a memfd of this
process, so it can be looked at whatever state the other process is in.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Pair, Side
from kvbaton.testing.transport_harness import DEADLINE_S, poll
from kvbaton.transports.catalogue import SUMS
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import Copy, FenceEnded, Loan, Transport, TransportEvent
from kvbaton.transports.mooncake import mooncake_transport
from kvbaton.transports.nixl import nixl_transport
from kvbaton.transports.shm import shm_transport
from kvbaton.transports.tcp import tcp_transport

from .forked_peers import forked
from .peer_process import (
    Answer,
    Calls,
    Cancel,
    Close,
    Connect,
    Disconnect,
    Drain,
    Endpoint,
    Fence,
    Kind,
    Lend,
    Open,
    Submit,
    make,
)

Make = Callable[[PeerId], Transport]
CAPABILITIES = {
    "shm": shm_transport.CAPABILITIES,
    "tcp": tcp_transport.CAPABILITIES,
    "tcp_encrypted": tcp_transport.CAPABILITIES,
    "nixl": nixl_transport.CAPABILITIES,
    "mooncake": mooncake_transport.CAPABILITIES,
}


def allocated_in(regions: list[Region]) -> Callable[[int], memoryview]:
    """Memory for both sides of a pair within one process; whoever has the list closes it."""

    def allocated(size: int) -> memoryview:
        regions.append(allocate(size))
        return regions[-1].view

    return allocated


class PeerProcess:
    """Calls into `peer_process.py`, or into a script like it, each with a deadline."""

    def __init__(self, script: str = "peer_process", *arguments: str, **env: str) -> None:
        self.process = forked(script, *arguments, **env)
        self._read = b""

    def call(self, call: Calls) -> Answer:
        self.process.stdin.write(msgspec.json.encode(call) + b"\n")
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                raise RuntimeError(f"the peer process did not answer {call}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return msgspec.json.decode(line, type=Answer)

    def alive(self) -> bool:
        return self.process.alive()

    def pause(self) -> None:
        self.process.stop()

    def resume(self) -> None:
        self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.end()


class FarTransport:
    """A transport in the peer process."""

    def __init__(self, process: PeerProcess, me: PeerId, kind: Kind, memory: Region) -> None:
        self._process = process
        self._me = me
        process.call(Open(me, kind, f"/proc/{os.getpid()}/fd/{memory.fd}", len(memory.view)))

    def endpoint(self, peer: PeerId) -> bytes:
        return self._process.call(Endpoint(self._me, peer)).endpoint

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self._process.call(Connect(self._me, peer, endpoint))

    def disconnect(self, peer: PeerId) -> None:
        self._process.call(Disconnect(self._me, peer))

    def lend(self, loan: Loan) -> None:
        due = [(area.region, area.rows.tolist(), area.shifts.tolist()) for area in loan.due]
        self._process.call(Lend(self._me, loan.job, loan.peer, loan.direction, loan.blocks, due))

    def submit(self, copy: Copy) -> bool:
        place = copy.direction, copy.local_region, copy.remote_region
        return self._process.call(Submit(self._me, copy.job, copy.peer, *place, copy.spans.tolist())).accepted

    def cancel(self, job: JobId) -> None:
        self._process.call(Cancel(self._me, job))

    def fence(self, peer: PeerId) -> None:
        self._process.call(Fence(self._me, peer))

    def drain(self) -> Sequence[TransportEvent]:
        answer = self._process.call(Drain(self._me))
        return [*answer.ended, *answer.rested, *(FenceEnded(peer) for peer in answer.fenced)]

    def set_waker(self, waker: Callable[[], None]) -> None:
        raise NotImplementedError("the far side is polled")

    def close(self) -> None:
        if self._process.alive():
            self._process.call(Close(self._me))


def _capabilities(kind: Kind) -> Capabilities:
    return CAPABILITIES.get(kind) or CAPABILITIES[kind.partition("_")[0].removesuffix(SUMS)]


class ProcessHarness:
    """`near` here, of the given make or the usual one; `far` in another process, with `env`. Close it when done."""

    offers = frozenset({"idle", "kill", "pause"})

    _process: PeerProcess | None = None

    def __init__(self, kind: Kind, near: Make | None = None, **env: str) -> None:
        if kind == "tcp_encrypted":
            self.offers = self.offers | {"unproven"}
        self.capabilities = _capabilities(kind)
        self._kind: Kind = kind
        self._near: Make = near or partial(make, kind)
        self._env = env
        self._sides: list[Side] = []
        self._regions: list[Region] = []
        self._count = 0

    def pair(self, near_bytes: int, far_bytes: int, near: Make | None = None) -> Pair:
        if self._process is None or not self._process.alive():
            self._process = PeerProcess(**self._env)
        self._count += 1
        here, there = allocate(near_bytes), allocate(far_bytes)
        near_id, far_id = (PeerId(WorkerId(name), Incarnation(self._count)) for name in ("near", "far"))
        transport = (near or self._near)(near_id)
        transport.register(0, here.view)
        sides = Side(near_id, transport, here.view), Side(far_id, self._far(far_id, there), there.view)
        self._regions += [here, there]
        return self._joined(*sides)

    def _far(self, me: PeerId, memory: Region) -> FarTransport:
        assert self._process is not None
        return FarTransport(self._process, me, self._kind, memory)

    def _joined(self, near: Side, far: Side) -> Pair:
        self._sides += [near, far]
        if self.capabilities.lends_reads:
            lend_everything(near.transport, far.peer)
            lend_everything(far.transport, near.peer)
        near.transport.connect(far.peer, far.transport.endpoint(near.peer))
        far.transport.connect(near.peer, near.transport.endpoint(far.peer))
        return Pair(near, far)

    def wait(self, predicate: Callable[[], bool], deadline_s: float) -> bool:
        return poll(predicate, deadline_s)

    def kill(self, side: Side) -> None:
        assert self._process is not None
        self._process.kill()

    def pause(self, side: Side) -> None:
        assert self._process is not None
        self._process.pause()

    def resume(self, side: Side) -> None:
        assert self._process is not None
        self._process.resume()

    def reset(self) -> None:
        if self._process is not None and self._process.alive():
            self._process.resume()
        for side in self._sides:
            side.transport.close()
        for region in self._regions:
            region.close()
        self._sides.clear()
        self._regions.clear()

    def close(self) -> None:
        self.reset()
        if self._process is not None:
            self._process.kill()
