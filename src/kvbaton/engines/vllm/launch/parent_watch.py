"""An engine's process that ends with the server that started it, where that server asked for it.

vLLM's engine process outlives a server that was killed, and keeps its memory, its ports and its place in the cluster.
`kvbaton up` ends such processes itself; a replica of Ray Serve has nobody who does.

Laws: it ends only a direct child of the process that was named, and only after that process is gone.
"""

from __future__ import annotations

import os
import threading

VARIABLE = "KVBATON_ENDS_WITH"
"""The process, by its number; set by a server for its own children."""
LOOK_S = 0.5


def watch_parent() -> None:
    """Called by vLLM's plugin in every process of an engine, perhaps more than once."""
    parent = os.environ.get(VARIABLE, "")
    if parent.isdecimal() and os.getppid() == int(parent):
        del os.environ[VARIABLE]
        threading.Thread(target=_outlive_not, args=(int(parent),), name="kvbaton-parent", daemon=True).start()


def _outlive_not(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(LOOK_S)
    os._exit(1)
