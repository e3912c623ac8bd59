"""Which data planes there are, in which order a pair prefers them, and how one is made.

The order is that of what the bytes pass through: another process's device memory, another process's host memory, an
RDMA fabric, a kernel's sockets. Both sides of a pair list what they have in this order (an operator may give another),
P takes the first that D has too, D opens it before anything depends on it, and where that fails the pair takes the next
(`protocol/machines/pairing_target.py`).

`auto` offers what is best without being told more: NIXL only where there is an RDMA device, since over TCP kvbaton's
own planes are faster or can cancel and fence; MoRI not, since it has not run on hardware; Mooncake not, since its
engine serves whoever can reach its port. Any of them is offered when it is named, and moves this kind of memory.

With checksums a plane is another plane (`tcp+sums`): both sides need the service that answers for the bytes, so a side
with and a side without have nothing in common, and are told so by name. Checksums that are `auto` are those of
`BETWEEN_HOSTS` for device memory on a plane that leaves the host, and off everywhere else.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvbaton.protocol.capabilities import Capabilities
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt, is_loopback
from kvbaton.transports.checksum.checksum_portions import Checksum
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport, summed
from kvbaton.transports.core.device_memory import DeviceMemory
from kvbaton.transports.core.transport import DeviceTransport, HostTransport
from kvbaton.transports.cuda.cuda_driver import SHARE
from kvbaton.transports.shm import shm_transport
from kvbaton.transports.tcp import tcp_transport

log = logging.getLogger(__name__)

AUTO = "auto"
SUMS = "+sums"
ORDER = ("cuda", "shm", "staged-shm", "mori", "nixl", "mooncake", "tcp", "staged-tcp")
"""Best first."""

RDMA_DEVICES = Path("/sys/class/infiniband")
ChecksumMode = Literal["off", "sample", "full"]
CHECKSUMS: tuple[ChecksumMode, ...] = ("off", "sample", "full")
ChecksumChoice = Literal["auto", "off", "sample", "full"]
BETWEEN_HOSTS: ChecksumMode = "off"
"""What `auto` is for device memory between hosts: `full` where that costs at most a tenth of a handoff, as
`python -m kvbaton.proof.bench.device.device_checksums` measures it."""


class PlaneError(OSError):
    """A data plane cannot be had here; the message says which and why."""


class PlaneSettings(msgspec.Struct, frozen=True):
    """What a data plane is told when it is made."""

    host: str = "127.0.0.1"  # that peers dial
    checksum: ChecksumChoice = "off"
    encrypt: Encrypt = "auto"
    copy_share: float = SHARE  # of a device's multiprocessors, for copies and digests together


class Plane(msgspec.Struct, frozen=True):
    """One entry of the list: what it needs besides this package, and whether `auto` offers it here."""

    name: str
    what: str
    needs: str  # how to get it
    usable: Callable[[], str]  # why it cannot be used in this process; "" when it can
    in_auto: Callable[[], bool]
    encrypts: bool = True  # what leaves the host, between hosts
    left_out: str = ""  # why `auto` may leave it out


class Told(msgspec.Struct, frozen=True):
    """What a plane is to memory of one kind on this machine; what `kvbaton doctor` lists."""

    name: str
    what: str
    offered: bool  # with this choice
    why_not: str  # "" when it is offered
    needs: str  # how to get it, where that is why
    writes: bool  # push writes over it; elsewhere the receiver reads behind the sender
    enforces: bool
    encrypts: bool  # or never leaves the host


def told(choice: str, device: str = "cpu", require_enforcement: bool = False) -> tuple[Told, ...]:
    """Every plane that moves memory of this kind, best first, offered or why not. Never raises for what is missing."""
    try:
        names, problem = offered(choice, device, require_enforcement=require_enforcement), ""
    except OSError as error:
        names, problem = (), str(error)
    return tuple(_told(name, choice, name in names, problem) for name in of_kind(device))


def _told(name: str, choice: str, is_offered: bool, problem: str) -> Told:
    plane, able = PLANES[name], capabilities(name)
    missing = "" if is_offered else plane.usable()
    why_not = missing
    if not is_offered and not missing:
        if parse(choice) != (AUTO,):
            why_not = problem if name in parse(choice) else f"transport is {choice}"
        else:
            why_not = plane.left_out if not plane.in_auto() else "it cannot keep a peer to what is lent to it"
    writes, encrypts = able.can_write and able.can_fence, plane.encrypts or able.same_host
    needs = plane.needs if missing else ""
    return Told(name, plane.what, is_offered, why_not, needs, writes, able.enforces, encrypts)


def parse(text: str) -> tuple[str, ...]:
    """The names in an operator's choice: `auto`, one name, or several with commas, best first."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in (AUTO, *ORDER):
            raise ValueError(f"got {name!r}, expected {AUTO}, or some of {', '.join(ORDER)} with commas, best first")
    if len(set(names)) != len(names) or (AUTO in names and len(names) > 1):
        raise ValueError(f"got {text!r}, which names one twice, or another beside {AUTO}")
    return names


