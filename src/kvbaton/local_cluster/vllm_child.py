"""Becomes an engine's process, and leaves a watcher beside it that ends the engine with the program that started it.

    python -m kvbaton.local_cluster.vllm_child COMMAND …      with a pipe as stdin, leading a process group of its own

Laws: the engine keeps this process's id. When stdin ends (the starter is gone, however) the engine is asked to stop,
and `GRACE_S` later made to. When its first process is gone, the rest of it goes too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

GRACE_S = 10.0
_LOOK_S = 0.2


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit("vllm_child: give a command; this is started by: kvbaton up --engine vllm")
    engine = os.getpid()
    if os.fork() == 0:
        watch(engine)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.execvp(command[0], command)


def watch(engine: int) -> None:
    """The watcher's life. It is in the group that it ends, so ending it is its last act."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == engine:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready and not os.read(0, 4096):
            break
    deadline = time.monotonic() + GRACE_S
    if os.getppid() == engine:
        os.kill(engine, signal.SIGTERM)
    while os.getppid() == engine and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
