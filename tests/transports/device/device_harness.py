"""`ProcessHarness` for planes of device memory, on a fake device or a real one; also within one process.

Memory is looked at through the device: this process opens the far side's allocation too, which outlives its owner.
"""

from __future__ import annotations

import ctypes
from typing import cast

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.testing import Pair, Side
from kvbaton.testing.transport_harness import Drives
from kvbaton.transports.checksum.checksum_transport import summed
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.cuda import cuda_transport
from kvbaton.transports.cuda.cuda_driver import Gpu
from kvbaton.transports.nixl import nixl_transport
from kvbaton.transports.staged import staged_transport
from tests.transports.device.device_peer import OpenDevice, Ruin, make_gpu, make_plane
from tests.transports.process_harness import FarTransport, PeerProcess, ProcessHarness

PLAIN = {
    "cuda": cuda_transport.CAPABILITIES,
    "nixl": nixl_transport.CAPABILITIES,
    "staged-shm": staged_transport.CAPABILITIES["shm"],
    "staged-tcp": staged_transport.CAPABILITIES["tcp"],
}
CAPABILITIES = {**PLAIN, **{able.name: able for able in map(summed, PLAIN.values())}}


class DeviceView:
    """Device memory that looks like a memoryview, as far as the contract looks."""

    def __init__(self, gpu: Gpu, address: int, size: int) -> None:
        self._gpu = gpu
        self._address = address
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self[:]  # type: ignore[return-value]

    def __getitem__(self, at: int | slice) -> int | bytes:
        if isinstance(at, int):
            return self._read(at, 1)[0]
        start, stop, _ = at.indices(self._size)
        return self._read(start, stop - start)

    def __setitem__(self, at: slice, data: bytes) -> None:
        start, stop, _ = at.indices(self._size)
        assert stop - start == len(data)
        held = ctypes.create_string_buffer(data, len(data))
        self._copy(self._address + start, ctypes.addressof(held), len(data))

    def _read(self, start: int, size: int) -> bytes:
        held = ctypes.create_string_buffer(size)
        self._copy(ctypes.addressof(held), self._address + start, size)
        return held.raw

    def _copy(self, target: int, source: int, size: int) -> None:
        with self._gpu as gpu:
            stream, event = gpu.stream(), gpu.event()
            gpu.copy(target, source, size, stream)
            gpu.record(event, stream)
            gpu.wait(event)
            gpu.drop_event(event)
            gpu.drop_stream(stream)


class FarDevice(FarTransport):
    """A transport in the peer process, and the handle of its memory."""

    def __init__(self, process: PeerProcess, me: PeerId, plane: str, size: int, dial_deadline_s: float) -> None:
        self._process = process
        self._me = me
        opened = OpenDevice(me, plane, size, dial_deadline_s)
        self.handle = process.call(opened).endpoint  # type: ignore[arg-type]


class DeviceHarness(ProcessHarness):
    """`near` here, `far` in another process (or here as well). Close it when done."""

    def __init__(self, plane: str, kind: str = "fake", *, together: bool = False, dial_deadline_s: float = 5.0) -> None:
        self.capabilities: Capabilities = CAPABILITIES[plane]
        self.offers = frozenset({"idle"} if together else {"idle", "kill", "pause"})
        if plane.startswith("staged"):
            self.offers |= {"unproven"}  # a launch may outlive its connection
        self.gpu = make_gpu(kind)
        self._plane = plane
        self._kind = kind
        self._together = together
        self._dial_deadline_s = dial_deadline_s
        self._sides: list[Side] = []
        self._regions = []
        self._owned: list[int] = []
        self._opened: list[int] = []
        self._count = 0

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        self._count += 1
        near_id, far_id = (PeerId(WorkerId(name), Incarnation(self._count)) for name in ("near", "far"))
        near = self._here(near_id, near_bytes)
        far = self._here(far_id, far_bytes) if self._together else self._there(far_id, far_bytes)
        return self._joined(near, far)

    def _here(self, me: PeerId, size: int) -> Side:
        transport = make_plane(self._plane, me, self.gpu, self._dial_deadline_s)
        with self.gpu as gpu:
            address = gpu.allocate(size)
        self._owned.append(address)
        transport.register(0, DeviceMemory(address, size))
        return self._side(me, transport, address, size)

    def _there(self, me: PeerId, size: int) -> Side:
        if self._process is None or not self._process.alive():
            self._process = PeerProcess("device.device_peer", self._kind)
        transport = FarDevice(self._process, me, self._plane, size, self._dial_deadline_s)
        with self.gpu as gpu:
            address = gpu.open(transport.handle)
        self._opened.append(address)
        return self._side(me, transport, address, size)

    def _side(self, me: PeerId, transport: Drives, address: int, size: int) -> Side:
        return Side(me, transport, cast(memoryview, DeviceView(self.gpu, address, size)))

    def ruin(self, side: Side) -> None:
        """The far process loses its device, and lives on."""
        assert self._process is not None
        self._process.call(Ruin(side.peer))  # type: ignore[arg-type]

    def reset(self) -> None:
        super().reset()
        with self.gpu as gpu:
            for address in self._opened:
                gpu.close(address)
            for address in self._owned:
                gpu.free(address)
        self._opened.clear()
        self._owned.clear()
