"""What the parts of the control plane share: their one error, their bounds, and what counts as an address.

Law: an address is checked where it enters, once. What a registered worker may advertise is numeric and dialable: a
host name would be resolved on the I/O thread that serves everyone else, and a wildcard leads nowhere.

Where the registries of a cluster are: `tcp://a:7700,registry-b@tcp://b:7700`.

Law: one text, one meaning, wherever it is given: a worker's or vLLM's `registry`, `--registry` of each command.

`"control_host": "auto"`: the address by which the rest of the cluster reaches this process.

Law: it is one numeric address of this host, never a wildcard or a name. What the platform says (POD_IP, VLLM_HOST_IP)
goes before what the routing table says; the latter is asked without a packet being sent.

Which worker listens where: how an address in another system's request id becomes the name of a known worker.

Laws: the book holds what authenticated discovery or the operator told, nothing that a request said; an address that it
does not hold leads nowhere. It is replaced as a whole by whoever learns of it, and may be read from any thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping

import msgspec

from kvbaton.protocol.ids import WorkerId, is_worker_id
from kvbaton.protocol.wire.codec import FRAME_BYTES_MAX


class AddressBook:
    """Workers by the address of their control socket."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], WorkerId] = {}

    def __len__(self) -> int:
        return len(self._names)

    def replace(self, endpoints: Mapping[str, str]) -> None:
        """From now on these workers are known, by name, at these `tcp://` endpoints, and no others."""
        self._names = {split_endpoint(endpoint): WorkerId(name) for name, endpoint in endpoints.items()}

    def at(self, host: str, port: int) -> WorkerId | None:
        return self._names.get((_canonical(host), port))


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host, canonical and without brackets, and port of a `tcp://` endpoint that was checked before."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return _canonical(host), int(port)


def moriio_address(endpoint: str) -> str:
    """MoRI-IO names a worker by two ports; here both are the control socket's, by which peers find it again."""
    host, port = split_endpoint(endpoint)
    return f"host:{host},handshake:{port},notify:{port}"


def p2p_nccl_address(endpoint: str) -> str:
    """P2pNccl names a worker by one `host:port`: the control socket's."""
    host, port = split_endpoint(endpoint)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _canonical(host: str) -> str:
    bare = host.strip("[]").lower()
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bare))
    return bare


ADDRESS_ENV = ("POD_IP", "VLLM_HOST_IP")


def own_address(field: str, towards: str, environ: Mapping[str, str] = os.environ) -> str:
    """`towards`: endpoint of a registry, or of anything else that peers are beside. `field` is for the error."""
    for name in ADDRESS_ENV:
        if text := environ.get(name, "").strip():
            return _numeric(field, name, text)
    if not towards:
        raise ControlError(f"{field}: auto needs POD_IP, VLLM_HOST_IP or a registry; give an address of this host")
    host, port = split_endpoint(towards)
    why = "no route"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ControlError(
            f"{field}: auto cannot find the registry {host} ({error}); set POD_IP, or give an address of this host"
        ) from None
    for family, kind, number, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, number) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    raise ControlError(f"{field}: auto found no way to {host} ({why}); set POD_IP, or give an address of this host")


def _numeric(field: str, name: str, text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ControlError(
            f"{field}: auto takes {name}, which is {text[:80]!r}; expected an address as numbers"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise ControlError(f"{field}: auto takes {name}, which is {text}; give the address by which peers reach it")
    return str(address)


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
