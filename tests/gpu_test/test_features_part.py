"""The part `features`: which servers each needs, what makes it fail, and that one which fails spares the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvbaton.engines.vllm.models.tiny_model import KINDS
from kvbaton_proof.gpu_test import command, feature_trial, gpu_features, trial
from kvbaton_proof.gpu_test.feature_trial import Drafts, alike, rate
from kvbaton_proof.gpu_test.gpu_features import FEATURES, ServerRoom, specs
from kvbaton_proof.gpu_test.sizes import CPU, QUICK, STANDARD
from kvbaton_proof.rig import meters, servers
from kvbaton_proof.rig.client import Answer
from kvbaton_proof.rig.record import Book
from kvbaton_proof.rig.servers import Spec

ANSWER = ("a", "b", "c", "d")
SIZES = msgspec.structs.replace(CPU, feature_tokens=(2, 5, 9), damaged=2)


def by_name(name: str) -> dict[str, Spec]:
    return {spec.name: spec for spec in specs(STANDARD, FEATURES[name])}


class TestSpecs:
    def test_every_plan_names_features_that_there_are(self) -> None:
        for sizes in (STANDARD, QUICK, CPU):
            assert gpu_features.named(sizes.features) == sizes.features
        assert set(STANDARD.features) == set(FEATURES)
        with pytest.raises(ValueError, match="--features: got 'magic', expected one of eagle, "):
            gpu_features.named(["magic"])

    def test_every_feature_has_an_engine_alone_and_pairs_of_its_model_and_dtype(self) -> None:
        for name, feature in FEATURES.items():
            alone, *pairs = specs(STANDARD, feature)
            assert alone.name == f"{name}-alone" and not alone.connector
            assert {(each.model, each.dtype) for each in (alone, *pairs)} == {(feature.model, feature.dtype)}
            assert all(each.connector == "kvbaton" for each in pairs)
            assert alone.models | {kind for each in pairs for kind in each.models} <= set(KINDS)

    def test_the_engine_alone_has_the_words_of_a_d(self) -> None:
        """Else it would be right about another engine."""
        for name, feature in FEATURES.items():
            if name == "uncached":
                continue
            for pair in specs(STANDARD, feature)[1 : 1 + len(feature.pairs)]:
                assert (*pair.args, *pair.d_args) == feature.alone

    def test_drafters_with_kv_are_on_both_sides_and_n_grams_on_d_alone(self) -> None:
        for name in ("eagle", "mtp", "mtp-states", "mtp-deltas"):
            pair = by_name(name)[name]
            assert pair.args[0] == "--speculative-config" and not pair.p_args and not pair.d_args
        assert by_name("n-grams")["n-grams"].args == by_name("n-grams")["n-grams"].p_args == ()

    def test_only_pairs_that_take_over_can_be_damaged(self) -> None:
        found = by_name("fp8")
        assert found["fp8"].has_control and not found["fp8-refused"].has_control
        assert found["fp8-refused"].args == found["fp8-refused"].d_args == ()
        assert found["fp8-refused"].p_args == ("--kv-cache-dtype", "fp8")

    def test_one_can_be_run_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = command.parser()
        args = options.parse_args(["--features", "fp8,eagle", "--nixl", "off"])
        assert command._sized(args, options).features == ("fp8", "eagle")
        with pytest.raises(SystemExit):
            command._sized(options.parse_args(["--features", "magic", "--nixl", "off"]), options)
        assert "got 'magic'" in capsys.readouterr().err


class TestDrafts:
    def test_counts_are_compared_request_by_request_and_not_in_sum(self) -> None:
        ours, theirs = [Drafts(n, 9) for n in (1, 2, 3, 4)], [Drafts(n, 9) for n in (4, 3, 2, 1)]
        assert rate(ours) == rate(theirs) == "10 of 36 (28%)"
        assert alike(ours, theirs) == (0, 0.5)
        assert alike(ours, ours) == (4, 0.0)

    def test_of_no_request_everything_is_chance(self) -> None:
        assert alike([], []) == (0, 1.0) and rate([]) == "0 of 0"


def test_features_begin_when_there_is_room_for_their_servers() -> None:
    async def main() -> list[int]:
        room, at_once, seen = ServerRoom(5), 0, []

        async def one(wanted: int) -> None:
            nonlocal at_once
            async with room.taken(wanted):
                at_once += min(wanted, 5)
                seen.append(at_once)
                await asyncio.sleep(0)
                at_once -= min(wanted, 5)

        await asyncio.gather(*map(one, (3, 3, 2, 9, 1)))
        return seen

    seen = asyncio.run(main())
    assert len(seen) == 5 and max(seen) == 5


class Fake:
    """Servers of all features whose answers, counters and control are as a case says."""

    def __init__(self, directory: Path, **case: Any) -> None:
        self.directory, self.case = directory, case
        self.delivered = self.generated = self.accepted = self.external = 0
        self.counts: dict[str, int] = {}

    async def ask(self, session: object, *urls: Any, tokens: int, params: object = None, **told: Any) -> Any:
        prompt = next(each for each in urls if isinstance(each, list))
        url, more = urls[0], told.get("more", {})
        is_alone = "alone" in url or more.get("cache_salt") == "alone"
        by_handoff = len(urls) > 2 or "headers" in told
        name = url.rsplit(" ", 1)[0]
        if by_handoff and "refused" not in name:
            self.delivered += 1
        self.generated += len(ANSWER)
        accepted = (len(prompt) * 7) % 11
        self.accepted += accepted + (self.case.get("guesses", 0) if by_handoff else 0)
        if not is_alone and not by_handoff:
            self.external += len(prompt) if self.case.get("keeps", True) else 0
        damaged = (self.directory / name).exists() and not self.case.get("blind")
        doubts = self.case.get("doubts") and " pull 0 " in more.get("cache_salt", "")
        wrong = (self.case.get("wrong") and by_handoff) or damaged or doubts
        base = ("z", *ANSWER[1:]) if name.startswith("lora") and not more.get("model") else ANSWER
        answer = ("x", *base[1:]) if wrong else base
        return Answer(tokens=answer, gaps=(1.0,) * 4, cached=len(prompt) - 1 - self.case.get("extra", 0))

    async def figures(self, session: object) -> dict[str, float]:
        end = "incompatible" if self.case.get("refused") else "delivered"
        return {
            f'kvbaton_ends_total{{end="{end}"}}': float(self.delivered or 9 * bool(self.case.get("refused"))),
            feature_trial.GENERATED: float(self.generated), feature_trial.ACCEPTED: float(self.accepted),
            feature_trial.DRAFTED: float(2 * self.accepted), feature_trial.EXTERNAL: float(self.external),
        }  # fmt: skip

    @contextlib.asynccontextmanager
    async def standing(self, site: object, wanted: list[Spec], *more: object) -> AsyncIterator[dict[str, Any]]:
        if self.case.get("explodes") in {spec.name for spec in wanted}:
            raise OSError("no such port")
        yield {spec.name: self.group(spec) for spec in wanted}

    def group(self, spec: Spec) -> Any:
        log = self.directory / "d0.log"
        log.write_text(self.case.get("log", "kv_dtype: got 'auto'"))

        def engine(name: str) -> Any:
            return SimpleNamespace(name=name, url=f"{spec.name} {name}", figures=self.figures, log=log)

        is_up = spec.name != self.case.get("down")
        shared = {"is_up": is_up, "problem": "out of memory", "commands": list, "spec": spec, "name": spec.name}
        engines = {name: engine(name) for name in ("alone", "p", "d", "router")}
        return SimpleNamespace(**shared, **engines, flag=self.directory / spec.name)


def missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], **case: Any
) -> tuple[list[str], list[str]]:
    """The verdicts that do not hold, and the notes."""
    fake = Fake(tmp_path, **case)

    async def yes(*told: object) -> bool:
        return True

    for module, name in ((feature_trial, "ask"), (trial, "ask"), (trial, "both_legs")):
        monkeypatch.setattr(module, name, fake.ask)
    monkeypatch.setattr(feature_trial, "forget", yes)
    monkeypatch.setattr(feature_trial, "LAG_S", 0.0)
    monkeypatch.setattr(meters, "LAG_S", 0.0)
    monkeypatch.setattr(meters, "at_rest", yes)
    page = Book(tmp_path, "standard", "cpu", {}, "test").begin("features")
    sizes = msgspec.structs.replace(SIZES, features=features)
    site, session = servers.Site("cpu", "python3", tmp_path, tmp_path), cast("Any", None)
    asyncio.run(gpu_features.run(sizes, site, session, page, lambda text: None, stands=fake.standing))
    return [each.name for each in page.part.verdicts if not each.ok], page.part.notes


@pytest.mark.parametrize(
    ("feature", "case", "bad"),
    [
        ("eagle", {}, []),
        ("eagle", {"wrong": True}, ["pull", "stream", "push", "drafts as good as on one engine"]),
        ("eagle", {"extra": 1}, ["pull"]),
        ("eagle", {"guesses": 1}, ["drafts as good as on one engine"]),
        ("eagle", {"blind": True}, ["control: damage is seen"]),
        ("lora", {}, []),
        ("mtp", {"down": "mtp"}, ["served"]),
    ],
)
def test_it_fails_for_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: str, case: dict[str, Any], bad: list[str]
) -> None:
    found, _ = missed(tmp_path, monkeypatch, (feature,), **case)
    control = f"{feature}: control: counts of other prompts"
    assert [name for name in found if name != control] == [f"{feature}: {each}" for each in bad]
    assert (control in found) == bool(case.get("wrong")), "nothing to compare is no control"


def test_what_the_engine_alone_says_too_when_asked_again_is_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, notes = missed(tmp_path, monkeypatch, ("fp8",), wrong=True, doubts=True)
    said = [note.partition("a wrong answer; ")[2] for note in notes if "a wrong answer" in note]
    assert said[0].startswith("8 of 8 times the engine alone says it too"), "the first prompt of pull"
    assert all(note.startswith("0 of 8 times") for note in said[1:]) and len(said) > 3
    assert {"fp8: pull", "fp8: stream", "fp8: push"} <= set(found), "the others are wrong"


def test_what_the_other_connector_does_not_have_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(tmp_path, monkeypatch, ("offloading",)) == ([], [])
    found, _ = missed(tmp_path, monkeypatch, ("offloading",), keeps=False)
    lost = [f"{engine} has lost its cache, the other connector has it" for engine in ("d", "p")]
    assert found == [f"{name}: {each}" for name in ("offloading", "offloading-turned") for each in lost]


def test_a_refusal_counts_only_if_d_took_nothing_and_named_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_pair = ["fp8: pull", "fp8: stream", "fp8: push"]  # in this case nothing is handed over, there either
    found, _ = missed(tmp_path, monkeypatch, ("fp8",), refused=True)
    assert found == of_pair
    found, _ = missed(tmp_path, monkeypatch, ("fp8",), refused=True, log="refused")
    assert found == ["fp8-refused: D's log names kv_dtype", *of_pair]
    found, _ = missed(tmp_path, monkeypatch, ("fp8",))
    assert found == ["fp8-refused: nothing is taken over"]


def test_a_feature_that_fails_spares_the_others_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = missed(tmp_path, monkeypatch, ("mtp", "lora", "eagle"), explodes="mtp", down="eagle-alone")
    assert sorted(found) == ["eagle-alone: served", "mtp: ran to its end"]
    told = "\n".join(notes)
    assert "no such port" in told and "eagle-alone: out of memory" in told and "logs/eagle-alone*.log" in told
