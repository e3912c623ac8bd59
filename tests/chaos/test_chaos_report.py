"""The report: what is in it, and that nothing of a member's words becomes part of the page."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvbaton_proof.chaos.outcome import Member, Outcome, Row, Sample, Second, Seen, bare, markdown, page, write
from kvbaton_proof.chaos.vllm import fault_table

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


GOOD = Row(at_s=1, title="flood", fault="flood", promises=(2, 3, 4), requests=9, right=9, recover_s=0.5)
BAD = Row(
    at_s=1, title="flood", fault="flood", promises=(2, 3, 4), requests=9, right=4, wrong=2, late=3, dead=1, left_over=5,
    note="d0 | died",
)  # fmt: skip
ALONE = Row(at_s=2, title="abort", fault="abort", promises=(1,), requests=2, right=1, errors=1, recover_s=2.0)


def outcome(connector: str, *rows: Row, seed: int = 1) -> Outcome:
    def total(name: str) -> int:
        return sum(getattr(row, name) or 0 for row in rows)

    names = ("requests", "right", "errors", "wrong", "late", "dead", "left_over")
    return Outcome(
        plan="standard", seed=seed, engine="vllm", connector=connector, seconds=300.0, rows=rows,
        **{name: total(name) for name in names},
    )  # fmt: skip


def test_both_runs_stand_side_by_side() -> None:
    drawn = fault_table.table(outcome("kvbaton", GOOD, ALONE), outcome("nixl", BAD), "a day")
    lines = {line.split(" | ")[0].strip("| "): line for line in drawn.splitlines() if line.startswith("|")}
    assert (
        "| 9 right | 0.5 s | 4 right, **2 wrong**, **3 late**, **5 left**, **1 dead** | **never** |" in lines["flood"]
    )
    assert "d0 / died" in lines["flood"], "a bar would end the cell"
    assert "| 1 right, 1 errors | 2.0 s | - | - |" in lines["abort"], "what was not run is not zero"
    assert "10 right, 1 errors, 0 wrong, 0 late, 0 left, 0 dead" in lines["**all**"]
    assert "2 of 2 kept" in lines["**all**"] and "0 of 1 kept" in lines["**all**"]
    assert {line.count(" | ") for line in lines.values()} == {len(fault_table.HEAD) - 1}
    assert "Run on a day, seed 1" in drawn


def test_runs_of_other_connectors_are_refused_and_other_seeds_told() -> None:
    assert "seeds 1 and 2" in fault_table.table(outcome("kvbaton", GOOD), outcome("nixl", BAD, seed=2), "a day")
    with pytest.raises(ValueError, match="connector: got nixl"):
        fault_table.table(outcome("nixl", GOOD), outcome("nixl", BAD), "a day")


def test_the_table_is_put_between_its_marks(tmp_path: Path) -> None:
    ours, theirs, page = tmp_path / "k.json", tmp_path / "n.json", tmp_path / "faults.md"
    ours.write_bytes(msgspec.json.encode({**msgspec.to_builtins(outcome("kvbaton", GOOD)), "ok": True}))
    theirs.write_bytes(msgspec.json.encode(outcome("nixl", BAD)))
    page.write_text(f"before\n{fault_table.BEGIN}\nold\n{fault_table.END}\nafter\n")
    assert fault_table.main([str(ours), str(theirs), "--date", "a day", "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "| flood |" in text
    assert fault_table.main([str(ours), str(theirs), "--date", "a day", "--into", str(page)]) == 0
    assert page.read_text() == text


def test_what_is_no_outcome_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "k.json").write_text("{}")
    with pytest.raises(SystemExit):
        fault_table.main([str(tmp_path / "k.json"), str(tmp_path / "k.json"), "--date", "a day"])
    assert "not an outcome" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no place for the table"):
        fault_table.put_into("a page", "a table")


def test_the_page_of_the_docs_has_a_place_for_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert fault_table.put_into(page, "a table\n").count("a table") == 1
