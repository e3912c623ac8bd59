"""Become a process of a network, then be the command: as a host of namespaces, or as a member of a relay.

Run as a script, by path and without site-packages: it needs nothing but the standard library, starts in some ten
milliseconds, and has one thread, which `setns` of a user namespace asks for.

Law: the process that was started becomes the command: same pid, same descriptors, same working directory.

    python -I -S enter.py host KEEPER-PID NET-FD COMMAND...
    python -I -S enter.py member DOOR NETWORK NAME ADDRESS SITE COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

MEMBER = "KVBATON_CHAOS_RELAY"  # in the environment of a relay's member: door, network, name and address
DOOR_S_MAX = 10.0


def enter(keeper: int, net_fd: int) -> None:
    """This process's namespaces are the keeper's from now on; its network is the one that the keeper holds open."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.getcwd()
    wanted = {"user": f"/proc/{keeper}/ns/user", "mnt": f"/proc/{keeper}/ns/mnt", "net": f"/proc/{keeper}/fd/{net_fd}"}
    # All are opened first: the keeper's files are looked up in the /proc of the mount namespace that we leave.
    opened = {kind: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for kind, path in wanted.items()}
    try:
        for kind, fd in opened.items():
            if os.fstat(fd).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
                continue  # in it already; of a user namespace the kernel would refuse it
            if libc.setns(fd, 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}: {os.strerror(ctypes.get_errno())}")
    finally:
        for fd in opened.values():
            os.close(fd)
    # A network that closes takes back its descriptors first and kills who is inside then: whoever comes in after that
    # would never be found.
    if os.stat(wanted["net"]).st_ino != os.stat("/proc/self/ns/net").st_ino:
        raise FileNotFoundError("the network was closed meanwhile")
    os.chdir(here)


def call(door: str, network: str, name: str, address: str, site: str) -> None:
    """The relay knows this process from now on, and its Python dials through it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(DOOR_S_MAX)
        sock.connect("\0" + door)
        sock.sendall(f'{{"pid": {os.getpid()}}}\n'.encode())
        if not sock.recv(1):
            raise ConnectionError("the network was closed meanwhile")
    paths = [site, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ[MEMBER] = " ".join((door, network, name, address))


def main(how: str, *words: str) -> int:
    command = words[2:] if how == "host" else words[5:]
    try:
        if how == "host":
            enter(int(words[0]), int(words[1]))
        else:
            call(*words[:5])
        os.execvp(command[0], command)
    except OSError as error:
        print(f"enter: {command[0]} was not started as that {how}: {error}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
