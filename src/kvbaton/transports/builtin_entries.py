"""The transports of this package, best first: each is a folder and its entry here.

The order follows what the bytes pass through: another process's device memory, another process's host memory, an RDMA
fabric, a kernel's sockets. `auto` offers the best without further configuration: NIXL only where there is an RDMA
device, since over TCP kvbaton's own transports are faster or can cancel and fence; not Mooncake, whose engine serves
any peer that can reach its port. What has not run on hardware is a package of its own (`DISTRIBUTIONS`).

Modules are imported in functions, so that no library is imported before its transport is requested.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.catalogue_entry import CatalogueEntry, PlaneSettings, loads

if TYPE_CHECKING:
    from kvbaton.transports.core.transport import DeviceTransport, HostTransport

DISTRIBUTIONS = {"mori": "kvbaton-mori"}
"""Transports of kvbaton's that are installed apart, over the same entry points as anybody's."""

RDMA_DEVICES = Path("/sys/class/infiniband")


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(each.name for each in RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else ()


# --- cuda


def _load_cuda() -> None:
    from kvbaton.transports.cuda.cuda_driver import load

    load()


def _cuda_capabilities() -> Capabilities:
    from kvbaton.transports.cuda.cuda_transport import CAPABILITIES

    return CAPABILITIES


def _make_cuda(me: PeerId, settings: PlaneSettings, device: int) -> DeviceTransport:
    from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport

    return CudaTransport(me, CudaConfig(device=device, share=settings.copy_share))


_CUDA = CatalogueEntry(
    name="cuda",
    what="device memory of another process on this host, by CUDA IPC and one kernel launch",
    needs="an NVIDIA GPU and its driver",
    usable=loads(_load_cuda),
    in_auto=lambda: True,
    shares=True,
    capabilities=_cuda_capabilities,
    make_device=_make_cuda,
)


# --- shm


def _shm_problem() -> str:
    return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"


def _shm_capabilities() -> Capabilities:
    from kvbaton.transports.shm.shm_transport import CAPABILITIES

    return CAPABILITIES


def _make_shm(me: PeerId, _settings: PlaneSettings) -> HostTransport:
    from kvbaton.transports.shm.shm_transport import ShmTransport

    return ShmTransport(me)


def _shm_endpoint() -> Any:
    from kvbaton.transports.local.region_listener import ShmEndpoint

    return ShmEndpoint


_SHM = CatalogueEntry(
    name="shm",
    what="host memory of another process on this host",
    needs="Linux",
    usable=_shm_problem,
    in_auto=lambda: True,
    shares=True,
    capabilities=_shm_capabilities,
    make=_make_shm,
    endpoint=_shm_endpoint,
)


# --- staged


def _staged(carrier: Literal["shm", "tcp"], way: str) -> CatalogueEntry:
    def capabilities() -> Capabilities:
        from kvbaton.transports.staged.staged_transport import CAPABILITIES

        return CAPABILITIES[carrier]

    def make(me: PeerId, settings: PlaneSettings, device: int) -> DeviceTransport:
        from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport

        share, host, encrypt = settings.copy_share, settings.host, settings.encrypt
        return StagedTransport(
            me, StagedConfig(carrier=carrier, device=device, share=share, host=host, encrypt=encrypt)
        )

    return CatalogueEntry(
        name=f"staged-{carrier}",
        what=f"device memory through pinned host memory, over {way}",
        needs="an NVIDIA GPU and its driver",
        usable=_CUDA.usable,
        in_auto=lambda: True,
        encrypts=True,
        capabilities=capabilities,
        make_device=make,
    )


# --- nixl


def _load_nixl() -> None:
    from kvbaton.transports.nixl.nixl_agent import load_bindings

    load_bindings()


def _nixl_capabilities() -> Capabilities:
    from kvbaton.transports.nixl.nixl_transport import CAPABILITIES

    return CAPABILITIES


def _make_nixl(me: PeerId, _settings: PlaneSettings) -> HostTransport:
    from kvbaton.transports.nixl.nixl_transport import NixlTransport

    return NixlTransport(me)


def _make_nixl_of_device(me: PeerId, _settings: PlaneSettings, device: int) -> DeviceTransport:
    from kvbaton.transports.nixl.nixl_transport import NixlTransport, device_config

    return NixlTransport(me, device_config(device))


_NIXL = CatalogueEntry(
    name="nixl",
    what="host or device memory by NIXL: RDMA and other UCX transports",
    needs="pip install nixl",
    usable=loads(_load_nixl),
    in_auto=lambda: bool(rdma_devices()),
    capabilities=_nixl_capabilities,
    make=_make_nixl,
    make_device=_make_nixl_of_device,
)


# --- mooncake


def _load_mooncake() -> None:
    from kvbaton.transports.mooncake.mooncake_engine import load

    load()


def _mooncake_capabilities() -> Capabilities:
    from kvbaton.transports.mooncake.mooncake_transport import CAPABILITIES

    return CAPABILITIES


def _make_mooncake(me: PeerId, settings: PlaneSettings) -> HostTransport:
    from kvbaton.transports.mooncake.mooncake_transport import MooncakeConfig, MooncakeTransport

    return MooncakeTransport(me, MooncakeConfig(host=settings.host))


_MOONCAKE = CatalogueEntry(
    name="mooncake",
    what="TCP by Mooncake's transfer engine",
    needs="pip install mooncake-transfer-engine-non-cuda (or -cuda), and libibverbs",
    usable=loads(_load_mooncake),
    numeric_host=True,
    capabilities=_mooncake_capabilities,
    make=_make_mooncake,
)


# --- tcp


def _tcp_capabilities() -> Capabilities:
    from kvbaton.transports.tcp.tcp_transport import CAPABILITIES

    return CAPABILITIES


def _make_tcp(me: PeerId, settings: PlaneSettings) -> HostTransport:
    from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpTransport

    return TcpTransport(me, TcpConfig(host=settings.host, encrypt=settings.encrypt))


def _tcp_endpoint() -> Any:
    from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpEndpoint

    return TcpEndpoint | SealedTcpEndpoint


_TCP = CatalogueEntry(
    name="tcp",
    what="kvbaton's own, over TCP",
    in_auto=lambda: True,
    encrypts=True,
    capabilities=_tcp_capabilities,
    make=_make_tcp,
    endpoint=_tcp_endpoint,
)

_ENTRIES = (_CUDA, _SHM, _staged("shm", "shared memory"), _NIXL, _MOONCAKE, _TCP, _staged("tcp", "TCP"))
PLANES: dict[str, CatalogueEntry] = {plane.name: plane for plane in _ENTRIES}
