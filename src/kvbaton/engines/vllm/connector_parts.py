"""What the connector has in the scheduler's process: before the engine has its cache, once it has it (P's and D's
halves, and what waits), and where what it has cached must be forgotten.

Law: only the scheduler's thread is here.

What is done with a request when vLLM has read it, before its scheduler sees it: a history is taken
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
import secrets
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

from kvbaton.api.params import HistoryWay
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.side.asks import Ask, ForeignLookup, Target, ask_of
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.guard import guarded, note, returns
from kvbaton.engines.side.prefill import PinAdmission, PrefillSide
from kvbaton.engines.side.protocols import NOTHING, LoadVerdict
from kvbaton.engines.side.store import NoStore
from kvbaton.engines.side.turns import TurnSide
from kvbaton.engines.vllm import repeated_answers
from kvbaton.engines.vllm.block_pool import CacheResets, PinnedPool, Waiting, status_aside
from kvbaton.engines.vllm.content.request_content import takes_long
from kvbaton.engines.vllm.content.weights_epoch import WeightsEpoch
from kvbaton.engines.vllm.continued_requests import ContinuedRequests, is_missing, way_of
from kvbaton.node.cluster_node import ClusterNode
from kvbaton.node.doorway import Doorway, ForgetCached
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


def context_tokens(vllm_config: Any) -> int:
    """What it serves; 0 where a first token is no text as it is: with a parser of reasoning only a stream shows it."""
    parsed = getattr(getattr(vllm_config, "structured_outputs_config", None), "reasoning_parser", "")
    drafts = getattr(vllm_config, "speculative_config", None)
    return 0 if parsed or drafts is not None else int(vllm_config.model_config.max_model_len)


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


class ConnectorParts:
    """Of one engine."""

    __slots__ = (
        "arrived", "decode", "door", "early", "failures", "held", "pins", "pool", "prefill", "resets", "stored",
        "turns", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        door: Doorway,
        pool: PinnedPool,
        prefill: PrefillSide,
        decode: DecodeSide,
        early: EarlyClaims,
        stored: NoStore,
        turns: TurnSide,
    ) -> None:
        self.door = door
        self.pool = pool
        self.prefill = prefill
        self.decode = decode
        self.early = early
        self.stored = stored
        self.turns = turns
        self.held: dict[str, Ask | None] = {}  # requests that came, by what they ask, until their content is known
        self.pins = pins = PinAdmission(prefill, door.budget, on_refused=turns.refused)
        self.waiting = Waiting(lambda each: decode.blocked(each) or pins.blocked(each), status_aside())
        self.resets = CacheResets(pool, lambda: chain(door.holders, stored.holders))
        self.arrived: list[str] = []  # loads of which vLLM is to be told
        self.failures: list[LoadVerdict] = []  # and those of which the workers are

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for something that only we can tell it."""
        return bool(self.arrived or self.waiting or self.decode.busy or self.stored.busy)

    def voided(self) -> None:
        """Weights were replaced: nothing that was loaded, and that vLLM has not been told of, is delivered."""
        self.sort()
        self.decode.voided()
        self.failures += [LoadVerdict(request_id) for request_id in self.arrived]
        self.failures[:] = [LoadVerdict(verdict.request_id, failed=True) for verdict in self.failures]
        self.arrived.clear()

    def before_reset(self, manager: Any, do_duties: Callable[[], None], nap: Callable[[float], None]) -> None:
        """vLLM is about to empty its prefix cache, which it refuses while a block is held."""
        do_duties()
        self.turns.keeper.let_all_go()
        door, stored = self.door, self.stored
        left = lambda: door.turn_blocks  # noqa: E731
        if self.resets.is_ours(manager):
            self._preempt(manager)
            stored.let_loads_go()
            door.cache_replaced()
            left = lambda: door.pinned_blocks + stored.held_blocks  # noqa: E731
        self.resets.wait(do_duties, nap, left)

    def _preempt(self, manager: Any) -> None:
        """Whoever waits for a load waits for nothing from here on, and is computed."""
        self.sort()
        for request_id in self.resets.preempt(manager):
            self.waiting.comes_again(request_id)
        ended = [verdict for verdict in self.failures if self.resets.preempts(verdict.request_id)]
        self.arrived += [verdict.request_id for verdict in ended]
        self.failures[:] = [verdict for verdict in self.failures if verdict not in ended]

    def sort(self) -> None:
        """Verdicts that have come since: what has arrived, and what has failed."""
        for verdict in self.decode.take_verdicts() + self.stored.take_verdicts():
            if verdict.is_good or self.resets.preempts(verdict.request_id):
                self.arrived.append(verdict.request_id)
            else:
                self.failures.append(verdict)


def lookup_of(settings: ConnectorSettings, node: ClusterNode, ticket_key: bytes) -> ForeignLookup:
    """How this engine reads `kv_transfer_params` of other systems' routers."""
    lookup = ForeignLookup(
        settings.mode,
        settings.modes,
        node.peer.worker,
        ticket_key,
        settings.ticket_ttl_s,
        node.book.at,
        settings.named_pairs,
    )
    node.on_keys.append(lambda keyring: setattr(lookup, "ticket_key", keyring.ticket_keys[0]))
    return lookup


class BeforeRanks:
    """What there is until the workers of an engine have said where its KV cache lies: nothing can be loaded.

    vLLM asks its workers before it serves; an engine without their word runs, but hands nothing over. Law: a prompt
    whose KV was promised is then not computed here in silence where the operator said that a failed load fails its
    request (`kv_load_failure_policy`): it gets blocks, as every load does, and one report that it has failed.
    """

    __slots__ = ("_fails", "_verdicts")

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self._verdicts: list[LoadVerdict] = []

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        promised = isinstance(params, dict) and params.get("do_remote_prefill") is True
        missing = request.num_prompt_tokens - local_tokens
        return (missing, True) if self._fails and promised and missing > 0 else NOTHING

    def allocated(self, request: Any, external_tokens: int) -> None:
        if external_tokens > 0:
            self._verdicts.append(LoadVerdict(request.request_id, failed=True))

    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        verdicts, self._verdicts = self._verdicts, []
        return tuple(verdicts)


class SpoiltCache:
    """Forgets what vLLM has cached, because KV of a member that is gone may be in it (decision 0023).

    Laws: afterwards no request finds a block from before, and none that is under way can put one back: vLLM caches its
    blocks under the hashes that the request carries, and these are replaced by chance, so that nobody ever asks for
    them; hashes to come hang on those. What it loads has failed, what it computes is handed to nobody, kept for no turn
    and put into no store; its own answer goes on. All is done before the node is told, or it is due again. Nothing
    raises into vLLM.
    """

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
