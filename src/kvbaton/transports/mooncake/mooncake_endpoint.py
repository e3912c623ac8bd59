"""The location of a rank's memory, as its peers get it: an engine's address and the place of each region.

Law: an endpoint that does not parse, or is impossible, is refused by ValueError before any connection. Mooncake has
neither names nor secrets, so an endpoint also says where this engine keeps its mark, 16 random bytes: a client reads
them first, and does not mistake another process with the same port for its peer.
"""

from __future__ import annotations

import ipaddress

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number, Port
from kvbaton.transports.core.shared_memory import REGIONS_MAX

ENDPOINT_BYTES_MAX = 16 << 10
MARK_BYTES = 16
ADDRESS_MAX = 1 << 64


class MooncakePlace(msgspec.Struct, frozen=True, array_like=True):
    """Memory in the owner's address space."""

    address: Number
    size_bytes: Bytes


class MooncakeEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="mooncake1"):
    """What a peer needs to read this rank's memory."""

    owner: PeerId
    host: str
    port: Port
    mark_address: Number
    mark: bytes
    regions: dict[Number, MooncakePlace]

    @property
    def session(self) -> str:
        """The peer's name among engines."""
        return f"{self.host}:{self.port}"


def parse(peer: PeerId, endpoint: bytes) -> MooncakeEndpoint:
    """The endpoint of `peer`; ValueError for anything else."""
    if len(endpoint) > ENDPOINT_BYTES_MAX:
        raise ValueError(f"an endpoint has at most {ENDPOINT_BYTES_MAX} bytes, this one {len(endpoint)}")
    try:
        there = msgspec.msgpack.decode(endpoint, type=MooncakeEndpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an endpoint of mooncake: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    ipaddress.IPv4Address(there.host)
    if not 0 < there.port < 1 << 16 or len(there.mark) != MARK_BYTES:
        raise ValueError("the endpoint has no usable port or mark")
    if len(there.regions) > REGIONS_MAX:
        raise ValueError(f"the endpoint has {len(there.regions)} regions, at most {REGIONS_MAX} are allowed")
    for region, place in [(-1, MooncakePlace(there.mark_address, MARK_BYTES)), *there.regions.items()]:
        if place.address < 1 or place.size_bytes < 1 or place.address + place.size_bytes > ADDRESS_MAX:
            raise ValueError(f"region {region} of the endpoint is not memory: {place}")
    return there
