"""The far side of a mooncake pair in a process of its own: `peer_process.py` with another transport in it."""

from __future__ import annotations

import peer_process  # type: ignore[import-not-found]

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.mooncake.mooncake_transport import MooncakeTransport


def make(_kind: str, peer: PeerId) -> MooncakeTransport:
    return MooncakeTransport(peer)


if __name__ == "__main__":
    peer_process.make = make
    peer_process.main()
