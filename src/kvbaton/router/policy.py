"""Routing policy: pure functions of the available workers, a turn, the load, and whom to avoid.

Laws: only workers that can hand KV to each other are paired: a mode, a dialect and a transport in common, equal
compatibility digests, two different workers. A pair with fewer doubts (suspect, shunned) goes before one with more,
whatever it costs, and then one with room before one that says it is full: advice, which never leaves nobody. Among
equals the policy decides, and where it sees no difference turns 0, 1, 2, … take all in turn.

A policy is a function that gives pairs a cost, in the table `POLICIES`; docs/router.md says how to write another one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b

import msgspec

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import PeerId
from kvbaton.router.workers.directory import ListedEngine, WorkerListState

FAR_TOKENS = 1024
"""What a copy over the network is worth, in tokens: shared memory goes first until its workers are this much busier."""
HOME_SHARE = 0.5
"""The part of a prompt that its home is taken to have seen: other routers may have sent its beginning there."""
WEIGHED_MAX = 256
"""Pairs that are weighed for one request; of more, those of the least loaded workers."""
NEVER = (WorkerListState.DRAINING, WorkerListState.BROKEN, WorkerListState.NO_HTTP)


class Pair(msgspec.Struct, frozen=True):
    prefill: ListedEngine
    decode: ListedEngine

    def __str__(self) -> str:
        return f"{self.prefill.name}/{self.decode.name}"

    @property
    def is_near(self) -> bool:
        """Whether both are known to run on one host."""
        return self.prefill.host != "" and self.prefill.host == self.decode.host


class Doubts(msgspec.Struct, frozen=True):
    """What one request has learned from its failed tries."""

    avoid: Collection[PeerId] = ()  # never again
    shun: Collection[PeerId] = ()  # only if nobody else is there
    tried: Collection[tuple[PeerId, PeerId]] = ()  # not again together


class Weights(msgspec.Struct, frozen=True):
    """All that a policy may look at besides the pairs."""

    policy: str = "round-robin"  # its name in `POLICIES`
    same_host: bool = True
    loads: Mapping[PeerId, int] = {}  # tokens under way
    seen: Mapping[PeerId, float] = {}  # tokens of this prompt that a prefill worker has seen lately
    home: bytes = b""  # digest of the prompt's beginning, the same at every router; b"": none
    tokens: int = 0  # of the prompt


Cost = Callable[[Pair], float]
"""In tokens, or whatever else the pairs of one request can be compared by: the least is asked."""


class Policy(msgspec.Struct, frozen=True):
    """How pairs with equally few doubts are told apart."""

    cost: Callable[[Sequence[Pair], Weights], Cost]  # called once for a request, with all pairs that are weighed for it
    by_load: bool = True  # False: D alone is taken in turn too, and all pairs are weighed, however many there are
    by_prefix: bool = False  # the router remembers who has seen which beginnings of prompts


def round_robin(able: Sequence[Pair], weights: Weights) -> Cost:
    """Every pair in turn; if `same_host`, none across hosts whose two workers both have one on their own."""
    # Only where both have a partner on their own host: a worker that has none would otherwise never be asked.
    settled = _settled(able) if weights.same_host else ()
    return lambda pair: _far(pair) if pair.prefill.peer in settled and pair.decode.peer in settled else 0


def least_loaded(able: Sequence[Pair], weights: Weights) -> Cost:
    """The pair with the fewest tokens under way; `FAR_TOKENS` are added for two hosts, if `same_host`."""
    loads, same_host = weights.loads, weights.same_host

    def cost(pair: Pair) -> float:
        tokens = loads.get(pair.prefill.peer, 0) + loads.get(pair.decode.peer, 0)
        return tokens + _far(pair) if same_host else tokens

    return cost


def prefix(able: Sequence[Pair], weights: Weights) -> Cost:
    """As `least_loaded`, less the tokens of this prompt that P has seen lately, or is likely to have: at its home."""
    loaded, seen = least_loaded(able, weights), dict(weights.seen)
    if weights.home:
        at = home({pair.prefill.peer for pair in able}, weights.home)
        seen[at] = max(seen.get(at, 0.0), HOME_SHARE * weights.tokens)
    return lambda pair: loaded(pair) - seen.get(pair.prefill.peer, 0.0)


def home(peers: Collection[PeerId], beginning: bytes) -> PeerId:
    """The worker to which prompts that begin so go where nothing else is known (rendezvous hashing).

    Every router finds the same one without asking the others, and most prompts keep theirs when workers come and go.
    """
    return max(peers, key=lambda peer: (blake2b(peer.worker.encode(), key=beginning, digest_size=8).digest(), peer))


POLICIES: dict[str, Policy] = {
    "round-robin": Policy(round_robin, by_load=False),
    "least-loaded": Policy(least_loaded),
    "prefix": Policy(prefix, by_prefix=True),
}
"""By the name that `--policy` takes."""

NO_DOUBTS = Doubts()
PLAIN = Weights()


def mismatch(prefill: ListedEngine, decode: ListedEngine, mode: Mode) -> str | None:
    """Why the two cannot serve a request together in `mode`; None if they can."""
    if prefill.name == decode.name:
        return f"{prefill.name} cannot hand over to itself"
    for worker in (prefill, decode):
        if mode not in worker.modes:
            return f"{worker.name} does not serve mode {mode}"
    if prefill.dialect != decode.dialect:
        return f"{prefill.name} speaks {prefill.dialect}, {decode.name} speaks {decode.dialect}"
    if prefill.compat and decode.compat and prefill.compat != decode.compat:
        return f"{prefill.name} and {decode.name} differ in their compatibility key"
    if prefill.transports and decode.transports and not set(prefill.transports) & set(decode.transports):
        ours, theirs = ", ".join(prefill.transports), ", ".join(decode.transports)
        return f"{prefill.name} and {decode.name} have no transport in common ({ours}; {theirs})"
    return None


def pairs(workers: Sequence[ListedEngine], mode: Mode) -> list[Pair]:
    """All pairs that can serve `mode`, ordered so that neighbours share as few workers as possible."""
    prefills = [worker for worker in workers if worker.prefills and worker.state not in NEVER]
    decodes = [worker for worker in workers if worker.decodes and worker.state not in NEVER]
    if not prefills or not decodes:
        return []
    found = []
    lap = math.lcm(len(prefills), len(decodes))
    for turn in range(len(prefills) * len(decodes)):
        prefill = prefills[turn % len(prefills)]
        decode = decodes[(turn + turn // lap) % len(decodes)]
        if mismatch(prefill, decode, mode) is None:
            found.append(Pair(prefill, decode))
    return found


def choose(able: Sequence[Pair], turn: int, weights: Weights = PLAIN, doubts: Doubts = NO_DOUBTS) -> Pair | None:
    """The pair for this turn, of those that `pairs` found; None if no one may be asked."""
    if not able:
        return None
    policy = POLICIES[weights.policy]
    if policy.by_load and len(able) > WEIGHED_MAX:
        able = _least_loaded_part(able, weights)
    cost_of = policy.cost(able, weights)
    best: list[Pair] = []
    least = (0, 0, 0.0)
    has_doubts = doubts is not NO_DOUBTS
    for pair in able:
        suspects = (pair.prefill.state is WorkerListState.SUSPECT) + (pair.decode.state is WorkerListState.SUSPECT)
        if has_doubts:
            if _is_out(pair, doubts):
                continue
            suspects += (pair.prefill.peer in doubts.shun) + (pair.decode.peer in doubts.shun)
        cost = (suspects, pair.prefill.full + pair.decode.full, cost_of(pair))
        if not best or cost < least:
            best, least = [pair], cost
        elif cost == least:
            best.append(pair)
    return best[turn % len(best)] if best else None


def alone(
    workers: Sequence[ListedEngine], turn: int, weights: Weights = PLAIN, doubts: Doubts = NO_DOUBTS
) -> ListedEngine | None:
    """A worker that answers by itself, prompt and all."""
    able = [
        worker for worker in workers if worker.decodes and worker.state not in NEVER and worker.peer not in doubts.avoid
    ]
    if not able:
        return None
    by_load = POLICIES[weights.policy].by_load
    order = able[turn % len(able) :] + able[: turn % len(able)]

    def cost(worker: ListedEngine) -> tuple[int, bool, float]:
        load = weights.loads.get(worker.peer, 0) if by_load else 0
        return _doubt(worker, doubts), worker.full, load - weights.seen.get(worker.peer, 0.0)

    return min(order, key=cost)


def _is_out(pair: Pair, doubts: Doubts) -> bool:
    p, d = pair.prefill.peer, pair.decode.peer
    return p in doubts.avoid or d in doubts.avoid or (p, d) in doubts.tried


def _doubt(worker: ListedEngine, doubts: Doubts) -> int:
    return (worker.state is WorkerListState.SUSPECT) + (worker.peer in doubts.shun)


def _far(pair: Pair) -> int:
    """What the copy from host to host is worth. Workers that tell no host are not held to be far."""
    p, d = pair.prefill.host, pair.decode.host
    return FAR_TOKENS if p and d and p != d else 0


def _settled(able: Sequence[Pair]) -> set[PeerId]:
    """Workers that have a partner on their own host."""
    near = [pair for pair in able if pair.is_near]
    return {pair.prefill.peer for pair in near} | {pair.decode.peer for pair in near}


def _least_loaded_part(able: Sequence[Pair], weights: Weights) -> list[Pair]:
    """The pairs of the P and the D that have least to do, and of the P that have seen most."""
    side = math.isqrt(WEIGHED_MAX)
    loads = weights.loads
    p_peers = {pair.prefill.peer for pair in able}
    d_peers = {pair.decode.peer for pair in able}
    p_best = set(
        heapq.nsmallest(side, sorted(p_peers), key=lambda peer: loads.get(peer, 0) - weights.seen.get(peer, 0.0))
    )
    d_best = set(heapq.nsmallest(side, sorted(d_peers), key=lambda peer: loads.get(peer, 0)))
    part = [pair for pair in able if pair.prefill.peer in p_best and pair.decode.peer in d_best]
    return part or list(able[:WEIGHED_MAX])


def explain(workers: Sequence[ListedEngine], mode: Mode) -> str:
    """Why no pair can serve `mode`, with the next step."""
    prefills = [worker for worker in workers if worker.prefills]
    decodes = [worker for worker in workers if worker.decodes]
    for role, candidates in (("prefill", prefills), ("decode", decodes)):
        if not candidates:
            return f"no {role} worker is registered; start one with: kvbaton worker --role {role} …"
        if all(worker.state is WorkerListState.DRAINING for worker in candidates):
            return f"every {role} worker is draining; start one with: kvbaton worker --role {role} …"
        if all(worker.state is WorkerListState.NO_HTTP for worker in candidates):
            return f"no {role} worker has an HTTP address; those here are inside other servers, which ask them"
        if all(worker.state in NEVER for worker in candidates):
            return f"no {role} worker responds; the router probes them and uses one when it does"
    reasons = [
        reason for prefill in prefills for decode in decodes if (reason := mismatch(prefill, decode, mode)) is not None
    ]
    return reasons[0] if reasons else f"no pair is left for mode {mode}"
