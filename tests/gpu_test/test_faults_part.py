"""The faults of a GPU machine: their order, what is held against whom, and the memory that the dead leave."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.outcome import Outcome, Row
from kvbaton_proof.chaos.vllm import fault_table
from kvbaton_proof.chaos.vllm.vllm_judge import Well
from kvbaton_proof.chaos.vllm.vllm_steps import DO
from kvbaton_proof.gpu_test import gpu_faults
from kvbaton_proof.gpu_test.gpu_faults import START_S, Meeting
from kvbaton_proof.gpu_test.gpu_machine import MemoryWatch
from kvbaton_proof.gpu_test.sizes import CPU, QUICK, STANDARD, Sizes
from kvbaton_proof.rig.connectors import D, P
from kvbaton_proof.rig.record import Book, Page
from kvbaton_proof.rig.servers import GIB

GOOD = Row(at_s=0, title="abort", fault="abort", promises=(1, 3), requests=2, right=2, recover_s=0.5)


def outcome(connector: str, *rows: Row, problems: tuple[str, ...] = ()) -> Outcome:
    counts = {"requests": 0, "right": 0, "errors": 0, "wrong": 0, "late": 0, "dead": 0, "left_over": 0}
    return Outcome(
        plan="standard", seed=1, engine="vllm", connector=connector, seconds=1.0, rows=rows, problems=problems, **counts
    )


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Book(tmp_path, "standard", "cuda", {}, "").begin("faults")


def test_kills_come_last_and_every_step_can_be_done() -> None:
    steps = gpu_faults.steps(STANDARD)
    kinds = [step.fault for step in steps]
    assert kinds == sorted(kinds, key=lambda kind: kind == "kill")
    assert set(kinds) <= set(DO)
    assert len({step.title() for step in steps}) == len(steps)


def test_only_the_named_steps_are_done() -> None:
    sizes = msgspec.structs.replace(CPU, faults=("abort", "kill p0 mid-copy"))
    assert [step.fault for step in gpu_faults.steps(sizes)] == ["abort", "kill"]
    assert gpu_faults.named(["kill p0 under load", "kill p0 mid-copy under load", "poison"])
    with pytest.raises(ValueError, match="earthquake"):
        gpu_faults.named(["earthquake"])


def test_what_kills_nixl_comes_after_its_kills_and_nothing_is_lost() -> None:
    steps = gpu_faults.steps(STANDARD)
    ours, theirs = (gpu_faults.order(name, steps) for name in ("kvbaton", "nixl"))
    assert ours == steps and sorted(map(repr, theirs)) == sorted(map(repr, steps))
    assert [step.fault for step in theirs[-len(gpu_faults.POISONS) :]] == ["poison"] * len(gpu_faults.POISONS)
    assert [step for step in ours if step.fault == "kill"] == [step for step in theirs if step.fault == "kill"]


def test_all_of_it_fits_with_130_s_for_models_and_a_start_and_15_for_answers() -> None:
    assert 130.0 + 15.0 + sum(gpu_faults.takes(step, STANDARD) for step in gpu_faults.steps(STANDARD)) <= 450.0


def test_both_connectors_get_servers_that_differ_in_nothing_else() -> None:
    ours, theirs = (spec for spec in gpu_faults.specs(STANDARD) if spec.connector)
    assert msgspec.structs.replace(theirs, connector="kvbaton", name=ours.name) == ours
    assert [spec.connector for spec in gpu_faults.specs(QUICK)] == ["", "kvbaton"]


def test_what_speaks_against_kvbaton_is_missed(page: Page) -> None:
    wrong = msgspec.structs.replace(GOOD, title="late-decode", wrong=1)
    gpu_faults._told({"kvbaton": outcome("kvbaton", GOOD, wrong)}, {}, page)
    assert {each.name: each.ok for each in page.part.verdicts} == {"abort": True, "late-decode": False}


def test_steps_that_were_not_run_are_missed_and_told_in_one_line_each(page: Page) -> None:
    both = {"kvbaton": outcome("kvbaton", GOOD), "nixl": outcome("nixl", GOOD)}
    gpu_faults._told(both, {"kvbaton": ["reset", "abort"], "nixl": ["poison", "kill"]}, page)
    assert [each.ok for each in page.part.verdicts] == [True, False]
    assert page.part.verdicts[1].reached == "not run: reset; abort"
    assert len(page.part.notes) == 1 and page.part.notes[0].endswith("poison; kill")


def test_memory_that_stays_mapped_is_missed_though_the_row_is_good(page: Page) -> None:
    row = msgspec.structs.replace(GOOD, title="kill p0", note="2.0 GiB of P's memory free again only: mapped still")
    gpu_faults._told({"kvbaton": outcome("kvbaton", row)}, {}, page)
    assert [each.ok for each in page.part.verdicts] == [True, False]


def test_what_speaks_against_nixl_is_told_and_not_judged(page: Page) -> None:
    dead = msgspec.structs.replace(GOOD, dead=1, recover_s=None)
    both = {"kvbaton": outcome("kvbaton", GOOD), "nixl": outcome("nixl", dead, problems=("P is gone",))}
    gpu_faults._told(both, {"kvbaton": [], "nixl": []}, page)
    page.end()
    assert page.part.ok
    assert "**1 dead**" in page.part.tables[0].rows[0][4] and page.part.notes == ["NixlConnector: P is gone"]


def test_without_kvbaton_there_is_nothing_good_to_say(page: Page) -> None:
    gpu_faults._told({"nixl": outcome("nixl", GOOD)}, {}, page)
    page.end()
    assert not page.part.ok


def test_a_connector_that_was_not_run_is_a_dash() -> None:
    rows = fault_table.lines(outcome("kvbaton", GOOD), None)
    assert [row[4] for row in rows] == ["-", "-"] and len(rows[0]) == len(fault_table.HEAD)


class TestDead:
    def pair(self, levels: list[int], level: int | None = 20 * GIB) -> gpu_faults.WatchedPair:
        return gpu_faults.WatchedPair(
            "kvbaton", Path(), {}, None, [], [], [], lambda text: None,  # type: ignore[arg-type]
            memory=MemoryWatch(lambda: levels.pop(0) if len(levels) > 1 else levels[0], 8 * GIB, 0.3, level),
        )  # fmt: skip

    def test_a_dead_p_gives_its_cache_back(self) -> None:
        pair = self.pair([20 * GIB, 11 * GIB])
        asyncio.run(pair.died(P))
        assert [each.after_s is not None for each in pair.memory.freed] == [True]

    def test_a_cache_that_d_keeps_mapped_is_seen(self) -> None:
        pair = self.pair([18 * GIB])
        asyncio.run(pair.died(P))
        assert [each.after_s for each in pair.memory.freed] == [None]

    @pytest.mark.parametrize(("names", "level"), [((D,), 20 * GIB), ((P, D), 20 * GIB), ((P,), None), ((), 20 * GIB)])
    def test_nothing_is_claimed_of_others_or_where_nobody_says(self, names: tuple[str, ...], level: int | None) -> None:
        pair = self.pair([0], level)
        asyncio.run(pair.died(*names))
        assert pair.memory.freed == []


class Played:
    """An engine that says what is done to it; a start takes a while."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def kill(self) -> None:
        self._told.append(f"{self.name} killed")

    def start(self) -> None:
        self._told.append(f"{self.name} started")

    async def ready(self, session: object) -> None:
        await asyncio.sleep(0.05)
        self._told.append(f"{self.name} up")


