"""What the connector has in the scheduler's process: before the engine has its cache, once it has it (P's and D's
halves, and what waits), and where what it has cached must be forgotten.

Law: only the scheduler's thread is here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import chain
from typing import Any

from kvbaton.engines.side.asks import Ask, ForeignLookup
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.guard import note
from kvbaton.engines.side.prefill import PinAdmission, PrefillSide
from kvbaton.engines.side.protocols import NOTHING, LoadVerdict
from kvbaton.engines.side.store import NoStore
from kvbaton.engines.side.turns import TurnSide
from kvbaton.engines.vllm.block_pool import CacheResets, PinnedPool
from kvbaton.engines.vllm.config.connector_settings import ConnectorSettings
from kvbaton.engines.vllm.content.weights_epoch import WeightsEpoch
from kvbaton.engines.vllm.early_claims import EarlyClaims
from kvbaton.engines.vllm.waiting import Waiting, status_aside
from kvbaton.node.cluster_node import ClusterNode
from kvbaton.node.doorway import Doorway, ForgetCached


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
