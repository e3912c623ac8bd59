"""An entry of the transport catalogue: what it is, what it needs, and how to construct one.

The entry is all that the rest of kvbaton knows about a transport: `--transport NAME`, `auto`, the ranks of vLLM,
`kvbaton doctor` and shell completion are derived from it. Functions instead of values, so that listing transports
imports none of their libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.core.transport import DeviceTransport, HostTransport
from kvbaton.transports.cuda.cuda_driver import SHARE

ChecksumMode = Literal["off", "sample", "full"]
ChecksumChoice = Literal["auto", "off", "sample", "full"]

SUMS = "+sums"
"""Ends the name of a transport with checksums."""


class PlaneError(OSError):
    """A transport is unavailable here; the message says which and why."""


class PlaneSettings(msgspec.Struct, frozen=True):
    """Construction settings of a transport."""

    host: str = "127.0.0.1"  # that peers connect to
    checksum: ChecksumChoice = "off"
    encrypt: Encrypt = "auto"
    copy_share: float = SHARE  # of a device's multiprocessors, for copies and digests together


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. `make` is for host memory, `make_device` for the memory of a given device."""

    name: str
    what: str
    capabilities: Callable[[], Capabilities]
    make: Callable[[PeerId, PlaneSettings], HostTransport] | None = None
    make_device: Callable[[PeerId, PlaneSettings, int], DeviceTransport] | None = None
    needs: str = "nothing"  # how to get it
    usable: Callable[[], str] = lambda: ""  # why it is unusable in this process; "" if it is usable
    in_auto: Callable[[], bool] = lambda: False
    encrypts: bool = False  # traffic between hosts
    shares: bool = False  # peers open the memory itself, which must be shareable
    numeric_host: bool = False  # it accepts only this host's own IPv4 address
    endpoint: Callable[[], Any] | None = None  # the type of its endpoints, to check one without a transport


def summed(inner: Capabilities) -> Capabilities:
    """Of a transport with checksums: the other process takes part now, with digests of its memory, and must know."""
    return msgspec.structs.replace(inner, name=inner.name + SUMS, one_sided=False)


def loads(load: Callable[[], Any]) -> Callable[[], str]:
    """For `usable`: whether a library is available; its first import may take a while."""

    def problem() -> str:
        try:
            load()
        except Exception as error:  # noqa: BLE001 - a library that is broken may raise anything
            return f"{type(error).__name__}: {error}"
        return ""

    return problem
