"""Which parts run, what a record keeps over several calls, and what the page says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton_proof.gpu_test import command, gpu_answers, gpu_faults, timing
from kvbaton_proof.gpu_test.command import ABOUT, acts
from kvbaton_proof.gpu_test.sizes import CPU, QUICK, STANDARD, sizes_of
from kvbaton_proof.rig import record
from kvbaton_proof.rig.record import Book


def book(directory: Path, plan: str = "standard", device: str = "cuda") -> Book:
    return Book(directory, plan, device, {"gpu": "one"}, "python -m kvbaton_proof.gpu_test")


class TestActs:
    def test_the_standard_plan_has_every_part_once(self) -> None:
        found = [name for act in acts("cuda", False, None) for name in act]
        assert sorted([*found, "sglang"]) == sorted(ABOUT) == sorted(command.RUN)

    def test_another_engine_is_started_only_where_it_is_named(self) -> None:
        assert acts("cpu", False, ["sglang"]) == acts("cuda", True, ["sglang"]) == [["sglang"]]
        assert not any("sglang" in act for quick in (True, False) for act in acts("cuda", quick, None))

    def test_named_parts_keep_the_acts_in_which_they_share_servers(self) -> None:
        assert acts("cuda", True, ["load", "answers", "timing"]) == [["answers"], ["timing", "load"]]

    def test_a_part_that_there_is_not_is_named(self) -> None:
        with pytest.raises(ValueError, match="--part: got 'speed', expected one of answers, "):
            acts("cuda", False, ["answers", "speed"])

    def test_servers_of_one_act_have_names_of_their_own(self) -> None:
        for sizes in (STANDARD, QUICK, CPU):
            for act in acts("cuda", False, None):
                found = {spec.name: spec for name in act for spec in command.specs(name, sizes)}
                for name in act:
                    assert all(found[spec.name] == spec for spec in command.specs(name, sizes))

    def test_timing_and_load_share_their_servers(self) -> None:
        assert command.specs("timing", STANDARD) == command.specs("load", STANDARD) != []

    def test_a_rehearsal_is_small_whatever_else_is_asked_for(self) -> None:
        assert sizes_of("cpu", True) is sizes_of("cpu", False) is CPU
        assert sizes_of("cuda", True) is QUICK


class TestRecord:
    def test_parts_of_earlier_calls_stay_and_a_part_that_is_run_again_is_replaced(self, tmp_path: Path) -> None:
        first = book(tmp_path)
        first.begin("answers").verdict("a", 1, "1", True)
        first.begin("bytes").verdict("b", 1, "1", True)
        again = book(tmp_path)
        again.begin("answers").verdict("c", 2, "2", True)
        found = record.read(tmp_path / record.FILE)
        assert [each.name for each in found.parts["answers"].verdicts] == ["c"]
        assert [each.name for each in found.parts["bytes"].verdicts] == ["b"]
        assert len(found.commands) == 2

    @pytest.mark.parametrize(("plan", "device"), [("quick", "cuda"), ("standard", "cpu")])
    def test_nothing_is_added_to_the_record_of_another_plan_or_device(
        self, tmp_path: Path, plan: str, device: str
    ) -> None:
        book(tmp_path).begin("answers")
        assert book(tmp_path, plan, device).record.parts == {}

    def test_every_line_is_on_disk_at_once(self, tmp_path: Path) -> None:
        found = book(tmp_path).begin("answers")
        table = found.table("t", ["a"])
        for write in (lambda: found.verdict("v", 1, "1", True), lambda: found.row(table, 7), lambda: found.note("n")):
            before = (tmp_path / record.FILE).read_bytes()
            write()
            assert (tmp_path / record.FILE).read_bytes() != before

    def test_a_part_is_good_only_if_it_ended_and_was_judged(self, tmp_path: Path) -> None:
        found = book(tmp_path).begin("answers")
        assert not found.part.ok
        found.end()
        assert not found.part.ok, "nothing was judged"
        found.verdict("told", 1, "2", False, judged=False)
        assert not found.part.ok
        found.verdict("judged", 1, "1", True)
        assert found.part.ok
        found.verdict("judged", 1, "2", False)
        assert not found.part.ok

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text('{"a": 1}')
        with pytest.raises(ValueError, match="not a record"):
            record.read(tmp_path / "x.json")


class TestPage:
    def test_what_was_missed_stands_first_and_what_did_not_end_is_missed(self, tmp_path: Path) -> None:
        kept = book(tmp_path)
        good = kept.begin("answers")
        good.verdict("tokens", "all", "all", True)
        good.end()
        bad = kept.begin("timing")
        bad.verdict("leg", "1.5", "at most 1.3", False)
        bad.verdict("peer", "9", "at most 1.3", False, judged=False)
        text = record.drawn(kept.record, ABOUT)
        rows = [line for line in text.splitlines() if line.startswith("| `")]
        assert [row.rsplit("|", 2)[1].strip() for row in rows] == [
            "**missed**",
            "**missed**",
            "holds",
            "told, not judged",
        ]
        assert "ended" in rows[1]

    def test_a_rehearsal_says_so(self, tmp_path: Path) -> None:
        assert "rehearsal" in record.drawn(book(tmp_path, device="cpu").record, ABOUT)
        assert "rehearsal" not in record.drawn(book(tmp_path / "other").record, ABOUT)

    def test_cells_cannot_break_the_table(self, tmp_path: Path) -> None:
        found = book(tmp_path)
        found.begin("answers").verdict("a|b\nc", "x", "y", False)
        assert "| a/b c | x | y |" in record.drawn(found.record, ABOUT)


class TestCommand:
    def test_the_list_names_every_part(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--list"]) == 0
        told = capsys.readouterr().out
        assert all(f"{name} " in told for name in ABOUT)

    def test_the_page_of_a_run_that_was_killed_is_drawn_from_its_record(self, tmp_path: Path) -> None:
        found = book(tmp_path).begin("answers")
        found.verdict("tokens", "all", "all", True)
        assert command.main(["--page", "--out", str(tmp_path)]) == 1, "it did not end"
        assert "ended from outside" in (tmp_path / command.PAGE).read_text()
        found.end()
        assert command.main(["--page", "--out", str(tmp_path)]) == 0

    @pytest.mark.parametrize(
        ("words", "said"), [(["--part", "nothing"], "--part: got 'nothing'"), (["--device", "tpu"], "invalid choice")]
    )
    def test_what_there_is_not_is_refused(
        self, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err

    def test_faults_are_named_by_title_or_by_kind(self) -> None:
        assert gpu_faults.named(["abort", "kill p0 mid-copy"]) == ("abort", "kill p0 mid-copy")
        with pytest.raises(ValueError, match="--faults: got 'earthquake'"):
            gpu_faults.named(["earthquake"])


class TestSizes:
    def test_every_variant_has_an_engine_alone_that_runs_its_steps_the_same_way(self) -> None:
        for sizes in (STANDARD, QUICK, CPU):
            alone = {spec.variant.graphs for spec in gpu_answers.specs(sizes) if not spec.connector}
            assert alone == {variant.graphs for variant in sizes.variants}

    def test_d_is_short_of_blocks_once_answers_grow_and_not_before(self) -> None:
        for sizes, block in ((STANDARD, 16), (QUICK, 16), (CPU, 128)):
            one = -(-(sizes.preempt_tokens + sizes.preempt_prompts) // block)
            grown = -(-(sizes.preempt_tokens + sizes.preempt_answer) // block)
            at_once = min(sizes.at_once, sizes.preempt_prompts, (sizes.d_blocks - 1) // one)
            assert at_once * grown > sizes.d_blocks - 1

    def test_the_servers_of_timing_hold_the_longest_prompt_and_the_crowd(self) -> None:
        for spec in timing.specs(STANDARD):
            assert spec.max_model_len > max(STANDARD.timed_tokens)
            assert spec.cache_bytes > STANDARD.crowd * STANDARD.crowd_tokens * 128 * 1024
