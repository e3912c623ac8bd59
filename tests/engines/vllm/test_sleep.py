"""Sleep: a cache that peers may read is not taken away, and an engine that is woken stays who it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.shared.connector_settings import ConnectorSettings

METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
SETTINGS = ConnectorSettings.parse({"name": "p0", "keys": "/keys", "transport": "staged-shm,staged-tcp"})


def config(device: str = "cuda", **model: bool) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(),
        device_config=SimpleNamespace(device_type=device),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, kv_load_failure_policy="recompute"),
    )


@pytest.mark.parametrize("pool", ["enable_cumem_allocator", "enable_sleep_mode"])
def test_a_worker_whose_cache_would_go_refuses_to_sleep(adapter: Callable[[str], ModuleType], pool: str) -> None:
    worker = adapter("worker_side").WorkerSide(config(**{pool: True}), None, SETTINGS)
    with pytest.raises(RuntimeError, match=r"^kvbaton: sleep .* nothing was taken away\. Next: "):
        worker.stays_registered()


def test_a_worker_whose_cache_stays_may_sleep(adapter: Callable[[str], ModuleType]) -> None:
    adapter("worker_side").WorkerSide(config(), None, SETTINGS).stays_registered()


def test_what_workers_say_again_at_a_wake_up_changes_nothing(
    adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = ModuleType("metrics")
    vars(metrics).update({name: type(name, (), {}) for name in ("KVConnectorPromMetrics", "KVConnectorStats")})
    monkeypatch.setitem(sys.modules, METRICS, metrics)
    side = adapter("scheduler_side")
    config_ = config()
    config_.parallel_config.data_parallel_size = 1
    scheduler = side.SchedulerSide(config_, None, SETTINGS, None)
    with pytest.raises(RuntimeError, match="did not say where its KV cache lies"):
        scheduler.ranks_known({(0, 0): None}, {})
    scheduler._live, scheduler.presence = alive = (object(), object())
    scheduler.ranks_known({(0, 0): None}, {})
    assert (scheduler._live, scheduler.presence) == alive
