"""Where a rank's KV cache lies, and the data planes over it: memory of the host, or of the rank's own device.

Laws: a cache lies in one kind of memory and on one device; anything else is refused at start, by the name of the layer.
Nothing here copies: what lies on a device stays there, and only its planes' own launches touch it. A plane that cannot
be had is left out where the operator chose `auto`, and refused by name where it was chosen.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.engines.vllm.config.connector_settings import ConnectorSettings
from kvbaton.engines.vllm.content.vllm_compat import cpu_page, device_page, state_page
from kvbaton.engines.vllm.memory.layer_events import HostClock, LayerClock, device_clock
from kvbaton.engines.vllm.memory.vllm_layout import RankFacts, regions_of
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.ids import PeerId
from kvbaton.transports import catalogue
from kvbaton.transports.core.shared_memory import DeviceMemory, Region, adopt
from kvbaton.transports.core.transport import Transport
from kvbaton.transports.core.wrapped import UnnamedTransport, faulty

log = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"


def cache_of(tensors: Mapping[str, Any]) -> HostCache | DeviceCache:
    """RuntimeError for memory of a kind, or a mix, that is not handed over."""
    where = {str(tensor.device): name for name, tensor in tensors.items()}
    kinds = {tensor.device.type for tensor in tensors.values()}
    if kinds == {CPU}:
        return HostCache(regions_of(tensors))
    if kinds == {CUDA} and len(where) == 1:
        return DeviceCache(regions_of(tensors), next(iter(tensors.values())).device.index or 0)
    found = ", ".join(f"{device} ({name})" for device, name in where.items())
    raise RuntimeError(
        f"kvbaton: the KV cache lies on {found}; expected host memory, or one CUDA device a rank: see docs/vllm.md"
    )


class HostCache:
    """Memory that vLLM allocated on the host. For planes that share it, it is adopted in place, once."""

    kind = CPU  # of the device, as data planes name it

    def __init__(self, storages: Sequence[Any]) -> None:
        self.memories = [_memory(storage) for storage in storages]
        self._adopted: list[Region] = []

    def paged(self, facts: RankFacts, vllm_config: Any) -> RankFacts:
        page = facts.page
        if page != "rows of tokens":
            sizes = {each.block_tokens for each in facts.groups if each.kind is not GroupKind.STATE}
            page = cpu_page(vllm_config, sizes)
        return _with_states(facts, page, self.kind)

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
    """Memory that vLLM allocated on a CUDA device."""

    kind = CUDA

    def __init__(self, storages: Sequence[Any], device: int) -> None:
        self.memories = [DeviceMemory(storage.data_ptr(), storage.nbytes(), device) for storage in storages]
        self._device = device

    def paged(self, facts: RankFacts, vllm_config: Any) -> RankFacts:
        return _with_states(facts, device_page(vllm_config, facts.page), self.kind)

    def plane(self, name: str, me: PeerId, told: catalogue.PlaneSettings) -> Transport:
        return catalogue.make_device(name, me, told, self.memories)

    def prepare(self, names: Sequence[str]) -> None:
        pass

    def clock(self) -> LayerClock:
        return device_clock(self._device)

    def close(self) -> None:
        """The memory is vLLM's."""


def _with_states(facts: RankFacts, page: str, device: str) -> RankFacts:
    if any(group.kind is GroupKind.STATE for group in facts.groups):
        page += f", {state_page(device)}"
    return msgspec.structs.replace(facts, page=page)


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
