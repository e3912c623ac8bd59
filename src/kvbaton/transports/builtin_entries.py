"""The transports of this package, best first: each is a folder and its entry here.

The order follows what the bytes pass through: another process's device memory, another process's host memory, an RDMA
fabric, a kernel's sockets. `auto` offers the best without further configuration: NIXL only where there is an RDMA
device, since over TCP kvbaton's own transports are faster or can cancel and fence; not MoRI, which has not run on
hardware; not Mooncake, whose engine serves any peer that can reach its port.

Modules are named where they are used (`the`), so that no library is imported before its transport is requested.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module as the
from pathlib import Path
from typing import Any

from kvbaton.transports.catalogue_entry import CatalogueEntry

RDMA_DEVICES = Path("/sys/class/infiniband")


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(each.name for each in RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else ()


def loads(load: Callable[[], Any]) -> Callable[[], str]:
    """Whether a library is available; its first import may take a while."""

    def problem() -> str:
        try:
            load()
        except Exception as error:  # noqa: BLE001 - a library that is broken may raise anything
            return f"{type(error).__name__}: {error}"
        return ""

    return problem


def _shm_problem() -> str:
    return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"


_HAS_GPU = loads(lambda: the("kvbaton.transports.cuda.cuda_driver").load())


def _staged(carrier: str, way: str) -> CatalogueEntry:
    def make(me: Any, told: Any, device: int) -> Any:
        staged, common = the("kvbaton.transports.staged.staged_transport"), {"host": told.host, "encrypt": told.encrypt}
        config = staged.StagedConfig(carrier=carrier, device=device, share=told.copy_share, **common)
        return staged.StagedTransport(me, config)

    return CatalogueEntry(
        name=f"staged-{carrier}",
        what=f"device memory through pinned host memory, over {way}",
        needs="an NVIDIA GPU and its driver",
        usable=_HAS_GPU,
        in_auto=lambda: True,
        encrypts=True,
        capabilities=lambda: the("kvbaton.transports.staged.staged_transport").CAPABILITIES[carrier],
        make_device=make,
    )


def _mori(me: Any, told: Any, _device: int = 0) -> Any:
    mori = the("kvbaton.transports.mori.mori_transport")
    return mori.MoriTransport(me, mori.MoriConfig(host=told.host))


def _nixl_of_device(me: Any, _told: Any, device: int) -> Any:
    nixl = the("kvbaton.transports.nixl.nixl_transport")
    return nixl.NixlTransport(me, nixl.device_config(device))


def _cuda(me: Any, told: Any, device: int) -> Any:
    cuda = the("kvbaton.transports.cuda.cuda_transport")
    return cuda.CudaTransport(me, cuda.CudaConfig(device=device, share=told.copy_share))


def _mooncake(me: Any, told: Any) -> Any:
    mooncake = the("kvbaton.transports.mooncake.mooncake_transport")
    return mooncake.MooncakeTransport(me, mooncake.MooncakeConfig(host=told.host))


def _tcp(me: Any, told: Any) -> Any:
    tcp = the("kvbaton.transports.tcp.tcp_transport")
    return tcp.TcpTransport(me, tcp.TcpConfig(host=told.host, encrypt=told.encrypt))


def _tcp_endpoints() -> Any:
    tcp = the("kvbaton.transports.tcp.tcp_transport")
    return tcp.TcpEndpoint | tcp.SealedTcpEndpoint


_ENTRIES = (
    CatalogueEntry(
        name="cuda",
        what="device memory of another process on this host, by CUDA IPC and one kernel launch",
        needs="an NVIDIA GPU and its driver",
        usable=_HAS_GPU,
        in_auto=lambda: True,
        shares=True,
        capabilities=lambda: the("kvbaton.transports.cuda.cuda_transport").CAPABILITIES,
        make_device=_cuda,
    ),
    CatalogueEntry(
        name="shm",
        what="host memory of another process on this host",
        needs="Linux",
        usable=_shm_problem,
        in_auto=lambda: True,
        shares=True,
        capabilities=lambda: the("kvbaton.transports.shm.shm_transport").CAPABILITIES,
        make=lambda me, _told: the("kvbaton.transports.shm.shm_transport").ShmTransport(me),
        endpoint=lambda: the("kvbaton.transports.local.region_listener").ShmEndpoint,
    ),
    _staged("shm", "shared memory"),
    CatalogueEntry(
        name="mori",
        what="RDMA by MoRI (ROCm)",
        needs="amd_mori",
        usable=loads(lambda: the("kvbaton.transports.mori.mori_engine").load()),
        numeric_host=True,
        capabilities=lambda: the("kvbaton.transports.mori.mori_transport").CAPABILITIES,
        make=_mori,
        make_device=_mori,
    ),
    CatalogueEntry(
        name="nixl",
        what="host or device memory by NIXL: RDMA and other UCX transports",
        needs="pip install nixl",
        usable=loads(lambda: the("kvbaton.transports.nixl.nixl_agent").load_bindings()),
        in_auto=lambda: bool(rdma_devices()),
        capabilities=lambda: the("kvbaton.transports.nixl.nixl_transport").CAPABILITIES,
        make=lambda me, _told: the("kvbaton.transports.nixl.nixl_transport").NixlTransport(me),
        make_device=_nixl_of_device,
    ),
    CatalogueEntry(
        name="mooncake",
        what="TCP by Mooncake's transfer engine",
        needs="pip install mooncake-transfer-engine-non-cuda (or -cuda), and libibverbs",
        usable=loads(lambda: the("kvbaton.transports.mooncake.mooncake_engine").load()),
        numeric_host=True,
        capabilities=lambda: the("kvbaton.transports.mooncake.mooncake_transport").CAPABILITIES,
        make=_mooncake,
    ),
    CatalogueEntry(
        name="tcp",
        what="kvbaton's own, over TCP",
        in_auto=lambda: True,
        encrypts=True,
        capabilities=lambda: the("kvbaton.transports.tcp.tcp_transport").CAPABILITIES,
        make=_tcp,
        endpoint=_tcp_endpoints,
    ),
    _staged("tcp", "TCP"),
)
PLANES: dict[str, CatalogueEntry] = {plane.name: plane for plane in _ENTRIES}
