"""kvbaton's shm and tcp without checksums, with sampled and with full ones: ways called `shm off`, `tcp full` …"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.checksum.checksum_portions import Checksum
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.transport import HostTransport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from kvbaton_proof.bench.transfer.workload import DrivenReader, DrivenSource

TRANSPORTS = ("shm", "tcp")
WAYS = tuple(f"{transport} {mode}" for transport in TRANSPORTS for mode in Checksum)


def make(way: str, me: PeerId, regions: Sequence[memoryview]) -> HostTransport:
    """`off` is the transport alone, as it runs without checksums."""
    name, mode = way.split()
    transport: HostTransport = ShmTransport(me) if name == "shm" else TcpTransport(me)
    if mode != Checksum.OFF:
        transport = SummedTransport(transport, me, SumConfig(Checksum(mode)))
    for number, region in enumerate(regions):
        transport.register(number, region)
    return transport


Source = functools.partial(DrivenSource, ways=WAYS, make=make)
Reader = functools.partial(DrivenReader, ways=WAYS, make=make)
