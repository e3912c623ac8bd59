"""Announces an embedded worker to another system's router, and resolves the addresses in that router's requests.

Laws: announced only once the registry lists it, since its peers know it by then; and no longer once it stops. These
formats have no goodbye: vllm-router keeps sending for up to five seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

from kvbaton.control.address_book import moriio_address, p2p_nccl_address
from kvbaton.control.plain.announcer import (
    MoriioAnnouncer,
    MoriioRegistration,
    TransferMode,
    p2p_nccl_registration,
    registration,
)
from kvbaton.engines.embedded.worker_options import WorkerOptions

LISTED_POLL_S = 0.05
INTERVAL_S = 1.0  # vllm-router forgets after 4 to 5 s: at vLLM's 3 s one that comes late costs a worker its place


def announcement(options: WorkerOptions, http_address: str, control_endpoint: str) -> MoriioRegistration:
    """The announcement for the router at `options.announce_to`; `ControlError` names an invalid field."""
    side: Literal["P", "D"] = "P" if options.role == "prefill" else "D"
    if options.announce_as == "p2p-nccl":
        return p2p_nccl_registration(side, http_address, p2p_nccl_address(control_endpoint))
    mode: TransferMode = "WRITE" if options.announce_as == "moriio-write" else "READ"
    address = moriio_address(control_endpoint)
    return registration(side, http_address, address, transfer_mode=mode, tp_size=options.tp)


class Herald:
    """Keeps one worker announced."""

    def __init__(self, router: str, said: MoriioRegistration) -> None:
        self._announcer = MoriioAnnouncer(f"tcp://{router}", said, interval_s=INTERVAL_S)
        self._stopped = False
        self._lock = threading.Lock()  # never started after it was stopped

    async def announce_when(self, is_listed: Callable[[], bool]) -> None:
        """Begin as soon as `is_listed`; without a deadline, as the worker itself serves without one."""
        while not is_listed():
            await asyncio.sleep(LISTED_POLL_S)
        with self._lock:
            if not self._stopped:
                self._announcer.start()

    def stop(self) -> None:
        """Stop announcing. From any thread, idempotent; blocks for milliseconds, at most the announcer's `STOP_S`."""
        with self._lock:
            self._stopped = True
        self._announcer.stop()
