"""What is refused at start: each in words that name what was found and what to change; no vLLM is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.vllm.config import supported, vllm_versions


def config(role: str = "kv_both", engine_id: str = "0f3a", device: str = "", model: Any = None, **parallel: Any) -> Any:
    transfer = SimpleNamespace(
        kv_role=role, engine_id=engine_id, kv_connector="BatonConnector", kv_load_failure_policy="recompute",
        is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer",
    )  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(**(model or {})), device_config=SimpleNamespace(device_type=device),
    )  # fmt: skip


def settings(**more: Any) -> ConnectorSettings:
    return ConnectorSettings.parse({"name": "p0", "keys": "/keys", **more})


def test_one_engine_is_taken() -> None:
    supported.check(config(data_parallel_size=1, data_parallel_index=0, data_parallel_rank=0), settings())
    supported.check(config("kv_producer"), settings())
    supported.check(config(data_parallel_size=2, nnodes=2, nnodes_within_dp=1), settings())
    supported.check(config(), settings(store="tcp://127.0.0.1:7710", role="prefill"))


class RayExecutor:
    uses_ray = True


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"nnodes": 2}, "nnodes: 2: tensor- and pipeline-parallel ranks .* fit on one host"),
        ({"nnodes": 4, "nnodes_within_dp": 2, "data_parallel_size": 2}, "nnodes: 2: tensor"),
        ({"enable_elastic_ep": True, "data_parallel_size": 2}, "enable_elastic_ep: .* start another engine"),
        ({"distributed_executor_backend": "ray", "world_size": 2}, "executor_backend: ray .* mp"),
        ({"distributed_executor_backend": RayExecutor, "world_size": 2}, "executor_backend: ray .* mp"),
        ({"distributed_executor_backend": "external_launcher", "world_size": 2}, "external_launcher .* mp"),
        ({"device": "xpu"}, "caches on xpu cannot be handed over"),
        ({"device": "tpu"}, "caches on tpu cannot be handed over"),
        ({"device": "cuda", "model": {"enable_sleep_mode": True, "enable_cumem_allocator": True}}, "--enable-sleep-m"),
        ({"device": "cuda", "model": {"enable_cumem_allocator": True}}, "no IPC handle.*staged-shm,staged-tcp"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(found: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^kvbaton: .*{told}"):
        supported.check(config(**found), settings())


@pytest.mark.parametrize("name", supported.ALLOCATOR)
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments: True"])
def test_segments_that_expand_are_refused_on_a_gpu_whatever_variable_has_them(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM looks at one of the two only."""
    supported.check(config(device="cuda"), settings())
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="leave expandable_segments out of PYTORCH_ALLOC_CONF and"):
        supported.check(config(device="cuda"), settings())
    supported.check(config(device="cpu"), settings())
    monkeypatch.setenv(name, value.replace("True", "False"))
    supported.check(config(device="cuda"), settings())


def test_amds_gpus_are_not_mistaken_for_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(hip="6.4"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ValueError, match="caches on rocm cannot"):
        supported.check(config(device="cuda"), settings())
    torch.version.hip = None
    supported.check(config(device="cuda"), settings())


def test_a_pool_without_handles_is_taken_where_no_handle_is_needed() -> None:
    found = config(device="cuda", model={"enable_cumem_allocator": True})
    supported.check(found, settings(transport="staged-shm,staged-tcp"))
    with pytest.raises(ValueError, match="no IPC handle"):
        supported.check(found, settings(transport="cuda,staged-tcp"))


def test_one_rank_under_ray_is_taken() -> None:
    supported.check(config(distributed_executor_backend="ray", world_size=1), settings())
    supported.check(config(distributed_executor_backend="mp", world_size=2, nnodes=1), settings())


def test_whoever_loads_must_be_a_consumer() -> None:
    with pytest.raises(ValueError, match="got 'kv_producer', expected 'kv_both' with"):
        supported.check(config("kv_producer"), settings(store="tcp://127.0.0.1:7710"))
    with pytest.raises(ValueError, match="expected 'kv_both' around"):
        supported.check(config("kv_both"), settings(), config("kv_producer"))
    with pytest.raises(ValueError, match="role: got 'decode'"):
        supported.check(config("kv_producer"), settings(role="decode"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("msgspec", "pip install -U msgspec"), ("zmq.backend", "pip install -U pyzmq"), ("kvbaton.x", "not whole"),
        ("vllm.distributed", "Install another vLLM"), ("torch", "pip install torch"),
    ],
)  # fmt: skip
def test_a_missing_package_is_not_blamed_on_vllm(name: str, told: str) -> None:
    assert told in str(vllm_versions.not_loaded(ImportError("no module", name=name)))
