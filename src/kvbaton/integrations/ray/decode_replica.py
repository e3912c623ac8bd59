"""Ray's prefill and decode servers, with kvbaton's ways: the decode server's requests go through an `Orchestrator`.

Law: what is said here is what Ray must be told, or asked; what is decided is in modules that need no Ray.

A replica ends with its engine.

Ray's handles notice the death of a replica's process with the next request, and one whose engine is dead only after
three health checks; until then it answers each request with an error. The other direction is
`engines.vllm.launch.parent_watch`.

Law: it ends for no other reason than Ray's own check of the engine's health.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDDecodeServer, PDPrefillServer
from ray.serve._private.http_util import session_id_from_headers
from ray.util.metrics import Counter

from kvbaton.integrations.ray.orchestrator import FIELD, OrchestrationSettings, Orchestrator
from kvbaton.router.openai_api import MODE_HEADER

LOOK_S = 0.25

log = logging.getLogger(__name__)


async def end_with(engine: Any) -> None:
    """Until the engine has died; then this process ends. `engine`: of Ray's protocol, its health check raises."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await engine.check_health()
        except Exception as error:  # noqa: BLE001 - whatever it says, it is what Ray would replace the replica for
            log.error("[replica-ends] kvbaton: this replica ends, because its engine is dead: %s", error)
            logging.shutdown()
            os._exit(1)


class BatonPrefillServer(PDPrefillServer):  # type: ignore[misc]
    """P: ends with its engine, and outlives its last answer long enough for the KV to be fetched."""

    async def start(self) -> None:
        await super().start()
        self._watching = asyncio.create_task(end_with(self.engine))

    async def __del__(self) -> None:
        watching = getattr(self, "_watching", None)
        if watching is not None:  # else its engine never started
            watching.cancel()
            await asyncio.sleep(_settings(self._llm_config).linger_s)
        await super().__del__()


class BatonDecodeServer(PDDecodeServer):  # type: ignore[misc]
    """D, and what asks P on its behalf."""

    async def start(self) -> None:
        await super().start()
        self._watching = asyncio.create_task(end_with(self.engine))
        outcomes = Counter(
            "kvbaton_ray_prompts", "Prompts of a decode replica, by where they were computed.", ("outcome",)
        )
        self._orchestrator = Orchestrator(
            _settings(self._llm_config),
            self._get_connector_backend(),
            self._decode,
            lambda outcome: outcomes.inc(1, {"outcome": outcome}),
        )

    async def __del__(self) -> None:
        watching = getattr(self, "_watching", None)
        if watching is not None:
            watching.cancel()
        await super().__del__()

    async def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Ray's hook: the whole life of a chat or completion."""
        headers = {} if raw_request_info is None else dict(raw_request_info.headers or {})
        asked = next((str(value) for name, value in headers.items() if name.lower() == MODE_HEADER), "")
        method = self._method_of(request, headers)
        async for chunk in self._orchestrator.answer(method, request, raw_request_info, asked):
            yield chunk

    async def _decode(self, request: Any, raw_request_info: Any) -> AsyncGenerator[Any, None]:
        """This replica's own engine, by the way of a server that orchestrates nothing."""
        plain: Any = super(PDDecodeServer, self)
        method = plain.chat if isinstance(request, ChatCompletionRequest) else plain.completions
        found: AsyncGenerator[Any, None] = await method(request, raw_request_info)
        return found

    def _method_of(self, request: Any, headers: dict[str, str]) -> Any:
        """P's method, with what Ray routes by: adapter and session."""
        adapter = serve.get_multiplexed_model_id()
        session = session_id_from_headers(headers) if headers else None
        options = {"multiplexed_model_id": adapter, "session_id": session}
        options = {name: value for name, value in options.items() if value}
        handle = self._prefill_handle.options(**options) if options else self._prefill_handle
        return handle.chat if isinstance(request, ChatCompletionRequest) else handle.completions


def _settings(llm_config: Any) -> OrchestrationSettings:
    return OrchestrationSettings.parse(llm_config.experimental_configs.get(FIELD))
