"""Memories, queues and counts, each compared with a model of a few lines."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from kvbaton.node.epochs import UNTOLD, EpochTable
from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.clock import Timers
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, Reader, ReservationId, WorkerId
from kvbaton.protocol.machines.backoff import SHUNNED_MAX, Shunned
from kvbaton.protocol.machines.inbound import INTAKE
from kvbaton.protocol.machines.lease import LEASE, READER
from kvbaton.protocol.machines.pairing_state import LINK
from kvbaton.protocol.machines.push_write import OUTLET
from kvbaton.protocol.machines.push_writer import Revocations
from kvbaton.protocol.machines.puts import PUT
from kvbaton.protocol.machines.quotas import BUCKETS_MAX, Buckets, Held, PerPeer
from kvbaton.protocol.table import Table, Verdict
from kvbaton_proof.sim.questions.exam import Question, same

ROUNDS = 40


def timers(rng: random.Random) -> None:
    """A key is due once, at the time that it was last set for; what is armed for the past waits for the next look."""
    found: Timers[str] = Timers()
    due: dict[str, float] = {}
    now, soonest = 0.0, -math.inf
    for _ in range(ROUNDS * 3):
        key, at = rng.choice("abcdef"), now + rng.choice((-1.0, 0.0, 0.5, 1.0, math.nan, rng.random() * 3))
        act = rng.random()
        if act < 0.55:
            found.set(key, at)
            due[key] = max(soonest, at)
        elif act < 0.65:
            found.clear(key)
            due.pop(key, None)
        else:
            now += rng.choice((0.0, 0.25, 0.5, 1.0))
            soonest = max(soonest, math.nextafter(now, math.inf))
            popped = found.pop_due(now)
            least = min(due.values(), default=math.inf)
            same(
                "a timer that is due", due.pop(popped) if popped is not None else None, least if least <= now else None
            )
        same("timers: when the next is due", found.next_at(), min(due.values(), default=None))
        same("timers: how many wait", len(found), len(due))
    _many_settings(rng)


def _many_settings(rng: random.Random) -> None:
    """What is set again and again takes the place of the former, and nothing else is lost or moved by that."""
    found: Timers[int] = Timers()
    due = {key: rng.uniform(0, 50) for key in range(9)}
    for key, at in due.items():
        found.set(key, at)
    for _ in range(200):
        due[0] = rng.uniform(50, 60)
        found.set(0, due[0])
    same("timers: as many are kept as wait, about", len(found._heap) > 150 + 2 * len(found), False)
    popped = iter(lambda: found.pop_due(100.0), None)
    same("timers: all, in the order in which they are due", list(popped), sorted(due, key=lambda key: due[key]))


def remembered(rng: random.Random) -> None:
    """The last `limit`, the oldest forgotten first, and told."""
    limit = rng.choice((1, 2, 3, 5))
    memory: Remembered[int, int] = Remembered(limit)
    kept: list[tuple[int, int]] = []
    for value in range(ROUNDS):
        key = rng.randrange(8)
        kept = [each for each in kept if each[0] != key] + [(key, value)]
        gone = kept.pop(0) if len(kept) > limit else None
        same("remembered: what is forgotten for it", memory.put(key, value), gone)
        same("remembered", [(k, memory.get(k)) for k in range(8) if k in memory], sorted(kept))
        same("remembered: how many", len(memory), len(kept))


def revocations(rng: random.Random) -> None:
    """What was revoked is covered for ever; what was not, only below a number that had to be forgotten (rule 13)."""
    limit = rng.choice((1, 2, 4))
    memory, floor = Revocations(limit), 0
    kept: list[int] = []
    for _ in range(ROUNDS):
        number = rng.randrange(1, 30)
        kept = [each for each in kept if each != number] + [number]
        memory.add(ReservationId(number))
        if len(kept) > limit:
            floor = max(floor, kept.pop(0))
        for each in range(1, 31):
            same(f"reservation {each} is covered", memory.cover(ReservationId(each)), each <= floor or each in kept)


def buckets(rng: random.Random) -> None:
    """So many at once, and so many a second in the long run; of each peer alone."""
    per_s, burst = rng.choice((0.5, 2.0, 5.0)), rng.choice((0.5, 1.0, 3.0, 4.0))
    quota: Buckets[str] = Buckets(per_s, burst)
    left: dict[str, tuple[float, float]] = {}
    refusals: Counter[str] = Counter()
    now = 0.0
    for _ in range(ROUNDS):
        now += rng.choice((0.0, 0.0, 0.1, 0.5, 2.0, -0.3))
        peer, cost = rng.choice("ab"), rng.choice((1.0, 1.0, 2.0, 9.0))
        had, since = left.get(peer, (burst, now))
        has = min(burst, had + (now - since) * per_s if now > since else had)
        price = min(cost, max(burst, 1.0))
        within = has >= price
        left[peer] = (has - price if within else has), now
        refusals[peer] += not within
        same(f"a bucket of {burst} with {has:.3f} gives {price}", quota.take(peer, now, cost), within)
        same("the first refusal", quota.is_first_refusal(peer), refusals[peer] == 1)
    free: Buckets[str] = Buckets(math.inf, 1.0)
    same("a quota without a limit", all(free.take("a", 0.0, 5.0) for _ in range(5)), True)
    if rng.random() < 0.2:
        _many_buckets()


def _many_buckets() -> None:
    """Beyond as many as are remembered, whoever was quiet longest begins anew, and nobody else."""
    quota: Buckets[int] = Buckets(1e-9, 1.0)
    for peer in range(BUCKETS_MAX):
        quota.take(peer, 0.0)
    same("the quiet longest, as long as all are remembered", quota.take(0, 0.0), False)
    quota.take(-1, 0.0)
    same("buckets: as many as may be remembered", len(quota._left), BUCKETS_MAX)
    same("who was quiet longest begins anew", quota.take(1, 0.0), True)
    same("who was not, does not", quota.take(0, 0.0), False)


def _reader(rng: random.Random) -> Reader:
    return Reader(PeerId(WorkerId(rng.choice(("d0", "d1"))), Incarnation(rng.randint(1, 2))), rng.randint(1, 3))


def per_peer(rng: random.Random) -> None:
    """Counted by worker, whatever its lives and attempts."""
    found: PerPeer[int] = PerPeer()
    kept: dict[Reader, int] = {}
    for value in range(ROUNDS):
        reader, act = _reader(rng), rng.random()
        if act < 0.5:
            found[reader] = kept[reader] = value
        elif act < 0.75:
            same("what is taken out", found.take(reader), kept.pop(reader, None))
        elif reader in kept:
            del found[reader], kept[reader]
        same("things of readers", dict(found), kept)
        for worker in ("d0", "d1"):
            count = sum(each.peer.worker == worker for each in kept)
            same(f"things of {worker}", found.of(WorkerId(worker)), count)
        same("workers that are counted", set(found._counts), {each.peer.worker for each in kept})


def held(rng: random.Random) -> None:
    """Seats and bytes of each worker; who gets up twice gives back once."""
    book = Held()
    kept: dict[tuple[LeaseId, Reader], int] = {}
    for _ in range(ROUNDS):
        key, size = (LeaseId(rng.randint(1, 3)), _reader(rng)), rng.randint(0, 100)
        if rng.random() < 0.5:
            book.give(*key)
            kept.pop(key, None)
        elif key not in kept:
            book.take(*key, size)
            kept[key] = size
        for worker in ("d0", "d1"):
            sizes = [size for (_, reader), size in kept.items() if reader.peer.worker == worker]
            same(
                f"what {worker} holds",
                (book.seats(WorkerId(worker)), book.bytes(WorkerId(worker))),
                (len(sizes), sum(sizes)),
            )
    same("nobody is counted who holds nothing", {w for w, n in book._seats.items() if n == 0}, set())


def shunned(rng: random.Random) -> None:
    """Left out for so long after its last failure, for that worker."""
    seconds = rng.choice((0.5, 2.0))
    book, until, now = Shunned(seconds), {}, 0.0
    for _ in range(ROUNDS):
        now += rng.choice((0.1, 0.3, 1.0))
        worker, plane = WorkerId(rng.choice("pq")), rng.choice(("tcp", "shm", "rdma"))
        if rng.random() < 0.4:
            book.add(worker, plane, now)
            until[worker, plane] = now + seconds
        names = ("rdma", "shm", "tcp")
        left = tuple(name for name in names if until.get((worker, name), 0.0) <= now)
        same(f"planes to {worker} that are worth a try", book.without(worker, names, now), left)
    if rng.random() < 0.1:
        for number in range(SHUNNED_MAX + 5):
            book.add(WorkerId(f"w{number}"), "tcp", now)
        same("planes that are left out are bounded", len(book._until), SHUNNED_MAX)


def epochs(rng: random.Random) -> None:
    """Of each block how often it was handed out; where that is not told, none that a pin ever had."""
    table, raised = EpochTable(rng.choice((0, 1, 4))), Counter[int]()
    untold = {rng.randrange(12) for _ in range(3)}
    for _ in range(ROUNDS):
        block = rng.randrange(-2, 12)
        table.raise_epoch(block)
        raised[block] += block >= 0
        asked = [rng.randrange(-2, 14) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
        known = [raised[each] if each >= 0 else 0 for each in asked]
        same(f"epochs of {asked}", table.all_of(asked), known)
        table.are_told = lambda blocks: True
        same(f"epochs of {asked}, all told", table.all_judged(asked), known)
        table.are_told = untold.isdisjoint
        judged = [UNTOLD if block in untold else epoch for block, epoch in zip(asked, known, strict=True)]
        same(f"epochs of {asked}, some untold", table.all_judged(asked), judged)
    if UNTOLD >= 0:
        same("what stands for an untold reuse is no epoch", UNTOLD, -1)


_ROWS = {
    "lease": "growing extended growing, growing completed complete, growing closed closing, complete closed closing,"
    " closing rested released",
    "reader": "live proven committed, live disproven stale, live left gone, gone proven committed,"
    " gone disproven stale",
    "outlet": "writing flushed flushed, writing stopped stopping, stopping rested closed, flushed acked closed,"
    " flushed stopped closed",
    "intake": "greeting linked claiming, claiming unlinked greeting, claiming granted granted,"
    " granted pull_begun copying, granted push_begun offered, copying copied committing,"
    " committing committed settling, offered written judging, judging judged settling,"
    " judging failed settling, greeting failed settling, claiming failed settling,"
    " granted failed settling, copying failed settling, committing failed settling, offered failed revoking,"
    " revoking quiesced settling, revoking written settling, settling rested done",
    "link": "greeting welcomed joining, greeting refused down, greeting lost down, joining linked up,"
    " joining lost down, up lost down",
    "put": "putting ended released, putting timed_out cancelling, cancelling ended released",
}
"""What takes each from where to where; whatever else happens changes nothing."""


def tables(rng: random.Random) -> None:
    """Every pair of a state and an event is a transition, late, or somebody's fault."""
    every: tuple[Table[Any, Any], ...] = (LEASE, READER, OUTLET, INTAKE, LINK, PUT)
    for each in every:
        rows = {f"{state.value} {event.value} {after.value}" for (state, event), after in each.next.items()}
        same(f"transitions of {each.name}", rows, {row.strip() for row in _ROWS[each.name].split(",")})
        for state in each.states:
            for event in each.events:
                late = Verdict.LATE if (state, event) in each.late else Verdict.ILLEGAL
                same(f"{each.name} {state} {event}", each.step(state, event), each.next.get((state, event), late))


BANK: list[Question] = [timers, remembered, revocations, buckets, per_peer, held, shunned, epochs, tables]
