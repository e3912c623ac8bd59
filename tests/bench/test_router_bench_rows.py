"""The figures of `kvbaton bench router`: percentiles, what is added, bounds, ratios and what is held against a run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvbaton.router import policy
from kvbaton_proof.bench.kit import cpu_meter
from kvbaton_proof.bench.kit.cpu_meter import Cpu, cpu_s, descended, family
from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.router import router_rows as rows_of
from kvbaton_proof.bench.router.router_rows import DIRECT, KVBATON, KVBATON_2, MORIIO, NIXL, TOY, Level, Row, Streams
from kvbaton_proof.bench.router.several_routers import ROUTERS, SeveralLoad, as_lines, several_routers

RATE, MORE_CPU = "req/s of two processes", "CPU a request of two processes"
ONE, MANY, STREAMING = Level(False, 1), Level(False, 64), Level(True, 512)


def row(target: str, level: Level = ONE, number: int = 1, **more: Any) -> Row:
    known: dict[str, Any] = {"answered": 1000, "asked": 1000, "seconds": 2.0, "p50_ms": 0.6, "p99_ms": 1.0}
    return Row(round=number, target=target, level=level, **{**known, **more})


def streams(target: str = KVBATON, **more: Any) -> Streams:
    known = {"asked": 512, "open_at_once": 512, "complete": 512}
    return Streams(round=1, target=target, **{**known, **more})


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert rows_of.percentile(values, 0.5) == 50
    assert rows_of.percentile(values, 0.99) == 99
    assert rows_of.percentile(values, 1.0) == 100
    assert rows_of.percentile([0.002], 0.99, 1e3) == 2
    assert rows_of.percentile([], 0.5) is None


def test_cpu_is_divided_by_the_requests_of_the_window_and_is_unknown_without_any() -> None:
    assert row(KVBATON, router_cpu_s=0.8).cpu_us == pytest.approx(800)
    assert row(KVBATON, router_cpu_s=0.8, answered=0).cpu_us is None
    assert row(DIRECT).cpu_us is None


def test_what_is_added_is_held_against_the_same_round() -> None:
    rows = [
        row(DIRECT, number=1, p50_ms=0.1),
        row(KVBATON, number=1, p50_ms=0.6),
        row(DIRECT, number=2, p50_ms=1.0),
        row(KVBATON, number=2, p50_ms=1.7),
    ]
    assert rows_of.added(rows, rows[1], lambda each: each.p50_ms) == pytest.approx(0.5)
    assert rows_of.added(rows, rows[3], lambda each: each.p50_ms) == pytest.approx(0.7)
    assert rows_of.added(rows, rows[0], lambda each: each.p50_ms) is None
    assert rows_of.added(rows[1:], rows[1], lambda each: each.p50_ms) is None


def test_times_are_those_of_the_quieter_rounds_and_cpu_is_of_all() -> None:
    rows = [
        row(KVBATON, number=1, p50_ms=0.6, router_cpu_s=0.5, others_cores=0.0),
        row(KVBATON, number=2, p50_ms=9.0, router_cpu_s=0.7, others_cores=1.9),
    ]
    told = rows_of.summary(rows, KVBATON, ONE)
    assert told is not None
    assert told.p50_ms == 0.6
    assert told.cpu_us == pytest.approx(600)
    assert told.requests == 2000


def good(cpu: float = 0.5, p50: float = 0.7) -> list[Row]:
    return [
        row(DIRECT, p50_ms=0.1),
        row(DIRECT, MANY),
        row(KVBATON, p50_ms=p50, router_cpu_s=cpu),
        row(KVBATON, MANY, router_cpu_s=cpu),
        row(NIXL, p50_ms=0.4, router_cpu_s=0.4),
        row(MORIIO, p50_ms=0.4, router_cpu_s=0.25),
        row(TOY, p50_ms=2.1, router_cpu_s=2.0),
    ]


def failed(rows: list[Row], all_streams: list[Streams]) -> list[str]:
    return [each.name for each in rows_of.bounds(rows, all_streams) if not each.ok]


def test_bounds_are_met_at_their_limit_and_not_beyond() -> None:
    assert failed(good(cpu=0.8, p50=1.1), [streams()]) == []
    assert failed(good(cpu=0.801), [streams()]) == ["CPU µs a request, 1 and 64 at once"]
    assert failed(good(p50=1.102), [streams()]) == ["ms added to p50, one at once"]


def test_the_cpu_bound_is_about_the_median_of_1_and_64_at_once() -> None:
    rows = [row(KVBATON, router_cpu_s=1.0), row(KVBATON, MANY, router_cpu_s=0.5)]
    rows.append(row(KVBATON, Level(False, 512), router_cpu_s=9.0))
    assert rows_of.cpu_us(rows, KVBATON) == pytest.approx(750)


def test_what_was_not_measured_meets_no_bound() -> None:
    assert not any(bound.ok for bound in rows_of.bounds([], []))
    assert not any(bound.ok for bound in rows_of.bounds([row(TOY)], [streams(TOY)]))


@pytest.mark.parametrize(
    "more", [{"complete": 511}, {"open_at_once": 511}, {"errors": {"connection lost": 1}}], ids=str
)
def test_streams_are_whole_only_if_all_were_open_at_once_and_ended(more: dict[str, Any]) -> None:
    assert streams().is_whole
    assert failed(good(), [streams(**more)]) == ["streams open at once that ended in full"]
    (said,) = rows_of.complaints([], [streams(**more)])
    assert said.startswith("kvbaton, round 1: of 512 streams")


def test_ratios_are_ours_by_theirs_and_leave_out_what_is_missing() -> None:
    found = rows_of.ratios(good())
    assert found[MORIIO]["cpu_us"] == {"1": 2.0}
    assert found[NIXL]["added_p50_ms"] == {"1": 2.0}
    assert found[TOY]["cpu_us"] == {"1": 0.25}
    assert NIXL not in rows_of.ratios(good()[:4])


def test_two_processes_are_held_to_vllm_routers_better_rate_and_to_the_cpu_of_one() -> None:
    busy = Level(False, 512)
    rows = [
        row(KVBATON, busy, router_cpu_s=1.0, answered=1000),
        row(KVBATON_2, busy, router_cpu_s=1.98, answered=1800),
        row(NIXL, busy, answered=1500),
        row(MORIIO, busy, answered=1800),
    ]
    rate, cpu = (next(each for each in rows_of.bounds(rows, []) if what in each.name) for what in (RATE, MORE_CPU))
    assert (rate.value, rate.ok, cpu.value, cpu.ok) == (1.0, True, 1.1, True)
    assert [RATE in each for each in failed([*rows[:3], row(MORIIO, busy, answered=1810)], [])].count(True) == 1
    dearer = [rows[0], row(KVBATON_2, busy, router_cpu_s=1.99, answered=1800), *rows[2:]]
    assert [MORE_CPU in each for each in failed(dearer, [])].count(True) == 1
    assert not any(RATE in each.name for each in rows_of.bounds(rows[:2], []))
    assert not any(MORE_CPU in each.name for each in rows_of.bounds(rows[1:], []))
    assert rows_of.ratios(rows)[f"{KVBATON_2} / {NIXL}"]["req_per_s"] == {"512": 1.2}


def test_complaints_name_target_level_and_reason() -> None:
    rows = [
        row(TOY, MANY, errors={"status 500": 2, "connection lost": 1}),
        row(NIXL, STREAMING, answered=0),
        row(KVBATON, handed_over=10),
        row(MORIIO, handed_over=999, errors={"connection lost": 1}),
        row(DIRECT),
    ]
    assert rows_of.complaints(rows, []) == [
        "toy, 64 at once, round 1: 3 of 1000 requests failed (1 connection lost, 2 status 500)",
        "vllm-router-nixl, 512 streams at once, round 1: nothing was answered in the window",
        "kvbaton, 1 at once, round 1: only 10 of 1000 requests reached D with P's ticket",
        "vllm-router-moriio, 1 at once, round 1: 1 of 1000 requests failed (1 connection lost)",
    ]


def test_a_family_is_all_descendants_and_nobody_else() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 1, 13: 10}
    assert descended(10, parents) == (10, 11, 13, 12)
    assert descended(99, parents) == (99,)
    assert family(1)[0] == 1


WORKS = """
import sys, time
print("begun", flush=True)
sys.stdin.readline()
until = time.process_time() + 0.2
while time.process_time() < until:
    pass
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_familys_cpu_time_grows_with_its_work() -> None:
    words = [sys.executable, "-c", WORKS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        before = cpu_meter.read({"engines": family(child.pid)})
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        used = before.until(cpu_meter.read({"engines": family(child.pid)}))
    assert used.used["engines"] >= 0.15 and used.at >= 0.15


def test_cpu_of_a_process_that_is_gone_is_nothing() -> None:
    assert cpu_s([2**22 + 1]) == 0
    assert Cpu(1, {"router": 2}, 3).until(Cpu(3, {"router": 5}, 9)) == Cpu(2, {"router": 3}, 6)


def test_a_page_tells_figures_bounds_failures_and_what_is_missing() -> None:
    facts = RunFacts(
        date="2026-01-01", machine="2 cores", versions={"kvbaton": "0"}, command="kvbaton bench router", seconds=3.0
    )
    measured = rows_of.Measured(
        targets=[KVBATON], missing={MORIIO: "make it"}, rounds=1, window_s=0.5, rows=good(cpu=0.9)[:5],
        streams=[streams(complete=3)], failures=["toy could not be measured: away"], commands={KVBATON: "python -m x"},
    )  # fmt: skip
    text = rows_of.findings(facts, measured).as_page()
    for said in (
        "| 1 | kvbaton | 500 | 0.700 | 1.00 | 0.600 | 0.00 | 900 |",
        "kvbaton / vllm-router-nixl | 2.25 | 2.00 | 1.00 |",
        "DOES NOT HOLD: CPU µs a request, 1 and 64 at once: 900 (<= 800, aim 400)",
        "holds: ms added to p50",
        "3 of 512 ended in full",
        "vllm-router-moriio was not measured: vllm-router is not installed; make it",
        "**toy could not be measured: away**",
        "these figures are coarse",
        "`python -m x`",
    ):
        assert said in text, said


LOAD = SeveralLoad(requests=800)


def test_hits_and_balance_hold_with_more_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.routers: row for row in several_routers(LOAD, ["prefix"])}
    assert tuple(rows) == ROUTERS and as_lines([*rows.values()])[1].split()[:2] == ["prefix", "1"]
    assert all(row.hit_rate >= 0.95 * rows[1].hit_rate and row.balance < 1.35 for row in rows.values()), rows
    monkeypatch.setattr(policy, "HOME_SHARE", 0.0)
    without = {row.routers: row for row in several_routers(LOAD, ["prefix"])}
    assert rows[4].hit_rate > 1.05 * without[4].hit_rate, (rows[4], without[4])


def test_the_same_seed_gives_the_same_rows() -> None:
    short = SeveralLoad(requests=100)
    assert several_routers(short) == several_routers(short)
