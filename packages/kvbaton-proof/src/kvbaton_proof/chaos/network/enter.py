"""Become a process of another host: enter its namespaces, then be the command.

Run as a script, by path and without site-packages: it needs nothing but the standard library, starts in some ten
milliseconds, and has one thread, which `setns` of a user namespace asks for.

Law: the process that was started becomes the command: same pid, same descriptors, same working directory.

    python -I -S enter.py KEEPER-PID NET-FD COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import sys


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


def main(argv: list[str]) -> int:
    try:
        enter(int(argv[0]), int(argv[1]))
        os.execvp(argv[2], argv[2:])
    except OSError as error:
        print(f"enter: {argv[2]} was not started as that host: {error}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
