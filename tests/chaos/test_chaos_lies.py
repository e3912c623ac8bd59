"""Lies: the list, what a seed draws of it, what a plan may hold, and how what came of them is counted."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import FRAME_BYTES_MAX, decode
from kvbaton_proof.chaos.chaos_plan import Plan, Step, from_json, to_json
from kvbaton_proof.chaos.draw import Size, draw
from kvbaton_proof.chaos.liars import false_fault, lies
from kvbaton_proof.chaos.liars.liar_main import TELLINGS
from kvbaton_proof.chaos.liars.liar_post import honest_card, said
from kvbaton_proof.chaos.liars.lies import ALWAYS, BY_NAME, EACH, LIAR, LIES, Count, Guise, Tally
from kvbaton_proof.chaos.liars.lies_to_engines import huge_layout
from kvbaton_proof.chaos.members import Ports, Spec
from kvbaton_proof.chaos.outcome import Outcome, bare, markdown

TWO = Size(2, 2)
ROLES = TWO.roles()


def _steps(seed: int, minutes: float = 3.0) -> list[Step]:
    return [step for step in draw(seed, 60 * minutes, TWO).steps if step.fault == LIAR]


# --- the list


def test_every_lie_of_the_list_can_be_told_and_no_other() -> None:
    assert set(TELLINGS) == set(BY_NAME)
    assert len(BY_NAME) == len(LIES)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_for_roles_that_there_are(lie: lies.Lie) -> None:
    assert set(lie.to) <= set(ROLES.values())
    assert lie.guises
    assert lie.what


def test_no_operator_is_said_to_lie_when_it_has_somebody_drained_nor_a_store_when_it_keeps() -> None:
    assert Guise.OPERATOR not in BY_NAME["drains"].guises
    assert Guise.STORE not in BY_NAME["hoard"].guises


def test_the_page_names_every_lie_as_the_list_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()
    table = page.partition("<!-- lies -->\n")[2].partition("<!-- /lies -->")[0]
    assert table.splitlines()[2:] == [f"| `{lie.name}` | {lie.what} |" for lie in LIES]


# --- what is drawn


@pytest.mark.parametrize("seed", range(20))
def test_three_minutes_have_a_liar_for_a_p_and_one_for_a_d_and_both_write_over_memory(seed: int) -> None:
    steps = _steps(seed)
    assert {step.target[0] for step in steps} == {"p", "d"}
    for step in steps:
        assert {f"{name}@{step.target}" for name in ALWAYS} <= set(step.lies)
        assert len(step.lies) == len(set(step.lies)) == EACH + len(ALWAYS)


@pytest.mark.parametrize("seed", range(20))
def test_to_a_d_the_liar_is_a_p_and_to_a_p_never(seed: int) -> None:
    for step in _steps(seed):
        assert (step.detail == Guise.PREFILL) is step.target.startswith("d")


@pytest.mark.parametrize("seed", range(20))
def test_only_lies_that_its_guise_can_tell_are_drawn_and_only_to_those_they_are_for(seed: int) -> None:
    for step in _steps(seed):
        for told in map(lies.parse, step.lies):
            assert Guise(step.detail) in told.lie.guises
            assert ROLES[told.to] in told.lie.to


def test_seeds_draw_every_lie_in_time_and_every_guise() -> None:
    steps = [step for seed in range(40) for step in _steps(seed)]
    assert {told.lie.name for step in steps for told in map(lies.parse, step.lies)} == set(BY_NAME)
    assert {step.detail for step in steps} == {str(guise) for guise in Guise}


def test_a_replay_tells_the_same_down_to_the_last_number(tmp_path: Path) -> None:
    assert false_fault.errand_of(_scene(tmp_path), STEP).seed == false_fault.errand_of(_scene(tmp_path), STEP).seed
    other = msgspec.structs.replace(STEP, at_s=2.0)
    assert false_fault.errand_of(_scene(tmp_path), other).seed != false_fault.errand_of(_scene(tmp_path), STEP).seed


def test_the_same_seed_tells_the_same_lies_and_another_seed_others() -> None:
    assert _steps(3) == _steps(3)
    assert {step.lies for step in _steps(3)}.isdisjoint(step.lies for step in _steps(4))


def test_a_cluster_of_one_each_is_lied_to_as_well() -> None:
    for step in draw(1, 180.0, Size(1, 1), [LIAR]).steps:
        assert {told.to for told in map(lies.parse, step.lies)} <= {"p0", "d0", "router", "store"}


# --- what a plan may hold


def _plan(**changes: Any) -> bytes:
    step = {"at_s": 1, "fault": LIAR, "target": "p0", "seconds": 1, "detail": "decode", "lies": ["read-all@p0"]}
    told = {"name": "x", "seed": 1, "engine": "embedded", "steps": [{**step, **changes}]}
    return msgspec.json.encode(told)


def test_lies_are_kept_in_the_plan_in_their_order() -> None:
    plan = draw(9, 180.0, TWO)
    again = from_json(to_json(plan))
    assert [step.lies for step in again.steps] == [step.lies for step in plan.steps]
    assert from_json(_plan()).steps[0].lies == ("read-all@p0",)


@pytest.mark.parametrize(
    ("changes", "said_of_it"),
    [
        ({"lies": []}, "a liar tells some"),
        ({"fault": "kill"}, "nobody else any"),
        ({"lies": ["read-all"]}, "expected NAME@MEMBER"),
        ({"lies": ["fib@p0"]}, "got 'fib@p0', expected NAME@MEMBER with one of read-all"),
        ({"lies": ["read-all@p7"]}, r"steps\[0\].lies: read-all cannot be told to 'p7'"),
        ({"lies": ["hoard@p0"]}, r"steps\[0\].lies: hoard cannot be told to 'p0'"),
        ({"detail": "priest"}, "detail: got 'priest'"),
        ({"detail": "store", "lies": ["beyond-lease@p0"]}, "beyond-lease cannot be told by a store"),
        ({"lies": ["read-all@p0"] * 65}, r"\$\.steps\[0\]\.lies"),
    ],
)
def test_lies_that_cannot_be_told_are_refused_by_their_field(changes: dict[str, Any], said_of_it: str) -> None:
    with pytest.raises(ValueError, match=said_of_it):
        from_json(_plan(**changes))


# --- what came of it


def test_a_lie_that_was_believed_is_a_problem_with_its_evidence_and_one_that_was_refused_is_none() -> None:
    tally = Tally()
    tally.of("read-all").told = 4
    tally.of("read-all").believe("p0 gave 64 bytes")
    tally.of("read-all").believe("p0 gave 128 bytes")
    tally.of("drains").told = tally.of("drains").refused = 2
    assert tally.problems() == ["liar: read-all was believed 2 of 4 times: p0 gave 64 bytes"]
    assert lies.figures(tally)["drains"] == {"told": 2, "refused": 2, "believed": 0}


def test_tallies_of_several_steps_add_up() -> None:
    one, other = Tally({"drains": Count(2, 2)}), Tally({"drains": Count(1, 0, 1, "p0 went"), "hoard": Count(7)})
    one.add(other)
    assert one.counts == {"drains": Count(3, 2, 1, "p0 went"), "hoard": Count(7)}
    assert lies.decode(lies.encode(one)) == one


def test_the_report_has_a_line_for_every_lie_that_was_told() -> None:
    outcome = Outcome(
        plan="random", seed=1, engine="embedded", connector="kvbaton", seconds=1.0, requests=1, right=1, errors=0,
        wrong=0, late=0, dead=0, left_over=0, rows=(), lies={"drains": {"told": 3, "refused": 2, "believed": 1}},
    )  # fmt: skip
    assert f"| drains | {BY_NAME['drains'].what} | 3 | 2 | 1 |" in markdown(bare(outcome))


# --- the process


class _Printing:
    """A network on which whatever is started says `told` and ends with `status`."""

    def __init__(self, told: bytes, status: int = 0) -> None:
        self._words = [sys.executable, "-c", f"print({told.decode()!r}); raise SystemExit({status})"]

    def address(self, name: str) -> str:
        return f"10.0.0.{len(name)}"

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        assert name == LIAR
        assert argv[1:3] == ["-m", "kvbaton_proof.chaos.liars.liar_main"]
        return self._words


def _scene(tmp_path: Path, network: Any = None) -> Any:
    specs = {
        "router": Spec("router", "router", "h1", Ports(1, 2)),
        "store": Spec("store", "store", "h2", Ports(3, 4)),
        "p0": Spec("p0", "prefill", "h3", Ports(5, 6)),
    }
    lives = {"store": SimpleNamespace(log=tmp_path / "store.log")}
    fleet = SimpleNamespace(specs=specs, lives=lives, around=SimpleNamespace(keys="k"))
    return SimpleNamespace(
        fleet=fleet, network=network or _Printing(b""), rng=random.Random(1), lies=Tally(), problems=[]
    )


STEP = Step(1.0, LIAR, "p0", seconds=1.0, detail="decode", lies=("read-all@p0",))


def test_what_the_liar_was_believed_breaks_the_verdict(tmp_path: Path) -> None:
    told = lies.encode(Tally({"read-all": Count(3, 1, 2, "p0 gave 9 bytes")}))
    scene = _scene(tmp_path, _Printing(told))
    assert asyncio.run(false_fault.tell_lies(scene, STEP)) == "refused of told: read-all 1/3"
    assert scene.problems == ["liar: read-all was believed 2 of 3 times: p0 gave 9 bytes"]
    assert lies.figures(scene.lies) == {"read-all": {"told": 3, "refused": 1, "believed": 2}}


def test_a_liar_that_fails_is_no_liar_that_was_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the liar ended with status 4; see .*liar.txt"):
        asyncio.run(false_fault.tell_lies(_scene(tmp_path, _Printing(b"{}", 4)), STEP))


@pytest.mark.parametrize(
    ("guise", "name"), [("prefill", "liar"), ("decode", "liar"), ("store", "store"), ("operator", "operator-liar")]
)
def test_a_liar_holds_the_one_key_of_its_guise_and_knows_where_everybody_is(
    guise: str, name: str, tmp_path: Path
) -> None:
    step = Step(1.0, LIAR, "p0", seconds=1.0, detail=guise, lies=("read-all@p0",))
    errand = false_fault.errand_of(_scene(tmp_path), step)
    assert errand.name == name
    assert errand.members["store"].control == "tcp://h2:3"
    assert errand.members["router"].control == "tcp://h1:2"
    assert (errand.members["p0"].control, errand.members["p0"].http) == ("tcp://h3:6", "h3:5")


# --- what is said


def _framed(body: bytes) -> bytes:
    return msgspec.msgpack.encode([2, "liar", 1, 0, 0, msgspec.Raw(body)])


def test_what_is_put_together_by_hand_reads_as_a_message_where_it_is_one() -> None:
    card = honest_card("h")
    envelope, message = decode(_framed(said(m.Hello, 7, card)))
    assert message == m.Hello(7, card)
    assert envelope.sender == PeerId(envelope.worker, envelope.incarnation)


def test_the_largest_layout_still_fits_into_a_frame() -> None:
    card = honest_card("h")
    fields = {name: getattr(card, name) for name in card.__struct_fields__}
    frame = _framed(said(m.Hello, 7, list({**fields, "layout": huge_layout()}.values())))
    assert FRAME_BYTES_MAX // 2 < len(frame) <= FRAME_BYTES_MAX


def test_a_plan_without_a_liar_is_as_it_was() -> None:
    assert Plan(name="x", seed=1, engine="embedded", steps=(Step(1.0, "flood"),)).steps[0].lies == ()
