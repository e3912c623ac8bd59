"""The connector in a worker's process: it owns the data planes of its rank, and says what the scheduler's side decided.

Laws: a verdict that came with a step is reported in that step, once. Nothing here waits for bytes: copies run on mover
threads, commands come over the rank's own link, and a layer's announcement is a note left for that link's thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.integrations.vllm.compat import cpu_page
from kvbaton.integrations.vllm.guard import guarded, makes, returns
from kvbaton.integrations.vllm.layout import Parallel, RankFacts, rank_facts, regions_of
from kvbaton.integrations.vllm.settings import ConnectorSettings
from kvbaton.integrations.vllm.shelving import rank_shelf
from kvbaton.integrations.vllm.step import BatonStep, Leaving, RankCard, StepDone
from kvbaton.protocol.ids import LeaseId, PeerId
from kvbaton.protocol.progress import GroupProgress
from kvbaton.runtime.rank_host import RankHost
from kvbaton.transports import planes
from kvbaton.transports.base import Transport
from kvbaton.transports.delayed import faulty
from kvbaton.transports.memory import Region, adopt
from kvbaton.transports.unnamed import UnnamedTransport

log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's connector."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        self._config = vllm_config
        self._cache = kv_cache_config
        self._settings = settings
        self._host: RankHost | None = None
        self._facts: RankFacts | None = None
        self._adopted: list[Region] = []
        self._layers_done: dict[str, tuple[int, ...]] = {}  # in the order of computation
        self._order_is_known = False
        self._heard: list[str] = []
        self._step = BatonStep()
        self._due = BatonStep()

    # --- coming to life: what goes wrong here is told at start, by raising

    def register(self, tensors: Mapping[str, Any]) -> None:
        """vLLM has allocated the cache: describe it, share it, and open the data planes of this rank."""
        parallel = self._parallel()
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors.values())
        if not on_cpu:
            raise RuntimeError(
                "kvbaton: only caches in host memory can be handed over by this version; see docs/vllm.md"
            )
        facts = rank_facts(tensors, self._cache, parallel, opaque_pages=True)
        if facts.page != "rows of tokens":
            sizes = {group.block_tokens for group in facts.groups}
            facts = msgspec.structs.replace(facts, page=cpu_page(self._config, sizes))
        rank = parallel.pp * parallel.tp_size + parallel.tp
        memories = [_memory(storage) for storage in regions_of(tensors)]
        shelf = rank_shelf(self._settings, facts, rank, self._config.parallel_config.world_size, memories)
        self._host = RankHost(rank, self._planes(memories), self._settings.control_host, shelf=shelf)
        self._host.start()
        self._facts = facts
        if self._settings.layerwise and self._config.parallel_config.pipeline_parallel_size == 1:
            self._layers_done = layers_done(facts)

    def card(self) -> RankCard | None:
        if self._host is None or self._facts is None:
            return None
        return RankCard(msgspec.msgpack.encode(self._facts), self._host.invitation.encode())

    def _parallel(self) -> Parallel:
        model, parallel = self._config.model_config, self._config.parallel_config
        pp, tp = divmod(parallel.rank, parallel.tensor_parallel_size)
        return Parallel(pp, tp, parallel.tensor_parallel_size, model.get_total_num_kv_heads())

    def _planes(self, memories: list[memoryview]) -> dict[str, Transport]:
        made: dict[str, Transport] = {}
        try:
            told = self._settings
            names = planes.offered(told.transport, checksum=told.checksum, require_enforcement=told.require_enforcement)
        except OSError as error:
            raise RuntimeError(f"kvbaton: {error}") from error
        for name in names:
            try:
                made[name] = self._plane(name, memories)
            except (ValueError, OSError) as error:
                if self._settings.transport != planes.AUTO:
                    raise RuntimeError(f"kvbaton: transport {name} cannot be used here: {error}") from error
                log.warning("[plane-not-offered] kvbaton: transport %s is not offered: %s", name, error)
        return made

    def _plane(self, name: str, memories: list[memoryview]) -> Transport:
        """A data plane over this rank's cache; the engine tells it later whose it is (rule 3)."""
        shared = name.removesuffix(planes.SUMS) == "shm"
        if shared:
            self._adopted += [adopt(_address(memory), memory.nbytes) for memory in memories]
        views = [region.view for region in self._adopted] if shared else memories

        def make(me: PeerId) -> Transport:
            told = planes.PlaneSettings(settings.control_host, settings.checksum, settings.encrypt)
            plane = planes.make(name, me, told, views)
            return faulty(plane, settings.fault_copy_delay_s, settings.fault_misplace_while)

        settings = self._settings
        return UnnamedTransport(planes.capabilities(name), make)

    @guarded(returns(None))
    def shutdown(self) -> None:
        if self._host is not None:
            self._host.stop()
        for region in self._adopted:
            region.close()

    # --- hooks

    def step_begun(self, step: object) -> None:
        """The metadata of a step; its verdicts are due in this step."""
        self._step = self._due = step if isinstance(step, BatonStep) else BatonStep()

    @guarded(returns(None))
    def layer_done(self, layer: str) -> None:
        """The KV of this step's chunks is in the cache in one layer."""
        done = self._layers_done.get(layer)
        if done is None or self._host is None:
            return
        if not self._order_is_known:
            self._heard.append(layer)
            return
        for leaving in self._step.leaving:
            self._host.progressed(LeaseId(leaving.lease), self._progress(leaving, done))

    @guarded(makes(lambda: (set(), set(), set())))
    def results(self) -> tuple[set[str], set[str], set[int]]:
        """(finished, of these failed, blocks to compute again): what this rank has to say, once."""
        verdicts, self._due = self._due.verdicts, BatonStep()
        finished = {verdict.request_id for verdict in verdicts}
        failed = {verdict.request_id for verdict in verdicts if verdict.failed}
        return finished, failed, {block for verdict in verdicts for block in verdict.bad_blocks}

    @guarded(returns(None))
    def step_done(self) -> StepDone | None:
        step = self._step
        if self._heard:
            self._learn_order()
        return StepDone(step.number) if step.leaving or step.ends_prompts else None

    def _learn_order(self) -> None:
        """Speak of layers one by one only after a step in which they came in the order that was expected."""
        heard, self._heard = self._heard, []
        self._order_is_known = heard == list(self._layers_done)
        if not self._order_is_known:
            log.warning("[layer-order] kvbaton: layers come in an order not expected; announcing whole chunks only")
            self._layers_done = {}

    def _progress(self, leaving: Leaving, done: tuple[int, ...]) -> tuple[GroupProgress, ...]:
        """`done` layers of each group have what this step adds, the others what was there before it."""
        assert self._facts is not None
        return tuple(
            GroupProgress(has) if count == len(group.layers) else GroupProgress(had, has, count)
            for group, count, had, has in zip(self._facts.groups, done, leaving.had, leaving.has, strict=True)
        )


def layers_done(facts: RankFacts) -> dict[str, tuple[int, ...]]:
    """For each layer, how many of each group are computed once it is; empty where vLLM's order is not understood.

    Layers are computed in the order of the numbers in their names, whatever group they are in.
    """
    order = sorted((_layer_number(name), index) for index, group in enumerate(facts.groups) for name in group.layers)
    for index, group in enumerate(facts.groups):
        if [name for (_, name), of in order if of == index] != list(group.layers):
            return {}
    found: dict[str, tuple[int, ...]] = {}
    done = [0] * len(facts.groups)
    for (_, name), index in order:
        done[index] += 1
        found[name] = tuple(done)
    return found


def _layer_number(name: str) -> tuple[int, str]:
    digits = next((part for part in name.split(".") if part.isdigit()), "0")
    return int(digits), name


def _memory(storage: Any) -> memoryview:
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(buffer).cast("B")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
