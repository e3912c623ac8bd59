"""`build_pd_app`: prefill and decode replicas of one model as a Ray Serve application, handing KV over by kvbaton.

    ingress (OpenAI's API) -> decode replicas (own engine, ask P) -> prefill replicas

Law: the configuration is one for all replicas of a deployment; whatever must differ is made by each replica itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults
from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.ingress import make_fastapi_ingress
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs

from kvbaton.engines.vllm.launch.launching import CONNECTOR
from kvbaton.integrations.ray.decode_replica import BatonDecodeServer, BatonPrefillServer
from kvbaton.integrations.ray.orchestration_settings import FIELD, OrchestrationSettings
from kvbaton.integrations.ray.replica_identity import KV_ROLES, RaySide, check_shared
from kvbaton.integrations.ray.retrying_ingress import BatonIngress

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
