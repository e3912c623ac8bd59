"""The far side of a mooncake pair in a process of its own: `peer_process.py` with another transport in it."""

from __future__ import annotations

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.mooncake.mooncake_transport import MooncakeTransport
from tests.transports import peer_process


def make(_kind: str, peer: PeerId) -> MooncakeTransport:
    return MooncakeTransport(peer)


def main() -> None:
    peer_process.make = make
    peer_process.main()
