"""Imports of what a process is made of: it stays until the process ends, so the garbage collector need not scan it.

Looking was a sixth of a worker's start, and most of its end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_freeze_imports() -> Iterator[None]:
    """Whatever is there at the end of the context is never looked at by the garbage collector again.

    For a process that is the command's own: in another's, what is garbage by then would stay, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
