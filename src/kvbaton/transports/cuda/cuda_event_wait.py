"""Device events in a form that the gate can wait for asleep.

Law: a CUDA event is never waited for by its own `synchronize`, which busy-waits on a whole core unless it was created
for blocking waits. A stream waits for it, and we sleep until our own event after it is done.
"""

from __future__ import annotations

from kvbaton.transports.core.transport import DeviceEvent
from kvbaton.transports.cuda.cuda_driver import Gpu


def quiet_event(event: DeviceEvent, gpu: Gpu) -> DeviceEvent:
    """`event` itself, unless it has a handle of CUDA (as `torch.cuda.Event` has)."""
    handle = getattr(event, "cuda_event", None)
    return event if handle is None else _Quiet(int(handle), event, gpu)


class _Quiet:
    def __init__(self, handle: int, event: DeviceEvent, gpu: Gpu) -> None:
        self._handle = handle
        self._kept = event  # its owner may drop it, and with it the handle
        self._gpu = gpu

    def synchronize(self) -> None:
        if not self._handle:  # created but never recorded: nothing to wait for
            return
        with self._gpu as gpu:
            stream, ours = gpu.stream(), gpu.event()
            try:
                gpu.stream_wait(stream, self._handle)
                gpu.record(ours, stream)
                gpu.wait(ours)
            finally:
                gpu.drop_event(ours)
                gpu.drop_stream(stream)
