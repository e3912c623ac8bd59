"""Whether a request whose load has failed may be loaded again, from another source.

vLLM (0.32.0) goes on reserving blocks for a load that failed until its request runs, and admits a load only into what
nobody has reserved. So a second load needs its blocks twice; without that room it bars the queue, behind itself, for
ever: three failed loads of half a cache each wait for one another (`kvbaton conformance vllm --seeds 292`).

Law: a second load begins only if its blocks are free beyond all that loads have reserved, or its prompt is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvbaton.engines.side.protocols import PinPool
from kvbaton.protocol.geometry.layout import needed_blocks

SPARE_BLOCKS = 1
"""For each request, since vLLM rounds up and keeps a place for the next token."""


@dataclass(slots=True)
class SecondLoads:
    """SideRequests that got blocks for a load and have not run since."""

    pool: PinPool
    block_tokens: int
    _reserved: dict[str, int] = field(default_factory=dict)

    def allocated(self, request: Any, external_tokens: int) -> None:
        """A request got blocks: to be loaded, or to run."""
        if external_tokens:
            self._reserved[request.request_id] = self._need(request)
        else:
            self.left(request.request_id)

    def left(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)

    def admits(self, request: Any) -> bool:
        if request.request_id not in self._reserved:
            return True
        return self.pool.free_blocks >= sum(self._reserved.values()) + self._need(request)

    def _need(self, request: Any) -> int:
        return needed_blocks(request.num_tokens, self.block_tokens) + SPARE_BLOCKS
