"""The far side of a device pair in a process of its own: `peer_process.py`, with memory of a device.

Its argument is `fake` or `cuda`; the far side's memory is told by its IPC handle, so that the other process can
look at it whatever becomes of this one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any
from unittest import mock

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.catalogue import SUMS
from kvbaton.transports.checksum.checksum_device import DeviceSums
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import DeviceTransport, Transport
from kvbaton.transports.cuda.cuda_driver import CudaError, CudaGpu, Gpu
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from kvbaton.transports.nixl import nixl_agent
from kvbaton.transports.nixl.nixl_transport import NixlConfig, NixlTransport, device_config
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from tests.transports.device.fake_gpu import FakeGpu
from tests.transports.peer_process import Answer, Call, Calls, carry_out


class OpenDevice(Call):
    plane: str
    memory_bytes: int
    dial_deadline_s: float


class Ruin(Call):
    """Lose the device: a launch reads where nothing is, which ends this process's context for good."""


DeviceCalls = OpenDevice | Ruin | Calls


def ruin(gpu: Gpu) -> None:
    if isinstance(gpu, FakeGpu):
        lost = CudaError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        gpu.refusals = dict.fromkeys(("wait", "copy", "move_rows", "record", "allocate", "free", "open", "close"), lost)
        return
    stream, event = gpu.stream(), gpu.event()
    with contextlib.suppress(CudaError):
        gpu.move_rows(4096, 1, range(1), stream)
        gpu.record(event, stream)
        gpu.wait(event)


class HostBindings:
    """NIXL's own bindings, for a device whose memory is the host's: it is named to NIXL as that."""

    def __init__(self) -> None:
        self._real: Any = _load_bindings()
        self.VRAM_SEG = self._real.DRAM_SEG

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_load_bindings = nixl_agent.load_bindings


def make_gpu(kind: str) -> Gpu:
    return FakeGpu() if kind == "fake" else CudaGpu(0)


def make_plane(plane: str, me: PeerId, gpu: Gpu, dial_deadline_s: float) -> DeviceTransport:
    if plane.endswith(SUMS):
        inner = make_plane(plane.removesuffix(SUMS), me, gpu, dial_deadline_s)
        config = SumConfig(dial_deadline_s=dial_deadline_s)
        return SummedTransport(inner, me, config, DeviceSums(f"sums-{me}", 0, gpu=gpu))
    if plane == "cuda":
        return CudaTransport(me, CudaConfig(dial_deadline_s=dial_deadline_s), gpu)
    if plane == "nixl" and isinstance(gpu, FakeGpu):
        with mock.patch.object(nixl_agent, "load_bindings", HostBindings):
            return NixlTransport(me, NixlConfig(device=0), gpu)
    if plane == "nixl":
        return NixlTransport(me, device_config(0), gpu)
    carrier = plane.removeprefix("staged-")
    staging = StagedConfig(carrier=carrier, slot_bytes=1 << 20, dial_deadline_s=dial_deadline_s)  # type: ignore[arg-type]
    return StagedTransport(me, staging, gpu)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries of others say on stdout what they like
    gpu = make_gpu(sys.argv[1])
    gpu.enter()
    transports: dict[PeerId, Transport] = {}
    for line in sys.stdin.buffer:
        call = msgspec.json.decode(line, type=DeviceCalls)
        if isinstance(call, OpenDevice):
            plane = make_plane(call.plane, call.me, gpu, call.dial_deadline_s)
            address = gpu.allocate(call.memory_bytes)
            plane.register(0, DeviceMemory(address, call.memory_bytes))
            transports[call.me] = plane
            answer = Answer(endpoint=gpu.export(address))
        elif isinstance(call, Ruin):
            ruin(gpu)
            answer = Answer()
        else:
            answer = carry_out(call, transports)
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
