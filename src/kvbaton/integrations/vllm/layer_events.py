"""When a layer of a step is computed: at once on the host, and on a device when an event behind it is over.

A forward on a device is a queue of work: the hook behind an attention layer runs when that layer was *issued*. So an
event is recorded there, on the stream that computes, and whoever wants to speak of the layer waits for it on a thread
of its own (rules 10 and 11).

Laws: the engine's thread never waits here, and gives up the interpreter for no call: it records, and leaves a note.
Notes are told in the order in which they were left, each after its event. Events are made once and used again; when
all of them are under way a note is dropped, which costs nothing but time, since every later layer covers it and the
step's own output covers the last.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from kvbaton.transports.cuda_driver import CudaError, CudaGpu, Gpu

log = logging.getLogger(__name__)

EVENTS_MAX = 256
"""Of one rank: some steps of a model with as many layers as any."""


class LayerClock(Protocol):
    """Tells of work that was issued once it is done."""

    def when_done(self, say: Callable[[], None]) -> None:
        """Call `say` when all that was issued on the current stream is done. By the engine's thread."""

    def close(self) -> None: ...


class HostClock:
    """On a CPU a layer that was called was computed."""

    def when_done(self, say: Callable[[], None]) -> None:
        say()

    def close(self) -> None:
        """There is nothing to close."""


class DeviceClock:
    """Pooled events of one device, and the thread that waits for them."""

    def __init__(self, gpu: Gpu, stream: Callable[[], int]) -> None:
        """`stream` gives the one on which the calling thread issues its work."""
        self._gpu = gpu
        self._stream = stream
        self._made = 0
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._issued: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-layers", daemon=True)
        self._thread.start()

    def when_done(self, say: Callable[[], None]) -> None:
        event = self._event()
        if event is None:
            return
        self._gpu.record(event, self._stream())
        self._issued.put((event, say))

    def close(self) -> None:
        self._broken = True
        self._issued.put(None)

    def _event(self) -> int | None:
        if self._broken:
            return None
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._made >= EVENTS_MAX:
                return None
        self._made += 1
        return self._gpu.event()

    def _run(self) -> None:
        try:
            self._gpu.enter()
            while (issued := self._issued.get()) is not None:
                event, say = issued
                self._gpu.wait(event)
                self._free.put(event)
                say()
        except CudaError as error:  # the engine will die of it by itself; nothing is told that is not known
            self._broken = True
            log.error("[device-lost] kvbaton: layers are not announced any more: %s", error)


def device_clock(device: int) -> DeviceClock:
    """For the device on which this process computes."""
    import torch

    return DeviceClock(CudaGpu(device), lambda: int(torch.cuda.current_stream(device).cuda_stream))
