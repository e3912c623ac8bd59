"""Several routers before the same workers, none of which hears of the others: what that costs in hits and balance.

A model on virtual time: the router's own memory of prefixes, loads and policy (production code, one of each for every
router), before prefill workers that compute one prompt at a time and keep the last beginnings. Requests come at random
times to random routers, as a load balancer sends them; which beginning each has follows Zipf's law.

Laws: pure; the same seed, the same rows. The same requests at the same times, whatever the number of routers.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router import policy
from kvbaton.router.policy import Weights
from kvbaton.router.workers.directory import ListedEngine
from kvbaton.router.workers.prefixes import Prefixes, beginning, pieces, prompt_text
from kvbaton.router.workers.worker_load import Loads, WorkerLoad

ROUTERS = (1, 2, 4)
POLICIES = ("least-loaded", "prefix")
CHARS_PER_TOKEN = 4


class SeveralRow(msgspec.Struct, frozen=True, kw_only=True):
    """One workload through so many routers."""

    routers: int
    policy: str
    requests: int
    hit_rate: float  # of the tokens that prompts have in common
    balance: float  # the busiest prefill worker's tokens, over the mean; 1 is even
    wait_p50_ms: float  # from the arrival to the end of the prefill
    wait_p99_ms: float


class SeveralLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The workload: more beginnings than one worker keeps, fewer than all together."""

    requests: int = 2500
    beginnings: int = 64
    common_tokens: int = 2048
    own_tokens: int = 256
    answer_tokens: int = 128
    prefills: int = 4
    decodes: int = 4
    kept: int = 20  # beginnings in one prefill worker's cache
    tokens_per_s: float = 20_000.0  # of one prefill worker
    busy: float = 0.7  # of the prefill workers, if every prompt's beginning were computed half the time
    answer_s: float = 2.0
    seed: int = 1


@dataclass(slots=True)
class _Prefill:
    kept: int
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    tokens: int = 0

    def has(self, group: int) -> bool:
        hit = group in self.cache
        self.cache[group] = None
        self.cache.move_to_end(group)
        while len(self.cache) > self.kept:
            self.cache.popitem(last=False)
        return hit


@dataclass(slots=True)
class _ModelRouter:
    """What one router knows."""

    policy: str
    prefixes: Prefixes = field(default_factory=lambda: Prefixes(1 << 16))
    loads: Loads = field(default_factory=Loads)
    turn: int = 0


def several_routers(load: SeveralLoad | None = None, names: Sequence[str] = POLICIES) -> list[SeveralRow]:
    """A row for each policy and number of routers."""
    load = load or SeveralLoad()
    return [_row(load, count, name) for name in names for count in ROUTERS]


def as_lines(rows: Sequence[SeveralRow]) -> list[str]:
    """A table in text."""
    lines = ["several routers (model): policy, routers, hit rate, balance, wait p50 and p99 in ms"]
    for row in rows:
        figures = f"{row.hit_rate:.3f}  {row.balance:.3f}  {row.wait_p50_ms:>7.1f}  {row.wait_p99_ms:>7.1f}"
        lines.append(f"  {row.policy:<12} {row.routers}  {figures}")
    return lines


def _row(load: SeveralLoad, count: int, name: str) -> SeveralRow:
    rng = random.Random(load.seed)
    texts = [_text(random.Random(f"{load.seed} {group}"), load.common_tokens) for group in range(load.beginnings)]
    shares = [1 / (1 + group) for group in range(load.beginnings)]
    each = load.common_tokens / 2 + load.own_tokens
    rate = load.busy * load.prefills * load.tokens_per_s / each
    workers = _workers(load)
    able = policy.pairs(workers, Mode.PULL)
    prefills = {worker.peer: _Prefill(load.kept) for worker in workers if worker.role == "prefill"}
    routers = [_ModelRouter(name) for _ in range(count)]
    ends: list[tuple[float, int, WorkerLoad]] = []
    now, hits, waits = 0.0, 0, []
    for number in range(load.requests):
        now += rng.expovariate(rate)
        group = rng.choices(range(load.beginnings), shares)[0]
        router = routers[int(rng.random() * 64) % count]
        while ends and ends[0][0] <= now:
            heapq.heappop(ends)[2].give()
        fields = {"prompt": texts[group] + _text(random.Random(number), load.own_tokens)}
        text = prompt_text(BodyKind.COMPLETION, fields)
        names, total = pieces(BodyKind.COMPLETION, fields, text)
        tokens = load.common_tokens + load.own_tokens
        seen = {peer: share * tokens for peer, share in router.prefixes.share(names, total).items()}
        home = beginning(b"bench", BodyKind.COMPLETION, fields, text)
        weights = Weights(router.policy, True, router.loads.tokens, seen, home, tokens)
        pair = policy.choose(able, router.turn, weights)
        assert pair is not None
        router.turn += 1
        place = prefills[pair.prefill.peer]
        hit = place.has(group)
        hits += hit
        computed = load.own_tokens + (0 if hit else load.common_tokens)
        place.tokens += computed
        place.free_at = max(now, place.free_at) + computed / load.tokens_per_s
        waits.append(place.free_at - now)
        router.prefixes.note(pair.prefill.peer, names)
        heapq.heappush(ends, (place.free_at, 2 * number, router.loads.take(pair.prefill.peer, tokens)))
        decode = router.loads.take(pair.decode.peer, tokens + load.answer_tokens)
        heapq.heappush(ends, (place.free_at + load.answer_s, 2 * number + 1, decode))
    tokens_of = [place.tokens for place in prefills.values()]
    waits.sort()
    return SeveralRow(
        routers=count,
        policy=name,
        requests=load.requests,
        hit_rate=round(hits / load.requests, 4),
        balance=round(max(tokens_of) * len(tokens_of) / sum(tokens_of), 3),
        wait_p50_ms=round(1e3 * waits[len(waits) // 2], 1),
        wait_p99_ms=round(1e3 * waits[len(waits) * 99 // 100], 1),
    )


def _workers(load: SeveralLoad) -> Sequence[ListedEngine]:
    found = []
    for role, count in (("prefill", load.prefills), ("decode", load.decodes)):
        for number in range(count):
            name = WorkerId(f"{role[0]}{number}")
            found.append(ListedEngine(name, role, f"http://{name}:1", Incarnation(number + 1)))  # type: ignore[arg-type]
    return found


def _text(rng: random.Random, tokens: int) -> str:
    return rng.randbytes(tokens * CHARS_PER_TOKEN // 2).hex()
