"""Cases about ends: every accepted copy has one, and nothing is lost, left running or left spinning."""

from __future__ import annotations

import random
import time

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId
from kvbaton.testing.transport_case import LARGE_BYTES, READ, SMALL_BYTES, Cases, copy
from kvbaton.testing.transport_harness import DEADLINE_S, Log, TransportHarness, idle_cpu_s

COPIES_MAX = 20_000
IDLE_S = 1.0
IDLE_CPU_S = 0.01
CLOSE_S = 20.0
CASES = Cases()


@CASES.add()
def every_accepted_copy_ends_exactly_once(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.near)
    rng = random.Random(11)
    spans = {"good": [(0, 0, 4096)], "large": [(0, 0, LARGE_BYTES // 4)], "bad": [(0, -1, 8)], "none": []}
    kinds = [rng.choice(list(spans)) for _ in range(60)]
    for job, kind in enumerate(kinds):
        assert log.wait(lambda job=job, kind=kind: pair.near.transport.submit(copy(job, pair.far, READ, spans[kind])))  # type: ignore[misc]
        if rng.random() < 0.3:
            pair.near.transport.cancel(JobId(rng.randint(0, job)))
    for job in range(len(kinds)):
        log.rest(job)
    pair.near.transport.disconnect(pair.far.peer)
    pair.near.transport.close()
    log.wait(lambda: False, 0.05)
    assert [len(log.ends(job)) for job in range(len(kinds))] == [1] * len(kinds)
    refusals = {Reason.BAD_SPAN, Reason.CANCELLED}
    assert {log.ends(job)[0].reason for job, kind in enumerate(kinds) if kind == "bad"} <= refusals


@CASES.add()
def a_full_queue_says_so_and_loses_nothing(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    spans = [(0, 0, 64)]
    accepted = 0
    while accepted < COPIES_MAX and pair.near.transport.submit(copy(accepted, pair.far, READ, spans)):
        accepted += 1
    assert 0 < accepted < COPIES_MAX, f"{accepted} copies accepted and no bound in sight"
    log = Log(harness, pair.near)
    for job in range(accepted):
        assert log.end(job).reason is None
    assert pair.near.transport.submit(copy(accepted, pair.far, READ, spans)), "no room although all have ended"
    assert log.end(accepted).reason is None


@CASES.add()
def the_waker_is_called_when_there_is_news(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    rung: list[int] = []
    pair.near.transport.set_waker(lambda: rung.append(1))
    for job in range(3):
        rung.clear()
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, 64)]))
        assert harness.wait(lambda: bool(rung), DEADLINE_S), "the waker was not called"
        assert pair.near.transport.drain(), "the waker was called without news"


@CASES.add()
def a_disconnect_ends_outstanding_copies(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.near)
    for job in range(8):
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, LARGE_BYTES)]))
    pair.near.transport.disconnect(pair.far.peer)
    for job in range(8):
        log.rest(job)
    assert pair.near.transport.submit(copy(9, pair.far, READ, [(0, 0, 64)]))
    assert log.end(9).reason is Reason.PEER_UNKNOWN
    assert [len(log.ends(job)) for job in range(8)] == [1] * 8


@CASES.add()
def close_is_idempotent_and_bounded_and_ends_what_was_accepted(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    log = Log(harness, pair.near)
    for job in range(4):
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, LARGE_BYTES)]))
    begun = time.monotonic()
    pair.near.transport.close()
    pair.near.transport.close()
    assert time.monotonic() - begun < CLOSE_S
    for job in range(4):
        log.end(job)


@CASES.add("idle")
def an_idle_transport_costs_no_cpu(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert Log(harness, pair.near).end(1).reason is None
    spent_s = idle_cpu_s(IDLE_S, IDLE_CPU_S * IDLE_S)
    assert spent_s < IDLE_CPU_S * IDLE_S, f"idle for {IDLE_S} s, it used {spent_s} s of CPU"
