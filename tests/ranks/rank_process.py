"""A rank in a process of its own: one transport over memory of the caller's, served by a RankHost.

Run as `python rank_process.py KIND WORKER INCARNATION PATH BYTES`. Prints the invitation in hex; then obeys lines:
`progress LEASE BLOCKS`, `stall SECONDS` (holds the GIL, as compilation does), or the end of its input.
"""

from __future__ import annotations

import ctypes
import os
import sys

from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, WorkerId
from kvbaton.ranks.rank_host import RankHost
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport


def main(kind: str, worker: str, incarnation: str, path: str, size: str) -> None:
    memory = Region(os.open(path, os.O_RDWR | os.O_CLOEXEC), int(size), 4096)
    me = PeerId(WorkerId(worker), Incarnation(int(incarnation)))
    transport: Transport = ShmTransport(me) if kind == "shm" else TcpTransport(me)
    transport.register(0, memory.view)
    host = RankHost(0, {kind: transport})
    host.start()
    print(host.invitation.encode().hex(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["progress", lease, blocks]:
                host.progressed(LeaseId(int(lease)), whole([int(blocks)]))
            case ["stall", seconds]:
                print("stalling", flush=True)
                ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # PyDLL keeps the GIL
    host.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
