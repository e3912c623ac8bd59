"""The prefill side of the device benchmark: a process of its own that offers its cache in every way (`-m` this).

It is asked by an `Order` and answers with an `Offer`; from then on block lists are asked for, and tickets answered.
"""

from __future__ import annotations

from typing import cast

import msgspec

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports.catalogue import SUMS
from kvbaton.transports.checksum.checksum_device import DeviceSums
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import DeviceTransport, LendingTransport
from kvbaton.transports.cuda.cuda_driver import CudaGpu, Gpu
from kvbaton.transports.cuda.cuda_transport import CudaTransport
from kvbaton.transports.staged.staged_listener import Carrier
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from kvbaton_proof.bench.device.device_world import BLOCKS, DEVICE, SEGMENT_BYTES, SEGMENTS, Cache, pattern
from kvbaton_proof.bench.kit.handoff_side import HandoffSide, paged_layout
from kvbaton_proof.bench.kit.piped_children import Parent

P = PeerId(WorkerId("bench-p"), Incarnation(1))
PLANES = ("cuda", "staged-shm", "staged-tcp")
SLOTS = (StagedConfig().slot_bytes, StagedConfig().slots)
"""Of staging: bytes, and how many."""


class Order(msgspec.Struct, frozen=True, tag=True):
    key_directory: str
    readers: dict[str, PeerId]  # by plane
    slots: tuple[int, int] = SLOTS
    handoffs: str = "cuda"  # the plane that they go over


class Offer(msgspec.Struct, frozen=True):
    handle: bytes  # of the cache, for a plain contiguous copy
    endpoints: dict[str, bytes]
    address: tuple[str, str]  # the node's endpoint and public key


def make_plane(name: str, me: PeerId, gpu: Gpu, slots: tuple[int, int]) -> DeviceTransport:
    if name.endswith(SUMS):
        sums = DeviceSums(f"kvbaton-sums-{me}", gpu.device, gpu=gpu)
        return SummedTransport(make_plane(name.removesuffix(SUMS), me, gpu, slots), me, SumConfig(), sums)
    if name == "cuda":
        return CudaTransport(me, gpu=gpu)
    carrier: Carrier = "shm" if name == "staged-shm" else "tcp"
    return StagedTransport(me, StagedConfig(carrier=carrier, slot_bytes=slots[0], slots=slots[1]), gpu)


def device_side(
    name: str, key_directory: str, memory: DeviceMemory, gpu: Gpu, plane: str = "cuda", slots: tuple[int, int] = SLOTS
) -> HandoffSide:
    """One end of handoffs over a transport of the device, with the cache registered."""

    def make(me: PeerId) -> DeviceTransport:
        made = make_plane(plane, me, gpu, slots)
        made.register(0, memory)
        return made

    return HandoffSide(name, key_directory, paged_layout(SEGMENTS, BLOCKS, SEGMENT_BYTES), BLOCKS, make)


class Prompts(msgspec.Struct, frozen=True, tag=True):
    """Lists of blocks that P shall grant tickets for."""

    blocks: list[list[int]]


def main() -> None:
    parent = Parent()
    questions = parent.questions(Order | Prompts)
    order = next(questions)
    gpu = CudaGpu(DEVICE)
    cache = Cache(gpu)
    cache.fill(pattern())
    endpoints: dict[str, bytes] = {}
    planes: list[DeviceTransport] = []
    for name, reader in order.readers.items():
        plane = make_plane(name, P, gpu, order.slots)
        plane.register(0, cache.memory)
        if plane.capabilities.lends_reads:
            lend_everything(cast(LendingTransport, plane), reader)
        endpoints[name] = plane.endpoint(reader)
        planes.append(plane)
    side = device_side("p", order.key_directory, cache.memory, gpu, order.handoffs, order.slots)
    with gpu:
        parent.answer(Offer(gpu.export(cache.address), endpoints, side.address))
    for prompts in questions:
        parent.answer([side.grant(blocks) for blocks in prompts.blocks])
    side.close()
    for plane in planes:
        plane.close()


if __name__ == "__main__":
    main()
