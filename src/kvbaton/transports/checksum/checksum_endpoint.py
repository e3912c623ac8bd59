"""Endpoint of a transport with its checksum service.

Law: an endpoint without a checksum service is refused by name, never treated as one that needs no checking; and so is
one whose digests are of another kind than ours (`checksum_memory`), which would always differ.
"""

from __future__ import annotations

import ipaddress

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Number, Port
from kvbaton.security.handshake import SECRET_BYTES

VERSION = b"sum1"
VERSIONS = {"host": VERSION, "device": b"sum2"}
"""By the kind of digest: xxh3, or what a device computes (`cuda_digest`)."""

BYTES_MAX = 1024  # as in `protocol.messages.Endpoints`


CANNOT, CAN, INSISTS = range(3)


class SumEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The address of the checksum service, and the endpoint of the transport itself."""

    host: str
    port: Port
    secret: bytes
    inner: bytes
    seals: Number = CANNOT  # versions that could not encrypt omit it


def is_summed(endpoint: bytes) -> bool:
    """Whether the sender of `endpoint` has a checksum service."""
    return endpoint.startswith(tuple(VERSIONS.values()))


def pack(endpoint: SumEndpoint, kind: str = "host") -> bytes:
    packed = VERSIONS[kind] + msgspec.msgpack.encode(endpoint)
    if len(packed) > BYTES_MAX:
        raise ValueError(
            f"checksum: the endpoint is {len(packed)} bytes with its checksum service, at most {BYTES_MAX} are allowed"
        )
    return packed


def parse(peer: PeerId, data: bytes, kind: str = "host") -> SumEndpoint:
    """ValueError for anything but an endpoint with a checksum service of that kind."""
    if not is_summed(data):
        raise ValueError(
            f"checksum: {peer} offers no checksums, so its bytes cannot be compared with ours; "
            "set checksum on both sides, or to off on both"
        )
    if not data.startswith(VERSIONS[kind]):
        raise ValueError(
            f"checksum: {peer} has its digests of another kind of memory than ours, {kind} memory, and they cannot be "
            "compared; keep the caches of both sides in the same kind of memory, or set checksum to off on both"
        )
    try:
        there = msgspec.msgpack.decode(data[len(VERSION) :], type=SumEndpoint)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint with a checksum service: {error}") from None
    ipaddress.ip_address(there.host)
    if not 0 < there.port < 1 << 16 or len(there.secret) != SECRET_BYTES:
        raise ValueError("the endpoint's checksum service has no usable port or secret")
    return there
