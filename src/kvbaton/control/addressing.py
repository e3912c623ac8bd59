"""What the parts of the control plane share: their one error, their bounds, and what counts as an address.

Law: an address is checked where it enters, once. What a registered worker may advertise is numeric and dialable: a
host name would be resolved on the I/O thread that serves everyone else, and a wildcard leads nowhere.

Where the registries of a cluster are: `tcp://a:7700,registry-b@tcp://b:7700`.

Law: one text, one meaning, wherever it is given: a worker's or vLLM's `registry`, `--registry` of each command.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

from kvbaton.protocol.ids import WorkerId, is_worker_id
from kvbaton.protocol.wire.codec import FRAME_BYTES_MAX

_HOST = r"\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9][A-Za-z0-9._-]{0,252})"
_AUTHORITY = re.compile(f"(?:{_HOST}):(?P<port>[0-9]{{1,5}})")


class ControlError(Exception):
    """The operator must act; the message names what is wrong and the next step."""


class ControlLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one control plane. Counts are per connection and direction unless they say otherwise."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    frames_queued_max: int = 4096  # beyond it a frame is lost, counted, and left to the protocol's repetition
    frames_per_receive_max: int = 256  # over all connections
    frames_per_s_max: float = 20_000.0  # of one peer, over all of its connections; what comes beyond it is dropped
    frames_burst_max: float = 40_000.0  # that may come at once after a pause
    peers_dialled_max: int = 256  # beyond it the peer that was silent longest is hung up on, and dialled again on use
    silence_s: float = 6.0  # a host that acknowledges nothing for so long is dead; a peer that says nothing, in doubt
    handshake_s: float = 10.0  # half-open connections are closed after this
    redial_s: float = 2.0  # a full connection that was silent for this long is replaced
    linger_s: float = 0.2  # closing waits this long for what is on its way


def check_authority(text: str) -> str:
    """`host:port` or `[v6]:port` as it may stand after `http://`; ValueError says what is wrong."""
    _split(text, port_min=1)
    return text


def host_of(authority: str) -> str:
    """The host of `host:port` or `[v6]:port`; ValueError says what is wrong."""
    return _split(authority, port_min=0)


def check_endpoint(text: str, *, names: bool = False) -> str:
    """A `tcp://` endpoint that can be dialled; ValueError says what is wrong. Names only from the operator."""
    host = _split(_after_scheme(text), port_min=1)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if names:
            return text
        raise ValueError(f"{text[:80]!r} names a host; give a numeric address, as tcp://10.0.0.1:5000") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{text[:80]!r} cannot be dialled; give the address by which peers reach this host")
    return text


def check_bind(text: str) -> str:
    """A `tcp://` address to listen on; port 0 asks for a free one. ValueError says what is wrong."""
    _split(_after_scheme(text), port_min=0)
    return text


def _after_scheme(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme != "tcp" or not rest:
        raise ValueError(f"{text[:80]!r} is not tcp://host:port")
    return rest


def _split(authority: str, port_min: int) -> str:
    """The host of an authority, once all of it is well formed."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise ValueError(f"{authority[:80]!r} is not host:port or [v6]:port")
    if not port_min <= int(match["port"]) <= 65535:
        raise ValueError(f"{authority[:80]!r}: port {match['port']} is outside {port_min}..65535")
    if match["v6"] is None:
        return match["host"]
    try:
        return str(ipaddress.IPv6Address(match["v6"]))
    except ValueError:
        raise ValueError(f"{authority[:80]!r}: {match['v6']} is not an IPv6 address") from None


REGISTRIES_MAX = 8
REGISTRY_NAME = "router"
"""In the key directory, where none is given: a router has a registry inside."""

RegistryPlace = tuple[WorkerId, str]
"""A registry's name in the key directory, and its endpoint."""


def registry_places(text: str, name: str = REGISTRY_NAME) -> tuple[RegistryPlace, ...]:
    """The registries of a list with commas; `name` is that of those without one. ValueError says what is wrong."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > REGISTRIES_MAX:
        raise ValueError(f"{len(parts)} registries, at most {REGISTRIES_MAX}")
    found = [_place(part, name) for part in parts]
    endpoints = [endpoint for _, endpoint in found]
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise ValueError(f"{endpoint} is given twice; give each registry once")
    return tuple(found)


def _place(text: str, default: str) -> RegistryPlace:
    name, at, endpoint = text.rpartition("@")
    if at and not is_worker_id(name):
        raise ValueError(f"{name[:80]!r} is no name; expected NAME@tcp://host:port, or tcp://host:port")
    return WorkerId(name if at else default), check_endpoint(endpoint, names=True)
