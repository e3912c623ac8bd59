"""Becomes an engine's process, and leaves a watcher that ends the engine when the program that started it exits.

    python -m kvbaton.local_cluster.vllm_child COMMAND …      with a pipe as stdin, as a process group leader

Laws: the engine keeps this process's pid. When stdin ends (the parent is gone, for whatever reason) the engine gets
SIGTERM, and SIGKILL `GRACE_S` later. When its first process exits, the rest of its group is killed, and what they had
in /dev/shm is removed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from kvbaton.processes.shared_segments import SegmentWatch

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
    """The watcher's main loop. It is in the group that it kills, so killing it is its last act."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    segments = SegmentWatch(os.getpgrp())
    while os.getppid() == engine:
        segments.look()
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready and not os.read(0, 4096):
            break
    deadline = time.monotonic() + GRACE_S
    if os.getppid() == engine:
        os.kill(engine, signal.SIGTERM)
    while os.getppid() == engine and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    segments.look()
    segments.remove()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
