"""Which transports are offered to a peer, in which order, and how to construct one: reads the catalogue.

Both sides of a pair list their transports, best first (`builtin_entries`, or an operator's own order), P takes the
first that D has too, D opens it before anything depends on it, and if that fails the pair takes the next
(`protocol/machines/pairing_target.py`). Any transport is offered if it is named and moves this kind of memory; those of
other packages (`external`) only then.

A transport with checksums is another transport (`tcp+sums`): both sides need the service that answers for the bytes, so
a side with and a side without have nothing in common, and the error names it. Checksums that are `auto` are those of
`BETWEEN_HOSTS` for device memory on a transport that leaves the host, and off everywhere else.

Transports of other packages: entry points of the group `kvbaton.transports`, each naming a `CatalogueEntry`.

Laws: a package's code is imported only when an operator has named its transport (or runs `kvbaton doctor`); its name is
known from the metadata alone. `auto` never offers one. A name that this package has, or that two packages claim, is
refused where it is used, naming the packages: no transport ever replaces another.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt, is_loopback
from kvbaton.transports.builtin_entries import DISTRIBUTIONS, PLANES, rdma_devices
from kvbaton.transports.catalogue_entry import (
    SUMS,
    CatalogueEntry,
    ChecksumChoice,
    ChecksumMode,
    PlaneError,
    PlaneSettings,
    summed,
)
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import DeviceTransport, HostTransport

if TYPE_CHECKING:
    from kvbaton.transports.checksum.checksum_memory import Sums
    from kvbaton.transports.checksum.checksum_transport import SummedTransport


GROUP = "kvbaton.transports"
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
RESERVED = ("auto",)
PAGE = "docs/write-a-transport.md"


@functools.cache
def claims() -> dict[str, tuple[EntryPoint, ...]]:
    """Transports of installed packages, by name. Read once: a later installation needs a new process."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, package_of(point))):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def entry_point_names() -> tuple[str, ...]:
    """Transports that can be named."""
    return tuple(name for name in claims() if not conflict(name) and NAME.fullmatch(name) and name not in RESERVED)


def conflict(name: str) -> str:
    """Why a name must not be used; "" when only one transport has it."""
    packages = [package_of(point) for point in claims().get(name, ())]
    if packages and name in PLANES:
        return (
            f"transport {name} is kvbaton's own, and package {packages[0]} claims that name too; "
            f"uninstall it (pip uninstall {packages[0]}), or have its entry point renamed"
        )
    if len(packages) > 1:
        return (
            f"transport {name} is claimed by the packages {' and '.join(packages)}; "
            f"uninstall all but one (pip uninstall {packages[-1]})"
        )
    return ""


def how_to_get(name: str) -> str:
    return f"pip install {DISTRIBUTIONS[name]}" if name in DISTRIBUTIONS else "install the package that has it"


@functools.cache
def load(name: str) -> CatalogueEntry:
    """The entry of another package. PlaneError names the package, and what to do."""
    if name not in claims():
        raise PlaneError(f"no transport {name}: choose from {', '.join(PLANES)}, or {how_to_get(name)}")
    (point,) = claims()[name]
    package = package_of(point)
    try:
        plane: CatalogueEntry = point.load()
    except Exception as error:  # external module: it may raise anything
        raise PlaneError(
            f"transport {name} of package {package} cannot be loaded ({point.value}): {type(error).__name__}: {error}; "
            f"update the package, or uninstall it (pip uninstall {package})"
        ) from error
    if problem := problem_of(plane, name):
        raise PlaneError(
            f"transport {name} of package {package} is not one ({point.value}): {problem}; "
            f"tell its author ({PAGE}), or uninstall it (pip uninstall {package})"
        )
    return msgspec.structs.replace(plane, in_auto=lambda: False)


def problem_of(plane: object, name: str) -> str:
    """Why a package's object is not a valid entry; "" when it is."""
    if not isinstance(plane, CatalogueEntry):
        return f"expected a kvbaton.transports.builtin_entries.CatalogueEntry, got a {type(plane).__name__}"
    if plane.name != name:
        return f"its entry is named {plane.name!r}"
    try:
        capabilities = plane.capabilities()
    except Exception as error:  # noqa: BLE001 - as above
        return f"its capabilities cannot be read: {error!r}"
    if capabilities.name != name:
        return f"its capabilities are named {capabilities.name!r}"
    makers = {"cpu": plane.make, "cuda": plane.make_device}
    missing = [kind for kind in capabilities.device_kinds if makers.get(kind) is None]
    return f"it claims to move {missing[0]} memory, but has no maker for that" if missing else ""


