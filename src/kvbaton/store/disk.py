"""The disk tier: one file a value, in one folder, up to a bound in bytes; the least recently used go first.

Laws: a file is written under another name and then renamed, so a name stands for a whole file or none. Whatever is
wrong with a file or the disk is a miss and a count, never an exception: frames carry their own sums, and the reader
checks them. A folder has one process at a time; what it held is there again when it is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections import Counter, OrderedDict
from pathlib import Path

VALUE_BYTES_MAX = 1 << 32
SUFFIX, UNFINISHED = ".kv", ".tmp"


class DiskError(Exception):
    """The operator must act; the message names the folder and the next step."""


class DiskTier:
    """Values as files. Calls may block on the disk; they may come from several threads."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        if bytes_max < 1:
            raise ValueError(f"bytes_max: {bytes_max}; give the disk space that values may take")
        self.counters: Counter[str] = Counter()
        self._folder = folder
        self._bytes_max = bytes_max
        self._lock = threading.Lock()  # of the books
        self._writing = threading.Lock()  # of the folder: what goes and what comes cannot cross
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file name, the least recently used first
        self._bytes = 0
        self._written = 0
        self._guard = _claimed(folder)
        self._find()

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._sizes)

    def has(self, key: str) -> bool:
        name = _name(key)
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
            return name in self._sizes

    def write(self, key: str, value: bytes | memoryview) -> bool:
        """Keep a value unless it is there; False when it could not be."""
        with self._writing:
            return self._write(_name(key), value)

    def read(self, key: str) -> bytes | None:
        """The file's bytes, whatever they are; None when there is none or it cannot be read."""
        if not self.has(key):
            return None
        with contextlib.suppress(OSError):  # being written, being evicted, or the disk is at fault
            return self._load(_name(key))
        with self._writing:  # nobody writes now: what cannot be read is not there
            if not self.has(key):
                return None
            with contextlib.suppress(OSError):
                return self._load(_name(key))
            self.counters["read_errors"] += 1
            self._remove(_name(key))  # else it would be said to be there, and never be put again
            return None

    def discard(self, key: str) -> None:
        with self._writing:
            self._remove(_name(key))

    def close(self) -> None:
        """Let another process have the folder. Idempotent."""
        with self._writing:
            if self._guard >= 0:
                os.close(self._guard)
                self._guard = -1

    def _write(self, name: str, value: bytes | memoryview) -> bool:
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return True
            if len(value) > self._bytes_max or self._guard < 0:
                return False
            self._written += 1
            evicted = self._admit(name, len(value))
            unfinished = self._folder / f"{self._written}{UNFINISHED}"
        for old in evicted:
            with contextlib.suppress(OSError):
                (self._folder / old).unlink()
        try:
            unfinished.write_bytes(value)
            unfinished.rename(self._folder / name)
        except OSError:
            self.counters["write_errors"] += 1
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self._forget(name)
            return False
        return True

    def _admit(self, name: str, size: int) -> list[str]:
        """Make room, in the books; the names of the files that must go."""
        evicted = []
        while self._bytes + size > self._bytes_max:
            old, gone = self._sizes.popitem(last=False)
            self._bytes -= gone
            evicted.append(old)
        self.counters["evicted"] += len(evicted)
        self._sizes[name] = size
        self._bytes += size
        return evicted

    def _load(self, name: str) -> bytes:
        with (self._folder / name).open("rb") as file:
            if not 0 < os.fstat(file.fileno()).st_size <= VALUE_BYTES_MAX:
                raise OSError("no value has that size")
            return file.read()

    def _remove(self, name: str) -> None:
        self._forget(name)
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(name, 0)

    def _find(self) -> None:
        """What an earlier process left: whole files count, oldest first; unfinished ones go."""
        found = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(UNFINISHED):
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith(SUFFIX):
                stat = entry.stat()
                found.append((stat.st_mtime_ns, entry.name, stat.st_size))
        for _, name, size in sorted(found):
            if size > self._bytes_max:
                (self._folder / name).unlink(missing_ok=True)
                continue
            for old in self._admit(name, size):
                (self._folder / old).unlink(missing_ok=True)


def _name(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=20).hexdigest() + SUFFIX


def _claimed(folder: Path) -> int:
    """A descriptor that holds the folder for this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        guard = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}; give a folder that this process may write to") from None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise DiskError(f"{folder}: another process serves it; give each its own folder") from None
    return guard
