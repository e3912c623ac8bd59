"""The ingress of `build_pd_app`: a request whose D died before it said anything is asked of another D.

Law: what a client has been sent is never sent again; a request is asked `tries` times at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress

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
