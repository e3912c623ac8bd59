"""When a layer of a step is computed: at once on the host, and on a device when an event behind it is over.

A forward on a device is a queue of work: the hook behind an attention layer runs when that layer was *issued*. So an
event is recorded there, on the stream that computes, and whoever wants to speak of the layer waits for it on a thread
of its own (rules 10 and 11).

Laws: the engine's thread never waits here, and gives up the interpreter for no call: it records, and leaves a note.
Notes are told in the order in which they were left, each after its event. Events are made once and used again; when
all of them are under way a note is dropped, which costs nothing but time, since every later layer covers it and the
step's own output covers the last. So is a note that comes too soon after another: to tell takes the interpreter from
the thread that launches, and what D copies then takes the device from what computes (docs/lab: 32 notes of a step
of 91 ms made it 100).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvbaton.transports.cuda.cuda_driver import CudaError, CudaGpu, Gpu

log = logging.getLogger(__name__)

EVENTS_MAX = 256
"""Of one rank: far more steps than an engine has in flight."""
NOTES_A_STEP = 8
"""Layers of a step that are spoken of one by one, at even distances; the last is always among them."""
SPACING_S = 0.02
"""Between notes of a step, but for its last, which is told at once. What is computed in this time is what D has still
to copy when P is done: 0.1 GB of an 8B model, a few milliseconds over RDMA."""


class LayerClock(Protocol):
    """Tells of work that was issued once it is done."""

    def when_done(self, say: Callable[[], None], *, last: bool) -> None:
        """Call `say` when all that was issued on the current stream is done. By the engine's thread. What is not the
        `last` of a step may be left out."""

    def close(self) -> None: ...


class HostClock:
    """On a CPU a layer that was called was computed."""

    def when_done(self, say: Callable[[], None], *, last: bool) -> None:
        say()

    def close(self) -> None:
        """There is nothing to close."""


class DeviceClock:
    """Pooled events of one device, and the thread that waits for them."""

    def __init__(self, gpu: Gpu, stream: Callable[[], int], now: Callable[[], float] = time.monotonic) -> None:
        """`stream` gives the one on which the calling thread issues its work."""
        self._gpu = gpu
        self._stream = stream
        self._now = now
        self._made = 0
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._issued: queue.SimpleQueue[tuple[int, Callable[[], None], bool] | None] = queue.SimpleQueue()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-layers", daemon=True)
        self._thread.start()

    def when_done(self, say: Callable[[], None], *, last: bool) -> None:
        event = self._event()
        if event is None:
            return
        self._gpu.record(event, self._stream())
        self._issued.put((event, say, last))

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
            due: float | None = None
            while (issued := self._issued.get()) is not None:
                event, say, last = issued
                self._gpu.wait(event)
                self._free.put(event)
                due = self._now() + SPACING_S if due is None else due
                if last or self._now() >= due:
                    say()
                    due = None if last else self._now() + SPACING_S
        except CudaError as error:  # the engine will die of it by itself; nothing is told that is not known
            self._broken = True
            log.error("[device-lost] kvbaton: layers are not announced any more: %s", error)


def spoken_of(layers: list[str]) -> dict[str, bool]:
    """Of a step's layers those that are announced, and whether each is the last."""
    stride = -(-len(layers) // NOTES_A_STEP) or 1
    chosen = layers[::-1][::stride]
    return {layer: layer == layers[-1] for layer in reversed(chosen)}


def device_clock(device: int) -> DeviceClock:
    """For the device on which this process computes."""
    import torch

    return DeviceClock(CudaGpu(device), lambda: int(torch.cuda.current_stream(device).cuda_stream))
