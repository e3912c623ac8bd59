"""Claims of requests that come while the engine core is in a step: its scheduler looks at them when that is done.

vLLM reads requests on a thread of its own. A step may take longer than P keeps a prompt for a D that has said nothing
(`lease_s`): the first one of a cold engine, or any on a starved host. So the claim goes out when the request is read,
and D's node renews it from then on.

Laws: the one thing that is done here, on vLLM's thread, is the claim, and only of what is plain: a ticket, no adapter,
no embeddings, the weights of the start. The scheduler's thread makes all others, and gives up one that was made for
weights that are replaced by then. Nothing here raises into vLLM.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from kvbaton.engines.side.asks import ForeignLookup, Target, ask_of
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.guard import guarded, returns
from kvbaton.engines.vllm.content.request_content import takes_long
from kvbaton.engines.vllm.content.weights_epoch import WeightsEpoch
from kvbaton.protocol.errors import ProtocolError

_CORE = "vllm.v1.engine.core"
_READS = "preprocess_add_request"
_MARK = "_kvbaton_claims"
_engines: weakref.WeakSet[EarlyClaims] = weakref.WeakSet()


class EarlyClaims:
    """Of one engine, which is known by its block pool."""

    def __init__(
        self, pool: Any, decode: DecodeSide, lookup: ForeignLookup, weights: WeightsEpoch, *, watches: bool
    ) -> None:
        self.pool = pool
        self.lookup = lookup
        self._decode = decode
        self._weights = weights
        if watches:
            _engines.add(self)
            watch_core()

    @guarded(returns(None))
    def read(self, request: Any) -> None:
        """On vLLM's thread: a request was read, of which the scheduler knows nothing yet."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not isinstance(params.get("ticket"), str) or self._weights.count:
            return
        if takes_long(request) or getattr(request, "resumable", False):
            return
        try:
            ask = ask_of(request, self.lookup)
        except ProtocolError:
            return
        if isinstance(ask, Target):
            self._decode.accepted(request, ask)

    @guarded(returns(None))
    def seen(self, request: Any) -> None:
        """On the scheduler's thread, first of all: what was claimed with other weights than these is given up."""
        if self._decode.is_accepted(request.request_id) and not self._weights.is_of(request):
            self._decode.finished(request)


def came(scheduler: Any, request: Any) -> None:
    """A request was read for the engine of this scheduler."""
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    for each in list(_engines):
        if each.pool is pool:
            each.read(request)


@guarded(returns(None))
def watch_core() -> None:
    """Hear of each request that vLLM's engine core reads; once a process, and where it has that method."""
    core = importlib.import_module(_CORE).EngineCore
    plain: Callable[..., Any] | None = getattr(core, _READS, None)
    if plain is None or getattr(plain, _MARK, False):
        return

    @functools.wraps(plain)
    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        _heard(self, found)
        return found

    setattr(reads, _MARK, True)
    setattr(core, _READS, reads)


@guarded(returns(None))
def _heard(core: Any, found: Any) -> None:
    came(core.scheduler, found[0])
