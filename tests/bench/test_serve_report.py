"""Ratios with their spread, the verdict, tables, the page, the picture, and the object that programs read."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from kvbaton_proof.bench.load.open_loop import Answer, Record
from kvbaton_proof.bench.load.request_plan import Ask, Piece
from kvbaton_proof.bench.serve.serve_parts import TIMES, Part, Turn, Used, part_of, quantiles, times_of, together
from kvbaton_proof.bench.serve.serve_report import (
    Report,
    Spread,
    base_of,
    complaints,
    findings,
    notes,
    plot,
    ratios,
)


def a_turn(number: int, target: str, count: int, seconds: float, ttft_s: float, used: Used | None = None) -> Turn:
    answer = Answer(ttft_s, ttft_s + 0.03, (0.01, 0.02), 3, b"x")
    records = [Record(Ask(index, 0.0, (Piece("u", 8),), 3), 0.0, 1.0, answer) for index in range(count)]
    return Turn(
        round=number, target=target, records=records, seconds=seconds, planned=count, is_timed=False,
        used=used or Used(),
    )  # fmt: skip


def a_part(number: int, target: str, req_per_s: float = 10.0, ttft_ms: float = 100.0, **more: Any) -> Part:
    found = part_of(a_turn(number, target, 4, 4 / req_per_s, ttft_ms / 1e3, more.pop("used", None)), None)
    return msgspec.structs.replace(found, **more)


def a_report(parts: list[Part], **more: Any) -> Report:
    names = list(dict.fromkeys(each.target for each in parts))
    pool = a_turn(0, "", 8, 1.0, 0.1)
    answers = [each.answer for each in pool.records if each.answer is not None]
    totals = [
        together([msgspec.structs.replace(pool, target=name)], [each for each in parts if each.target == name], None)
        for name in names
    ]
    values: dict[str, Any] = {
        "ok": True, "wrong": (), "notes": (), "stopped": False, "date": "2026-01-02", "machine": "2 cores",
        "versions": {"kvbaton": "1"}, "command": "kvbaton bench serve", "seconds": 3.0, "load_before": 0.5,
        "engine": "embedded", "options": {"rounds": 2}, "order": [(each.round, each.target) for each in parts],
        "targets": totals, "parts": parts, "ratios": ratios(parts, names),
        "quantiles": {name: {time: quantiles(times_of(answers, time)) for time in TIMES} for name in names},
    }  # fmt: skip
    return Report(**values | more)


THREE_ROUNDS = [
    a_part(1, "aggregated"), a_part(1, "pull", 8.0, 150.0), a_part(2, "aggregated", 5.0), a_part(2, "pull", 5.0, 300.0),
    a_part(3, "aggregated", 4.0), a_part(3, "pull", 2.0, 110.0),
]  # fmt: skip


def test_a_ratio_is_taken_within_a_round_and_told_with_its_spread() -> None:
    (found,) = ratios(THREE_ROUNDS, ["aggregated", "pull"])
    assert (found.target, found.base) == ("pull", "aggregated")
    assert found.by_metric["req/s"] == Spread(0.8, 0.5, 1.0, 3, above=0, below=2)
    assert found.by_metric["TTFT p50"] == Spread(1.5, 1.1, 3.0, 3, above=3, below=0)
    assert found.by_metric["goodput/s"] is None


def test_a_round_that_only_one_has_counts_for_no_ratio() -> None:
    (found,) = ratios([*THREE_ROUNDS, a_part(4, "aggregated", 99.0)], ["aggregated", "pull"])
    assert found.by_metric["req/s"] == Spread(0.8, 0.5, 1.0, 3, above=0, below=2)
    assert ratios([a_part(1, "aggregated")], ["aggregated", "pull"]) == []


@pytest.mark.parametrize(
    ("above", "below", "is_decided"),
    [
        (0, 0, False),
        (5, 0, False),
        (6, 0, True),
        (0, 6, True),
        (7, 1, False),
        (8, 1, True),
        (9, 2, False),
        (10, 2, True),
    ],
)
def test_rounds_decide_when_chance_would_hardly_have_them_agree(above: int, below: int, is_decided: bool) -> None:
    assert Spread(1.0, 1.0, 1.0, above + below, above, below).is_decided is is_decided


def test_others_are_compared_with_the_aggregated_engines_or_with_the_first() -> None:
    assert base_of(["pull", "aggregated"]) == "aggregated" and base_of(["b", "a"]) == "b"


def test_what_is_wrong_is_counted_by_name() -> None:
    failed = a_part(1, "pull", right=1, errors={"short answer": 2, "status 503": 1})
    assert complaints([failed], exact=True) == [
        "pull, round 1: 3 of 4 requests failed: 2 × short answer, 1 × status 503"
    ]
    assert complaints([a_part(1, "pull", sent=3, right=3)], exact=True) == [
        "pull, round 1: only 3 of 4 requests were sent"
    ]
    assert complaints([a_part(1, "pull", sent=3, right=3)], exact=True, stopped=True) == []
    assert complaints([a_part(1, "pull", planned=None, sent=0, right=0)], exact=True) == [
        "pull, round 1: nothing was sent"
    ]
    held = a_part(2, "push", used=Used(held=("d0 has 3 blocks pinned",)))
    assert complaints([held], exact=False) == ["push, round 2: d0 has 3 blocks pinned"]
    assert complaints([msgspec.structs.replace(held, unfinished=1)], exact=False, stopped=True) == []
    assert complaints(THREE_ROUNDS, exact=True) == []


def test_other_answers_are_wrong_where_engines_are_exact_and_only_there() -> None:
    other = a_part(1, "pull", same_answers=3, compared_answers=4)
    assert complaints([other], exact=True) == ["pull, round 1: 1 of 4 answers are not the first target's"]
    assert complaints([other], exact=False) == []


def test_tables_have_every_target_time_and_ratio() -> None:
    found = findings(a_report(THREE_ROUNDS))
    for text in (found.as_text(), found.as_page()):
        assert "aggregated" in text and "8 of 8" in text
        assert all(name in text for name in ("TTFT", "TPOT", "ITL", "E2E"))
        assert "pull / aggregated" in text and "0.80 (0.50 to 1.00)" in text
    assert len(findings(a_report([a_part(1, "pull")])).tables) == 2, "one target has no ratios"


def test_the_page_says_what_rounds_decide_and_nothing_more() -> None:
    again = [msgspec.structs.replace(each, round=each.round + 3) for each in THREE_ROUNDS]
    said = findings(a_report([*THREE_ROUNDS, *again]), "x.svg").as_page()
    assert "pull beside aggregated: WORSE in TTFT p50 (1.50), TTFT p99 (1.50), E2E p50" in said
    assert "undecided in req/s" in said and "](x.svg)" in said and "    kvbaton bench serve\n" in said
    assert f"Order of the parts: {' '.join(['aggregated pull'] * 6)}." in said
    one = findings(a_report(THREE_ROUNDS)).as_page()
    assert "Fewer than 6 decide nothing" in one and "WORSE" not in one and "better in" not in one


def test_the_page_says_what_is_wrong_what_ran_and_how_busy_the_machine_was() -> None:
    busy = [a_part(1, "pull", used=Used(others_cores=0.7))]
    wrong, ran = ["pull, round 1: 3 of 4 requests failed"], {"aggregated d0": "kvbaton worker --name d0"}
    said = findings(a_report(busy, ok=False, wrong=wrong, stopped=True, commands=ran)).as_page()
    assert "**pull, round 1: 3 of 4 requests failed**" in said and "answered in full" not in said
    assert "not quiet" in said and "up to 0.70" in said and "stopped before it was done" in said
    assert "- aggregated d0: `kvbaton worker --name d0`" in said
    assert "## What ran" not in findings(a_report(THREE_ROUNDS, engine="")).as_page()


def test_the_picture_is_xml_with_a_line_for_each_target() -> None:
    report = a_report(THREE_ROUNDS)
    root = ElementTree.fromstring(plot(report))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 and plot(report) == plot(report)
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) == 101 and [x for x, _ in points] == sorted(x for x, _ in points), "slower is further right"
        assert all(0 <= x <= float(root.attrib["width"]) for x, _ in points)
        assert all(0 <= y <= float(root.attrib["height"]) for _, y in points)


def test_the_object_is_read_back_as_it_was_and_by_its_schema() -> None:
    report = a_report(THREE_ROUNDS)
    data = msgspec.json.encode(report)
    assert msgspec.json.encode(msgspec.json.decode(data, type=Report)) == data
    schema = msgspec.json.schema(Report)["$defs"]
    assert set(msgspec.json.decode(data)) == set(schema["Report"]["properties"])
    assert {"ok", "wrong", "targets", "parts", "ratios", "quantiles"} <= set(schema["Report"]["required"])
    for each in msgspec.json.decode(data)["parts"]:
        assert set(each) == set(schema["Part"]["properties"])
        assert set(each["ttft"]) == {"count", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data.replace(b'"median":', b'"middle":'), type=Report)


def test_notes_say_what_a_figure_is_worth() -> None:
    good = a_part(0, "pull", 5.0, together=0.05, held_back_p99_ms=1.0, used=Used(handed_over=4))
    assert notes([good], 5.0) == notes([good], float("inf")) == notes([good], None) == []
    bad = msgspec.structs.replace(good, together=0.4, held_back_p99_ms=99.0, used=Used(handed_over=1))
    said = notes([bad], 50.0)
    assert [line[:24] for line in said] == [
        "50 requests/s were asked", "pull: 3 of 4 requests we", "Tokens that came in one ", "Requests were sent after",
    ]  # fmt: skip
