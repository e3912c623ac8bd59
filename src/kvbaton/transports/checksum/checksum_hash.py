"""xxh3 of spans of memory, by the library xxhash, without blocking other threads.

Law: the caller has range-checked every span; no lock is held over more than one of them.

The library holds the GIL while it digests a small buffer (64 KiB; not at 256), so digesting 16 KiB segments in a row
makes every other thread wait out a switch interval, 5 ms, each time it wants to run. The library's C function, called
past its Python wrapper, lets them run within 0.07 ms (docs/lab/2026-11-15-checksum.md). It is used where the shared
object exports it (seen in the wheels of 3.5.0 for x86_64 and 4.1.0 for x86_64 and aarch64) and agrees with the wrapper.
Delete this path when the wrapper releases the GIL for small buffers too.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import struct
from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from kvbaton.transports.core.transport import Spans

log = logging.getLogger(__name__)

ROWS_A_LOOK = 64
"""Rows that are digested between two looks at `halt`: 2 ms at the largest piece that is asked for here."""

_PROBE = bytes(range(256)) * 5


def digests(memory: memoryview, spans: Spans, width: int, halt: bytearray) -> bytes:
    """A little-endian digest for each row; ends early, with undefined results, once `halt[0]` is set."""
    found: list[int] = []
    for low in range(0, len(spans), ROWS_A_LOOK * width):
        if halt[0]:
            break
        rows = spans[low : low + ROWS_A_LOOK * width]
        found += _each(memory, zip(rows[0::width], rows[width - 1 :: width], strict=True))
    return struct.pack(f"<{len(found)}Q", *found)


def _each(memory: memoryview, rows: Iterable[tuple[int, int]]) -> list[int]:
    digest = _native
    if digest is None:
        return [xxhash.xxh3_64_intdigest(memory[at : at + size]) for at, size in rows]
    base = np.frombuffer(memory, np.uint8).__array_interface__["data"][0] if memory.nbytes else 0
    return [digest(base + at, size) for at, size in rows]


def _load() -> Callable[[int, int], int] | None:
    """The library's own function, if it is available and agrees with its wrapper."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        function = library.XXH3_64bits
    except (ImportError, OSError, AttributeError) as error:
        log.info("digesting with the GIL held: %s", error)
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
    probe = np.frombuffer(_PROBE, np.uint8).ctypes.data
    agrees = all(function(probe, size) == xxhash.xxh3_64_intdigest(_PROBE[:size]) for size in (0, 9, 200, len(_PROBE)))
    return function if agrees else None


_native = _load()
