"""The real Dynamo package, in its own environment: `make dynamo-test` makes it and runs this.

Law: Dynamo's table of connector protocols refuses our name before vLLM's plugins are loaded, or the test is void.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS, make_kv_connector_protocol
from vllm.plugins import load_general_plugins


def config(name: str, extra: dict[str, Any]) -> Any:
    """As much of vLLM's configuration as Dynamo looks at."""
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra))


def test_dynamo_takes_our_connector_once_vllm_has_loaded_its_plugins() -> None:
    alone = config("BatonConnector", {})
    among = config("MultiConnector", {"connectors": [{"kv_connector": "BatonConnector"}, {"kv_connector": "Other"}]})
    for each in (alone, among):
        with pytest.raises(ValueError, match="BatonConnector"):
            make_kv_connector_protocol(each)
    load_general_plugins()
    assert KV_CONNECTOR_PROTOCOLS["BatonConnector"] is KV_CONNECTOR_PROTOCOLS["NixlConnector"]
    for each in (alone, among):
        protocol = make_kv_connector_protocol(each)
        asked = protocol.prefill_request_kv_transfer_params()
        assert asked["do_remote_decode"] is True and asked["do_remote_prefill"] is False
        told = SimpleNamespace(kv_transfer_params={"ticket": "x", "do_remote_prefill": True})
        assert protocol.decode_request_kv_transfer_params(told) == told.kv_transfer_params, "P's answer, as it is"
