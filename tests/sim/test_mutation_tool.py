"""The mutation tool: each operator finds its places, names last, a switch takes effect and leaves nothing behind."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.protocol.geometry import progress
from kvbaton.protocol.legality import Verdict
from kvbaton.protocol.machines import lease
from kvbaton_proof.sim import cover, reach
from kvbaton_proof.sim.campaign import pool
from kvbaton_proof.sim.looking import Seen, look
from kvbaton_proof.sim.mutants import hunting, kept, mutating, mutation, mutation_operators, survey, under_test
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.mutation import Mutant
from kvbaton_proof.sim.mutants.mutation_operators import Edit

BY_TESTS_MAX = 0.2
"""Of the kept mutants, those that worlds do not see."""


def arguments_of(function: Any) -> list[inspect.Parameter]:
    function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
    return list(inspect.signature(function).parameters.values())


def test_what_is_written_by_hand_takes_the_arguments_of_what_it_replaces(monkeypatch):
    """Three were caught by the error of their own call, for the code had an argument more."""
    seen: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def patched(owner: Any, name: Any, replacement: Any) -> Iterator[None]:
        original = owner[name] if isinstance(owner, dict) else vars(owner)[name]
        if inspect.isroutine(original) or isinstance(original, property):
            seen.append((f"{mutant.name}: {name}", original, replacement))
        yield

    monkeypatch.setattr(mutation, "_patched", patched)
    for mutant in MUTANTS:
        with mutant.switch():
            pass
    assert len(seen) > len(MUTANTS) / 2
    takes_any = inspect.Parameter.VAR_POSITIONAL
    wrong = [
        name
        for name, original, replacement in seen
        if not any(each.kind is takes_any for each in arguments_of(replacement))
        and len(arguments_of(replacement)) != len(arguments_of(original))
    ]
    assert not wrong


def found(source: str) -> list[Edit]:
    tree = ast.parse(textwrap.dedent(source))
    function = tree.body[-1]
    assert isinstance(function, ast.FunctionDef)
    return list(mutation_operators.edits(function))


def mutants(source: str, operator: str, *arguments: Any, **others: Any) -> Iterator[Any]:
    """What each mutant of the last function answers."""
    text = textwrap.dedent(source)
    for at, edit in enumerate(found(text)):
        if edit.operator == operator:
            tree = ast.parse(text)
            function = tree.body[-1]
            assert isinstance(function, ast.FunctionDef)
            list(mutation_operators.edits(function))[at].make()
            scope: dict[str, Any] = dict(others)
            exec(compile(tree, "sample", "exec"), scope)
            yield scope[function.name](*arguments)


GUARDED = """
def f(x):
    if x > 3:
        return "much"
    return "little"
