"""Becomes an engine's process, and leaves a watcher that ends the engine when the program that started it exits.

    python -m kvbaton.local_cluster.vllm_child COMMAND …      with a pipe as stdin, as a process group leader

Laws: the engine keeps this process's pid. When stdin ends (the parent is gone, for whatever reason) the engine gets
SIGTERM, and SIGKILL `GRACE_S` later. When its first process exits, the rest of its group is killed, and what they had
in /dev/shm is removed.

Segments of /dev/shm that a group of processes made and cannot remove any more, since it was killed.

vLLM's engine core is killed with its resource tracker, which alone would have unlinked them: 400 MB for each engine.

Law: a segment counts as the group's only if it was not there when the watch began and one of its processes has it
mapped. Everything else in /dev/shm is somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

ROOT = "/dev/shm/"
PREFIXES = ("psm_", "sem.")
"""Of Python's `multiprocessing`: shared memory and semaphores."""
LOOKS_MAX = 10
"""At one name: it may have been made and not mapped yet. After that it is another program's."""


class SegmentWatch:
    """The segments of one process group. A look costs a listing of /dev/shm, unless there is a new name."""

    def __init__(self, group: int) -> None:
        self.names: set[str] = set()
        self._group = group
        self._looks = dict.fromkeys(_listed(), LOOKS_MAX)

    def look(self) -> None:
        there = _listed()
        self.names.intersection_update(there)
        self._looks = {name: self._looks.get(name, 0) for name in there}
        fresh = {name for name in there if self._looks[name] < LOOKS_MAX and name not in self.names}
        if fresh:
            self.names |= fresh & set(mapped(self._group))
            self._looks |= {name: self._looks[name] + 1 for name in fresh}

    def remove(self) -> None:
        in_use = set(mapped(self._group, inside=False))  # by somebody who found it, or made another of this name
        for name in self.names.intersection(_listed()) - in_use:
            with contextlib.suppress(OSError):
                os.unlink(ROOT + name)


def mapped(group: int, *, inside: bool = True) -> Iterator[str]:
    """Names in /dev/shm that processes of a group have mapped, or those of all others."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if (os.getpgid(int(pid)) == group) is not inside:
                continue
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
                yield from (line.rpartition(ROOT)[2].strip() for line in maps if ROOT in line)


def _listed() -> list[str]:
    try:
        return [name for name in os.listdir(ROOT) if name.startswith(PREFIXES)]
    except OSError:  # there is none
        return []


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
