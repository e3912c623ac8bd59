"""vLLM's side of kvbaton: `"kv_connector": "BatonConnector", "kv_connector_module_path": "kvbaton.integrations.vllm"`.

Importing this package is cheap and needs no vLLM; the connector is loaded when vLLM looks it up by name, in every one
of its processes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BatonConnector"]


def __getattr__(name: str) -> Any:
    if name == "BatonConnector":
        try:
            from kvbaton.engines.vllm.connector import BatonConnector
        except ImportError as error:
            from kvbaton.engines.vllm.config.vllm_versions import not_loaded

            raise not_loaded(error) from error
        return BatonConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
