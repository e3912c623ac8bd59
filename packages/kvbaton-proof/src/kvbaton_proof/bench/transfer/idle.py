"""The cost of idle transports: each in two processes, connected, and left alone.

    python -m kvbaton_proof.bench.transfer.idle read tcp       D; it starts its P, `serve tcp`

Law: all of them at the same time and over the same seconds; the time is what the kernel charged the processes with.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from array import array
from collections.abc import Sequence
from typing import cast

from kvbaton.processes.proc_stat import cpu_s
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports import catalogue
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import LendingTransport
from kvbaton_proof.bench.kit.piped_children import Parent, PipedChild
from kvbaton_proof.bench.transfer.workload import Driven, P, pattern, verify

IDLE_S = 10.0
MEMORY_BYTES = 1 << 20
D = PeerId(WorkerId("bench-d"), Incarnation(1))


def measure(names: Sequence[str], idle_s: float = IDLE_S) -> dict[str, float]:
    """Percent of a core by data plane, of the busier of its two processes."""
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(PipedChild("kvbaton_proof.bench.transfer.idle", "read", name)) for name in names
        ]
        pids = [child.hear(tuple[int, int]) for child in children]
        before = [[cpu_s(pid) for pid in pair] for pair in pids]
        begun = time.monotonic()
        time.sleep(idle_s)  # the measurement itself
        elapsed_s = time.monotonic() - begun
        used = [
            max(cpu_s(pid) - spent for pid, spent in zip(pair, at, strict=True))
            for pair, at in zip(pids, before, strict=True)
        ]
    return {name: round(100 * each / elapsed_s, 2) for name, each in zip(names, used, strict=True)}


def serve(name: str, parent: Parent) -> None:
    memory = allocate(MEMORY_BYTES)
    memory.view[:] = pattern(MEMORY_BYTES).data
    transport = catalogue.make(name, P, catalogue.PlaneSettings(), [memory.view])
    if transport.capabilities.lends_reads:
        lend_everything(cast(LendingTransport, transport), D)
    parent.answer(transport.endpoint(D))
    for _ in sys.stdin:
        pass
    transport.close()


def read(name: str, parent: Parent) -> None:
    """One read, then nothing more."""
    memory, spans = allocate(MEMORY_BYTES), array("q", (0, 0, MEMORY_BYTES))
    with PipedChild("kvbaton_proof.bench.transfer.idle", "serve", name) as source:
        transport = catalogue.make(name, D, catalogue.PlaneSettings(), [])
        driven = Driven(name, transport, memory.view, source.hear(bytes))
        driven.read(spans)
        verify(name, memory.view, pattern(MEMORY_BYTES), spans)
        parent.answer((os.getpid(), source.pid))
        for _ in sys.stdin:
            pass
        driven.close()


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](sys.argv[2], Parent())
