"""Which worker listens where: how an address in another system's request id becomes the name of a known worker.

Laws: the book holds what authenticated discovery or the operator told, nothing that a request said; an address that it
does not hold leads nowhere. It is replaced as a whole by whoever learns of it, and may be read from any thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping

from kvbaton.protocol.ids import WorkerId


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
