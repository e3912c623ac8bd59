"""A temporary directory for the keys of a cluster that lives as long as one process, as that of `kvbaton up`.

Laws: the keys go with the process that made the room, however it ends. A helper waits on a pipe that only that process
holds and removes them when it closes, so also after kill -9; what is left where the helper was killed too goes when the
next room is made. A room that is in use is known by a lock that its maker holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "kvbaton-room-"
KEYS = "keys"
"""What is in a room under this name is secret, and goes first."""
LOCK = "lock"
HELPER_S = 5.0
_REMOVE = 'read -r _; rm -rf -- "$1"'


@contextlib.contextmanager
def key_room() -> Iterator[Path]:
    """A directory of this user's alone; gone after the context, and its keys in any case."""
    sweep()
    made = Path(tempfile.mkdtemp(prefix=".kvbaton-"))  # under a name that nobody sweeps, until it is held
    guard = os.open(made / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        room = made.rename(made.with_name(made.name.replace(".kvbaton-", PREFIX, 1)))
        with _helped(room):
            try:
                yield room
            finally:
                shutil.rmtree(room, ignore_errors=True)
    finally:
        os.close(guard)


def sweep() -> int:
    """Remove the rooms whose makers are gone; returns how many there were."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):
                count += _swept(entry)
    return count


def _swept(room: Path) -> bool:
    told = room.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid():
        return False
    try:
        guard = os.open(room / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # of one that was being removed
        shutil.rmtree(room, ignore_errors=True)
        return True
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(room, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(guard)
    return True


@contextlib.contextmanager
def _helped(room: Path) -> Iterator[None]:
    """While it lasts, the end of this process is the end of the keys. Without a shell there is the next sweep."""
    try:
        helper = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", str(room / KEYS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is not for it
        )
    except OSError:
        yield
        return
    try:
        yield
    finally:
        assert helper.stdin is not None
        helper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(HELPER_S)
