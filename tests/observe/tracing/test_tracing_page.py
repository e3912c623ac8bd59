"""What docs/tracing.md says of spans is what is sent."""

from __future__ import annotations

import re
from pathlib import Path

from kvbaton.cli.flags.traces import BASE_VARIABLE, OFF_VARIABLE, SAMPLE_DEFAULT, TRACES_VARIABLE
from kvbaton.observe.tracing.export import ExportSettings
from kvbaton.observe.tracing.trace_spans import spans_of
from tests.observe.tracing.flights import decode, moments, prefill, router

PAGE = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text()
PROSE = " ".join(PAGE.split())


def every_span():
    pushed = moments(
        ("accepted", 0),
        ("scheduled", 0),
        ("begun", 0),
        ("offered", 3, "d0"),
        ("complete", 9),
        ("written", 12, "d0"),
        ("closed", 14),
    )
    flights = [router(retries=1), prefill(), prefill(moments=pushed), decode(), decode(end="peer_gone", detail="gone")]
    return [span for flight in flights for span in spans_of(flight)]


def test_every_span_is_in_the_table_with_its_kind_and_no_other():
    rows = re.findall(r"^\| `(kvbaton\.\w+)` \| (?:router|P|D) \| (\w+) \|", PAGE, re.MULTILINE)
    assert dict(rows) == {span.name: str(span.kind) for span in every_span()}


def test_every_attribute_is_in_the_table_and_no_other():
    table = PAGE.partition("| attribute | |")[2].partition("\n\n")[0]
    firsts = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    told = {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}
    assert told == {name for span in every_span() for name in span.attributes}


def test_numbers_and_names_of_the_page_are_those_of_the_program():
    settings = ExportSettings()
    assert f"at most {settings.flights_max:,} handoffs are queued" in PROSE
    assert f"shutdown waits {settings.close_s:.0f} s for it" in PROSE
    assert f"`--trace-sample` (default {SAMPLE_DEFAULT:.0f}, all of them)" in PROSE
    assert all(f"`{name}" in PAGE for name in (BASE_VARIABLE, TRACES_VARIABLE, OFF_VARIABLE))