"""


def test_a_guard_is_dropped_or_always_holds():
    assert list(mutants(GUARDED, "guard", 5)) == ["little"]
    assert list(mutants(GUARDED, "always", 1)) == ["much"]


def test_a_choice_is_forced_both_ways():
    source = """
    def f(x):
        if x:
            y = 1
        else:
            y = 2
        return y if x else -y
    """
    assert list(mutants(source, "never", True)) == [2, -1]
    assert list(mutants(source, "always", False)) == [-1, 2]


def test_comparisons_are_turned_and_off_by_one():
    assert list(mutants(GUARDED, "edge", 3)) == ["much"]
    assert list(mutants(GUARDED, "turn", 5)) == ["little"]
    chained = "def f(x):\n    return 0 <= x < 3\n"
    assert list(mutants(chained, "edge", 0)) == [False, True]
    assert list(mutants(chained, "edge", 3)) == [False, True]
    assert list(mutants("def f(x):\n    return x in (1,)\n", "turn", 1)) == [False]


def test_logic_is_swapped_and_each_operand_forgotten():
    source = "def f(a, b):\n    return a and b\n"
    assert list(mutants(source, "logic", True, False)) == [True]
    assert list(mutants(source, "operand", True, False)) == [False, True]
    assert list(mutants("def f(a):\n    return not a\n", "turn", True)) == [True]


def test_numbers_and_bounds_are_off_by_one():
    assert list(mutants("def f(xs):\n    return xs[1]\n", "off_up", "abc")) == ["c"]
    assert list(mutants("def f(xs):\n    return xs[1]\n", "off_down", "abc")) == ["a"]
    bounded = "def f(xs, n):\n    return xs[:n]\n"
    assert list(mutants(bounded, "off_up", "abc", 1)) == ["ab"]
    assert list(mutants(bounded, "off_down", "abc", 1)) == [""]
    assert list(mutants("def f(n):\n    return list(range(n))\n", "off_down", 2)) == [[0]]
    assert next(mutants("def f(n):\n    return n // 2\n", "off_up", 3)) == 2
    assert list(mutants("def f(a, b):\n    return a + b\n", "arithmetic", 3, 1)) == [2]
    assert list(mutants("def f(xs):\n    return min(xs)\n", "other", [1, 2])) == [2]


def test_a_bound_is_not_kept_and_an_error_is_passed_on():
    assert list(mutants("def f(x):\n    return max(x, 3)\n", "bound", 1)) == [1, 3]
    caught = """
    def f(words):
        try:
            return int(words)
        except ValueError:
            return 0
    """
    with pytest.raises(ValueError, match="invalid literal"):
        next(mutants(caught, "uncaught", "x"))


def test_fields_are_forgotten():
    source = """
    def f(make):
        box = make()
        box.size = 3
        box.seen[1] = 4
        return box.size, box.seen
    """
    assert list(mutants(source, "forget", lambda: SimpleNamespace(size=0, seen={}))) == [(0, {1: 4}), (3, {})]


def test_an_argument_is_forgotten_where_it_has_a_default():
    def shout(word: str, times: int = 1) -> str:
        return word * times

    function = ast.parse("def f():\n    return shout('x', times=3)\n").body[0]
    assert isinstance(function, ast.FunctionDef)

    named = list(mutation_operators.edits(function, lambda callee: inspect.signature(shout)))
    assert [edit.what for edit in named if edit.operator == "default"] == ["shout('x', times=3) -> without times"]
    nameless = list(mutants("def f(x):\n    return dict(a=x)\n", "default", 3))
    assert nameless == [{"a": None}]


def test_a_loop_ends_after_its_first_pass():
    source = """
    def f(xs):
        n = 0
        for x in xs:
            if not x:
                continue
            n = n + x
        return n, [y for y in xs]
    """
    assert list(mutants(source, "once", [1, 2])) == [(1, [1, 2]), (3, [1])]
    assert list(mutants("def f(xs):\n    while xs:\n        xs.pop()\n    return xs\n", "once", [1, 2])) == [[1]]


def test_a_call_is_left_out_and_a_function_returns_at_once():
    source = """
    def f(xs) -> None:
        xs.append(1)
        xs.append(2)
    """
    xs: list[int] = []
    assert list(mutants(source, "drop", xs)) == [None, None]
    assert xs == [2, 1]
    assert list(mutants(source, "early", xs)) == [None]
    assert xs == [2, 1]
    asked = "def f(x) -> bool:\n    y = x\n    return y\n"
    assert list(mutants(asked, "early", 0)) == [True, False]
    assert list(mutants(asked, "turn", 0)) == [True]


def test_what_is_only_told_is_left_alone():
    source = """
    def f(self, x):
        '''Words.'''
        assert x > 0
        log.warning("%d", x + 1)
        self.desk.count("late")
        self.counters["late"] += 1
        self.told = str(x)[:DETAIL_CHARS_MAX]
        raise ProtocolError(f"{x + 1}: too much")
    """
    assert [edit.operator for edit in found(source)] == ["forget", "drop"]
    assert found("def __init__(self):\n    self.x = 1\n") == []


def test_names_last_when_other_functions_change():
    before = ast.parse("def f(x):\n    return x > 1\n\ndef g(x):\n    return x < 2\n")
    after = ast.parse("def f(x):\n    return x > 1 and x < 5\n\ndef g(x):\n    return x < 2\n")

    def names(tree: ast.Module) -> set[str]:
        of_g = mutating._found("protocol.machines.lease", tree, "g")
        return {place.name for place, _ in of_g}

    assert names(before) == names(after) != set()
    every = [place.name for place in mutating.places("protocol.machines.lease")]
    assert len(every) == len(set(every))
    assert {name.split(":")[1] for name in every} >= {"judge", "Lease.used_up"}


def test_everybody_who_has_imported_a_function_runs_the_mutant():
    places = [place for place in mutating.places("protocol.machines.lease") if place.function == "judge"]
    imported_before, code = lease.judge, lease.judge.__code__
    with mutating.switched(places[0].name):
        assert imported_before.__code__ is not code
    assert lease.judge.__code__ is code


def test_a_property_is_mutated_too_and_put_back_after_an_exception():
    name = next(place.name for place in mutating.places("protocol.machines.lease") if place.function == "Lease.used_up")
    fget = lease.Lease.__dict__["used_up"].fget
    code = fget.__code__
    with pytest.raises(ZeroDivisionError), mutating.switched(name):
        assert fget.__code__ is not code
        raise ZeroDivisionError
    assert fget.__code__ is code


def test_a_row_of_a_table_is_forgotten_while_it_is_switched_on():
    rows = [place for place in mutating.places("protocol.machines.lease") if place.operator == "row"]
    assert rows[0].what == "GROWING, EXTENDED: GROWING -> late"
    assert {place.function for place in rows} == {"LEASE", "READER"}
    growing, extended = lease.LeaseState.GROWING, lease.LeaseEvent.EXTENDED
    with mutating.switched(rows[0].name):
        assert lease.LEASE.step(growing, extended) is Verdict.LATE
    assert lease.LEASE.step(growing, extended) is growing


def test_an_edit_that_compiles_to_the_same_is_known():
    some = mutating.places("protocol.geometry.progress")
    assert not all(mutating.is_equivalent(place.name) for place in some)
    assert progress.__name__ == "kvbaton.protocol.geometry.progress"


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "protocol.machines.lease:judge:guard:99",
        "protocol.nowhere:f:guard:1",
        "protocol.machines.lease:gone:guard:1",
    ],
)
def test_a_name_without_a_place_is_an_error(name: str):
    with pytest.raises(mutating.Vanished, match=name.split(":", maxsplit=1)[0]), mutating.switched(name):
        pass


def test_a_place_is_followed_within_its_function_and_not_beyond():
    place = next(place for place in mutating.places("protocol.machines.lease") if place.function == "judge")
    moved = place.name.rsplit(":", 1)[0] + ":7"
    assert mutating.place_of(moved, place.what) == place
    with pytest.raises(mutating.Vanished, match="no longer there"):
        mutating.place_of(place.name, "something else -> nothing")


def test_every_kept_mutant_is_still_a_place_in_the_code():
    lines = kept.read()
    gone = []
    for name, what in [*((line.name, line.what) for line in lines), *kept.equivalent().items()]:
        try:
            mutating.place_of(name, what)
        except mutating.Vanished as error:
            gone.append(str(error))
    assert gone == [], "hunt again (tools/kept_mutants.py) or take the line out"
    assert len({line.name for line in lines}) == len(lines)
    assert len(kept.every()) >= 150
    by_tests = sum(not kept.catcher_of(name).isdigit() for name in kept.every())
    assert by_tests <= BY_TESTS_MAX * len(kept.every()), "the simulator sees less than it did"


def test_who_is_remembered_caught_a_mutant_that_is_there():
    catchers = kept.handwritten_catchers()
    assert set(catchers) <= {mutant.name for mutant in MUTANTS}
    assert kept.handwritten_catchers(kept.written_catchers(catchers)) == catchers


def test_a_seed_to_which_the_clean_tree_objects_proves_nothing(monkeypatch: pytest.MonkeyPatch):
    name = "commit_answered_once"
    switched = []

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        switched.append(True)
        yield
        switched.pop()

    def look_at(seed: int) -> Seen | None:
        return Seen("no leak", "always") if seed == 1 or (seed == 2 and switched) else None

    hunting._unharmed.cache_clear()
    monkeypatch.setattr(hunting, "look", look_at)
    monkeypatch.setattr(kept, "find", lambda name: Mutant(name, "13", "", switch))
    catch = hunting.hunt(name, 5, fresh=True)
    hunting._unharmed.cache_clear()
    assert (catch.caught, catch.seed, catch.seeds_needed, list(catch.passed_over)) == (True, 2, 3, [1])


def test_a_clean_world_is_looked_at_once_however_many_mutants_it_catches(monkeypatch: pytest.MonkeyPatch):
    """A hunt of hundreds takes seven times as long if each switch forgets what the clean tree does."""
    looked: list[tuple[int, bool]] = []
    code = lease.judge.__code__

    def look_at(seed: int) -> Seen | None:
        looked.append((seed, lease.judge.__code__ is code))
        return None if lease.judge.__code__ is code else Seen("no leak", "while it is on")

    hunting._unharmed.cache_clear()
    monkeypatch.setattr(hunting, "look", look_at)
    names = [place.name for place in mutating.places("protocol.machines.lease") if place.function == "judge"][:3]
    assert all(catch.caught for catch in hunting.hunt_all(names, 1, fresh=True))
    hunting._unharmed.cache_clear()
    assert looked.count((0, True)) == 1 and looked.count((0, False)) == len(names) == 3


def test_a_kept_line_says_what_it_must():
    by_world = kept.Kept("protocol.machines.lease:judge:guard:1", "6", "a -> b | c", "7")
    by_test = kept.Kept("protocol.machines.lease:judge:guard:2", "6", "a -> b", "tests/x.py::test_y[[True]]")
    assert kept.read(kept.written([by_world, by_test])) == [by_world, by_test]
    with pytest.raises(ValueError, match="has 2 fields, not 4"):
        kept.read("protocol.machines.lease:judge:guard:1 || 6\n")


def test_a_mutant_that_never_returns_is_seen_and_the_next_world_is_well(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvbaton_proof.sim.looking.SEED_CPU_S", 2.0)
    name = next(
        place.name
        for place in mutating.places("protocol.machines.context")
        if place.function == "Timers.pop_due" and place.operator == "turn" and "due > now" in place.what
    )
    with mutating.switched(name):
        seen = look(0)
    assert seen is not None and seen.promise.startswith("no ")
    assert look(0) is None


def test_a_drawing_is_spread_and_repeats_itself():
    modules = ("protocol.machines.lease", "protocol.geometry.progress", "node.epochs")
    drawn = survey.draw(modules, 24, 3)
    assert drawn == survey.draw(modules, 24, 3) != survey.draw(modules, 24, 4)
    assert {place.module for place in drawn} == set(modules)
    assert len({place.operator for place in drawn}) >= 6
    assert len({place.name for place in drawn}) == 24


def test_what_survives_worlds_can_be_seen_by_tests():
    """And what is switched on there is on: a test that holds on the clean tree fails."""
    tests = ("tests/protocol/machines/test_lease.py",)
    with pool(1) as processes:  # as a hunt does it: pytest is not run within pytest

        def judged(name: str) -> under_test.Verdict:
            return processes.submit(under_test.judged, name, tests).result()

        assert not judged("protocol.machines.push_writer:Writer._step:always:2").caught
        verdict = judged("protocol.machines.lease:judge:guard:1")
    assert verdict.caught and verdict.test.startswith(f"{tests[0]}::")


def test_a_mutant_is_judged_by_the_tests_of_its_module_first():
    assert under_test.tests_of(["protocol.machines.lease"]) == (
        "tests/protocol/machines/test_lease.py", "tests/protocol", "tests/scenarios", "tests/upgrade",
    )  # fmt: skip
    assert under_test.tests_of(["node.epochs", "ranks.rank_host"])[:2] == (
        "tests/node/test_epochs.py", "tests/ranks/test_rank_host.py",
    )  # fmt: skip
    assert under_test.tests_of(["proof.sim.world.sim_engine"]) == ()


def test_who_caught_a_mutant_is_asked_first(monkeypatch: pytest.MonkeyPatch):
    """A test that is remembered is all that is run; one that sees it no longer is followed by worlds and all others."""
    name, asked = "commit_answered_once", []
    sees = {"tests/x.py::test_y"}

    def judge(name: str, tests: Sequence[str]) -> under_test.Verdict:
        asked.append(list(tests))
        return under_test.Verdict(bool(sees.intersection(tests)), "".join(sees.intersection(tests)))

    monkeypatch.setattr(kept, "catcher_of", lambda name: "tests/x.py::test_y")
    monkeypatch.setattr(under_test, "judged", judge)
    monkeypatch.setattr(hunting, "look", lambda seed: asked.append([seed]))
    catch = hunting.hunt(name, 2)
    assert (catch.by, catch.catcher, catch.caught, asked) == (
        "tests",
        "tests/x.py::test_y",
        False,
        [["tests/x.py::test_y"]],
    )
    sees.clear()
    asked.clear()
    assert hunting.hunt(name, 2).by == "nobody"
    assert asked[:3] == [["tests/x.py::test_y"], [0], [1]] and len(asked) == 4
    monkeypatch.setattr(under_test, "is_checkout", lambda: False)
    assert hunting.hunt(name, 2).by == "not asked"


def test_each_reason_for_an_unreached_line_names_a_function():
    there = {
        f"{module}:{span.name}" for module in (*mutating.core(), *mutating.ranks()) for span in reach.functions(module)
    }
    assert sorted(set(cover.reasons()) - there) == []
    with pytest.raises(ValueError, match="reason"):
        cover.reasons("protocol.machines.lease:judge\n")


def test_lines_are_counted_by_the_worlds_that_reach_them():
    modules = ("protocol.machines.lease", "node.epochs")
    reached = reach.together([reach.reached_by(modules, [0]), reach.reached_by(modules, [1])])
    del reached["node.epochs"]
    why = {"node.epochs:EpochTable.all_of": "why", "protocol.machines.lease:gone": "stale"}
    figures = cover.summed(modules, reached, why)
    missed = {each.function: each.reason for each in figures.missed}
    assert missed["node.epochs:EpochTable.all_of"] == "why"
    assert missed["node.epochs:EpochTable.raise_epoch"] == ""
    assert "protocol.machines.lease:new_lease" not in missed
    assert figures.stale_reasons == ["protocol.machines.lease:gone"]
    assert figures.share_in_functions < figures.share < 1.0
    assert not figures.holds
    place = next(place for place in mutating.places("protocol.machines.lease") if place.function == "Lease.used_up")
    assert set(survey.seeds_for(place, reached)) <= {0, 1} != set()
