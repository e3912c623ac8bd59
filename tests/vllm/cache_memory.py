"""The KV cache of a running engine, from outside: for tests that damage it on purpose."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from tests.vllm.engines import Engine

_SHARED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*memfd:kvbaton", re.MULTILINE)
NOISE = struct.pack("<4f", 0.7, -0.4, 0.2, -0.9) * (1 << 16)  # a megabyte of numbers that a model can live with
_PAGE = 4096


def overwrite_cache(engine: Engine) -> int:
    """Write noise over all that an engine's workers have in their (shared) caches; how many bytes."""
    written = 0
    for pid in engine.pids():
        for start, end in _SHARED.findall(Path(f"/proc/{pid}/maps").read_text()):
            written += _overwrite(pid, int(start, 16) + _PAGE, int(end, 16) - _PAGE)
    return written


def _overwrite(pid: int, start: int, end: int) -> int:
    """Leaves out the first page, which the allocator shares, and what was never touched."""
    written = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory, open(f"/proc/{pid}/pagemap", "rb") as pages:
        for place in range(start, end, len(NOISE)):
            size = min(len(NOISE), end - place)
            pages.seek(place // _PAGE * 8)
            if not any(entry & 0x80 for entry in pages.read(size // _PAGE * 8)[7::8]):
                continue
            memory.seek(place)
            written += memory.write(NOISE[:size])
    return written
