"""Worker processes that start in a twentieth of the time: forked from one process that has imported what they import.

Law: each is a process of its own that runs `python -m kvbaton.cli.main worker …` (or a script around it), with its own
arguments and log, and is ended by whoever started it. Only the imports, most of a second of a core, are done once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from tests.vllm.forking import Forked, forked

IMPORTED = (
    "kvbaton.cli.worker",
    "kvbaton.engines.embedded.embedded_worker",
    "kvbaton.transports.shm.shm_transport",
    "kvbaton.transports.tcp.tcp_transport",
)
MAIN = ("-m", "kvbaton.cli.main")


def start(words: Sequence[str], log: Path) -> Forked:
    """`words` as behind `python`."""
    log.write_bytes(b"")  # it is there from now on, however long a fork takes
    return forked(words, os.environ, log, imported=IMPORTED)


async def ended(process: Forked, within_s: float) -> int:
    """Its exit status; `subprocess.TimeoutExpired` when it does not end."""
    return await asyncio.to_thread(process.wait, within_s)
