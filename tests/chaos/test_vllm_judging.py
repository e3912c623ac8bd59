"""What comes of a step is judged on stand-ins of P and D: every planted misbehaviour is seen, and good ones pass."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton_proof.chaos import strangers
from kvbaton_proof.chaos.chaos_plan import Step, from_json, to_json
from kvbaton_proof.chaos.fault_catalogue import BY_NAME, FAULTS, ON_VLLM, Moment
from kvbaton_proof.chaos.outcome import Row
from kvbaton_proof.chaos.vllm import vllm_judge, vllm_run, vllm_steps
from kvbaton_proof.chaos.vllm.vllm_judge import Pair, Well, row_of
from kvbaton_proof.chaos.vllm.vllm_steps import DO, MUTATIONS, poisoned, standard
from kvbaton_proof.rig.client import Answer, Tally, ask
from kvbaton_proof.rig.connectors import CONNECTORS, given
from kvbaton_proof.rig.server import EngineError
from tests.chaos.vllm_stand_in import Habits, right, stand_ins

SHORT_S = 0.05
STEPS = standard("kvbaton", 1).steps


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here has to wait for a real engine."""
    for name in ("LOADED_S", "PENDING_S", "LATE_S", "ABORT_LOAD_S", "ABORT_AFTER_S", "RETRY_S", "FREE_S"):
        monkeypatch.setattr(vllm_steps, name, SHORT_S)
    for name, count in {"FLOOD": 12, "REUSES": 8, "HELD": 4, "LATE": 4, "ABORT_CLIENTS": 4, "IDLE": 5}.items():
        monkeypatch.setattr(vllm_steps, name, count)
    monkeypatch.setattr(vllm_steps, "STRANGERS_S", 0.3)
    monkeypatch.setattr(vllm_steps, "SETTLE_S", 0.0)
    for name in ("RECOVER_S", "REST_S", "GRACE_S", "LEASE_S", "FIGURES_LAG_S"):
        monkeypatch.setattr(vllm_judge, name, 0.3)
    monkeypatch.setattr(vllm_judge, "RECOVER_S", 3.0)  # in which there is a probe, and it is answered
    monkeypatch.setattr(vllm_judge, "LOOK_S", 0.02)
    monkeypatch.setattr(vllm_judge, "PROBE_DEADLINE_S", 3.0)
    for name in ("DEADLINE_S", "CROWDED_DEADLINE_S", "POISON_DEADLINE_S"):
        monkeypatch.setattr(vllm_steps, name, 5.0)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that are well: nothing runs out only because the machine is busy."""
    for name in ("RECOVER_S", "REST_S", "GRACE_S", "LEASE_S", "FIGURES_LAG_S", "PROBE_DEADLINE_S"):
        monkeypatch.setattr(vllm_judge, name, 20.0)
    for name in ("DEADLINE_S", "CROWDED_DEADLINE_S", "POISON_DEADLINE_S"):
        monkeypatch.setattr(vllm_steps, name, 20.0)


def row(tmp_path: Path, step: Step, spoil: Callable[[Habits, Habits], None], *, after: bool = False) -> Row:
    """One step on stand-ins; what is spoilt is so from the start, or only once the step is over."""
    step = Step(step.at_s, step.fault, step.target, step.moment, min(step.seconds, SHORT_S), step.detail)

    async def carried_out() -> Row:
        async with stand_ins(tmp_path) as (pair, p, d):
            if not after:
                spoil(p, d)
            async with contextlib.AsyncExitStack() as later:
                scene = vllm_steps.Scene(pair, step, random.Random(1), later)
                await vllm_steps.DO[step.fault](scene)
                if after:
                    spoil(p, d)
                well = await vllm_judge.examined(pair, time.monotonic(), time.monotonic)
            return row_of(step, 0.0, scene.tally, well, scene.note)

    return asyncio.run(carried_out())


def nothing(p: Habits, d: Habits) -> None:
    pass


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("step", STEPS, ids=[step.title() for step in STEPS])
def test_engines_that_behave_keep_every_promise(step: Step, tmp_path: Path) -> None:
    found = row(tmp_path, step, nothing)
    assert found.ok, found
    assert found.right == found.requests or found.fault == "abort"
    assert found.right > 0 or found.fault in ("kill", "abort"), "else this step tries nothing"


@pytest.mark.usefixtures("patience")
def test_p_is_killed_while_d_reads_and_others_are_served(tmp_path: Path) -> None:
    found = row(tmp_path, Step(0, "kill", "p0", Moment.MID_COPY, detail="under load"), nothing)
    assert found.ok and found.right > vllm_steps.MID_COPY, "some of them are of the load"
    assert row(tmp_path, Step(0, "kill", "p0", Moment.MID_COPY), nothing).right == vllm_steps.MID_COPY


FLOOD = Step(0, "flood")


def test_a_wrong_answer_is_seen(tmp_path: Path) -> None:
    found = row(tmp_path, FLOOD, lambda p, d: setattr(d, "wrong", True))
    assert found.wrong > vllm_steps.FLOOD and not found.ok and found.recover_s is None


def test_an_answer_that_is_wrong_after_the_fault_is_wrong_too(tmp_path: Path) -> None:
    found = row(tmp_path, FLOOD, lambda p, d: setattr(d, "wrong", True), after=True)
    assert found.right == vllm_steps.FLOOD and found.wrong >= vllm_judge.PROBES
    assert found.requests == found.right + found.wrong and "0 right" in found.note


def test_a_hang_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_steps, "POISON_DEADLINE_S", 0.2)
    found = row(tmp_path, Step(0, "poison", "d0", detail="no source"), lambda p, d: setattr(d, "silent", True))
    assert found.late == 2 and found.requests == 2 and not found.ok
    assert "no answer" in found.note


def test_what_is_left_in_an_engine_is_seen(tmp_path: Path) -> None:
    found = row(tmp_path, FLOOD, lambda p, d: setattr(p, "held_blocks", 7))
    assert found.left_over == 7 and found.wrong == 0 and not found.ok


def test_a_dead_engine_is_seen(tmp_path: Path) -> None:
    found = row(tmp_path, FLOOD, lambda p, d: setattr(d, "ill", True), after=True)
    assert found.dead == 1 and found.recover_s is None and not found.ok
    assert "d0 died" in found.note


def test_right_answers_without_a_handoff_are_not_recovery(tmp_path: Path) -> None:
    found = row(tmp_path, FLOOD, lambda p, d: setattr(d, "hands_over", False))
    assert found.right == vllm_steps.FLOOD and found.recover_s is None and not found.ok
    assert "nothing is handed over any more" in found.note


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("hands_over", [True, False])
def test_a_connector_of_a_user_is_judged_by_what_d_did_not_compute(
    hands_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = 'mine={"kv_connector": "X", "kv_role": "kv_both"}'
    given(line)
    monkeypatch.setitem(CONNECTORS, "mine", CONNECTORS.pop("mine"))  # forgotten again afterwards
    assert {step.detail for step in standard("mine", 1).steps if step.fault == "poison"} == set(vllm_steps.ANYBODYS)

    async def well() -> Well:
        async with stand_ins(tmp_path) as (pair, _, d):
            pair.connector, d.hands_over = "mine", hands_over
            return await vllm_judge.examined(pair, time.monotonic(), time.monotonic)

    found = asyncio.run(well())
    assert (found.recover_s is not None) == hands_over
    assert found.note == "" if hands_over else "nothing is handed over any more" in found.note
    told = vllm_run.outcome(standard("mine", 3), 1.0, (), (), (), Counter())
    assert shlex.split(told.replay)[7:] == [line, "--seed", "3"]
    told = vllm_run.outcome(standard("mine", 3, ["replay"]), 1.0, (), (), (), Counter())
    assert told.replay.endswith("--faults 'replay d0 used ticket,replay d0 foreign ticket'")


def test_errors_are_counted_by_kind_and_are_no_broken_promise(tmp_path: Path) -> None:
    step = Step(0, "poison", "d0", detail="both flags")

    async def carried_out() -> Row:
        async with stand_ins(tmp_path) as (pair, _p, d), contextlib.AsyncExitStack() as later:
            scene = vllm_steps.Scene(pair, step, random.Random(1), later)
            d.refuses = True
            await vllm_steps.DO[step.fault](scene)
            d.refuses = False
            well = await vllm_judge.examined(pair, time.monotonic(), time.monotonic)
            return row_of(step, 0.0, scene.tally, well, scene.note)

    found = asyncio.run(carried_out())
    assert found.errors == 2 and "2 x status 500" in found.note and found.ok


def test_a_tally_judges_each_way_a_request_can_end() -> None:
    tally = Tally()
    for told in (
        Answer(tokens=("a",)),
        Answer(tokens=("b",)),
        Answer(late=True, error="late"),
        Answer(error="status 500"),
    ):
        tally.count(told, ["a"])
    assert (tally.right, tally.wrong, tally.late, tally.errors) == (1, 1, 1, Counter({"status 500": 1}))
    assert tally.requests == 4


def test_an_answer_that_is_no_completion_is_an_error(tmp_path: Path) -> None:
    async def told() -> Answer:
        async with stand_ins(tmp_path) as (pair, _p, _d):
            return await ask(pair.session, f"{pair.d.url}/nowhere", [1, 2], deadline_s=20)

    assert asyncio.run(told()).error == "status 404"


def test_the_outcome_sums_its_rows_and_keeps_what_broke() -> None:
    plan = standard("kvbaton", 3, ["flood", "abort"])
    good = row_of(plan.steps[0], 1.0, Tally(right=4), Well(recover_s=0.5, rest_s=9.0), "")
    bad = row_of(plan.steps[1], 2.0, Tally(right=1, wrong=2), Well(dead=("d0",), left_over=3), "seen")
    found = vllm_run.outcome(plan, 10.0, [good, bad], [], [], Counter())
    assert (found.requests, found.right, found.wrong, found.dead, found.left_over) == (7, 5, 2, 1, 3)
    assert good.ok and not bad.ok and not found.ok
    assert "nothing held 9 s after" in good.note
    assert found.replay.endswith("--connector kvbaton --seed 3 --faults abort,flood"), "only these were run"
    assert vllm_run.outcome(plan, 10.0, [good], [], [], Counter()).ok
    assert not vllm_run.outcome(plan, 10.0, [good], [], ["could not"], Counter()).ok


def test_the_right_answers_differ_between_prompts() -> None:
    assert right([1, 2, 3]) != right([1, 2, 4])


def test_what_cannot_be_begun_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(vllm_run.VllmRunError, match="earthquake"):
        vllm_run.run("kvbaton", 1, lambda text: None, tmp_path, ["earthquake"])
    with pytest.raises(vllm_run.VllmRunError, match="is not a program"):
        vllm_run.run("kvbaton", 1, lambda text: None, tmp_path, vllm_python="/nowhere/python")
    assert list(tmp_path.iterdir()) == []


async def lives_after(tmp_path: Path, spoil: Callable[[Habits], None]) -> tuple[int, int]:
    async with stand_ins(tmp_path) as (pair, _p, d):
        spoil(d)
        problems: list[str] = []
        assert await vllm_run.judged(pair, FLOOD, 1, time.monotonic(), Counter(), problems) is not None
        assert problems == []
        return pair.p.lives, pair.d.lives


@pytest.mark.usefixtures("patience")
def test_what_is_well_is_not_started_again(tmp_path: Path) -> None:
    assert asyncio.run(lives_after(tmp_path, lambda d: None)) == (0, 0)
    assert asyncio.run(lives_after(tmp_path, lambda d: setattr(d, "ill", True))) == (0, 1)


def test_what_is_not_well_is_started_again_though_nobody_died(tmp_path: Path) -> None:
    assert asyncio.run(lives_after(tmp_path, lambda d: setattr(d, "hands_over", False))) == (1, 1)


def test_an_engine_that_never_comes_back_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Pair, *names: str) -> None:
        if names:
            raise EngineError(f"{names[0]} did not serve")

    async def problems() -> list[str]:
        async with stand_ins(tmp_path) as (pair, _p, d):
            d.hands_over = False
            found: list[str] = []
            assert await vllm_run.judged(pair, FLOOD, 1, time.monotonic(), Counter(), found) is None
            return found

    monkeypatch.setattr(Pair, "restart", refuse)
    assert asyncio.run(problems()) == ["after flood: p0 did not serve"]


def test_a_stranger_that_was_let_in_breaks_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def visit(*_: object) -> Counter[str]:
        return Counter({"visits": 3, strangers.LET_IN: 2})

    async def problems() -> list[str]:
        async with stand_ins(tmp_path) as (pair, _p, _d):
            found: list[str] = []
            await vllm_run.judged(pair, Step(0, "strangers", "p0"), 1, time.monotonic(), Counter(), found)
            return found

    monkeypatch.setattr(strangers, "visit", visit)
    assert asyncio.run(problems()) == ["strangers were let in 2 times"]


GIVEN: dict[str, dict[str, Any]] = {
    "kvbaton": {"do_remote_prefill": True, "mode": "pull", "ticket": "abcdef"},
    "nixl": {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[1, 2, 3]],
        "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5, "tp_size": 1,
    },
}  # fmt: skip


def test_both_connectors_get_the_same_steps() -> None:
    ours, theirs = standard("kvbaton", 1), standard("nixl", 1)
    assert ours.steps == theirs.steps and ours.connector != theirs.connector


def test_a_plan_is_kept_as_json() -> None:
    plan = standard("nixl", 4)
    assert from_json(to_json(plan)) == plan


def test_what_is_said_to_run_on_vllm_is_in_the_plan_and_can_be_done() -> None:
    faults = {step.fault for step in standard("kvbaton", 1).steps}
    assert faults == {fault.name for fault in FAULTS if fault.vllm}
    assert faults | {fault.name for fault in ON_VLLM} == set(DO)
    assert all(BY_NAME[name].promises for name in faults)


def test_titles_tell_steps_apart() -> None:
    titles = [step.title() for step in standard("kvbaton", 1).steps]
    assert len(set(titles)) == len(titles)
    assert "kill p0 mid-copy" in titles and "stop p0 mid-copy 40 s" in titles


def test_a_part_of_the_plan_is_chosen_by_fault_or_title() -> None:
    assert {step.fault for step in standard("kvbaton", 1, ["flood", "abort"]).steps} == {"flood", "abort"}
    assert [step.title() for step in standard("kvbaton", 1, ["kill p0 mid-copy"]).steps] == ["kill p0 mid-copy"]


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'earthquake', expected one of kill, stop"):
        standard("kvbaton", 1, ["flood", "earthquake"])


@pytest.mark.parametrize("connector", ["kvbaton", "nixl"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_changes_what_p_gave(name: str, connector: str) -> None:
    given = GIVEN[connector]
    before = json.dumps(given)
    bad = poisoned(name, connector, given)
    assert bad != given and json.dumps(given) == before
    assert bad["do_remote_prefill"] is True
    json.dumps(bad)


def test_a_mutation_goes_to_the_field_of_the_connector() -> None:
    assert "remote_engine_id" not in poisoned("no source", "nixl", GIVEN["nixl"])
    assert poisoned("half the blocks", "nixl", GIVEN["nixl"])["remote_block_ids"] == [[1]]
    assert poisoned("a number of 2**62", "nixl", GIVEN["nixl"])["remote_block_ids"] == [[2**62] * 3]
    assert poisoned("half the blocks", "kvbaton", GIVEN["kvbaton"])["ticket"] == "abc"
    assert "ticket" not in poisoned("no blocks", "kvbaton", GIVEN["kvbaton"])


def test_parameters_of_another_connector_are_not_mutated() -> None:
    with pytest.raises(ValueError, match="remote_block_ids"):
        poisoned("no source", "nixl", GIVEN["kvbaton"])
