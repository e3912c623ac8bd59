"""Checks that only its owner can read and change a key directory.

Law: who can write a public file lets himself in, and who can put another directory or file in a key's place does too;
so every folder from the one above on is looked at, and every file, whatever its name: copies and drafts hold secrets.
A secret is its user's alone; one that belongs to root may be read by the group that root chose, as Kubernetes mounts a
Secret for a process that is not root.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Opening(msgspec.Struct, frozen=True):
    """One path that is open to others, and the next step."""

    path: Path
    found: str  # begins with the path
    fix: str


def is_open(told: os.stat_result) -> bool:
    """Whether others than those who are meant may have a secret of this owner and mode."""
    from_root = told.st_uid == 0 and os.geteuid() != 0
    return bool(told.st_mode & (OTHERS & ~stat.S_IRGRP if from_root else OTHERS))


def openings(base: Path) -> list[Opening]:
    """All that can be seen of them; what cannot be looked at is left out."""
    with contextlib.suppress(OSError):
        if os.statvfs(base).f_flag & os.ST_RDONLY:  # nobody writes there, whatever the modes say
            return [*_read_by_others(base)]
    return [*_folders(base), *_files(base), *_read_by_others(base)]


def _folders(base: Path) -> Iterator[Opening]:
    above = base.absolute().parent
    with contextlib.suppress(OSError):
        told = above.stat()
        if (who := _writers(told)) and not told.st_mode & stat.S_ISVTX:
            said = f"{above} can be written by {who}: they could replace the directory {base.name}"
            yield Opening(above, said, f"chmod go-w {above}")
    for path, why in (
        (base, "they could put other files in place of these"),
        (base / "public", "writing a public file grants access"),
        (base / "secret", "they could put other files in place of these"),
        (base / "tokens", "who writes a token file can join"),
        (base / "joined", "they could remove and restore members"),
    ):
        with contextlib.suppress(OSError):
            if who := _writers(path.stat()):
                yield Opening(path, f"{path} can be written by {who}: {why}", f"chmod 700 {path}")


def _files(base: Path) -> Iterator[Opening]:
    """Files of other users, or that others may write. The directory's own user, and root, may have any."""
    with contextlib.suppress(OSError):
        owners = {0, os.stat(base).st_uid}
        for path in (base / "public", base / "secret", *_plain_files(base)):
            told = path.stat()
            if told.st_uid not in owners:
                said = f"{path} belongs to user {told.st_uid}, who can change it"
                yield Opening(path, said, f"chown it to user {min(owners - {0}, default=0)}")
            elif stat.S_ISREG(told.st_mode) and _is_for_all(path, base) and (who := _writers(told)):
                said = f"{path} can be written by {who}: they could get access by this name"
                yield Opening(path, said, f"chmod go-w {path}")


def _read_by_others(base: Path) -> Iterator[Opening]:
    for path in _plain_files(base):
        with contextlib.suppress(OSError):
            told = path.stat()
            if not _is_for_all(path, base) and is_open(told):
                said = f"{path} has mode {stat.S_IMODE(told.st_mode):04o}: others could read it"
                yield Opening(path, said, f"chmod 600 {path}")


def _is_for_all(path: Path, base: Path) -> bool:
    """Whether others may read it."""
    return path.parent == base / "public" or path == base / "public-admission.json"


def _plain_files(base: Path) -> list[Path]:
    """Also those whose names begin with a dot, as drafts do; what links lead to, not where mounts keep it."""
    found: list[Path] = []
    for folder in (base, base / "public", base / "secret", base / "tokens", base / "joined"):
        with contextlib.suppress(OSError):
            found += sorted(path for path in folder.iterdir() if not path.name.startswith("..") and path.is_file())
    return found


def _writers(told: os.stat_result) -> str:
    """Who else may write; "" if nobody. A group that has its user alone in it is nobody else."""
    if told.st_mode & stat.S_IWOTH:
        return "everybody"
    return "its group" if told.st_mode & stat.S_IWGRP and not _is_own_group(told) else ""


def _is_own_group(told: os.stat_result) -> bool:
    try:
        user, group = pwd.getpwuid(told.st_uid), grp.getgrgid(told.st_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}
