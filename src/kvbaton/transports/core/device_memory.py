"""Device memory as transports know it: its address and size.

Law: the owner keeps memory allocated until the transports that use it are closed. Nothing here touches it.
"""

from __future__ import annotations

import msgspec

from kvbaton.transports.core.shared_memory import REGIONS_MAX


class DeviceMemory(msgspec.Struct, frozen=True):
    """A stretch of one device's memory: of a tensor `t`, `DeviceMemory(t.data_ptr(), t.nbytes, t.device.index)`."""

    address: int
    nbytes: int
    device: int = 0

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes < 1 or self.device < 0 or self.address + self.nbytes > 1 << 63:
            raise ValueError(f"{self}: expected an address above 0, at least one byte and a device from 0 on")


def mapped_bytes_of(transport: object) -> int:
    """Device memory of other processes that a transport has mapped; 0 for one that maps none (the attribute is
    optional)."""
    return max(int(getattr(transport, "mapped_bytes", 0)), 0)


class RegisteredDevice:
    """The memory that a transport may touch, by region number: all of one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._regions: dict[int, DeviceMemory] = {}

    def add(self, region: int, memory: DeviceMemory) -> None:
        """ValueError for memory of another kind or device, or a number that is out of range or taken."""
        if not isinstance(memory, DeviceMemory):
            raise ValueError(f"region {region}: got a {type(memory).__name__}, expected a DeviceMemory")
        if memory.device != self._device:
            raise ValueError(f"region {region}: memory of device {memory.device}, this transport has {self._device}")
        if not 0 <= region < REGIONS_MAX or region in self._regions:
            raise ValueError(f"region {region} is taken, or not one of 0..{REGIONS_MAX - 1}")
        self._regions[region] = memory

    def get(self, region: int) -> DeviceMemory | None:
        return self._regions.get(region)

    def items(self) -> list[tuple[int, DeviceMemory]]:
        return list(self._regions.items())

    def clear(self) -> None:
        self._regions.clear()
