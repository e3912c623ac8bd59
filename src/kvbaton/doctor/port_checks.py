"""Ports: whether they can be bound now, and whether two parts of a configuration use the same one.

Law: a port is tried by binding it for an instant, without listening; a process that already has it is not disturbed.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvbaton.doctor.config_checks import ANYWHERE, ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, finding

PORT_MAX = 65535
DEFAULT_PORT = "8000"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Use(msgspec.Struct, frozen=True):
    """A port that something will listen on."""

    where: str
    what: str
    host: str
    port: int


def uses(engine: ConfiguredEngine) -> Iterator[Use]:
    """The fixed ports of an engine; 0 takes a free one and needs no check."""
    if engine.options is not None:
        yield from _fixed(engine.where, "http_port", engine.options.http_host, engine.options.http_port)
    elif engine.launch.options is not None:
        text = engine.launch.option("port") or DEFAULT_PORT
        if text.lstrip("-").isdigit():
            yield Use(engine.where, "--port", engine.launch.option("host"), int(text))
    elif engine.settings is not None and engine.settings.http_address:
        host, _, text = engine.settings.http_address.rpartition(":")
        yield Use(engine.where, "http_address", host.strip("[]"), int(text))
    if engine.told is not None:
        yield from _fixed(engine.where, "control_port", engine.told.control_host, engine.told.control_port)


def examine(wanted: Iterable[Use]) -> list[Finding]:
    """Checks every port against the machine and against the others."""
    listed = list(wanted)
    found: list[Finding] = []
    for index, use in enumerate(listed):
        if not 1 <= use.port <= PORT_MAX:
            text = f"{use.what}: {use.port} is not a valid port"
            found.append(finding("port-range", use.where, text, f"choose 1 to {PORT_MAX}"))
            continue
        twin = next((other for other in listed[:index] if _clash(use, other)), None)
        if twin is not None:
            text = f"{use.what} and {twin.what} of {twin.where} are both {_told(use)}"
            found.append(finding("port-twice", use.where, text, f"give {use.what} another port"))
        else:
            found += _try(use)
    return found


def _fixed(where: str, what: str, host: str, port: int) -> Iterator[Use]:
    if port:
        yield Use(where, what, host, port)


def _clash(one: Use, other: Use) -> bool:
    wide = one.host in ANYWHERE or other.host in ANYWHERE
    return one.port == other.port and (wide or _numeric(one.host) == _numeric(other.host))


def _try(use: Use) -> Iterator[Finding]:
    family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not matter
        try:
            probe.bind((_numeric(use.host), use.port))
        except (OSError, TypeError, ValueError) as error:
            yield _refused(use, error)
            return
    low, high = _ephemeral()
    if low <= use.port <= high:
        text = f"{use.what}: {use.port} is in {low}..{high}, the range for outgoing connections"
        fix = f"choose one below {low}, or: sysctl -w net.ipv4.ip_local_reserved_ports={use.port}"
        yield finding("port-ephemeral", use.where, text, fix)


def _refused(use: Use, error: Exception) -> Finding:
    if not isinstance(error, OSError) or error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        text = f"{use.what}: {use.host} is not an address of this machine"
        return finding("host-foreign", use.where, text, "run doctor on that host too")
    text = f"{use.what}: {_told(use)} cannot be bound: {error.strerror}"
    fix = f"find the process: ss -ltnp 'sport = :{use.port}'; stop it, or choose another port"
    return finding("port-taken", use.where, text, fix)


def _numeric(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _told(use: Use) -> str:
    host = f"[{use.host}]" if ":" in use.host else use.host
    return f"{host or '*'}:{use.port}"


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return PORT_MAX + 1, PORT_MAX + 1
    return low, high
