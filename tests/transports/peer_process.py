"""The far side of a pair in a process of its own: carries out calls from standard input, one JSON line each.

Forked by `forked_peers.py`. It can be stopped and killed like any process, which is what it is for.
"""

from __future__ import annotations

import os
import sys
from array import array
from typing import Literal, cast

import msgspec

from kvbaton.protocol.geometry.spans import Area
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.catalogue import SUMS
from kvbaton.transports.checksum.checksum_transport import SummedTransport
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    CopyRested,
    Direction,
    HostTransport,
    LendingTransport,
    Loan,
    Transport,
    TransportEvent,
)
from kvbaton.transports.mooncake.mooncake_transport import MooncakeTransport
from kvbaton.transports.nixl.nixl_transport import UCX, NixlConfig, NixlTransport
from kvbaton.transports.shm.shm_transport import ShmConfig, ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpTransport

Kind = Literal["shm", "tcp", "tcp_encrypted", "nixl", "nixl_tcp", "mooncake", "shm+sums", "tcp+sums", "nixl+sums"]
WAYS = {"nixl": UCX, "nixl_tcp": {**UCX, "TLS": "tcp"}}
"""Left alone, UCX copies from process to process on one host; over TCP the peer's own process takes part."""


class Call(msgspec.Struct, tag=True):
    me: PeerId


class Open(Call):
    """A transport whose region 0 is a memfd of the caller's."""

    kind: Kind
    memory_path: str
    memory_bytes: int


class Endpoint(Call):
    peer: PeerId


class Connect(Call):
    peer: PeerId
    endpoint: bytes


class Disconnect(Call):
    peer: PeerId


class Lend(Call):
    job: int
    peer: PeerId
    direction: Direction
    blocks: tuple[tuple[int, ...], ...]
    due: list[tuple[int, list[int], list[int]]]  # region, rows, shifts


class Submit(Call):
    job: int
    peer: PeerId
    direction: Direction
    local_region: int
    remote_region: int
    spans: list[int]


class Cancel(Call):
    job: int


class Fence(Call):
    peer: PeerId


class Drain(Call):
    pass


class Close(Call):
    pass


Calls = Open | Endpoint | Connect | Disconnect | Lend | Submit | Cancel | Fence | Drain | Close


class Answer(msgspec.Struct):
    endpoint: bytes = b""
    accepted: bool = False
    ended: list[CopyEnded] = []
    rested: list[CopyRested] = []
    fenced: list[PeerId] = []


def make(kind: Kind, peer: PeerId, dial_deadline_s: float = 5.0) -> Transport:
    if kind.endswith(SUMS):
        plane = make(cast(Kind, kind.removesuffix(SUMS)), peer, dial_deadline_s)
        return SummedTransport(cast(HostTransport, plane), peer)
    if kind in WAYS:
        return NixlTransport(peer, NixlConfig(ucx=WAYS[kind]))
    if kind == "mooncake":
        return MooncakeTransport(peer)
    if kind == "shm":
        return ShmTransport(peer, ShmConfig(dial_deadline_s=dial_deadline_s))
    encrypt: Encrypt = "on" if kind == "tcp_encrypted" else "auto"
    return TcpTransport(peer, TcpConfig(dial_deadline_s=dial_deadline_s, encrypt=encrypt))


def carry_out(call: Calls, transports: dict[PeerId, Transport]) -> Answer:
    match call:
        case Open():
            fd = os.open(call.memory_path, os.O_RDWR | os.O_CLOEXEC)
            transports[call.me] = make(call.kind, call.me)
            transports[call.me].register(0, Region(fd, call.memory_bytes, 4096).view)
        case Endpoint():
            return Answer(endpoint=transports[call.me].endpoint(call.peer))
        case Connect():
            transports[call.me].connect(call.peer, call.endpoint)
        case Disconnect():
            transports[call.me].disconnect(call.peer)
        case Lend():
            lending = cast(LendingTransport, transports[call.me])
            due = tuple(Area(region, array("q", rows), array("q", shifts)) for region, rows, shifts in call.due)
            lending.lend(Loan(JobId(call.job), call.peer, call.direction, call.blocks, due))
        case Submit():
            spans = array("q", call.spans)
            regions = call.local_region, call.remote_region
            copy = Copy(JobId(call.job), call.peer, call.direction, *regions, spans)
            return Answer(accepted=transports[call.me].submit(copy))
        case Cancel():
            transports[call.me].cancel(JobId(call.job))
        case Fence():
            transports[call.me].fence(call.peer)
        case Drain():
            return report(list(transports[call.me].drain()))
        case Close():
            transports.pop(call.me).close()
    return Answer()


def report(events: list[TransportEvent]) -> Answer:
    answer = Answer(ended=[], rested=[], fenced=[])
    for event in events:
        if isinstance(event, CopyEnded):
            answer.ended.append(event)
        elif isinstance(event, CopyRested):
            answer.rested.append(event)
        else:
            answer.fenced.append(event.peer)
    return answer


def main() -> None:
    transports: dict[PeerId, Transport] = {}
    for line in sys.stdin.buffer:
        answer = carry_out(msgspec.json.decode(line, type=Calls), transports)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
