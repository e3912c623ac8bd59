"""The identity of this host, from its kernel.

Law: the same for processes that can reach each other locally, and for no others: one boot, and one namespace of it
where the local path requires that. Without a boot id a process is on its own host.
"""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> str:
    """Processes that may share memory with us: the same kernel."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else secrets.token_hex(16)


def host_identity(namespace: str = "net") -> str:
    """One boot, one namespace: `net` for abstract sockets, `pid` for process ids."""
    return f"{boot_id()}/{os.stat(f'/proc/self/ns/{namespace}').st_ino}"
