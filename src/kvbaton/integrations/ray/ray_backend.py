"""`BatonConnector` as Ray Serve's LLM library knows connectors: a backend that sets a replica up and shapes requests.

It serves Ray's own `build_pd_openai_app` as well as `build_pd_app`. Registered under the connector's name, it is made
in every replica before its engine starts.

Law: nothing here waits; what can be wrong with a configuration is said by the engine that reads it.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend

from kvbaton.api.params import Mode
from kvbaton.engines.vllm.launch import parent_watch
from kvbaton.engines.vllm.launch.launching import CONNECTOR
from kvbaton.integrations.ray import request_shaping
from kvbaton.integrations.ray.orchestrator import MODE, NONCE
from kvbaton.integrations.ray.replica_identity import joined, side_of

NAME = "name"


class BatonBackend(BaseConnectorBackend):  # type: ignore[misc]
    """One replica's side of kvbaton."""

    @property
    def _extra(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        return found

    @property
    def mode(self) -> Mode:
        """For requests that name none."""
        return Mode(self._extra.get("mode", Mode.PULL))

    @property
    def requires_peer_binding(self) -> bool:
        return self.mode is not Mode.PULL

    @property
    def concurrent_handoff(self) -> bool:
        return self.mode is not Mode.PULL

    def setup(self) -> None:
        """Give this replica its own identity. The engine, in a process of its own, reads it from its configuration."""
        os.environ[parent_watch.VARIABLE] = str(os.getpid())
        config = self.kv_transfer_config
        config.update({name: value for name, value in CONNECTOR.items() if name not in config})
        config.setdefault("kv_load_failure_policy", "recompute")
        replica = serve.get_replica_context().replica_tag
        config["kv_connector_extra_config"] = joined(self._extra, side_of(config), replica)

    def replica_metadata(self) -> dict[str, Any]:
        """What D must know of this P to have stream and push begin at both at once."""
        return {NAME: self._extra[NAME]}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        return request_shaping.prefill_request(request, self._legs(request, peer)[0])

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any) -> Any:
        params = self._legs(request, peer)[1]
        if params is None:
            params = getattr(prefill_response, "kv_transfer_params", None)
        return request_shaping.decode_request(request, params)

    def _legs(self, request: Any, peer: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
        # Asked twice for one request, by callers that keep nothing in between: all that goes in must be the same.
        told = peer or {}
        prefill = str(told.get(NAME, ""))
        mode = Mode(told.get(MODE, self.mode)) if prefill else Mode.PULL
        unique = f"{request.request_id} {told.get(NONCE, '')}"
        return request_shaping.legs(mode, unique, prefill, self._extra[NAME])
