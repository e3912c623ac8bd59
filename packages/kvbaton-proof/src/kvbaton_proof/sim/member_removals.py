"""Members whose keys are removed from a simulated world, and on whom the KV of the others rests.

A worker whose key was removed dies, and comes back under its name with another key. Each of the others learns of it in
its own time, by the production keyring, `renewed_keys` and, where it has a store, `bind_store`.

Laws: on whom KV rests is followed here, prompt by prompt, whatever the core believes. An engine that knows of a removal
uses no KV of that member, whether it lies in its own cache, in another's, in a turn or in the store. It forgets its
cache at most once for each removal that it heard of.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from zmq.utils import z85

from kvbaton.control.keyring import Keyring
from kvbaton.control.signing import Signer
from kvbaton.node.cluster_node import renewed_keys
from kvbaton.node.doorway import ForgetCached
from kvbaton.protocol.events import CacheReplaced, Departed, Groups
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.ranks.store_trust import bind_store
from kvbaton_proof.sim.hardship.world_plan import FAULTY_S
from kvbaton_proof.sim.promises import NEEDLESS, WRONG, Broken
from kvbaton_proof.sim.ranks.sim_rank_store import hashes_of
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.sim_memory import Words
from kvbaton_proof.sim.world.sim_pool import Prefixes
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.touches import ALWAYS, TICKET_KEY, handoff_of, pair

if TYPE_CHECKING:
    from kvbaton.node.cluster_node import ClusterNode
    from kvbaton_proof.sim.cluster import Cluster

LEARNS_S = 1.5
"""Within which everybody has heard of a removal."""
SOON_S = 0.3
"""Within which an engine that has heard of it has forgotten its cache."""
AWAY_S = 2.0
REPLACES = 2
_LANDED = {"as delivered", "as proven good"}

Rests = frozenset[str]
"""Members, by name and key, on whose KV something rests."""


class Members:
    """Of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.world = cluster.world
        self._cluster = cluster
        self._rng = random.Random(f"kvbaton-sim-{self.world.seed}-members")
        self._keys = {each.name: 0 for each in (*cluster.plan.prefill, *cluster.plan.decode)}
        self._removed: dict[str, WorkerId] = {}  # origins that are gone, and whose they were
        self._views: dict[WorkerId, View] = {}
        self.handed: dict[str, Rests] = {}  # by handoff
        self.put: defaultdict[bytes, list[Rests]] = defaultdict(list)  # by what stands for a value: of each put of it
        for count, act in ((cluster.plan.removals, self._remove), (REPLACES, self._replace)):
            for _ in range(count):
                self.world.after(self._rng.uniform(2.0, FAULTY_S * 0.8), act)

    def next_of(self, names: list[WorkerId], source: WorkerId) -> WorkerId:
        """They hand on in a ring, so that each takes from one alone; with a store, the first takes from that alone."""
        after = names.index(source) + 1
        return names[after % len(names) if self._cluster.talk is not None or after < len(names) else after - 2]

    def join(self, life: Life) -> None:
        view = self._views[life.peer.worker] = View(self, life, self._keyring(life.peer.worker))
        view.known = dict.fromkeys(self._removed, self.world.now)

    def settle(self) -> None:
        """Everybody hears of everything, before the dead come back."""
        for view in self._views.values():
            self._tell(view)
            self.world.after(SOON_S, view.life.wake_engine)  # one that slept would forget with the next request

    def _keyring(self, name: WorkerId) -> Keyring:
        peers = {each: f"{each}:{number}" for each, number in self._keys.items()}
        signing = {key: _signer(key).public for key in peers.values()}
        removed = frozenset(self._removed.values())
        return Keyring(
            name, peers[name], _secret(peers[name]), peers, (TICKET_KEY,), signing=signing, removed_names=removed
        )

    def _remove(self) -> None:
        """An operator takes a member's key away, and its process with it."""
        cluster, world, rng = self._cluster, self.world, self._rng
        name = rng.choice(sorted(self._keys))
        life = cluster.lives[name]
        if not life.alive:
            return
        world.tell(f"{life.peer}: its key is removed")
        self._removed[self._views[name].origin] = name
        self._keys[name] += 1
        world.strike("removed", *self._keys, lasts_s=LEARNS_S + SOON_S)
        world.touch("values_doubted", *self._keys, lasts_s=ALWAYS)  # who writes, and who is named, is believed no more
        life.crash()
        for leg in [leg for leg in cluster.legs if leg.life is life and not leg.ends]:
            cluster.end_leg(leg, "error", "the worker was removed")
        world.touch("crashed", name, lasts_s=AWAY_S)
        for view in list(self._views.values()):
            world.after(rng.uniform(0.01, LEARNS_S), partial(self._tell, view))
        world.after(AWAY_S, partial(cluster.worker_faults.restart, life.character))

    def _tell(self, view: View) -> None:
        life, keyring = view.life, self._keyring(view.life.peer.worker)
        if not life.alive or (keyring.removed_names, keyring.peers) == (view.keyring.removed_names, view.keyring.peers):
            return
        for event in renewed_keys(life.node, view.keyring, keyring):
            if isinstance(event, Departed):
                self.world.touch("said_gone", pair(life.peer.worker, event.worker))
            life.node.tell(event)
        view.keyring = keyring
        view.told += 1
        for origin in self._removed:
            view.known.setdefault(origin, self.world.now)
        for take in view.on_keys:
            take(keyring)
        life.wake()

    def _replace(self) -> None:
        """An engine says that its cache was replaced, as vLLM does also when it could not empty it."""
        view = self._views[self._rng.choice(sorted(self._views))]
        if view.life.alive:
            view.replaces()


