"""Which pair serves a request: pure functions of the workers known, the mode, a turn and whom to avoid.

Law: only workers that can hand KV to each other are paired (a mode and a transport in common, equal compatibility
digests, two different workers); turns 0, 1, 2, … cover every such pair before one is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import PeerId
from kvbaton.router.directory import State, Worker


class Pair(msgspec.Struct, frozen=True):
    prefill: Worker
    decode: Worker

    def __str__(self) -> str:
        return f"{self.prefill.name}/{self.decode.name}"


def mismatch(prefill: Worker, decode: Worker, mode: Mode) -> str | None:
    """Why the two cannot serve a request together in `mode`; None if they can."""
    if prefill.name == decode.name:
        return f"{prefill.name} cannot hand over to itself"
    for worker in (prefill, decode):
        if mode not in worker.modes:
            return f"{worker.name} does not serve mode {mode}"
    if prefill.compat and decode.compat and prefill.compat != decode.compat:
        return f"{prefill.name} and {decode.name} differ in their compatibility key"
    if prefill.transports and decode.transports and not set(prefill.transports) & set(decode.transports):
        return f"{prefill.name} and {decode.name} have no transport in common"
    return None


def pairs(workers: Sequence[Worker], mode: Mode) -> list[Pair]:
    """All pairs that can serve `mode`, ordered so that neighbours share as few workers as possible."""
    prefills = [worker for worker in workers if worker.prefills and worker.state is not State.DRAINING]
    decodes = [worker for worker in workers if worker.decodes and worker.state is not State.DRAINING]
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


def choose(
    workers: Sequence[Worker],
    mode: Mode,
    turn: int,
    *,
    avoid: Collection[PeerId] = (),
    shun: Collection[PeerId] = (),
    tried: Collection[Pair] = (),
) -> Pair | None:
    """The pair for this turn: none of `tried`, nobody of `avoid`, and as few suspect or shunned workers as can be."""
    spent = {(pair.prefill.peer, pair.decode.peer) for pair in tried}
    able = [
        pair
        for pair in pairs(workers, mode)
        if not {pair.prefill.peer, pair.decode.peer} & set(avoid) and (pair.prefill.peer, pair.decode.peer) not in spent
    ]
    if not able:
        return None
    doubts = [_doubt(pair.prefill, shun) + _doubt(pair.decode, shun) for pair in able]
    least = min(doubts)
    best = [pair for pair, doubt in zip(able, doubts, strict=True) if doubt == least]
    return best[turn % len(best)]


def _doubt(worker: Worker, shun: Collection[PeerId]) -> int:
    return int(worker.state is State.SUSPECT) + int(worker.peer in shun)


def common_mode(workers: Sequence[Worker], preferred: Sequence[Mode]) -> Mode | None:
    """The first of `preferred` that some pair can serve."""
    return next((mode for mode in preferred if pairs(workers, mode)), None)


def explain(workers: Sequence[Worker], mode: Mode) -> str:
    """Why no pair can serve `mode`, with the next step."""
    prefills = [worker for worker in workers if worker.prefills]
    decodes = [worker for worker in workers if worker.decodes]
    for role, candidates in (("prefill", prefills), ("decode", decodes)):
        if not candidates:
            return f"no {role} worker is registered; start one with: kvbaton worker --role {role} …"
        if all(worker.state is State.DRAINING for worker in candidates):
            return f"every {role} worker is draining; start one with: kvbaton worker --role {role} …"
    reasons = [
        reason for prefill in prefills for decode in decodes if (reason := mismatch(prefill, decode, mode)) is not None
    ]
    return reasons[0] if reasons else f"no pair is left for mode {mode}"
