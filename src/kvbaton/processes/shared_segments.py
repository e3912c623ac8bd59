"""Segments of /dev/shm that a group of processes made and cannot remove any more, since it was killed.

vLLM's engine core is killed with its resource tracker, which alone would have unlinked them: 400 MB for each engine.

Law: a segment counts as the group's only if it was not there when the watch began and one of its processes has it
mapped. Everything else in /dev/shm is somebody else's.
"""

from __future__ import annotations

import contextlib
import os
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