def offered(
    choice: str, device: str = "cpu", checksum: ChecksumChoice = "off", require_enforcement: bool = False
) -> tuple[str, ...]:
    """What this process offers its peers, best first. OSError names what a chosen one lacks.

    With `require_enforcement` only those on which a peer reaches nothing but what is lent to it.
    """
    names = _usable(choice, device)
    if require_enforcement:
        open_ = [name for name in names if not capabilities(name).enforces]
        if open_ and parse(choice) != (AUTO,):
            kept = ", ".join(name for name in ORDER if capabilities(name).enforces)
            raise PlaneError(
                f"transport {open_[0]} cannot keep a peer to what is lent to it, and require_enforcement is set; "
                f"use some of {kept}, or leave that out"
            )
        names = tuple(name for name in names if name not in open_)
    return tuple(name if checksum_of(name, device, checksum) == "off" else name + SUMS for name in names)


def checksum_of(name: str, device: str, checksum: ChecksumChoice) -> ChecksumMode:
    """What `auto` comes to on one plane, for memory of one kind."""
    if checksum != "auto":
        return checksum
    return "off" if device == "cpu" or capabilities(name).same_host else BETWEEN_HOSTS


def _usable(choice: str, device: str) -> tuple[str, ...]:
    names = parse(choice)
    if names != (AUTO,):
        for name in names:
            _check_kind(name, device)
            problem = PLANES[name].usable()
            if problem:
                raise PlaneError(f"transport {name} cannot be used here: {problem}")
        return names
    found = [name for name in of_kind(device) if PLANES[name].in_auto()]
    return tuple(name for name in found if not PLANES[name].usable())


def capabilities(name: str) -> Capabilities:
    """What a data plane can promise, without making one."""
    base, _, carrier = name.removesuffix(SUMS).partition("-")
    told = _MODULES[base]().CAPABILITIES
    plain: Capabilities = told[carrier] if carrier else told
    return summed(plain) if name.endswith(SUMS) else plain


def exposed(name: str, host: str, encrypt: Encrypt = "auto") -> str:
    """What an operator must know before this plane is used at `host`; "" when nobody on the network can read it."""
    plain = name.removesuffix(SUMS)
    if is_loopback(host) or capabilities(plain).same_host:
        return ""
    if not PLANES[plain].encrypts:
        return f"transport {plain} is not encrypted, and serves whoever reaches it: keep it on a network of its own"
    return f"transport {plain} is not encrypted between hosts, since encrypt is off" if encrypt == "off" else ""


def make(name: str, me: PeerId, settings: PlaneSettings, memory: Sequence[memoryview]) -> HostTransport:
    """A data plane over these regions of host memory."""
    plain = name.removesuffix(SUMS)
    check_host(plain, settings.host)
    _warn(plain, settings)
    try:
        plane = _plain(plain, me, settings)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a library may raise anything, and without its device some do
        raise PlaneError(f"transport {name} cannot be used here: {type(error).__name__}: {error}") from error
    if plain != name:
        plane = SummedTransport(plane, me, _sum_config(settings))
    for region, view in enumerate(memory):
        plane.register(region, view)
    return plane


def make_device(name: str, me: PeerId, settings: PlaneSettings, memory: Sequence[DeviceMemory]) -> DeviceTransport:
    """A data plane over these regions of one device's memory."""
    plain, device = name.removesuffix(SUMS), memory[0].device
    _check_kind(plain, "cuda")
    check_host(plain, settings.host)
    _warn(plain, settings)
    try:
        plane = _of_device(plain, me, settings, device)
    except (ValueError, OSError):
        raise
    except Exception as error:  # the driver's, or a library's
        raise PlaneError(f"transport {name} cannot be used here: {type(error).__name__}: {error}") from error
    if plain != name:
        plane = with_device_sums(plane, me, settings, device)
    for region, each in enumerate(memory):
        plane.register(region, each)
    return plane


def of_kind(device: str) -> tuple[str, ...]:
    """The planes that move memory of this kind, `cpu` (the host's) or `cuda`, best first."""
    return tuple(name for name in ORDER if device in capabilities(name).device_kinds)


def _check_kind(name: str, device: str) -> None:
    """PlaneError for a plane that cannot move such memory."""
    if name not in of_kind(device):
        memory = "host memory" if device == "cpu" else "device memory"
        raise PlaneError(f"transport {name} does not move {memory}, which goes over {', '.join(of_kind(device))}")


def with_device_sums(plane: DeviceTransport, me: PeerId, settings: PlaneSettings, device: int) -> SummedTransport:
    """Checksums around a plane of device memory: digested by the device, on both sides."""
    sums = _module("sums_device")().DeviceSums(f"kvbaton-sums-{me}", device, settings.copy_share)
    return SummedTransport(plane, me, _sum_config(settings), sums)