def pairs(told: list[str], *connectors: str, until: float = float("inf")) -> list[gpu_faults.WatchedPair]:
    """Pairs on one GPU whose memory is watched for a moment."""
    turn, meeting = asyncio.Lock(), Meeting(len(connectors))
    found = []
    for rank, connector in enumerate(connectors):

        class Telling(gpu_faults.WatchedPair):
            async def died(self, *names: str) -> None:
                told.append(f"{self.connector} watched")
                await asyncio.sleep(0.02)
                told.append(f"{self.connector} watched no more")

        engines = {name: Played(f"{connector} {name}", told) for name in (P, D)}
        found.append(
            Telling(
                connector, Path(), engines, None, [], [], [], lambda text: None,  # type: ignore[arg-type]
                turn=turn, meeting=meeting, rank=rank, until=until,
            )
        )  # fmt: skip
    return found


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do what they must to an engine, and are always good."""

    async def examined(*_: object) -> Well:
        return Well(recover_s=0.1)

    async def judged(pair: gpu_faults.WatchedPair, step: Step, *_: object) -> Row:
        if step.fault == "kill":
            await pair.restart(step.target)
        elif step.fault == "poison" and pair.connector == "nixl":
            await pair.restart(D)
        return msgspec.structs.replace(GOOD, title=step.title(), fault=step.fault)

    monkeypatch.setattr(gpu_faults, "examined", examined)
    monkeypatch.setattr(gpu_faults, "judged", judged)


def carried_out(told: list[str], found: list[gpu_faults.WatchedPair], page: Page, sizes: Sizes) -> list[Outcome]:
    async def main() -> list[Outcome]:
        done = [gpu_faults._carried_out(pair, sizes, page, lambda text: None) for pair in found]
        return await asyncio.wait_for(asyncio.gather(*done), 60)

    return asyncio.run(main())


@pytest.mark.usefixtures("played")
def test_nobody_kills_or_starts_while_another_is_watched_and_starts_overlap(page: Page) -> None:
    told: list[str] = []
    found = pairs(told, "kvbaton", "nixl")
    sizes = msgspec.structs.replace(STANDARD, faults=("kill p0 mid-copy under load", "poison"))
    ended = carried_out(told, found, page, sizes)
    assert all(len(each.rows) == len(gpu_faults.steps(sizes)) for each in ended)
    watched, starting = "", set()
    for each in told:
        who, _, what = each.rpartition(" ")
        if what == "watched":
            assert not watched and not starting
            watched = each
        elif what == "more":
            watched = ""
        else:
            assert not watched, each
            starting ^= {who} if what in ("started", "up") else set()
    kills = told[: told.index("nixl p0 up") + 1]
    assert kills.index("nixl p0 started") < kills.index("kvbaton p0 up"), "starts overlap"
    assert kills.index("kvbaton p0 killed") < kills.index("nixl p0 killed"), "what NIXL leaves mapped comes after"
    assert all("successor served" in row.note for one in ended for row in one.rows if row.fault == "kill")


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(("until", "rows"), [(float("inf"), len(gpu_faults.steps(CPU))), (0.0, 0)])
def test_every_step_is_done_or_told_as_not_run(until: float, rows: int, page: Page) -> None:
    found = pairs([], "kvbaton", "nixl", until=until)
    for each, pair in zip(carried_out([], found, page, CPU), found, strict=True):
        assert len(each.rows) == rows and len(each.rows) + len(pair.not_run) == len(gpu_faults.steps(CPU))
        assert not pair.turn.locked() and not pair.has_turn


@pytest.mark.usefixtures("played")
def test_cheap_steps_leave_time_for_the_kills(page: Page) -> None:
    kills = sum(gpu_faults.takes(step, CPU) for step in gpu_faults.steps(CPU) if step.fault == "kill")
    found = pairs([], "kvbaton", until=time.monotonic() + kills + 3.0)
    ended = carried_out([], found, page, CPU)[0]
    assert [row.fault for row in ended.rows] == ["kill", "kill"] and "abort" in found[0].not_run[-6]


@pytest.mark.usefixtures("played")
def test_who_dies_when_there_is_no_time_for_a_start_stays_dead_and_keeps_nobody_waiting(page: Page) -> None:
    told: list[str] = []
    found = pairs(told, "kvbaton", "nixl", until=time.monotonic() + START_S - 1.0)
    sizes = msgspec.structs.replace(STANDARD, faults=("poison",))
    ours, theirs = carried_out(told, found, page, sizes)
    assert len(ours.rows) == len(gpu_faults.POISONS) and len(theirs.rows) == 1
    assert found[1].fallen == (D,) and len(found[1].not_run) == len(gpu_faults.POISONS) - 1 and told == []


@pytest.mark.usefixtures("played")
def test_a_pair_that_ends_early_keeps_nobody_waiting(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    good = gpu_faults.judged

    async def judged(pair: gpu_faults.WatchedPair, *others: object) -> Row | None:
        return None if pair.connector == "nixl" else await good(pair, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_faults, "judged", judged)
    ours, theirs = carried_out([], found := pairs([], "kvbaton", "nixl"), page, CPU)
    assert len(ours.rows) == len(gpu_faults.steps(CPU)) and theirs.rows == ()
    assert len(found[1].not_run) == len(gpu_faults.steps(CPU)) - 1
