"""Members on addresses of this machine's own, for plans without faults of the network.

Law: nothing is made, so nothing is left; a fault of a wire is refused, never left out in silence.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

HOSTS_MAX = 250


class LoopbackNetwork:
    """Each member has an address of its own in 127.0.0.0/8. Implements `Network`, but for its faults."""

    kind = "loopback"

    def __init__(self, names: Sequence[str]) -> None:
        if len(names) > HOSTS_MAX:
            raise ValueError(f"names: {len(names)}, at most {HOSTS_MAX}")
        net = f"127.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._addresses = {name: f"{net}.{host}" for name, host in zip(names, itertools.count(2), strict=False)}

    def address(self, name: str) -> str:
        return self._addresses[name]

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def cut(self, source: str, target: str) -> None:
        raise OSError(f"cut {source}-{target}: this network has no wires; run where namespaces are allowed")

    def slow(self, source: str, target: str, delay_s: float, loss: float) -> None:
        raise OSError(f"slow {source}-{target}: this network has no wires; run where namespaces are allowed")

    def heal(self) -> None:
        pass

    def close(self) -> None:
        pass
