"""The disk tier: one file per value, in one folder, up to a bound in bytes; the least recently used go first.

Laws: a file is written under another name and then renamed, so a name stands for a whole file or none. Any problem with
a file or the disk is a miss and a count, never an exception: frames carry their own checksums, and the reader verifies
them. A folder belongs to one process at a time; its contents survive a restart. A value is KV of a user's prompt:
folder and files are accessible to their owner only, whatever the umask is; anything but a plain file of this user is
neither read nor kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

VALUE_BYTES_MAX = 1 << 32
SUFFIX, UNFINISHED = ".kv", ".tmp"
OTHERS = stat.S_IRWXG | stat.S_IRWXO


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
        self._lock = threading.Lock()  # of the index
        self._writing = threading.Lock()  # of the folder: writes and evictions do not overlap
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
        """Store a value unless it exists; False on failure."""
        with self._writing:
            return self._write(_name(key), value)

    def read(self, key: str) -> bytes | None:
        """The file's bytes, whatever they are; None when it does not exist or cannot be read."""
        if not self.has(key):
            return None
        with contextlib.suppress(OSError):  # being written or evicted, or a disk error
            return self._load(_name(key))
        with self._writing:  # no writer now: an unreadable file does not exist
            if not self.has(key):
                return None
            with contextlib.suppress(OSError):
                return self._load(_name(key))
            self.counters["read_errors"] += 1
            self._remove(_name(key))  # otherwise it would be reported as present and never put again
            return None

    def discard(self, key: str) -> None:
        with self._writing:
            self._remove(_name(key))

    def sweep(self, believes: Callable[[memoryview], bool], head_bytes: int) -> int:
        """Delete values whose first bytes are not to be believed; returns how many."""
        with self._lock:
            names = list(self._sizes)
        bad = 0
        for name in names:
            with contextlib.suppress(OSError):  # evicted meanwhile
                with open(_open_private(self._folder / name), "rb") as file:
                    head = file.read(head_bytes)
                if not believes(memoryview(head)):
                    bad += 1
                    with self._writing:
                        self._remove(name)
        return bad

    def close(self) -> None:
        """Release the folder for another process. Idempotent."""
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
            _write_private(unfinished, value)
            unfinished.rename(self._folder / name)
        except OSError:
            self.counters["write_errors"] += 1
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self._forget(name)
            return False
        return True

    def _admit(self, name: str, size: int) -> list[str]:
        """Make room in the index; returns the names of the files to delete."""
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
        with open(_open_private(self._folder / name), "rb") as file:
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
        """Files of an earlier process: complete ones count, oldest first; incomplete and foreign ones are deleted."""
        found = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(UNFINISHED):
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith(SUFFIX):
                try:
                    guard = _open_private(Path(entry.path))
                except OSError:
                    with contextlib.suppress(OSError):  # a folder, for example: not a value
                        Path(entry.path).unlink()
                    continue
                told = os.fstat(guard)
                os.fchmod(guard, 0o600)  # an earlier version left it to the umask
                os.close(guard)
                found.append((told.st_mtime_ns, entry.name, told.st_size))
        for _, name, size in sorted(found):
            if size > self._bytes_max:
                (self._folder / name).unlink(missing_ok=True)
                continue
            for old in self._admit(name, size):
                (self._folder / old).unlink(missing_ok=True)


def _name(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=20).hexdigest() + SUFFIX


def _write_private(path: Path, value: bytes | memoryview) -> None:
    """Write everything to a new file that only this user can access."""
    guard = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(guard, "wb", buffering=0) as file:
        os.fchmod(guard, 0o600)  # a umask may have taken even this user's rights
        left = memoryview(value).cast("B")
        while left:
            left = left[file.write(left) :]


def _open_private(path: Path) -> int:
    """A descriptor to read from; `OSError` if it is not a plain file of this user with a single link."""
    guard = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    told = os.fstat(guard)
    if not stat.S_ISREG(told.st_mode) or told.st_uid != os.geteuid() or told.st_nlink != 1:
        os.close(guard)
        raise OSError("not a file that only this user can access")
    return guard


def _claimed(folder: Path) -> int:
    """A descriptor that locks the folder for this process."""
    try:
        _make(folder)
        _check(folder)
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        guard = os.open(folder / "lock", flags, 0o600)
        os.fchmod(guard, 0o600)
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}; give a folder that this process may write to") from None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise DiskError(f"{folder}: another process serves it; give each its own folder") from None
    return guard


def _make(folder: Path) -> None:
    """Create the folder and its missing parents, each accessible to this user only."""
    if not folder.exists():
        _make(folder.parent)
        with contextlib.suppress(FileExistsError):  # another process was first: checked like any other
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)  # a umask may have taken even this user's rights


def _check(folder: Path) -> None:
    told = folder.stat()
    mode = stat.S_IMODE(told.st_mode)
    other = f"or give a folder that does not exist yet, such as {folder / 'kv'}"
    if not stat.S_ISDIR(told.st_mode):
        raise DiskError(f"{folder}: not a folder; give a folder")
    if told.st_uid != os.geteuid():
        raise DiskError(
            f"{folder} belongs to user {told.st_uid}, not to {os.geteuid()} who runs this; chown it, {other}"
        )
    if mode & OTHERS:
        raise DiskError(f"{folder} has mode {mode:04o}: others could read the KV in it; chmod 700 {folder}, {other}")
