"""What is refused at start: each in words that name what was found and what to change; no vLLM is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.integrations.vllm import supported, versions
from kvbaton.integrations.vllm.settings import ConnectorSettings


def config(role: str = "kv_both", engine_id: str = "0f3a", **parallel: Any) -> Any:
    transfer = SimpleNamespace(
        kv_role=role, engine_id=engine_id, kv_connector="BatonConnector", kv_load_failure_policy="recompute",
        is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer",
    )  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace()
    )


def settings(**more: Any) -> ConnectorSettings:
    return ConnectorSettings.parse({"name": "p0", "keys": "/keys", **more})


@pytest.mark.parametrize(
    "found",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 1, "data_parallel_index": 1},
        {"data_parallel_rank": 1},
        {"engine_id": "0f3a_dp0", "data_parallel_size": 1, "data_parallel_index": 0},
        {"data_parallel_external_lb": True},
        {"data_parallel_hybrid_lb": True},
    ],
)
def test_data_parallelism_is_refused_however_it_shows(found: dict[str, Any]) -> None:
    """Of a dense model vLLM tells each rank that it is the only one; the engine id alone still says rank 0."""
    with pytest.raises(ValueError, match=r"data parallelism is not supported .* each with a name of its own"):
        supported.check(config(**found), settings())


def test_one_engine_is_taken() -> None:
    supported.check(config(data_parallel_size=1, data_parallel_index=0, data_parallel_rank=0), settings())
    supported.check(config("kv_producer"), settings())
    supported.check(config(), settings(store="tcp://127.0.0.1:7710", role="prefill"))


def test_a_child_of_a_rank_is_refused_by_the_outer_engine_id() -> None:
    with pytest.raises(ValueError, match="engine_id is 'outer_dp0'"):
        supported.check(config(), settings(), config(engine_id="outer_dp0"))


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
    assert told in str(versions.not_loaded(ImportError("no module", name=name)))
