"""What the installed vLLM asks of a connector about sleep: each hook is answered by ours, and none by default."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.configs import EngineShape

pytestmark = pytest.mark.timeout(300)

ASKED = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")


@pytest.fixture(scope="module")
def connector() -> Any:
    configs.prepare()
    from kvbaton.engines.vllm.connector import BatonConnector

    return BatonConnector


@pytest.mark.parametrize("hook", ASKED)
def test_each_hook_is_ours(connector: Any, hook: str) -> None:
    assert hook in vars(connector)


@pytest.mark.parametrize("beside", [(), ("baton",)])
def test_vllm_refuses_a_launch_that_would_sleep_by_name(connector: Any, beside: tuple[str, ...]) -> None:
    """Releases that do not ask (before 0.33) get our own refusal, where the connector is made."""
    shape = EngineShape(beside=beside)
    config = configs.vllm_config(shape, {}, module=configs.CONNECTOR_MODULE, connector=configs.CONNECTOR_CLASS)
    config.model_config.enable_sleep_mode = True
    asks = hasattr(connector.__mro__[1], "supports_sleep_mode")
    with pytest.raises(ValueError, match="Connector does not support sleep mode") if asks else nullcontext():
        config._verify_kv_transfer_compat()
