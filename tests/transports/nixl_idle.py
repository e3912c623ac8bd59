"""What an idle NIXL data plane costs: two processes, connected by one read, then left alone for ten seconds.

    .venv-vllm/bin/python -m tests.transports.nixl_idle

Prints the share of one core that each process used; the exit status is 1 when one used 2 % or more.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvbaton.testing import Log
from kvbaton.testing.transport_case import READ, SMALL_BYTES, copy

from .nixl_harness import WAYS, NixlHarness

IDLE_S = 10.0
SHARE_MAX = 0.02
TICKS_S = 0.01  # of /proc/*/stat


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return TICKS_S * (int(fields[11]) + int(fields[12]))


def main() -> int:
    worst = 0.0
    for kind in WAYS:
        harness = NixlHarness(kind)
        pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
        assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 4096)]))
        assert Log(harness, pair.near).end(1).reason is None
        here, there = time.process_time(), cpu_s(harness.process.process.pid)
        time.sleep(IDLE_S)  # the measurement itself
        shares = (time.process_time() - here) / IDLE_S, (cpu_s(harness.process.process.pid) - there) / IDLE_S
        print(f"{'one host' if kind == 'shm' else kind}: reader {shares[0]:.2%} of a core, read one {shares[1]:.2%}")
        worst = max(worst, *shares)
        harness.close()
    return worst >= SHARE_MAX


if __name__ == "__main__":
    sys.exit(main())
