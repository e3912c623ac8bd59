"""Memory that a router's processes share: sums over all, one writer for each row, nothing left of one that ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvbaton.api.bodies import BodyKind
from kvbaton.api.http.client_quotas import ClientQuotas
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.metric_types import Histogram
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.processes import shared_counts
from kvbaton.router.processes.shared_counts import (
    HELD,
    NUMBERS,
    SharedCounts,
    SharedLoads,
    SharedPrefixes,
    SharedQuotas,
    SharedStats,
    WorkerNumbers,
)
from kvbaton.router.router_stats import RouterStats
from kvbaton.router.workers.prefixes import pieces

A, B, C = (PeerId(WorkerId(name), Incarnation(1)) for name in "abc")


@pytest.fixture
def counts() -> Iterator[SharedCounts]:
    made = SharedCounts.made(2, 64)
    yield made
    made.close()


def test_a_life_keeps_its_number_and_no_other_gets_it_soon() -> None:
    numbers = WorkerNumbers()
    first = numbers.of([A, B])
    assert len({*first.values(), 0}) == 3
    assert numbers.of([B, C])[B] == first[B]
    assert numbers.of([B, C])[C] not in first.values()
    lives = [PeerId(WorkerId("a"), Incarnation(life)) for life in range(2, 2 + NUMBERS)]
    for life in lives:
        given = numbers.of([B, life])
        assert given[B] == first[B] != given[life] and 0 < given[life] < NUMBERS


def test_load_is_of_all_processes_and_a_worker_that_left_gets_its_own_back(counts: SharedCounts) -> None:
    mine, other = (SharedLoads(counts, counts.row(index)) for index in (0, 1))
    for each in (mine, other):
        each.know({A: 1, B: 2})
    load = mine.take(A, 10)
    other.take(A, 5)
    mine.look(1.0)
    other.look(1.0)
    assert mine.tokens == other.tokens == {A: 15}
    mine.know({B: 2})
    mine.look(1.001)
    assert mine.tokens == {A: 15}, "something is under way there"
    load.give()
    load.give()
    mine.know({B: 2})
    other.look(2.0)
    assert other.tokens == {A: 5} and counts.row(0).tolist().count(0) == len(counts.row(0))
    counts.clear(1)
    other.look(3.0)
    assert other.tokens == {}


def test_a_life_that_left_and_came_back_takes_its_load_along(counts: SharedCounts) -> None:
    loads = SharedLoads(counts, counts.row(0))
    loads.know({A: 1, B: 2})
    load = loads.take(A, 10)
    loads.know({B: 2})
    loads.know({A: 3, B: 2})
    loads.look(1.0)
    assert loads.tokens == {A: 10}
    load.give()
    assert [counts.tokens(number) for number in range(4)] == [0] * 4, "else it looks idle by as much for ever"


def test_calls_under_way_are_bounded_together(counts: SharedCounts) -> None:
    mine, other = (SharedStats(counts, counts.row(index), ClientQuotas()) for index in (0, 1))
    assert mine.enter(3, 4) and not other.enter(2, 4) and other.enter(1, 4) and not mine.enter(1, 4)
    assert (mine.in_flight, other.in_flight, mine.under_way) == (3, 1, 4)
    mine.leave(3)
    assert other.enter(3, 4) and not mine.enter(1, 4)
    counts.clear(1)
    assert mine.enter(4, 4), "what an ended process had under way is over"


def test_no_address_holds_more_than_is_left_whichever_processes_it_asks(counts: SharedCounts) -> None:
    mine, other = (SharedQuotas(counts, counts.row(index), b"key", 1000) for index in (0, 1))
    tabs = [mine.tab("10.0.0.1"), other.tab("10.0.0.1")]
    assert tabs[0].hold(300) and not tabs[1].hold(201) and tabs[1].hold(200), "half of all is the most for one"
    assert other.tab("10.0.0.2").hold(250) and not mine.tab("10.0.0.2").hold(1)
    assert (mine.bytes, other.bytes, mine.total) == (300, 450, 750)
    for tab in tabs:
        tab.close()
    assert counts.total(HELD) == 250 and "holds 250 bytes" in mine.full("request").message


def test_every_process_knows_what_another_has_sent(counts: SharedCounts) -> None:
    mine, other = SharedPrefixes(counts), SharedPrefixes(counts)
    for each in (mine, other):
        each.know({A: 1, B: 2, C: NUMBERS - 1})
    names = (5, -7, 11)
    mine.note(A, names)
    mine.note(C, names[:1])
    assert other.share(names, 3) == {A: 1.0, C: pytest.approx(1 / 3)}
    other.note(B, names)
    assert mine.share(names, 3) == {A: 1.0, B: 1.0, C: pytest.approx(1 / 3)}
    mine.know({B: 2})
    assert mine.share(names, 3) == {B: 1.0}, "who left is not told"
    mine.note(B, (5 + 64,))
    assert other.share(names, 3) == {}, "another beginning has its place"


def test_names_of_beginnings_are_the_same_in_processes_that_hash_alike() -> None:
    code = (
        "from kvbaton.api.bodies import BodyKind; from kvbaton.router.workers.prefixes import pieces;"
        "print(pieces(BodyKind.COMPLETION, {'prompt': 'x' * 600, 'model': 'm'}))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("7", "7", "8")
    ]
    assert said[0] == said[1] != said[2]
    assert len(pieces(BodyKind.COMPLETION, {"prompt": "x" * 600})[0]) == 2


def test_figures_of_several_processes_are_those_of_one() -> None:
    both, parts = RouterStats(), [RouterStats(), RouterStats()]
    for number in range(20):
        for each in (both, parts[number % 2]):
            each.enter(1, 100)
            each.ended("ok" if number % 3 else "no_pair", 200 if number % 3 else 503)
            each.waits.note("pull", 0.01 * number, (0.0, 0.005 * number), f"handoff-{number}")
            each.tickets += number
            each.room.refused["request"] += 1
    merged = shared_counts.MergedStats(lambda: None)
    merged.processes = 1
    shared_counts.merge(merged, [shared_counts.counted(each) for each in parts])
    assert merged.as_numbers() == both.as_numbers()
    for mine, theirs in zip(merged.waits.families(), both.waits.families(), strict=True):
        assert mine.metric is theirs.metric and mine.samples.keys() == theirs.samples.keys()
        for labels, found in mine.samples.items():
            wanted = theirs.samples[labels]
            assert isinstance(found, Histogram) and isinstance(wanted, Histogram)
            assert found.counts == wanted.counts and found.sum == pytest.approx(wanted.sum)
            assert [each and each.transfer for each in found.exemplars] == [
                each and each.transfer for each in wanted.exemplars
            ]
    assert merged.waits.families()[0].metric is metric_names.ROUTER_FIRST_BYTE
    over = shared_counts.together([shared_counts.at_rest(shared_counts.counted(each)) for each in parts])
    assert (over.in_flight, over.counters["ends"]) == (0, dict(both.ends)), "what an ended one counted stays counted"
