"""The report: what is in it, and that nothing of a member's words becomes part of the page."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.outcome import Member, Outcome, Row, Sample, Second, Seen, bare, markdown, page, write

OUTCOME = Outcome(
    plan="random", seed=7, engine="embedded", connector="kvbaton", seconds=4.0, requests=9, right=8, errors=1, wrong=0,
    late=0, dead=0, left_over=0,
    rows=(
        Row(at_s=1.0, title="kill d0 mid-copy", fault="kill", promises=(1, 2), right=3, recover_s=0.5, seconds=2.0,
            left_over=None, note="at p0: a | b"),
    ),
    members=(Member(name="d0", fds=(60, 61), threads=(18, 19), rss_mib=(80.0, 81.0), lives=2, pins=0, used_blocks=0),),
    errors_by_kind={"503:no_pair": 1}, network="namespaces", replay="kvbaton chaos --replay plan.json",
)  # fmt: skip
SEEN = Seen(
    OUTCOME, {"d0": [Sample(0.0, 1, 60, 18, 80.0), Sample(2.0, 2, 60, 18, 70.0)]},
    [Second(3, 0, 0), Second(5, 1, 0)], (), (), (), 1.25,
)  # fmt: skip


def test_the_page_has_verdict_rows_members_timeline_and_the_command_that_repeats_it() -> None:
    said = markdown(SEEN)
    assert "every promise held" in said
    assert "| 1.0 s | kill d0 mid-copy | 1, 2 | 3 | 0 | 0 | 0 | 0 | 0.5 s | at p0: a / b |" in said
    assert "| d0 | 2 | 60 → 61 | 18 → 19 | 80 → 81 |" in said
    assert "503:no_pair: 1" in said
    assert "kvbaton chaos --replay plan.json" in said
    assert "kill d0 mid-copy\n" in said


def test_a_broken_promise_is_said_first() -> None:
    broken = msgspec.structs.replace(OUTCOME, wrong=1, problems=("d0: holds 1 pins",))
    said = markdown(msgspec.structs.replace(SEEN, outcome=broken, wrongs=("expected 'a', got 'b'",)))
    assert said.startswith("# kvbaton chaos: a promise broke\n")
    assert "- d0: holds 1 pins" in said
    assert "- expected 'a', got 'b'" in said


def test_words_of_members_are_escaped() -> None:
    broken = msgspec.structs.replace(OUTCOME, problems=("<script>alert(1)</script>",))
    said = page(msgspec.structs.replace(SEEN, outcome=broken))
    assert "<script" not in said
    assert "&lt;script&gt;" in said


def test_the_timeline_is_one_picture_of_load_faults_and_memory() -> None:
    said = page(SEEN)
    assert said.count("<svg") == 3
    assert said.count("<polyline") == 2
    assert "kill d0 mid-copy" in said


def test_a_run_of_which_only_the_outcome_is_left_has_a_report_too(tmp_path: Path) -> None:
    write(tmp_path, bare(msgspec.structs.replace(OUTCOME, members=())))
    told = json.loads((tmp_path / "outcome.json").read_text())
    assert told["ok"] is True
    assert told["seed"] == 7
    assert "Timeline" not in (tmp_path / "report.md").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()