__all__ = [
    "AUTO",
    "BETWEEN_HOSTS",
    "CHECKSUMS",
    "ORDER",
    "PLANES",
    "SUMS",
    "CatalogueEntry",
    "ChecksumChoice",
    "ChecksumMode",
    "PlaneError",
    "PlaneSettings",
    "capabilities",
    "check_host",
    "checksum_of",
    "conflict",
    "endpoint_type",
    "exposed",
    "make",
    "make_device",
    "names",
    "of_kind",
    "offered",
    "parse",
    "plane_of",
    "rdma_devices",
]  # fmt: skip

log = logging.getLogger(__name__)

AUTO = "auto"
ORDER = tuple(PLANES)
"""This package's own, best first."""

CHECKSUMS: tuple[ChecksumMode, ...] = ("off", "sample", "full")
BETWEEN_HOSTS: ChecksumMode = "off"
"""What `auto` is for device memory between hosts: `full` where that costs at most a tenth of a handoff, as
`python -m kvbaton_proof.bench.device.device_checksums` measures it."""

MadeT = TypeVar("MadeT")


def names() -> tuple[str, ...]:
    """All known transports: this package's own, then those of other packages."""
    return (*ORDER, *entry_point_names())


def plane_of(name: str) -> CatalogueEntry:
    """The entry of a transport, with checksums or without. PlaneError if none fits the name."""
    plain = name.removesuffix(SUMS)
    return PLANES[plain] if plain in PLANES else load(plain)


def parse(text: str) -> tuple[str, ...]:
    """The names in an operator's choice: `auto`, one name, or several separated by commas, best first."""
    chosen = tuple(part.strip() for part in text.split(","))
    for name in chosen:
        if problem := conflict(name):
            raise ValueError(problem)
        if name not in (AUTO, *names()):
            apart = f"; {name} comes with: {how_to_get(name)}" if name in DISTRIBUTIONS else ""
            known = ", ".join(names())
            raise ValueError(f"got {name!r}, expected {AUTO}, or some of {known}, separated by commas{apart}")
    if len(set(chosen)) != len(chosen) or (AUTO in chosen and len(chosen) > 1):
        raise ValueError(f"got {text!r}, which names one twice, or another besides {AUTO}")
    return chosen


def offered(
    choice: str, device: str = "cpu", checksum: ChecksumChoice = "off", require_enforcement: bool = False
) -> tuple[str, ...]:
    """The transports that this process offers its peers, best first. OSError names what a chosen one lacks.

    With `require_enforcement` only those on which a peer can reach only the memory lent to it.
    """
    found = _usable(choice, device)
    if require_enforcement:
        open_ = [name for name in found if not capabilities(name).enforces]
        if open_ and parse(choice) != (AUTO,):
            kept = ", ".join(name for name in ORDER if capabilities(name).enforces)
            raise PlaneError(
                f"transport {open_[0]} cannot confine a peer to the memory lent to it, and require_enforcement is set; "
                f"use some of {kept}, or leave that out"
            )
        found = tuple(name for name in found if name not in open_)
    return tuple(name if checksum_of(name, device, checksum) == "off" else name + SUMS for name in found)


def checksum_of(name: str, device: str, checksum: ChecksumChoice) -> ChecksumMode:
    """What `auto` means on one transport, for memory of one kind."""
    if checksum != "auto":
        return checksum
    return "off" if device == "cpu" or capabilities(name).same_host else BETWEEN_HOSTS


def _usable(choice: str, device: str) -> tuple[str, ...]:
    chosen = parse(choice)
    if chosen != (AUTO,):
        for name in chosen:
            _check_kind(name, device)
            problem = plane_of(name).usable()
            if problem:
                raise PlaneError(f"transport {name} cannot be used here: {problem}")
        return chosen
    found = [name for name in of_kind(device) if PLANES[name].in_auto()]
    return tuple(name for name in found if not PLANES[name].usable())


