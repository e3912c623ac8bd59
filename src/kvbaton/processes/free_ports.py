"""Free ports for processes that bind them later.

Law: outside the kernel's range for outgoing connections (Linux: ip_local_port_range starts at 32768), so that a port
that is free now is still free when the process that was given it has started.
"""

from __future__ import annotations

import errno
import random
import socket

PORTS = range(12_000, 32_000)
_TRIES = 2_000


def free_ports(count: int, host: str = "127.0.0.1", rng: random.Random | None = None) -> list[int]:
    """Ports that are free now, all different."""
    draw = rng or random.Random()
    found: list[int] = []
    for _ in range(_TRIES):
        port = draw.choice(PORTS)
        if port not in found and is_free(host, port):
            found.append(port)
        if len(found) >= count:
            return found
    raise OSError(f"no {count} free ports between {PORTS.start} and {PORTS.stop} in {_TRIES} tries")


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # an address of another network namespace, where all are free
    return True