class View:
    """One life's: whom it knows to be gone, and what its own KV rests on."""

    def __init__(self, members: Members, life: Life, keyring: Keyring) -> None:
        self.life = life
        self.keyring = keyring
        self.known: dict[str, float] = {}  # who is gone, since when this life knows it
        self.told = 0
        self.era = 0  # rises when the cache is forgotten
        self.on_keys: list[Callable[[Keyring], object]] = []
        self._members = members
        engine, identity = life.engine, life.node.ledger.desk.identity
        identity.origin_of, identity.is_gone = keyring.origin_of, keyring.is_gone
        engine.prefixes = MemberPrefixes(engine.shape, engine.pool.reuses, self)
        engine.on_forget = self._forget
        around(engine, "_allocate", self._allocate)
        around(engine, "_check_tokens", self._check_tokens)
        around(engine, "put_away", self._put_away)
        around(engine, "_start_prefill", self._start_prefill)
        around(engine, "finish", self._finish)
        around_item(self.ledger._on_event, CacheReplaced, self._replaced)
        if life.ranks is not None and life.ranks.shelf is not None:
            around(engine, "values_of", self._values_of)
            around(engine.fetching, "_on_end", self._fetched)
            bind_store(life.ranks.shelf, cast("ClusterNode", self))

    @property
    def ledger(self) -> Ledger:
        return self.life.node.ledger

    @property
    def origin(self) -> str:
        return self.keyring.origin_of(self.life.peer.worker)

    def takes(self, request: SimRequest, rests: Rests, how: str) -> None:
        """A request uses KV: none of it is of a member that is known to be gone."""
        request.rests |= rests
        late = self._members.world.now - SOON_S
        gone = sorted(origin for origin in rests if self.known.get(origin, late) < late)
        if gone:
            raise Broken(WRONG, f"{self.life.peer.worker}: {request.id} has KV of {gone}, who was removed, {how}")

    def is_spoilt(self, request: SimRequest) -> bool:
        return request.era != self.era

    def replaces(self) -> None:
        """The engine says that its cache was replaced, also what is handed over while it is computed."""
        self._doubt()
        self.life.engine.prefill.voided()
        self.life.doorway.cache_replaced()

    def _doubt(self) -> None:
        self._members.world.touch("cache_replaced", self.life.peer.worker, lasts_s=SOON_S)

    # --- what the engine does

    def _forget(self, duty: ForgetCached) -> None:
        """As engines do it: what is under way goes on, and nobody else has anything of it."""
        self.era += 1
        if self.era > self.told:
            raise Broken(
                NEEDLESS, f"{self.life.peer.worker}: forgets its cache {self.era} times, for {self.told} removals"
            )
        self._doubt()
        for prompt in self.life.engine.prefill.prompts.values():  # given up, whether or not they have begun
            self._members.world.touch("removed", *prompt.request.handoffs)
        self.life.engine.void()
        self._members.world.faults["caches_forgotten"] += 1
        self.life.engine.prefixes.forget()
        self.life.doorway.cache_forgotten(duty, 0)

    def _replaced(self, original: Any, event: CacheReplaced, now: float) -> None:
        """What was only asked for rests on nobody yet, and goes on."""
        intakes = self.ledger.consumer.by_handoff.values()
        asked = [each for each in intakes if event.forgotten and each.end is None and each.source is None]
        original(event, now)
        ended = [each.wanted.request for each in asked if each.end is not None]
        if ended:
            raise Broken(
                NEEDLESS, f"{self.life.peer.worker}: forgets its cache, and with it {ended}, which has no KV yet"
            )

    def _allocate(self, original: Any, request: SimRequest) -> bool:
        request.rests, request.era = frozenset(), self.era
        return bool(original(request))

    def _check_tokens(self, original: Any, request: SimRequest, tokens: int, when: str) -> None:
        original(request, tokens, when)
        ticket = request.offer[0] if request.offer is not None else request.ticket
        if when in _LANDED or when.startswith("as taken"):
            self.takes(request, self._members.handed.get(handoff_of(ticket), frozenset()), when)
        if when == "as delivered":
            self.life.engine.prefixes.publish(request, request.tokens)
            size = self.life.engine.shape.block_tokens
            for blank in self.life.engine.device.blank:
                blank.difference_update(block for ids in request.blocks for block in ids[: request.tokens // size])

    def _start_prefill(self, original: Any, request: SimRequest) -> None:
        if request.role == "prefill":
            self._members.handed[handoff_of(request.ticket)] = request.rests | {self.origin}
        original(request)

    def _put_away(self, original: Any, request: SimRequest) -> None:
        if not self.is_spoilt(request):
            original(request)

    def _finish(self, original: Any, request: SimRequest, how: str, detail: str) -> None:
        if self.is_spoilt(request) and request.keep:
            self._members.world.touch("turn_unkept", handoff_of(request.keep))
            request.keep = ""
        ticket = detail if how == "prefilled" else request.keep
        self._members.handed[handoff_of(ticket)] = request.rests | {self.origin}
        original(request, how, detail)

    def _values_of(self, original: Any, request: SimRequest, blocks: Groups) -> tuple[Groups, tuple[bytes, ...]]:
        groups, keys = original(request, blocks)
        for key in keys:
            self._members.put[key].append(request.rests | {self.origin})
        return groups, keys

    def _fetched(self, original: Any, request: SimRequest, blocks: int, turn: int) -> None:
        """Whichever of its writers a value is of, it rests on those on whom all of them do."""
        if blocks and request.turn == turn:
            for key in hashes_of(request.content, blocks, self.life.engine.shape.block_tokens):
                written = self._members.put[key]
                self.takes(request, written[0].intersection(*written[1:]), "from the store")
        original(request, blocks, turn)


class MemberPrefixes(Prefixes):
    """A prefix cache of which it is known on whom its blocks rest; what was loaded is found in it too."""

    def __init__(self, shape: Any, reuses: Any, view: View) -> None:
        super().__init__(shape, reuses)
        self._view = view
        self._rests: dict[tuple[Words, int], Rests] = {}  # by content and block of the prompt

    def publish(self, request: SimRequest, computed: int | None = None) -> None:
        if self._view.is_spoilt(request):
            return
        super().publish(request, computed)
        size = self._shape.block_tokens
        for index in range((request.computed if computed is None else computed) // size):
            self._rests[request.content, index] = request.rests

    def of(self, request: SimRequest) -> list[list[int]]:
        found = super().of(request)
        for index in range(len(found[0])):
            self._view.takes(request, self._rests[request.content, index], "from its own cache")
        return found


def around(owner: object, name: str, do: Callable[..., Any]) -> None:
    """`do` has the original as its first argument."""
    setattr(owner, name, partial(do, getattr(owner, name)))


def around_item(table: dict[Any, Any], key: object, do: Callable[..., Any]) -> None:
    table[key] = partial(do, table[key])


@functools.lru_cache(maxsize=64)
def _secret(public: str) -> str:
    return z85.encode(hashlib.blake2b(public.encode(), digest_size=32).digest()).decode()


@functools.lru_cache(maxsize=64)
def _signer(public: str) -> Signer:
    return Signer.of(_secret(public))
