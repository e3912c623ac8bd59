"""Hosts out of namespaces: a network of its own per host, with one TUN device whose packets we carry by hand.

Laws: a host is its network namespace, held open by this process, so it outlives every process in it and goes when this
one goes. Needs no tool and no privilege: where this user may not make namespaces, they are made in a user namespace.
All hosts share one mount namespace, in which the private tmpfs are.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvbaton_proof.chaos.network import net_control

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_IFF_UP, _IFF_RUNNING = 0x1, 0x40

DEVICE = "baton0"
MTU_BYTES = 60_000  # few packets for many bytes: each costs this process two system calls
NETWORK = (10, 77, 0)


@dataclass(frozen=True, slots=True)
class Host:
    """`net_fd` keeps its namespace; packets that leave it are read from `tun_fd`, and written there to reach it."""

    name: str
    address: str
    net_fd: int
    tun_fd: int


_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int, what: str) -> None:
    _check(f"unshare {what}", _libc.unshare(flags))


def leave_the_machine(tmpfs: Mapping[str, int], own_user: bool) -> None:
    """This process gets mounts of its own, with a tmpfs of so many MiB at each path.

    With `own_user`, or where it may not do so otherwise, in a user namespace, whose root it is. A real root that may
    does without: in a user namespace it could not read other users' files any more. OSError: it is not allowed here.
    This process must have one thread.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare((CLONE_NEWUSER if own_user else 0) | CLONE_NEWNS | CLONE_NEWNET, "mounts and network")
    except PermissionError:
        if own_user:
            raise
        own_user = True
        unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET, "user, mounts and network")
    if own_user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    _check("make mounts private", _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    for path, mib in tmpfs.items():
        options = f"size={mib}m,mode=1777".encode()
        _check(
            f"tmpfs on {path}",
            _libc.mount(b"kvbaton-chaos", os.fsencode(path), b"tmpfs", _MS_NOSUID | _MS_NODEV, options),
        )


def make_hosts(names: Sequence[str]) -> list[Host]:
    """Host `names[i]` has address 10.77.0.(i+1). Leaves this process in a network of nobody."""
    hosts = []
    for number, name in enumerate(names, 1):
        unshare(CLONE_NEWNET, "network")
        address = ".".join(map(str, (*NETWORK, number)))
        tun_fd = _tun(address)
        hosts.append(Host(name, address, os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), tun_fd))
    unshare(CLONE_NEWNET, "network")
    return hosts


def end_processes(hosts: Sequence[Host], spare: Collection[int]) -> list[int]:
    """Kill what still runs in these hosts, but for `spare`; the pids that could not be ended.

    Takes the hosts' descriptors back first, so that nobody comes in any more (see `enter`).
    """
    held = [os.dup(host.net_fd) for host in hosts]  # so that no namespace of somebody else gets one of their numbers
    for host in hosts:
        os.close(host.net_fd)
    rooms = {(info.st_dev, info.st_ino) for info in map(os.fstat, held)}

    def inside(pid: int) -> bool:
        info = os.stat(f"/proc/{pid}/ns/net")
        return (info.st_dev, info.st_ino) in rooms

    return net_control.end_all(inside, spare)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _tun(address: str) -> int:
    """A device in the network of this process, with `address`, up; and the loopback device up."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.ExitStack() as undo, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        undo.callback(os.close, fd)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        fcntl.ioctl(plug, _SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), MTU_BYTES))
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
            place = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(plug, request, struct.pack("16s16s8x", DEVICE.encode(), place))
        for device in (DEVICE, "lo"):
            got = fcntl.ioctl(plug, _SIOCGIFFLAGS, struct.pack("16sH22x", device.encode(), 0))
            flags = struct.unpack("16sH22x", got)[1] | _IFF_UP | _IFF_RUNNING
            fcntl.ioctl(plug, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags))
        undo.pop_all()
    return fd