def _sum_config(settings: PlaneSettings) -> SumConfig:
    mode = BETWEEN_HOSTS if settings.checksum == "auto" else settings.checksum
    return SumConfig(Checksum(mode), host=settings.host, encrypt=settings.encrypt)


def _warn(name: str, settings: PlaneSettings) -> None:
    problem = exposed(name, settings.host, settings.encrypt) if name in PLANES else ""
    if problem:
        log.warning("[plane-exposed] %s", problem)


def _of_device(name: str, me: PeerId, settings: PlaneSettings, device: int) -> DeviceTransport:
    base, _, carrier = name.partition("-")
    module = _MODULES[base]()
    made: DeviceTransport
    if base == "cuda":
        made = module.CudaTransport(me, module.CudaConfig(device=device, share=settings.copy_share))
    elif base == "nixl":
        made = module.NixlTransport(me, module.device_config(device))
    elif base == "mori":
        made = module.MoriTransport(me, module.MoriConfig(host=settings.host))
    else:
        told = {"host": settings.host, "encrypt": settings.encrypt, "share": settings.copy_share}
        made = module.StagedTransport(me, module.StagedConfig(carrier=carrier, device=device, **told))
    return made


def _plain(name: str, me: PeerId, settings: PlaneSettings) -> HostTransport:
    if name == "shm":
        return shm_transport.ShmTransport(me)
    if name == "tcp":
        return tcp_transport.TcpTransport(me, tcp_transport.TcpConfig(host=settings.host, encrypt=settings.encrypt))
    _check_kind(name, "cpu")
    module = _MODULES[name]()
    if name == "mooncake":
        made: HostTransport = module.MooncakeTransport(me, module.MooncakeConfig(host=settings.host))
    elif name == "nixl":
        made = module.NixlTransport(me)
    else:
        made = module.MoriTransport(me, module.MoriConfig(host=settings.host))
    return made


# --- what this machine has


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(each.name for each in RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else ()


def _has_rdma() -> bool:
    return bool(rdma_devices())


def _always() -> str:
    return ""


def _shm_problem() -> str:
    return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"


def _loads(load: Callable[[], Any]) -> Callable[[], str]:
    """Whether a library can be had; its first import may take a while."""

    def problem() -> str:
        try:
            load()
        except Exception as error:  # noqa: BLE001 - a library that is broken may raise anything
            return f"{type(error).__name__}: {error}"
        return ""

    return problem


def _module(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(f"kvbaton.transports.{name}")


_MODULES: dict[str, Callable[[], Any]] = {name: _module(name) for name in {each.partition("-")[0] for each in ORDER}}

PLANES: dict[str, Plane] = {
    plane.name: plane
    for plane in (
        Plane(
            "cuda",
            "device memory of another process of this host, by CUDA IPC and one kernel launch",
            "an NVIDIA GPU and its driver",
            _loads(lambda: _module("cuda_driver")().load()),
            lambda: True,
        ),
        Plane("shm", "host memory of another process of this host", "Linux", _shm_problem, lambda: True),
        Plane(
            "mori",
            "RDMA by MoRI (ROCm)",
            "amd_mori",
            _loads(lambda: _module("mori_engine")().load()),
            lambda: False,
            encrypts=False,
            left_out="auto leaves it out: it has not run on hardware; name it to use it",
        ),
        Plane(
            "nixl",
            "host or device memory by RDMA, and what else UCX has, by NIXL",
            "pip install nixl",
            _loads(lambda: _module("nixl_agent")().load_bindings()),
            _has_rdma,
            encrypts=False,
            left_out="auto leaves it out where there is no RDMA device; name it to use it",
        ),
        Plane(
            "mooncake",
            "TCP by Mooncake's transfer engine",
            "pip install mooncake-transfer-engine-non-cuda (or -cuda), and libibverbs",
            _loads(lambda: _module("mooncake_engine")().load()),
            lambda: False,
            encrypts=False,
            left_out="auto leaves it out: its engine serves whoever reaches its port; name it to use it",
        ),
        Plane("tcp", "kvbaton's own over TCP", "nothing", _always, lambda: True),
        *(
            Plane(
                f"staged-{carrier}",
                f"device memory through pinned memory of the host, over {way}",
                "an NVIDIA GPU and its driver",
                _loads(lambda: _module("cuda_driver")().load()),
                lambda: True,
            )
            for carrier, way in (("shm", "shared memory"), ("tcp", "TCP"))
        ),
    )
}


def check_host(name: str, host: str) -> None:
    """Some data planes take a numeric address only."""
    if name in {"mooncake", "mori"}:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"host: {host!r}; {name} needs this host's own IPv4 address, as numbers") from None
