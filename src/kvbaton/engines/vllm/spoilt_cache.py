"""Forgetting what vLLM has cached, because KV of a member that is gone may be in it (decision 0023).

Laws: afterwards no request finds a block from before, and none that is under way can put one back: vLLM caches its
blocks under the hashes that the request carries, and these are replaced by chance, so that nobody ever asks for them;
hashes to come hang on those. What it loads has failed, what it computes is handed to nobody, kept for no turn and put
into no store; its own answer goes on. All is done before the node is told, or it is due again. Nothing raises into
vLLM. Only the scheduler's thread is here.
"""

from __future__ import annotations

import secrets
from typing import Any

from kvbaton.engines.side.guard import note
from kvbaton.engines.vllm.connector_parts import ConnectorParts
from kvbaton.engines.vllm.content.weights_epoch import WeightsEpoch
from kvbaton.node.doorway import ForgetCached


class SpoiltCache:
    """Of one engine: its requests under way, and how all that they and the cache have is forgotten."""

    def __init__(self, weights: WeightsEpoch) -> None:
        self.weights = weights
        self._underway: dict[str, Any] = {}  # vLLM's requests, by id; as many as vLLM has
        self.times = 0  # that it was forgotten

    def came(self, request: Any) -> None:
        self.weights.mark(request)
        self._underway[request.request_id] = request

    def left(self, request: Any) -> None:
        self._underway.pop(request.request_id, None)

    def forget(self, live: ConnectorParts, duty: ForgetCached) -> None:
        """At a step: before any request looks for cached blocks again. One that has just looked must do it again."""
        try:
            self.weights.begin_again()
            live.prefill.voided()
            live.voided()
            live.stored.let_go()
            for request in self._underway.values():
                _unfindable(request)
            blocks = live.pool.forget_spoilt()
        except Exception as error:  # noqa: BLE001 - promise 4
            note("forget_cached", error)
            live.door.cache_not_forgotten(duty)
        else:
            self.times += 1
            live.door.cache_forgotten(duty, blocks)


def _unfindable(request: Any) -> None:
    """From now on its blocks are cached under hashes that no other request can have."""
    request.block_hashes[:] = [type(each)(secrets.token_bytes(len(each))) for each in request.block_hashes]
    request.cache_salt = f"spoilt {secrets.token_hex(16)}"  # of a request that has no full block yet
