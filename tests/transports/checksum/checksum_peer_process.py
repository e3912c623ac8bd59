"""`peer_process` with checksums around the far side's data plane; `KVBATON_TEST_PLANE` says which plane that is."""

from __future__ import annotations

import os

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.checksum.checksum_transport import SummedTransport
from kvbaton.transports.core.transport import HostTransport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from tests.transports import peer_process

PLANE = "KVBATON_TEST_PLANE"


def plane(name: str, peer: PeerId) -> HostTransport:
    if name == "nixl":
        from kvbaton.transports.nixl.nixl_transport import NixlTransport

        return NixlTransport(peer)
    return ShmTransport(peer) if name == "shm" else TcpTransport(peer)


def make(kind: str, peer: PeerId, dial_deadline_s: float = 5.0) -> SummedTransport:
    return SummedTransport(plane(os.environ.get(PLANE) or kind, peer), peer)


def main() -> None:
    peer_process.make = make
    peer_process.main()
