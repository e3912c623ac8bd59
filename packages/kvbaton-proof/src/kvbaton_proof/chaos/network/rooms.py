"""A small room for a member's files: a tmpfs of its own, in a mount namespace of its own, which can be full.

`python -m kvbaton_proof.chaos.network.rooms DIR BYTES ARGV…` mounts a tmpfs at DIR for this process alone and becomes
ARGV: same pid.

Law: no byte is written to a disk of this machine, nor to its /dev/shm; the room is gone with the last process in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
TRY_S = 20.0
FILLER = "filler"


def command(folder: str, size_bytes: int, argv: Sequence[str], *, full: bool = False) -> list[str]:
    """`argv` with a room at `folder`."""
    words = [
        sys.executable,
        "-m",
        "kvbaton_proof.chaos.network.rooms",
        folder,
        str(size_bytes),
        "full" if full else "empty",
    ]
    return [*words, *argv]


def are_allowed() -> bool:
    """Whether this process may make one; tried in another process."""
    try:
        words = command("/dev/shm", 4096, ["true"])
        return subprocess.run(words, timeout=TRY_S, capture_output=True, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def fill(pid: int, folder: str) -> int:
    """Fill the room of a process, as seen from outside; how many bytes went in."""
    count = _fill(Path(f"/proc/{pid}/root{folder}") / FILLER)
    if not count:
        raise OSError(f"not a byte could be put into the room of process {pid} at {folder}")
    return count


def clear(pid: int, folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (Path(f"/proc/{pid}/root{folder}") / FILLER).unlink()


def allow_no_writes(pid: int) -> None:
    """Where no room can be made: every write of this process to a file fails. Python lives on (SIGXFSZ is ignored)."""
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))


def allow_writes(pid: int) -> None:
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def _fill(filler: Path) -> int:
    count = 0
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as out:
        for piece in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):  # it is full, for a piece of this size
                while True:
                    count += out.write(bytes(piece))
    return count


def _enter(folder: str, size_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    steps: tuple[Callable[[], int], ...] = (
        lambda: int(libc.unshare(CLONE_NEWNS)),
        lambda: int(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)),
        lambda: int(libc.mount(b"kvbaton", folder.encode(), b"tmpfs", 0, f"size={size_bytes},mode=0700".encode())),
    )
    for step in steps:
        if step() != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"room at {folder}: {os.strerror(number)}; is this process allowed to mount?")


def main(words: Sequence[str]) -> None:
    folder, size_bytes, how, *argv = words
    _enter(folder, int(size_bytes))
    if how == "full":
        _fill(Path(folder) / FILLER)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
