"""`build_pd_app`: prefill and decode replicas of one model as a Ray Serve application, handing KV over by kvbaton.

    ingress (OpenAI's API) -> decode replicas (own engine, ask P) -> prefill replicas

Laws: the configuration is one for all replicas of a deployment; whatever must differ is made by each replica itself. A
request whose D died before it said anything is asked of another D, `tries` times at most; what a client has been sent
is never sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults
from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress, make_fastapi_ingress
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs

from kvbaton.engines.vllm.launch.launching import CONNECTOR
from kvbaton.integrations.ray.decode_replica import BatonDecodeServer, BatonPrefillServer
from kvbaton.integrations.ray.orchestrator import FIELD, OrchestrationSettings
from kvbaton.integrations.ray.replica_identity import KV_ROLES, RaySide, check_shared
from kvbaton.integrations.ray.request_shaping import is_servers_fault

log = logging.getLogger(__name__)

PAUSE_S = 0.2


class BatonIngress(OpenAiIngress):  # type: ignore[misc]
    """OpenAI's endpoints in front of the decode deployment."""

    def __init__(self, *args: Any, tries: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tries = tries

    async def _get_response(self, **asked: Any) -> AsyncGenerator[Any, None]:
        for left in reversed(range(self._tries)):
            said = False
            try:
                async for chunk in super()._get_response(**asked):
                    if left and not said and is_servers_fault(chunk):
                        raise _AskAgainError(chunk)
                    said = True
                    yield chunk
                return
            except (RayActorError, RayTaskError, _AskAgainError) as error:
                if said or not left or isinstance(error, TaskCancelledError):
                    raise
                log.warning("[asked-again] kvbaton: no answer from a decode replica: %s", type(error).__name__)
            await asyncio.sleep(PAUSE_S)


class _AskAgainError(Exception):
    """A decode replica answered with an error of its own."""


BACKEND = "kvbaton.integrations.ray.ray_backend:BatonBackend"


def register() -> None:
    """Have every process of this Ray cluster find the backend by the connector's name. After `ray.init`."""
    name = CONNECTOR["kv_connector"]
    if not KVConnectorBackendFactory.is_registered(name):
        KVConnectorBackendFactory.register_backend(name, BACKEND)


def build_pd_app(args: Mapping[str, Any], *, kvbaton: Mapping[str, Any] | None = None) -> Any:
    """An application for `serve.run`. `args`: as for `ray.serve.llm.build_pd_openai_app`; `kvbaton`: docs/ray.md."""
    settings = OrchestrationSettings.parse(kvbaton)
    if RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING:
        raise ValueError(
            "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING: not with build_pd_app, whose ingress asks again; unset it"
        )
    config = PDServingArgs.model_validate(dict(args))
    sides: Mapping[RaySide, Any] = {"prefill": config.prefill_config, "decode": config.decode_config}
    for side, llm_config in sides.items():
        _complete(side, llm_config, settings, kvbaton or {})
    register()
    prefill = build_llm_deployment(config.prefill_config, name_prefix="Prefill:", deployment_cls=BatonPrefillServer)
    decode = build_llm_deployment(
        config.decode_config,
        name_prefix="Decode:",
        bind_kwargs={"prefill_server": prefill},
        deployment_cls=BatonDecodeServer,
    )
    return _ingress(config, decode, settings)


def _complete(side: RaySide, llm_config: Any, settings: OrchestrationSettings, given: Mapping[str, Any]) -> None:
    """Fill in what follows from the side; what contradicts it is refused."""
    field = f"{side}_config.engine_kwargs"
    if (llm_config.engine_kwargs.get("data_parallel_size") or 1) > 1:
        raise ValueError(f"{field}.data_parallel_size: not with build_pd_app; set deployment_config.num_replicas")
    transfer = llm_config.engine_kwargs["kv_transfer_config"]
    wanted = {**CONNECTOR, "kv_role": KV_ROLES[side]}
    for name, value in wanted.items():
        if transfer.setdefault(name, value) != value:
            raise ValueError(f"{field}.kv_transfer_config.{name}: got {transfer[name]!r}, expected {value!r}")
    try:
        check_shared(transfer.get("kv_connector_extra_config") or {})
    except ValueError as error:
        raise ValueError(f"{field}.kv_transfer_config.{error}") from None
    llm_config.experimental_configs[FIELD] = dict(given)
    llm_config.deployment_config.setdefault("health_check_period_s", settings.health_check_period_s)


def _ingress(config: Any, decode: Any, settings: OrchestrationSettings) -> Any:
    options = maybe_apply_llm_deployment_config_defaults(
        BatonIngress.get_deployment_options([config.decode_config]), config.ingress_deployment_config
    )
    model, adapters = config.decode_config.model_id, config.decode_config.lora_config
    return serve.deployment(make_fastapi_ingress(BatonIngress), **options).bind(
        llm_deployments={model: decode},
        model_cards={model: to_model_metadata(model, config.decode_config)},
        lora_paths={model: adapters.dynamic_lora_loading_path} if adapters is not None else {},
        tries=settings.decode_tries,
    )
