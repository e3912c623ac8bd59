"""Routing policy: pure functions of the available workers, a turn, the load, and whom to avoid.

Laws: only workers that can hand KV to each other are paired: a mode, a dialect and a transport in common, equal
compatibility digests, two different workers. A pair with fewer doubts (suspect, shunned) goes before one with more,
whatever it costs. Among equals the policy decides, and where it sees no difference turns 0, 1, 2, … take all in turn.

    round-robin    every pair in turn; if `same_host`, none across hosts whose two workers both have one on their own
    least-loaded   the pair with the fewest tokens under way; `FAR_TOKENS` are added for two hosts, if `same_host`
    prefix         the same, less the tokens of this prompt that P has seen lately
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import PeerId
from kvbaton.router.workers.directory import State, Worker

FAR_TOKENS = 1024
"""What a copy over the network is worth, in tokens: shared memory goes first until its workers are this much busier."""
WEIGHED_MAX = 256
"""Pairs that are weighed for one request; of more, those of the least loaded workers."""
_NEVER = (State.DRAINING, State.BROKEN)


class Policy(enum.StrEnum):
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    PREFIX = "prefix"


class Pair(msgspec.Struct, frozen=True):
    prefill: Worker
    decode: Worker

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
    """What a policy may look at."""

    policy: Policy = Policy.ROUND_ROBIN
    same_host: bool = True
    loads: Mapping[PeerId, int] = {}  # tokens under way
    seen: Mapping[PeerId, float] = {}  # tokens of this prompt that a prefill worker has seen lately


NO_DOUBTS = Doubts()
PLAIN = Weights()


def mismatch(prefill: Worker, decode: Worker, mode: Mode) -> str | None:
    """Why the two cannot serve a request together in `mode`; None if they can."""
    if prefill.name == decode.name:
        return f"{prefill.name} cannot hand over to itself"
    for worker in (prefill, decode):
        if mode not in worker.modes:
            return f"{worker.name} does not serve mode {mode}"
    if prefill.dialect is not decode.dialect:
        return f"{prefill.name} speaks {prefill.dialect}, {decode.name} speaks {decode.dialect}"
    if prefill.compat and decode.compat and prefill.compat != decode.compat:
        return f"{prefill.name} and {decode.name} differ in their compatibility key"
    if prefill.transports and decode.transports and not set(prefill.transports) & set(decode.transports):
        ours, theirs = ", ".join(prefill.transports), ", ".join(decode.transports)
        return f"{prefill.name} and {decode.name} have no transport in common ({ours}; {theirs})"
    return None


def pairs(workers: Sequence[Worker], mode: Mode) -> list[Pair]:
    """All pairs that can serve `mode`, ordered so that neighbours share as few workers as possible."""
    prefills = [worker for worker in workers if worker.prefills and worker.state not in _NEVER]
    decodes = [worker for worker in workers if worker.decodes and worker.state not in _NEVER]
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
    if weights.policy is not Policy.ROUND_ROBIN and len(able) > WEIGHED_MAX:
        able = _least_loaded_part(able, weights)
    best: list[Pair] = []
    least = (0, 0.0)
    settled = _settled(able) if weights.same_host and weights.policy is Policy.ROUND_ROBIN else ()
    for pair in able:
        if _is_out(pair, doubts):
            continue
        cost = (_doubt(pair.prefill, doubts) + _doubt(pair.decode, doubts), _cost(pair, weights, settled))
        if not best or cost < least:
            best, least = [pair], cost
        elif cost == least:
            best.append(pair)
    return best[turn % len(best)] if best else None


def alone(workers: Sequence[Worker], turn: int, weights: Weights = PLAIN, doubts: Doubts = NO_DOUBTS) -> Worker | None:
    """A worker that answers by itself, prompt and all."""
    able = [
        worker
        for worker in workers
        if worker.decodes and worker.state not in _NEVER and worker.peer not in doubts.avoid
    ]
    if not able:
        return None
    by_load = weights.policy is not Policy.ROUND_ROBIN
    order = able[turn % len(able) :] + able[: turn % len(able)]

    def cost(worker: Worker) -> tuple[int, float]:
        load = weights.loads.get(worker.peer, 0) if by_load else 0
        return _doubt(worker, doubts), load - weights.seen.get(worker.peer, 0.0)

    return min(order, key=cost)


def _is_out(pair: Pair, doubts: Doubts) -> bool:
    if doubts is NO_DOUBTS:
        return False
    p, d = pair.prefill.peer, pair.decode.peer
    return p in doubts.avoid or d in doubts.avoid or (p, d) in doubts.tried


def _doubt(worker: Worker, doubts: Doubts) -> int:
    return (worker.state is State.SUSPECT) + (worker.peer in doubts.shun)


def _cost(pair: Pair, weights: Weights, settled: Collection[PeerId]) -> float:
    """In tokens."""
    far = 0 if not weights.same_host or pair.is_near or not _could_be_near(pair) else FAR_TOKENS
    if weights.policy is Policy.ROUND_ROBIN:
        return far if pair.prefill.peer in settled and pair.decode.peer in settled else 0
    loads = weights.loads
    cost = loads.get(pair.prefill.peer, 0) + loads.get(pair.decode.peer, 0) + far
    return cost - weights.seen.get(pair.prefill.peer, 0.0) if weights.policy is Policy.PREFIX else cost


def _settled(able: Sequence[Pair]) -> set[PeerId]:
    """Who has somebody on its own host."""
    near = [pair for pair in able if pair.is_near]
    return {pair.prefill.peer for pair in near} | {pair.decode.peer for pair in near}


def _could_be_near(pair: Pair) -> bool:
    """Workers that tell no host are not held to be far."""
    return pair.prefill.host != "" and pair.decode.host != ""


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


def explain(workers: Sequence[Worker], mode: Mode) -> str:
    """Why no pair can serve `mode`, with the next step."""
    prefills = [worker for worker in workers if worker.prefills]
    decodes = [worker for worker in workers if worker.decodes]
    for role, candidates in (("prefill", prefills), ("decode", decodes)):
        if not candidates:
            return f"no {role} worker is registered; start one with: kvbaton worker --role {role} …"
        if all(worker.state is State.DRAINING for worker in candidates):
            return f"every {role} worker is draining; start one with: kvbaton worker --role {role} …"
        if all(worker.state in _NEVER for worker in candidates):
            return f"no {role} worker answers; the router probes them and asks again when one does"
    reasons = [
        reason for prefill in prefills for decode in decodes if (reason := mismatch(prefill, decode, mode)) is not None
    ]
    return reasons[0] if reasons else f"no pair is left for mode {mode}"
