"""`peer_process` with NIXL on the far side: what it is asked for by kind is the way that UCX goes.

Run as `python nixl_peer_process.py`, like the other one.
"""

from __future__ import annotations

import peer_process

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.nixl.nixl_transport import UCX, NixlConfig, NixlTransport

WAYS = {"shm": UCX, "tcp": {**UCX, "TLS": "tcp"}}
"""Left alone, UCX copies from process to process on one host; over TCP the peer's own process takes part."""


def make(kind: str, peer: PeerId, dial_deadline_s: float = 0.0) -> Transport:
    return NixlTransport(peer, NixlConfig(ucx=WAYS[kind]))


if __name__ == "__main__":
    peer_process.make = make
    peer_process.main()
