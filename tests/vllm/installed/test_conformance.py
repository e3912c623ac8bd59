"""The conformance suite itself: its harness is right on a right connector, and sees every way in which one is wrong.

Needs vLLM's Python: `make vllm`, then `.venv-vllm/bin/python -m pytest tests/vllm/installed/test_conformance.py`.
"""

from __future__ import annotations

import time

import pytest

from kvbaton.engines.vllm.content import vllm_compat
from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.case_registry import all_cases
from kvbaton_proof.conformance.conformance_engine import LabEngine, StepOutcome
from kvbaton_proof.conformance.conformance_oracle import WrongKvError, answer
from kvbaton_proof.conformance.lab import Lab, prompt_of

configs.prepare()
pytestmark = pytest.mark.timeout(300)  # the first import of vLLM alone takes a minute on a busy machine

PROBE = "kvbaton_proof.conformance.probe"
SHAPES = {
    "plain": configs.EngineShape(),
    "two groups": configs.EngineShape(windows=(0, 8)),
    "pipelined": configs.EngineShape(pipelined=True),
    "not aggregated": configs.EngineShape(aggregated=False),
    "blocks outermost": configs.EngineShape(layout="BLHNC"),
}


def pair(shape: configs.EngineShape, fault: str = "") -> tuple[LabEngine, LabEngine]:
    def engine(name: str, fault: str) -> LabEngine:
        return LabEngine(shape, {"name": name, "fault": fault}, module=PROBE, connector="Probe")

    return engine("p", ""), engine("d", fault)


def hand_over(p: LabEngine, d: LabEngine, prompt: list[int], steps: int = 80) -> StepOutcome:
    at_p = p.add(prompt, {"do_remote_decode": True}, max_tokens=1)
    while p.step():
        pass
    at_d = d.add(prompt, p.outcomes[at_p].params, max_tokens=5)
    for _ in range(steps):
        d.step()
    return d.outcomes[at_d]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_connector_passes(shape: str) -> None:
    p, d = pair(SHAPES[shape])
    for length in (1, 3, 4, 5, 16, 17, 40):
        prompt = prompt_of(length)
        assert hand_over(p, d, prompt).tokens == answer(prompt, 5)
    assert (p.blocks_left, d.blocks_left) == (0, 0)
    assert sum(d.watch.loads.values()) == 7
    assert not p.watch.errors + d.watch.errors


def test_a_load_that_copies_nothing_is_seen_at_the_first_token() -> None:
    p, d = pair(configs.EngineShape(), "copies nothing")
    with pytest.raises(WrongKvError, match=r"position 0 .* holds poison"):
        hand_over(p, d, prompt_of(20))


def test_a_source_that_was_reused_is_seen() -> None:
    p, d = pair(configs.EngineShape(blocks=9, prefix_caching=False))
    first = p.add(prompt_of(20, 1), {"do_remote_decode": True}, max_tokens=1)
    second = p.add(prompt_of(20, 2), max_tokens=1)
    while p.step():
        pass
    assert p.outcomes[second].reason == "length"
    d.add(prompt_of(20, 1), p.outcomes[first].params)
    with pytest.raises(WrongKvError, match="another's bytes"):
        for _ in range(40):
            d.step()


def test_layers_announced_before_the_device_has_computed_them_are_seen() -> None:
    """The connector takes a host's cache for computed when its hook is called; the suite's late device has not."""
    lab = Lab(overlapped=True, before_executing=lambda: time.sleep(0.02))
    try:
        lab.duo(configs.EngineShape(chunk_tokens=8), layerwise=True)
        with pytest.raises(WrongKvError):
            for seed in range(6):  # the first step is only listened to
                lab.finish(lab.hand_over("stream", prompt_of(60, seed)))
    finally:
        lab.close()


def test_a_drafter_that_saw_a_guess_instead_of_the_prompt_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a state P stops before the last token: what its drafter takes for it is P's own answer."""
    monkeypatch.setattr(vllm_compat, "answers_with", lambda request, token: None)
    lab = Lab()
    try:
        lab.duo(configs.EngineShape(windows=(0, configs.STATE), drafts=1, blocks=81))
        with pytest.raises(WrongKvError, match="the drafter of"):
            lab.finish(lab.hand_over("pull", prompt_of(20)))
    finally:
        lab.close()


def test_a_report_of_nobody_is_vllm_s_assertion() -> None:
    p, d = pair(configs.EngineShape(), "reports the unknown")
    with pytest.raises(AssertionError):
        hand_over(p, d, prompt_of(20))


def test_a_load_that_is_never_reported_stays_on_the_books() -> None:
    p, d = pair(configs.EngineShape(), "never reports")
    assert hand_over(p, d, prompt_of(20)).reason is None
    assert d.blocks_left == 5
    assert d.has_work


def test_a_failed_load_is_computed_here() -> None:
    p, d = pair(configs.EngineShape(), "fails")
    assert hand_over(p, d, prompt_of(20)).tokens == answer(prompt_of(20), 5)
    assert d.watch.failed
    assert d.blocks_left == 0


def test_the_names_of_cases_are_sentences_and_unique() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    assert all(len(name.split("[")[0].split("_")) >= 3 for name in names)