def capabilities(name: str) -> Capabilities:
    """The capabilities of a transport, without constructing one."""
    plain = plane_of(name).capabilities()
    return summed(plain) if name.endswith(SUMS) else plain


def endpoint_type(name: str) -> Any:
    """The type of a transport's endpoints, if this package knows it; otherwise None."""
    plane = PLANES.get(name)
    return plane.endpoint() if plane is not None and plane.endpoint is not None else None


def exposed(name: str, host: str, encrypt: Encrypt = "auto") -> str:
    """A warning for the operator before this transport is used at `host`; "" when the network cannot read it."""
    plain = name.removesuffix(SUMS)
    if is_loopback(host) or capabilities(plain).same_host:
        return ""
    if not plane_of(plain).encrypts:
        return f"transport {plain} is not encrypted, and serves any peer that reaches it: use a private network"
    return f"transport {plain} is not encrypted between hosts, since encrypt is off" if encrypt == "off" else ""


def make(name: str, me: PeerId, settings: PlaneSettings, memory: Sequence[memoryview]) -> HostTransport:
    """A transport over these regions of host memory."""
    _check_kind(name.removesuffix(SUMS), "cpu")
    maker = plane_of(name).make
    assert maker is not None  # its entry says that it moves such memory
    plane = _made(name, settings, lambda: maker(me, settings))
    if name.endswith(SUMS):
        plane = _with_sums(plane, me, settings)
    for region, view in enumerate(memory):
        plane.register(region, view)
    return plane


def make_device(name: str, me: PeerId, settings: PlaneSettings, memory: Sequence[DeviceMemory]) -> DeviceTransport:
    """A transport over these regions of one device's memory."""
    _check_kind(name.removesuffix(SUMS), "cuda")
    device, maker = memory[0].device, plane_of(name).make_device
    assert maker is not None  # its entry says that it moves such memory
    plane = _made(name, settings, lambda: maker(me, settings, device))
    if name.endswith(SUMS):
        from kvbaton.transports.checksum.checksum_device import DeviceSums  # digested by the device, on both sides

        sums = DeviceSums(f"kvbaton-sums-{me}", device, settings.copy_share)
        plane = _with_sums(plane, me, settings, sums)
    for region, each in enumerate(memory):
        plane.register(region, each)
    return plane


def _made(name: str, settings: PlaneSettings, maker: Callable[[], MadeT]) -> MadeT:
    plain = name.removesuffix(SUMS)
    check_host(plain, settings.host)
    problem = exposed(plain, settings.host, settings.encrypt)
    if problem:
        log.warning("[plane-exposed] %s", problem)
    try:
        return maker()
    except (ValueError, OSError):
        raise
    except Exception as error:  # a library may raise anything, and without its device some do
        raise PlaneError(f"transport {name} cannot be used here: {type(error).__name__}: {error}") from error


def of_kind(device: str) -> tuple[str, ...]:
    """This package's own transports for this kind of memory, `cpu` (the host's) or `cuda`, best first."""
    return tuple(name for name in ORDER if device in capabilities(name).device_kinds)


def _check_kind(name: str, device: str) -> None:
    """PlaneError for a transport that cannot move such memory."""
    if device not in capabilities(name).device_kinds:
        memory = "host memory" if device == "cpu" else "device memory"
        raise PlaneError(f"transport {name} does not move {memory}; use {', '.join(of_kind(device))}")


def _with_sums(
    plane: HostTransport | DeviceTransport, me: PeerId, settings: PlaneSettings, sums: Sums | None = None
) -> SummedTransport:
    from kvbaton.transports.checksum.checksum_memory import Checksum  # with NumPy, when somebody wants them
    from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport

    mode = BETWEEN_HOSTS if settings.checksum == "auto" else settings.checksum
    config = SumConfig(Checksum(mode), host=settings.host, encrypt=settings.encrypt)
    return SummedTransport(plane, me, config, sums)


def check_host(name: str, host: str) -> None:
    """Some transports accept only a numeric address."""
    if plane_of(name).numeric_host:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"host: {host!r}; {name} requires this host's own numeric IPv4 address") from None
