"""What is done with a request when vLLM has read it, before its scheduler sees it: a history is taken
(`continued_requests`), and the KV of its prompt is claimed.

vLLM reads requests on a thread of its own. A step may take longer than P keeps a prompt for a D that has said nothing
(`lease_s`): the first one of a cold engine, or any on a starved host. So the claim goes out when the request is read,
and D's node renews it from then on.

Laws: on vLLM's thread claims are made of what is plain alone: a ticket, no adapter, no embeddings, the weights of the
start. The scheduler's thread makes all others, and gives up one that was made for weights that are replaced by then.
Nothing here raises into vLLM but what ends a request whose history is not taken.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from kvbaton.api.params import HistoryWay
from kvbaton.engines.side.asks import ForeignLookup, Target, ask_of
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.guard import guarded, returns
from kvbaton.engines.vllm import repeated_answers
from kvbaton.engines.vllm.content.request_content import takes_long
from kvbaton.engines.vllm.content.weights_epoch import WeightsEpoch
from kvbaton.engines.vllm.continued_requests import ContinuedRequests, is_missing, way_of
from kvbaton.protocol.errors import ProtocolError, Reason

_CORE = "vllm.v1.engine.core"
_READS = "preprocess_add_request"
_MARK = "_kvbaton_claims"
_engines: weakref.WeakSet[EarlyClaims] = weakref.WeakSet()


class EarlyClaims:
    """Of one engine, which is known by its block pool."""

    def __init__(
        self,
        pool: Any,
        decode: DecodeSide,
        lookup: ForeignLookup,
        weights: WeightsEpoch,
        continued: ContinuedRequests,
        *,
        claims: bool,
    ) -> None:
        self.pool = pool
        self.lookup = lookup
        self.continued = continued
        self._decode = decode
        self._weights = weights
        self._claims = claims
        _engines.add(self)
        watch_core()

    @guarded(returns(None))
    def read(self, request: Any) -> None:
        """On vLLM's thread: a request was read, of which the scheduler knows nothing yet."""
        params = request.kv_transfer_params
        if not self._claims or self._weights.count:
            return
        if not isinstance(params, dict) or not isinstance(params.get("ticket"), str):
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


def continues(vllm_config: Any) -> HistoryWay:
    """How this engine goes on with an answer that another began; its hooks for that are put in."""
    return way_of(vllm_config, repeats=repeated_answers.install() and watch_core())


def came(scheduler: Any, request: Any) -> None:
    """A request was read for the engine of this scheduler. ProtocolError: it has a history that is not taken."""
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    engines = [each for each in list(_engines) if each.pool is pool]
    for each in engines:
        each.continued.take(request, scheduler)
    if is_missing(request):
        raise ProtocolError(Reason.BAD_MESSAGE, "kv_transfer_params.history: this engine knows of no cluster yet")
    for each in engines:
        each.read(request)


@guarded(returns(False))
def watch_core() -> bool:
    """Hear of each request that vLLM's engine core reads; once a process. False: it has no such method."""
    core = importlib.import_module(_CORE).EngineCore
    plain: Callable[..., Any] | None = getattr(core, _READS, None)
    if plain is None or getattr(plain, _MARK, False):
        return plain is not None

    @functools.wraps(plain)
    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        came(self.scheduler, found[0])
        return found

    setattr(reads, _MARK, True)
    setattr(core, _READS, reads)
    return True
