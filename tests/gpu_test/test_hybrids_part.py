"""The part `hybrids`: which servers it needs, what it asks, and what makes it fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvbaton.engines.vllm.models.tiny_hybrids import HYBRIDS
from kvbaton_proof.gpu_test import gpu_hybrids, trial
from kvbaton_proof.gpu_test.sizes import CPU, STANDARD
from kvbaton_proof.rig import meters, oracle
from kvbaton_proof.rig.client import Answer
from kvbaton_proof.rig.oracle import Right
from kvbaton_proof.rig.record import Book

ANSWER = ("a", "b", "c", "d")
SIZES = msgspec.structs.replace(CPU, hybrids=("mamba2",), hybrid_tokens=(2, 5, 9), damaged=2)


def test_each_model_has_an_engine_alone_and_two_also_a_pair_without_prefix_cache() -> None:
    specs = {spec.name: spec for spec in gpu_hybrids.specs(STANDARD)}
    assert set(STANDARD.hybrids) <= set(HYBRIDS)
    assert [name for name in specs if name.endswith("-uncached")] == ["falcon-h1-uncached", "qwen3-next-uncached"]
    assert all(not specs[f"{kind}-alone"].connector and specs[kind].has_control for kind in STANDARD.hybrids)


def test_what_shares_a_beginning_shares_it_with_what_was_handed_over() -> None:
    asked = gpu_hybrids.questions(SIZES, "mamba2")
    for prompt, longer in zip(asked.fresh["pull"], asked.sharing, strict=True):
        assert longer[: len(prompt)] == prompt and len(longer) > len(prompt)
    assert len({tuple(prompt) for prompt in asked.everything()}) == len(asked.everything())


class Site:
    """A pair whose answers, counters and control are as a case says."""

    def __init__(self, flag: Path, *, wrong: bool, extra: int, blind: bool) -> None:
        self.flag, self.wrong, self.extra, self.blind = flag, wrong, extra, blind
        self.delivered = 0

    async def answer(self, session: object, *urls: object, **options: object) -> Any:
        prompt = next(each for each in urls if isinstance(each, list))
        self.delivered += 1
        damaged = self.flag.exists() and not self.blind
        tokens = ("x", *ANSWER[1:]) if self.wrong or damaged else ANSWER
        return Answer(tokens=tokens, cached=len(prompt) - 1 - self.extra)

    def group(self, name: str) -> Any:
        async def figures(session: object) -> dict[str, float]:
            return {'kvbaton_ends_total{end="delivered"}': float(self.delivered)}

        engine = SimpleNamespace(url=name, figures=figures)
        spec = SimpleNamespace(prefix_caching=True, connector="kvbaton")
        shared = {"is_up": True, "commands": list, "flag": self.flag, "spec": spec, "name": name}
        return SimpleNamespace(**shared, alone=engine, p=engine, d=engine, router=engine)


@pytest.mark.parametrize(
    ("site", "missed"),
    [
        ({}, []),
        ({"wrong": True}, ["pull", "stream", "push", "beginning known"]),
        ({"extra": 1}, ["pull"]),
        ({"blind": True}, ["control: damage is seen"]),
    ],
)
def test_it_fails_for_a_wrong_answer_a_token_too_many_and_a_control_that_sees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: dict[str, Any], missed: list[str]
) -> None:
    case: dict[str, Any] = {"wrong": False, "extra": 0, "blind": False, **site}
    made = Site(tmp_path / "flag", **case)

    async def learned(session: object, url: str, prompts: list[Any], *more: object, **options: object) -> list[Right]:
        return [Right(ANSWER, (1.0,) * 4)] * len(prompts)

    async def calm(*told: object) -> bool:
        return True

    monkeypatch.setattr(oracle, "learned", learned)
    monkeypatch.setattr(meters, "at_rest", calm)
    monkeypatch.setattr(trial, "both_legs", made.answer)
    monkeypatch.setattr(trial, "ask", made.answer)
    book = Book(tmp_path, "standard", "cpu", {}, "test")
    groups = {name: made.group(name) for name in ("mamba2", "mamba2-alone")}
    session: Any = None
    asyncio.run(gpu_hybrids.run(SIZES, groups, session, book.begin("hybrids"), lambda text: None))
    bad = [each.name.removeprefix("mamba2: ") for each in book.record.parts["hybrids"].verdicts if not each.ok]
    assert bad == missed
