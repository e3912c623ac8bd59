"""A worker that shares no memory with its peers, although all say that they are on one host. Run it as a script.

`python cut_off_worker.py HOW worker …` is `kvbaton worker …` in a process where shm fails as between two containers:
`namespace` (the peer's sockets belong to another network namespace), `door` (nobody answers at the peer's socket), or
`mint` (this one can open no socket for its peers).
"""

from __future__ import annotations

import errno
import os
import socket
import sys

from kvbaton.cli.main import main
from kvbaton.transports.local import region_listener
from kvbaton.transports.shm import shm_transport


def _another_namespace() -> str:
    return "boot/another-network-namespace"


def _nobody_there(name: str) -> socket.socket:
    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _no_socket(self: object, peer: object) -> bytes:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def cut_off(how: str) -> None:
    if how == "namespace":
        for module in (shm_transport, region_listener):  # that which says where it is, and that which compares
            setattr(module, "host_identity", _another_namespace)  # noqa: B010 - the name that they have for it
    elif how == "door":
        region_listener.dial = _nobody_there
    elif how == "mint":
        setattr(shm_transport.ShmTransport, "endpoint", _no_socket)  # noqa: B010 - a method, replaced in this process only
    else:
        raise SystemExit(f"got {how!r}, expected namespace, door or mint")


if __name__ == "__main__":
    cut_off(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
