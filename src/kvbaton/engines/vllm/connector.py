"""`BatonConnector`, as vLLM sees it: every hook of `KVConnectorBase_V1`, each one line to the side that knows.

One class serves both of vLLM's roles; which one an object has decides which side it holds. Nothing is decided here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import vllm.config as vllms
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.shared.store_setup import enrolment_of
from kvbaton.engines.side import guard
from kvbaton.engines.side.guard import guarded, makes, returns
from kvbaton.engines.vllm import plugin
from kvbaton.engines.vllm.config import supported, vllm_versions
from kvbaton.engines.vllm.config.data_parallel import place_of
from kvbaton.engines.vllm.memory import vllm_layout
from kvbaton.engines.vllm.scheduler_side import SchedulerSide
from kvbaton.engines.vllm.step_metadata import BatonStep
from kvbaton.engines.vllm.vllm_stats import BatonMetrics, BatonStats, NoMetrics
from kvbaton.engines.vllm.worker_side import WorkerSide

plugin.register()

BLOCK_BY_BLOCK = "BLHNC"
"""vLLM's name for blocks outermost, then layers, heads, tokens."""
MULTI = "kv_connector.v1.multi_connector"


class BatonConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV over between vLLM engines."""

    _cache_hit_source = getattr(getattr(base, "CacheHitSource", None), "P2P", None)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_versions.check(KVConnectorBase_V1, stateful=vllm_layout.stateful(kv_cache_config))
        guard.log_beside_vllm()
        settings = ConnectorSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config).settled()
        outer = getattr(vllms, "get_current_vllm_config_or_none", lambda: None)()
        supported.check(vllm_config, settings, outer)
        place = place_of(vllm_config, outer)
        if place is not None:
            settings = settings.of_rank(place.rank)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            enrolment = enrolment_of(settings, settings.plays(vllm_config.kv_transfer_config))
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, settings, enrolment, place)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)
        self._bad_blocks: set[int] = set()
        self._hands_over = settings.hands_over

    @property
    def requires_kv_delivery(self) -> bool:
        """What only goes to a store is no loss: a later miss."""
        return self._hands_over and bool(self._vllm_config.kv_transfer_config.is_kv_producer)

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a hook of the scheduler's role was called on a worker's connector"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None, "a hook of a worker's role was called on the scheduler's connector"
        return self._worker

    # --- both roles

    @guarded(returns(None))
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.shutdown()

    @guarded(returns(None))
    def get_kv_connector_stats(self) -> BatonStats | None:
        return BatonStats.of(self._scheduler) if self._scheduler is not None else None

    @classmethod
    @guarded(makes(BatonStats))
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BatonStats:
        return BatonStats(data) if data else BatonStats()

    @classmethod
    @guarded(makes(NoMetrics))
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> BatonMetrics | NoMetrics:
        return BatonMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    @guarded(returns(False))
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Never: it is asked without the role, and D needs its full graphs. A forward in which layers cannot be seen is
        announced whole, by its output; prefills are not captured whole, so theirs are seen."""
        return False

    @classmethod
    @guarded(returns(None))
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a device all layers of a block together, heads apart: one span a block between equals, and heads can be
        cut out for another tensor-parallel size. Where a backend cannot, vLLM says so and takes its own. It is a wish,
        which vLLM takes for a need: in a MultiConnector two needs end the engine, so beside others it is none."""
        if vllm_config.device_config.device_type != "cuda" or _is_asked_beside_others():
            return None
        return BLOCK_BY_BLOCK

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No, so that vLLM (0.33) refuses such a launch by our name: a cache that peers may read must stay."""
        return False

    # --- the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.scheduler.manager = kv_cache_manager
        self.scheduler.bind_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.scheduler.ranks_known(metadata, vllm_versions.versions())

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.scheduler.ranks_known({(0, tp): card for tp, card in metadata.items()}, vllm_versions.versions())

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BatonStep:
        return self.scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.step_ended(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.scheduler.busy()

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        return ()

    # --- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self.worker.stays_registered()

    def restore_kv_caches(self) -> None:
        """What `unregister_kv_caches` lets pass was not taken away."""

    def get_handshake_metadata(self) -> Any:
        return self.worker.card()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.step_begun(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copies were started by the ledger the moment there were blocks for them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no forward ever waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """Nothing is saved on the step."""

    @guarded(makes(KVConnectorTransferResults))
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        finished, failed, self._bad_blocks = self.worker.results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> Any:
        return self.worker.step_done()


def _is_asked_beside_others() -> bool:
    """Does a MultiConnector ask? It gives each child a configuration in which nothing speaks of the others."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith(MULTI):
            return True
        frame = frame.f_back
    return False
