"""Listening ports of processes, from the kernel: TCP of both families and UNIX sockets, named and abstract.

Law: nothing is asked of the processes themselves, so no port can be forgotten; what ends meanwhile is left out.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

Place = tuple[str, int]
"""Host and port. Of a UNIX socket its path, or a zero byte and its abstract name; and 0."""

_LISTEN = "0A"
_ACCEPTS = 0x10000  # __SO_ACCEPTCON of /proc/net/unix


def listening(pids: Iterable[int]) -> list[Place]:
    """Every place where one of these processes accepts connections, sorted."""
    found: set[Place] = set()
    for pid in pids:
        inodes = set(_sockets(pid))
        found |= {place for inode, place in _places(pid) if inode in inodes}
    return sorted(found)


def family(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    found = [pid]
    for each in found:
        try:
            tasks = list(Path(f"/proc/{each}/task").iterdir())
            found += [int(word) for task in tasks for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def is_local(place: Place) -> bool:
    """Whether only this machine can reach it."""
    host = place[0]
    return host[:1] in ("\0", "/") or ipaddress.ip_address(host).is_loopback


def _sockets(pid: int) -> Iterator[str]:
    try:
        entries = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return
    for entry in entries:
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _places(pid: int) -> Iterator[tuple[str, Place]]:
    for table in ("tcp", "tcp6"):
        for words in _rows(pid, table):
            if words[3] == _LISTEN:
                yield words[9], _address(words[1])
    for words in _rows(pid, "unix"):
        if int(words[3], 16) & _ACCEPTS and len(words) > 7:
            yield words[6], (words[7].replace("@", "\0", 1) if words[7].startswith("@") else words[7], 0)


def _rows(pid: int, table: str) -> list[list[str]]:
    try:
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return []
    return [line.split() for line in lines]


def _address(text: str) -> Place:
    """The kernel writes each word of an address in the byte order of the machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(packed)), int(port, 16)
