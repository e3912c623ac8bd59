"""Where a rank's KV cache lies, and the data planes over it: memory of the host, or of the rank's own device.

Laws: nothing here copies: what lies on a device stays there, and only its planes' own launches touch it. A plane that
cannot be had is left out where the operator chose `auto`, and refused by name where it was chosen.

When a layer of a step is computed: at once on the host, and on a device when an event behind it is over.

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

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.protocol.ids import PeerId
from kvbaton.transports import catalogue
from kvbaton.transports.core.shared_memory import DeviceMemory, Region, adopt
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.core.wrapped import UnnamedTransport, faulty
from kvbaton.transports.cuda.cuda_driver import CudaError, CudaGpu, Gpu

log = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"


class HostCache:
    """Memory that the engine allocated on the host. For planes that share it, it is adopted in place, once."""

    kind = CPU  # of the device, as data planes name it

    def __init__(self, storages: Sequence[Any]) -> None:
        self.memories = [_memory(storage) for storage in storages]
        self._adopted: list[Region] = []

    def plane(self, name: str, me: PeerId, told: catalogue.PlaneSettings) -> Transport:
        return catalogue.make(name, me, told, self._shared() if catalogue.plane_of(name).shares else self.memories)

    def prepare(self, names: Sequence[str]) -> None:
        """Adopt what is shared now, before anybody writes to it. ValueError says why that cannot be done."""
        if any(catalogue.plane_of(name).shares for name in names):
            self._shared()

    def clock(self) -> LayerClock:
        return HostClock()

    def close(self) -> None:
        for region in self._adopted:
            region.close()

    def _shared(self) -> list[memoryview]:
        if not self._adopted:
            self._adopted = [adopt(_address(memory), memory.nbytes) for memory in self.memories]
        return [region.view for region in self._adopted]


class DeviceCache:
    """Memory that the engine allocated on a CUDA device."""

    kind = CUDA

    def __init__(self, storages: Sequence[Any], device: int) -> None:
        self.memories = [DeviceMemory(storage.data_ptr(), storage.nbytes(), device) for storage in storages]
        self._device = device

    def plane(self, name: str, me: PeerId, told: catalogue.PlaneSettings) -> Transport:
        return catalogue.make_device(name, me, told, self.memories)

    def prepare(self, names: Sequence[str]) -> None:
        pass

    def clock(self) -> LayerClock:
        return device_clock(self._device)

    def close(self) -> None:
        """The memory is the engine's."""


def planes_over(cache: HostCache | DeviceCache, settings: ConnectorSettings) -> dict[str, Transport]:
    """The data planes that this rank offers; the engine tells them later whose they are (rule 3)."""
    auto = settings.transport == catalogue.AUTO
    try:
        names = catalogue.offered(
            settings.transport,
            device=cache.kind,
            checksum=settings.checksum,
            require_enforcement=settings.require_enforcement,
        )
    except OSError as error:
        raise RuntimeError(f"kvbaton: {error}") from error
    made: dict[str, Transport] = {}
    for name in names:
        try:
            cache.prepare([name])
            made[name] = _unnamed(cache, name, settings)
        except (ValueError, OSError) as error:
            if not auto:
                raise RuntimeError(f"kvbaton: transport {name} cannot be used here: {error}") from error
            log.warning("[plane-not-offered] kvbaton: transport %s is not offered: %s", name, error)
    if not made:
        raise RuntimeError(f"kvbaton: no data plane can be offered for a KV cache in {cache.kind} memory: see the log")
    return made


def _unnamed(cache: HostCache | DeviceCache, name: str, settings: ConnectorSettings) -> UnnamedTransport:
    told = catalogue.PlaneSettings(settings.control_host, settings.checksum, settings.encrypt, settings.copy_share)

    def make(me: PeerId) -> Transport:
        return faulty(cache.plane(name, me, told), settings.fault_copy_delay_s, settings.fault_misplace_while)

    return UnnamedTransport(catalogue.capabilities(name), make)


def _memory(storage: Any) -> memoryview:
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(buffer).cast("B")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


EVENTS_MAX = 256
"""Of one rank: far more steps than an engine has in flight."""
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


def device_clock(device: int) -> DeviceClock:
    """For the device on which this process computes."""
    import torch

    return DeviceClock(CudaGpu(device), lambda: int(torch.cuda.current_stream(device).cuda_stream))
