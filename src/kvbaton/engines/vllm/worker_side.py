"""The connector in a worker's process: it owns the data planes of its rank, and says what the scheduler's side decided.

Laws: a verdict that came with a step is reported in that step, once. Nothing here waits for bytes: copies run on mover
threads, commands come over the rank's own link, and a layer's announcement is a note left for that link's thread, which
on a device is left by the clock once an event behind that layer is over (`layer_events`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from kvbaton.engines.shared.caches import (
    CPU,
    DeviceCache,
    HostCache,
    HostClock,
    LayerClock,
    planes_over,
)
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.side.guard import guarded, makes, returns
from kvbaton.engines.side.protocols import Leaving
from kvbaton.engines.vllm import interpreter
from kvbaton.engines.vllm.config import supported
from kvbaton.engines.vllm.memory.rank_shelf import rank_shelf
from kvbaton.engines.vllm.memory.vllm_caches import cache_of, paged, spoken_of
from kvbaton.engines.vllm.memory.vllm_layout import Parallel, RankFacts, rank_facts
from kvbaton.engines.vllm.step_metadata import BatonStep, RankCard, StepDone
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.geometry.progress import GroupProgress
from kvbaton.protocol.ids import LeaseId
from kvbaton.ranks.rank_host import RankHost

log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's connector."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        self._config = vllm_config
        self._cache = kv_cache_config
        self._settings = settings
        self._host: RankHost | None = None
        self._facts: RankFacts | None = None
        self._memory: HostCache | DeviceCache | None = None
        self._clock: LayerClock = HostClock()
        self._layers_done: dict[str, tuple[int, ...]] = {}  # in the order of computation
        self._spoken_of: dict[str, bool] = {}  # those that are, and whether it is the last
        self._order_is_known = False
        self._heard: list[str] = []
        self._step = BatonStep()
        self._due = BatonStep()

    # --- coming to life: what goes wrong here is told at start, by raising

    def register(self, tensors: Mapping[str, Any]) -> None:
        """vLLM has allocated the cache: describe it, share it, and open the data planes of this rank."""
        parallel = self._parallel()
        cache = self._memory = cache_of(tensors)
        facts = rank_facts(tensors, self._cache, parallel, opaque_pages=cache.kind == CPU)
        facts = paged(facts, self._config, cache.kind)
        rank = parallel.pp * parallel.tp_size + parallel.tp
        role = self._settings.plays(self._config.kv_transfer_config)
        ranks = self._config.parallel_config.world_size
        shelf = rank_shelf(self._settings, facts, rank, ranks, cache.memories, role=role)
        self._host = RankHost(rank, planes_over(cache, self._settings), self._settings.control_host, store=shelf)
        interpreter.share()
        self._host.start()
        self._facts = facts
        if self._settings.layerwise and self._config.parallel_config.pipeline_parallel_size == 1:
            self._layers_done = layers_done(facts)
            self._spoken_of = spoken_of(list(self._layers_done))
            self._clock = cache.clock()

    def stays_registered(self) -> None:
        """vLLM (0.33) asks it of a worker that is about to sleep, perhaps with a cache that stays where it is.
        RuntimeError, before anything was taken away, where it would not stay: peers may read it at any time."""
        asked = supported.asked_of(self._config, self._settings.transport)
        if asked.sleeps or asked.cumem:
            raise RuntimeError(
                "kvbaton: sleep would take the KV cache away while peers may read it; nothing was taken away. "
                "Next: wake up, and pause with level 0, or leave out --enable-cumem-allocator and --enable-sleep-mode"
            )

    def card(self) -> RankCard | None:
        if self._host is None or self._facts is None:
            return None
        return RankCard(msgspec.msgpack.encode(self._facts), self._host.invitation.encode())

    def _parallel(self) -> Parallel:
        model, parallel = self._config.model_config, self._config.parallel_config
        pp, tp = divmod(parallel.rank, parallel.tensor_parallel_size)
        return Parallel(pp, tp, parallel.tensor_parallel_size, model.get_total_num_kv_heads())

    @guarded(returns(None))
    def shutdown(self) -> None:
        if self._host is not None:
            self._host.stop()
        self._clock.close()
        if self._memory is not None:
            self._memory.close()

    # --- hooks

    def step_begun(self, step: object) -> None:
        """The metadata of a step; its verdicts are due in this step."""
        self._step = self._due = step if isinstance(step, BatonStep) else BatonStep()

    @guarded(returns(None))
    def layer_done(self, layer: str) -> None:
        """The KV of this step's chunks is in the cache in one layer."""
        if not self._order_is_known:
            self._heard += [layer] if layer in self._layers_done else []
        elif self._step.leaving and layer in self._spoken_of and self._host is not None:
            say = partial(self._announce, self._host, self._step.leaving, self._layers_done[layer])
            self._clock.when_done(say, last=self._spoken_of[layer])

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
        return StepDone(step.number) if step.leaving or step.ends_prompts or step.is_awaited else None

    def _learn_order(self) -> None:
        """Speak of layers one by one only after a step in which they came in the order that was expected."""
        heard, self._heard = self._heard, []
        self._order_is_known = heard == list(self._layers_done)
        if not self._order_is_known:
            log.warning("[layer-order] kvbaton: layers come in an order not expected; announcing whole chunks only")
            self._layers_done, self._spoken_of = {}, {}

    def _announce(self, host: RankHost, leaving: tuple[Leaving, ...], done: tuple[int, ...]) -> None:
        """By the clock's thread: these layers are in the cache, on the device and done."""
        for each in leaving:
            host.progressed(LeaseId(each.lease), self._progress(each, done))

    def _progress(self, leaving: Leaving, done: tuple[int, ...]) -> tuple[GroupProgress, ...]:
        """`done` layers of each group have what this step adds, the others what was there before it; states never."""
        assert self._facts is not None
        return leaving.progress(done, [len(group.layers) for group in self._facts.groups])


def layers_done(facts: RankFacts) -> dict[str, tuple[int, ...]]:
    """For each layer, how many of each group are computed once it is; empty where vLLM's order is not understood.

    Layers are computed in the order of the numbers in their names, whatever group they are in. vLLM says nothing of
    layers with states.
    """
    spoken = [(index, group) for index, group in enumerate(facts.groups) if group.kind is not GroupKind.STATE]
    order = sorted((_layer_number(name), index) for index, group in spoken for name in group.layers)
    for index, group in spoken:
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
