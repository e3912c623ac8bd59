"""The GPUs of this machine: whether they exist, and whether processes and GPUs can read each other's memory.

Law: read-only, and no GPU is used: it queries the driver about devices and the kernel about namespaces.
"""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.transports import catalogue
from kvbaton.transports.cuda.cuda_driver import CudaError, CudaHost

MACHINE = "this machine"
NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""Inode numbers of the host's own namespaces; a container has others."""
PAIRS_SHOWN = 8


class Host(Protocol):
    """See `cuda_driver.CudaHost`."""

    count: int

    def name(self, device: int) -> str: ...
    def shares(self, device: int) -> bool: ...
    def reaches(self, device: int, other: int) -> bool: ...


def look() -> tuple[Host | None, str]:
    """The driver, or the reason why it cannot be queried."""
    try:
        host = CudaHost()
    except (ImportError, CudaError) as error:
        return None, str(error)
    return (host, "") if host.count else (None, "the driver shows no GPU (CUDA_VISIBLE_DEVICES?)")


def names(host: Host | None) -> tuple[str, ...]:
    return tuple(host.name(device) for device in range(host.count)) if host is not None else ()


def examine(host: Host | None, problem: str, device: str) -> list[Finding]:
    """`device`: where the KV caches are."""
    if device != "cuda":
        return []
    if host is None:
        fix = "check nvidia-smi; in a container: --gpus all; or check for host memory: --device cpu"
        return [finding("gpu-missing", MACHINE, f"no GPU can be used: {problem}", fix)]
    return [*_sharing(host), *_peers(host), *_container(), *_locking(catalogue.rdma_devices())]


def _sharing(host: Host) -> Iterator[Finding]:
    for device in range(host.count):
        if not host.shares(device):
            found = f"GPU {device} ({host.name(device)}): the driver offers no CUDA IPC, so transport cuda is not used"
            yield finding("gpu-ipc", MACHINE, found, "nothing, if staged-shm is fast enough; otherwise another GPU")


def _peers(host: Host) -> Iterator[Finding]:
    apart = [
        f"{one} and {other}"
        for one, other in itertools.combinations(range(host.count), 2)
        if not (host.reaches(one, other) and host.reaches(other, one))
    ]
    if apart:
        shown = ", ".join(apart[:PAIRS_SHOWN]) + (
            f" and {len(apart) - PAIRS_SHOWN} more" if apart[PAIRS_SHOWN:] else ""
        )
        found = f"no peer access between GPUs {shown}: KV between them uses staged-shm, through host memory"
        fix = "put P and D of a pair on GPUs with peer access: nvidia-smi topo -p2p r"
        yield finding("gpu-peer", MACHINE, found, fix)


def _container(proc: Path = Path("/proc/self/ns")) -> Iterator[Finding]:
    own = [name for name, number in NAMESPACES.items() if _inode(proc / name) not in {0, number}]
    if own:
        found = f"this is a container with its own {' and '.join(own)} namespace: transport cuda works only inside it"
        fix = "run P and D in one container, or give both --ipc=host --pid=host; otherwise KV uses staged-tcp"
        yield finding("gpu-container", MACHINE, found, fix)


def _locking(rdma: Sequence[str]) -> Iterator[Finding]:
    """The driver pins staging memory whatever the limit is; RDMA does not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if rdma and soft != resource.RLIM_INFINITY:
        found = f"at most {soft >> 10} KiB of memory may be locked; nixl over {rdma[0]} locks all that it registers"
        yield finding("memlock-small", MACHINE, found, "ulimit -l unlimited, or LimitMEMLOCK=infinity of the unit")


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
