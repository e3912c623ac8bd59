"""The faults of a GPU machine: their order, what is held against whom, and the memory that the dead leave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvbaton.chaos import vllm_page
from kvbaton.chaos.outcome import Outcome, Row
from kvbaton.chaos.plan import Step
from kvbaton.chaos.vllm_judge import Well
from kvbaton.chaos.vllm_plan import D, P
from kvbaton.chaos.vllm_steps import DO
from kvbaton.gpu_test import faults
from kvbaton.gpu_test.record import Book, Page
from kvbaton.gpu_test.servers import GIB
from kvbaton.gpu_test.sizes import CPU, QUICK, STANDARD

GOOD = Row(at_s=0, title="abort", fault="abort", promises=(1, 3), requests=2, right=2, recover_s=0.5)


def outcome(connector: str, *rows: Row, problems: tuple[str, ...] = ()) -> Outcome:
    counts = {"requests": 0, "right": 0, "errors": 0, "wrong": 0, "late": 0, "dead": 0, "left_over": 0}
    return Outcome(
        plan="standard", seed=1, engine="vllm", connector=connector, seconds=1.0, rows=rows, problems=problems, **counts
    )


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Book(tmp_path, "standard", "cuda", {}, "").begin("faults")


def test_kills_come_first_and_every_step_can_be_done() -> None:
    steps = faults.steps(STANDARD)
    kinds = [step.fault for step in steps]
    assert kinds == sorted(kinds, key=lambda kind: kind != "kill")
    assert set(kinds) <= set(DO)
    assert len({step.title() for step in steps}) == len(steps)


def test_only_the_named_steps_are_done() -> None:
    sizes = msgspec.structs.replace(CPU, faults=("abort", "kill p0 mid-copy"))
    assert [step.fault for step in faults.steps(sizes)] == ["kill", "abort"]


def test_both_connectors_get_servers_that_differ_in_nothing_else() -> None:
    ours, theirs = (spec for spec in faults.specs(STANDARD) if spec.connector)
    assert msgspec.structs.replace(theirs, connector="kvbaton", name=ours.name) == ours
    assert [spec.connector for spec in faults.specs(QUICK)] == ["", "kvbaton"]


def test_what_speaks_against_kvbaton_is_missed(page: Page) -> None:
    wrong = msgspec.structs.replace(GOOD, title="late-decode", wrong=1)
    faults._told({"kvbaton": outcome("kvbaton", GOOD, wrong)}, page)
    assert {each.name: each.ok for each in page.part.verdicts} == {"abort": True, "late-decode": False}


def test_a_step_that_was_not_run_is_missed(page: Page) -> None:
    faults._told({"kvbaton": outcome("kvbaton", GOOD, problems=("reset: not run: no time was left",))}, page)
    assert [each.ok for each in page.part.verdicts] == [True, False]


def test_memory_that_stays_mapped_is_missed_though_the_row_is_good(page: Page) -> None:
    row = msgspec.structs.replace(GOOD, title="kill p0", note="2.0 GiB of P's memory free again only: mapped still")
    faults._told({"kvbaton": outcome("kvbaton", row)}, page)
    assert [each.ok for each in page.part.verdicts] == [True, False]


def test_what_speaks_against_nixl_is_told_and_not_judged(page: Page) -> None:
    dead = msgspec.structs.replace(GOOD, dead=1, recover_s=None)
    faults._told({"kvbaton": outcome("kvbaton", GOOD), "nixl": outcome("nixl", dead, problems=("P is gone",))}, page)
    page.end()
    assert page.part.ok
    assert "**1 dead**" in page.part.tables[0].rows[0][4] and page.part.notes == ["NixlConnector: P is gone"]


def test_without_kvbaton_there_is_nothing_good_to_say(page: Page) -> None:
    faults._told({"nixl": outcome("nixl", GOOD)}, page)
    page.end()
    assert not page.part.ok


def test_a_connector_that_was_not_run_is_a_dash() -> None:
    rows = vllm_page.lines(outcome("kvbaton", GOOD), None)
    assert [row[4] for row in rows] == ["-", "-"] and len(rows[0]) == len(vllm_page.HEAD)


class TestDead:
    def pair(self, levels: list[int], level: int | None = 20 * GIB) -> faults.WatchedPair:
        return faults.WatchedPair(
            "kvbaton", Path(), {}, None, [], [], [], lambda text: None,  # type: ignore[arg-type]
            memory=lambda: levels.pop(0) if len(levels) > 1 else levels[0], p_bytes=8 * GIB, within_s=0.3, level=level,
        )  # fmt: skip

    def test_a_dead_p_gives_its_cache_back(self) -> None:
        pair = self.pair([20 * GIB, 11 * GIB])
        asyncio.run(pair.died(P))
        assert [each.after_s is not None for each in pair.freed] == [True]

    def test_a_cache_that_d_keeps_mapped_is_seen(self) -> None:
        pair = self.pair([18 * GIB])
        asyncio.run(pair.died(P))
        assert [each.after_s for each in pair.freed] == [None]

    @pytest.mark.parametrize(("names", "level"), [((D,), 20 * GIB), ((P, D), 20 * GIB), ((P,), None), ((), 20 * GIB)])
    def test_nothing_is_claimed_of_others_or_where_nobody_says(self, names: tuple[str, ...], level: int | None) -> None:
        pair = self.pair([0], level)
        asyncio.run(pair.died(*names))
        assert pair.freed == []


def test_engines_are_started_again_only_in_turn() -> None:
    """A restart outside of a step that kills waits for whoever watches the memory."""
    pair = TestDead().pair([20 * GIB])
    order: list[str] = []

    async def ready(*names: str) -> None:
        order.append("restarted")

    class Calm:
        def kill(self) -> None: ...
        def start(self) -> None: ...

    async def main() -> None:
        pair.engines = {D: Calm()}  # type: ignore[dict-item]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(faults.WatchedPair, "ready", lambda self, *names: ready(*names))
            async with pair.turn:
                waiting = asyncio.create_task(pair.restart(D))
                await asyncio.sleep(0)
                order.append("watched")
                pair.has_turn = True
                await pair.restart(D)  # who has the turn does not wait for itself
                pair.has_turn = False
            await waiting

    asyncio.run(main())
    assert order == ["watched", "restarted", "restarted"]


@pytest.mark.parametrize(("until", "rows"), [(float("inf"), len(faults.steps(CPU))), (0.0, 0)])
def test_every_step_is_done_or_told_as_not_run(
    until: float, rows: int, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def examined(*_: object) -> Well:
        return Well(recover_s=0.1)

    async def judged(_pair: object, step: Step, *_: object) -> Row:
        return msgspec.structs.replace(GOOD, title=step.title())

    monkeypatch.setattr(faults, "examined", examined)
    monkeypatch.setattr(faults, "judged", judged)
    pair = TestDead().pair([0])
    found = asyncio.run(faults._carried_out(pair, CPU, until, page, lambda text: None))
    assert len(found.rows) == rows and len(found.rows) + len(found.problems) == len(faults.steps(CPU))
    assert not pair.turn.locked() and not pair.has_turn
