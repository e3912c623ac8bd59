"""`peer_process` with NIXL on the far side: what it is asked for by kind is the way that UCX goes."""

from __future__ import annotations

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.nixl.nixl_transport import UCX, NixlConfig, NixlTransport
from tests.transports import peer_process

WAYS = {"shm": UCX, "tcp": {**UCX, "TLS": "tcp"}}
"""Left alone, UCX copies from process to process on one host; over TCP the peer's own process takes part."""


def make(kind: str, peer: PeerId, dial_deadline_s: float = 0.0) -> Transport:
    return NixlTransport(peer, NixlConfig(ucx=WAYS[kind]))


def main() -> None:
    peer_process.make = make
    peer_process.main()
