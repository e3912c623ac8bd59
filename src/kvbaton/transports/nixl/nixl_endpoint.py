"""The endpoint of a NIXL agent: its metadata, the places of regions, and its process.

Law: nothing of it reaches NIXL before it was parsed here: version, owner, every size bounded. An agent's name contains
its owner's, and the metadata must be of that agent: NIXL identifies agents by name alone, and metadata under another
peer's name would replace that peer's (nixl 1.5.1). It is compressed, since NIXL's metadata repeats itself for every
region (64 regions: 3,200 bytes, 600 compressed).

The process is named so that its death can be proven. NIXL reports a dead peer, a connection that timed out and a broken
network by one and the same error, and only the first means that a WRITE can no longer land.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Number
from kvbaton.transports.core.shared_memory import REGIONS_MAX, host_identity
from kvbaton.transports.nixl.nixl_agent import NixlPlace

VERSION = b"nixl1"
BYTES_MAX = 256 << 10
ADDRESS_MAX = 1 << 63
DEVICES_MAX = 1 << 10
NONCE_BYTES = 8
METADATA_HEAD = b"nixlSerDes|Agent"
"""How NIXL's metadata begins; the name's length, the name and a bar follow."""

DEAD_STATES = "ZX"


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One process, uniquely: pids are reused, a pid with its start time is not."""

    host: str  # this boot and this PID namespace
    pid: Number
    started: Number

    def is_over(self) -> bool:
        """Whether it is known to have died; False if that cannot be known from here."""
        if self.host != host_identity("pid"):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        found = _stat_of(self.pid)
        return found is not None and (found.started != self.started or found.dead)


class _Stat(msgspec.Struct, frozen=True):
    started: int
    dead: bool  # and none of its threads is still running


class NixlEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to reach an agent."""

    owner: PeerId
    agent: str
    life: Life
    places: dict[Number, NixlPlace]  # addresses in its process, by region
    metadata: bytes


def this_life() -> Life:
    found = _stat_of(os.getpid())
    return Life(host_identity("pid"), os.getpid(), found.started if found else 0)


def name_agent(owner: PeerId) -> str:
    """A new name, which identifies the owner."""
    return f"{owner.incarnation}.{secrets.token_hex(NONCE_BYTES)}.{owner.worker}"


def pack(endpoint: NixlEndpoint) -> bytes:
    return VERSION + zlib.compress(msgspec.msgpack.encode(endpoint), 9)


def parse(peer: PeerId, data: bytes) -> NixlEndpoint:
    """ValueError for anything but an endpoint of `peer`."""
    if data[: len(VERSION)] != VERSION:
        raise ValueError(f"not an endpoint of nixl: it does not begin with {VERSION!r}; do both sides run one version?")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data[len(VERSION) :], BYTES_MAX)
        if not unpacker.eof:
            raise ValueError(f"not an endpoint of nixl: cut short, or more than {BYTES_MAX} bytes")
        there = msgspec.msgpack.decode(plain, type=NixlEndpoint)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint of nixl: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    if not _is_named_after(there.agent, peer):
        raise ValueError(f"the endpoint's agent {there.agent!r} is not one of {peer}")
    name = there.agent.encode()
    if not there.metadata.startswith(METADATA_HEAD + struct.pack("<Q", len(name)) + name + b"|"):
        raise ValueError(f"the endpoint's metadata is not of its agent {there.agent!r}; do both sides run one nixl?")
    for region, place in there.places.items():
        inside = place.size >= 1 and 0 < place.address < ADDRESS_MAX - place.size
        if not 0 <= region < REGIONS_MAX or not inside or not 0 <= (place.device or 0) < DEVICES_MAX:
            raise ValueError(f"the endpoint's region {region} is out of bounds: {place}")
    return there


def _is_named_after(agent: str, owner: PeerId) -> bool:
    incarnation, _, rest = agent.partition(".")
    nonce, _, worker = rest.partition(".")
    return (incarnation, worker) == (str(owner.incarnation), owner.worker) and len(nonce) == 2 * NONCE_BYTES


def _stat_of(pid: int) -> _Stat | None:
    """What /proc says about a process; None when it says nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state, threads, started = fields[0].decode(), int(fields[17]), int(fields[19])
    return _Stat(started, dead=state in DEAD_STATES and threads <= 1)
