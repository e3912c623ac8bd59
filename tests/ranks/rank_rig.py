"""Ranks and their links for tests: in threads of this process, or with the rank in a process of its own.

Hosts of this process are reached over sockets, as if they were in another, unless a rig is made `near`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.ranks import rank_host
from kvbaton.ranks.rank_host import RankHost
from kvbaton.ranks.rank_link import RankLinks
from kvbaton.ranks.rank_messages import RankInvitation
from kvbaton.testing import InProcessHarness, Log, Pair, Side
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.shm import shm_transport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpTransport

from ..transports.process_harness import ProcessHarness

MAKE: dict[str, Callable[[PeerId], Transport]] = {"shm": ShmTransport, "tcp": TcpTransport}
CAPABILITIES = {"shm": shm_transport.CAPABILITIES, "tcp": tcp_transport.CAPABILITIES}
NEAR, FAR = (PeerId(WorkerId(name), Incarnation(1)) for name in ("near", "far"))


class Rig:
    """Everything that a test opens, and its end."""

    def __init__(self, near: bool = False) -> None:
        self.near = near
        self.regions: list[Region] = []
        self.transports: list[Transport] = []
        self.hosts: list[RankHost] = []
        self.links: list[RankLinks] = []
        self.processes: list[RankProcess] = []

    def memory(self, size: int) -> Region:
        self.regions.append(allocate(size))
        return self.regions[-1]

    def direct(self, kind: str, me: PeerId, memory: memoryview) -> Transport:
        transport = MAKE[kind](me)
        transport.register(0, memory)
        self.transports.append(transport)
        return transport

    def host(self, *transports: tuple[str, Transport], rank: int = 0) -> RankHost:
        host = self.keep(RankHost(rank, dict(transports)))
        host.start()
        return host

    def keep(self, host: RankHost) -> RankHost:
        """Have it stopped at the end; unless all is near, links take its invitation for one of another process."""
        self.hosts.append(host)
        if not self.near:
            del rank_host._HERE[host.invitation.rank_public]
        return host

    def link(self, *invitations: RankInvitation, ping_s: float = 2.0, lost_s: float = 15.0, **told: Any) -> RankLinks:
        links = RankLinks([RankInvitation.decode(each.encode()) for each in invitations], ping_s, lost_s, **told)
        self.links.append(links)
        links.start()
        return links

    def remote(self, kind: str, me: PeerId, memory: memoryview) -> Any:
        """A transport in a rank of its own, seen through a link."""
        host = self.host((kind, self.direct(kind, me, memory)))
        return self.link(host.invitation).transports(0)[kind]

    def process(self, kind: str, me: PeerId, memory: Region) -> RankProcess:
        self.processes.append(RankProcess(kind, me, memory))
        return self.processes[-1]

    def close(self) -> None:
        for links in self.links:
            assert links.stop()
        for process in self.processes:
            process.kill()
        for host in self.hosts:
            assert host.stop()
        for transport in self.transports:
            transport.close()
        for region in self.regions:
            region.close()
        self.__init__(self.near)  # type: ignore[misc]


class RankProcess:
    """`rank_process.py`, which can be stopped and killed."""

    def __init__(self, kind: str, me: PeerId, memory: Region) -> None:
        path, size = f"/proc/{os.getpid()}/fd/{memory.fd}", str(len(memory.view))
        script = Path(__file__).with_name("rank_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), kind, me.worker, str(me.incarnation), path, size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        assert self.process.stdout is not None
        self.invitation = RankInvitation.decode(bytes.fromhex(self.process.stdout.readline().decode()))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class LinkedHarness(InProcessHarness):
    """`near` behind a link with its host in this process, `far` direct: the two kinds speak with each other."""

    def __init__(self, kind: str, near: bool = False) -> None:
        self.capabilities = CAPABILITIES[kind]
        self._kind = kind
        self._rig = Rig(near)
        self._count = 0

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        self._count += 1
        near_id, far_id = (PeerId(WorkerId(name), Incarnation(self._count)) for name in ("near", "far"))
        here, there = self._rig.memory(near_bytes).view, self._rig.memory(far_bytes).view
        near = Side(near_id, self._rig.remote(self._kind, near_id, here), here)
        far = Side(far_id, self._rig.direct(self._kind, far_id, there), there)
        join(near, far)
        return Pair(near, far)

    def reset(self) -> None:
        self._rig.close()


class LinkedProcessHarness(ProcessHarness):
    """`near` behind a link, `far` in another process that can be stopped and killed."""

    near = False

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        pair = super().pair(near_bytes, far_bytes)
        pair.near.transport.disconnect(pair.far.peer)
        rig = Rig(self.near)
        rig.keep(RankHost(0, {self._kind: pair.near.transport}))  # type: ignore[dict-item]
        rig.hosts[0].start()
        pair.near.transport = rig.link(rig.hosts[0].invitation).transports(0)[self._kind]
        join(pair.near, pair.far)
        self.rigs = [*getattr(self, "rigs", []), rig]
        return pair

    def reset(self) -> None:
        super().reset()
        for rig in getattr(self, "rigs", []):
            rig.close()
        self.rigs: list[Rig] = []


def join(near: Side, far: Side) -> None:
    for side, other in ((near, far), (far, near)):
        if getattr(side.transport, "capabilities", CAPABILITIES["shm"]).lends_reads:  # a far process has lent already
            lend_everything(side.transport, other.peer)
    far.transport.connect(near.peer, endpoint(near, far.peer))
    near.transport.connect(far.peer, endpoint(far, near.peer))


def endpoint(side: Side, peer: PeerId) -> bytes:
    """Asks again when a busy machine makes a rank late, as the node does."""
    found: list[bytes] = []

    def asked() -> bool:
        with contextlib.suppress(TimeoutError):
            found.append(side.transport.endpoint(peer))
        return bool(found)

    until(asked)
    return found[0]


def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    assert poll(lambda: bool(condition()), deadline_s), "the condition did not come true in time"


def log_of(side: Side) -> Log:
    class _Polled:
        def wait(self, predicate: Callable[[], bool], deadline_s: float) -> bool:
            return poll(predicate, deadline_s)

    return Log(_Polled(), side)  # type: ignore[arg-type]


__all__: Sequence[str] = [
    "FAR",
    "NEAR",
    "LinkedHarness",
    "LinkedProcessHarness",
    "RankProcess",
    "Rig",
    "endpoint",
    "join",
    "log_of",
    "until",
]
