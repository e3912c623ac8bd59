"""What a peer needs to reach a data plane and the sum service beside it.

Law: an endpoint without a sum service is refused by name, never taken for one that needs no checking.
"""

from __future__ import annotations

import ipaddress

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Number, Port
from kvbaton.transports.auth import SECRET_BYTES

VERSION = b"sum1"
BYTES_MAX = 1024  # as in `protocol.messages.Endpoints`


CANNOT, CAN, INSISTS = range(3)


class SumEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where the sum service listens, and the endpoint of the data plane itself."""

    host: str
    port: Port
    secret: bytes
    inner: bytes
    seals: Number = CANNOT  # a version that could not encrypt said nothing


def is_summed(endpoint: bytes) -> bool:
    """Whether the sender of `endpoint` has a sum service beside its data plane."""
    return endpoint.startswith(VERSION)


def pack(endpoint: SumEndpoint) -> bytes:
    packed = VERSION + msgspec.msgpack.encode(endpoint)
    if len(packed) > BYTES_MAX:
        raise ValueError(
            f"checksum: the endpoint is {len(packed)} bytes with its sum service, at most {BYTES_MAX} can be told"
        )
    return packed


def parse(peer: PeerId, data: bytes) -> SumEndpoint:
    """ValueError for anything but an endpoint with a sum service."""
    if not is_summed(data):
        raise ValueError(
            f"checksum: {peer} offers no sums, so its bytes cannot be compared with ours; "
            "set checksum on both sides, or to off on both"
        )
    try:
        there = msgspec.msgpack.decode(data[len(VERSION) :], type=SumEndpoint)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint with a sum service: {error}") from None
    ipaddress.ip_address(there.host)
    if not 0 < there.port < 1 << 16 or len(there.secret) != SECRET_BYTES:
        raise ValueError("the endpoint's sum service has no usable port or secret")
    return there
