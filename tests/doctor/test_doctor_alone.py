"""`kvbaton doctor` on a running cluster says whether D computes prompts that a P should have, and why."""

from __future__ import annotations

import pytest

from kvbaton.doctor.cluster_checks import SeenWorkerState, alone_findings, by_label, findings, lines, share_line
from kvbaton.observe.flight.worker_reports import PromptShare, WorkerGauges, share_of


def test_a_cluster_that_runs_on_d_alone_is_told_so_with_the_reason_and_the_next_step() -> None:
    found = list(alone_findings("worker d0", {"alone": 900, "planned": 100}, {"unasked": 700, "no_prefill": 200}))
    assert [each.code for each in found] == ["decode-alone", "decode-alone"]
    assert "70% of 1000 prompt tokens" in found[0].found and "unasked" in found[0].found
    assert "router" in found[0].fix
    assert "no prefill worker is registered" in found[1].found


@pytest.mark.parametrize(
    ("prompts", "alone"),
    [
        ({}, {}),
        ({"handoff": 1000, "alone": 100}, {"stale": 100}),  # a tenth is borne
        ({"alone": 99}, {"unasked": 99}),  # too few to say anything
        ({"planned": 1000, "cached": 5000}, {}),
    ],
)
def test_a_cluster_that_hands_over_is_not(prompts: dict[str, int], alone: dict[str, int]) -> None:
    assert list(alone_findings("worker d0", prompts, alone)) == []


def test_a_worker_tells_its_share_among_its_lines() -> None:
    state = SeenWorkerState("d0", "http://x", prompt_tokens={"alone": 600, "handoff": 400}, alone_tokens={"stale": 600})
    assert [line for line in lines(state) if "computed by D" in line] == [
        "  prompt tokens computed by D although a P should have: 60.0% of 1000 (stale 60.0%)"
    ]
    assert [each.code for each in findings((state,))] == ["decode-alone"]
    assert share_line({}, {}) == ""
    assert share_line({"handoff": 10}, {}).endswith("0.0% of 10")


def test_vllms_page_is_read_by_label() -> None:
    text = (
        'kvbaton_alone_tokens_total{engine="0",reason="unasked",worker="d0"} 70.0\n'
        'kvbaton_alone_tokens_total{engine="1",reason="unasked",worker="d1"} 5.0 # {handoff="x"} 1 2\n'
        'kvbaton_alone_tokens_total{engine="0",reason="stale",worker="d0"} 0.0\n'
        'kvbaton_prompt_tokens_total{engine="0",source="alone"} 9.0\n'
    )
    assert by_label(text, "alone_tokens_total", "reason") == {"unasked": 75}
    with pytest.raises(ValueError, match="many"):
        by_label('kvbaton_alone_tokens_total{reason="x"} many', "alone_tokens_total", "reason")


def test_the_share_of_a_cluster_is_that_of_its_registered_workers() -> None:
    told = {"prompt_tokens_total": 100.0, "alone_tokens_total": 40.0, "alone_tokens.stale": 40.0}
    workers = [
        WorkerGauges("d0", here=True, gauges=told),
        WorkerGauges("d1", here=True, gauges=told | {"alone_tokens.stale": float("nan"), "alone_tokens_total": -7.0}),
        WorkerGauges("gone", here=False, gauges=told),
        WorkerGauges("p0", here=True),
    ]
    assert share_of(workers) == PromptShare(200, 40, {"stale": 40})
