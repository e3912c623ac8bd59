"""A replica ends with its engine.

Ray's handles notice the death of a replica's process with the next request, and one whose engine is dead only after
three health checks; until then it answers each request with an error. The other direction is
`engines.vllm.launch.parent_watch`.

Law: it ends for no other reason than Ray's own check of the engine's health.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

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
