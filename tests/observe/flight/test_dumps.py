"""Records on disk: bounded, private, never in the way."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from kvbaton.observe.flight import dumps as under_test
from kvbaton.observe.flight.dumps import DumpError, Dumps, prepared, read
from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment

GOOD = Flight(FlightSeat.DECODE, "d0", handoff="ab.0", moments=(Moment("asked", 1.0),), end="delivered")
BAD = Flight(FlightSeat.DECODE, "d0", handoff="cd.0", moments=(Moment("asked", 2.0),), end="stale", detail="reused")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written by the end of a `close`, also where the disk or the machine stands still."""
    monkeypatch.setattr(under_test, "CLOSE_S", 60.0)


def test_failures_are_written_as_they_happen_and_nothing_else(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path / "f", "d0", list)
    for flight in (GOOD, BAD, GOOD, BAD):
        dumps.on_flight(flight)
    dumps.close()
    (path,) = (tmp_path / "f").iterdir()
    assert read(path) == [BAD, BAD]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_all_there_is_is_written_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumps = Dumps(tmp_path, "d0", lambda: [GOOD, BAD])
    with caplog.at_level(logging.WARNING):
        dumps.ask()
        dumps.close()
    (path,) = tmp_path.glob("d0.*.dump.jsonl")
    assert read(path) == [GOOD, BAD]
    assert str(path) in caplog.text and "2 records" in caplog.text


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "FAILED_BYTES_MAX", 300)
    monkeypatch.setattr(under_test, "DUMPS_MAX", 2)
    dumps = Dumps(tmp_path, "d0", lambda: [GOOD])
    for _ in range(50):
        dumps.on_flight(BAD)
    for _ in range(5):
        dumps.ask()
    dumps.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len([name for name in sizes if ".dump." in name]) == 2
    failed = {name: size for name, size in sizes.items() if "failed" in name}
    assert sorted(failed) == ["d0.failed.jsonl", "d0.failed.jsonl.1"] and max(failed.values()) < 600


def test_a_worker_whose_name_begins_another_leaves_that_ones_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "DUMPS_MAX", 1)
    for name in ("p.1", "p", "p"):
        dumps = Dumps(tmp_path, name, lambda: [GOOD])
        dumps.ask()
        dumps.close()
    assert sorted(path.name.partition(".2")[0] for path in tmp_path.iterdir()) == ["p", "p.1"]


def test_a_record_that_cannot_be_made_costs_only_itself(tmp_path: Path) -> None:
    asked = list[int]()

    def flights() -> list[Flight]:
        asked.append(1)
        if len(asked) == 1:
            raise ZeroDivisionError
        return [GOOD]

    dumps = Dumps(tmp_path, "d0", flights)
    dumps.ask()
    dumps.ask()
    dumps.close()
    (path,) = tmp_path.iterdir()
    assert read(path) == [GOOD]


def test_a_disk_that_fails_is_said_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    dumps = Dumps(place, "d0", list)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            dumps.on_flight(BAD)
        dumps.close()
    assert caplog.text.count("flights-not-written") == 1


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "QUEUED_MAX", 0)
    dumps = Dumps(tmp_path, "d0", list)
    dumps.on_flight(BAD)
    dumps.ask()
    dumps.close()
    assert dumps.dropped == 1 and list(tmp_path.iterdir()) == []


def test_a_directory_that_somebody_else_put_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DumpError, match="not a directory of this user; name another with --flight-dir"):
        prepared(tmp_path / "link")


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    place = tmp_path / "f"
    place.mkdir(mode=0o700)
    (tmp_path / "precious").write_text("kept")
    os.symlink(tmp_path / "precious", place / "d0.failed.jsonl")
    dumps = Dumps(place, "d0", list)
    dumps.on_flight(BAD)
    dumps.close()
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_list_is_read_as_well_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"seat":"decode","worker":"d0"}]')
    assert read(path) == [Flight(FlightSeat.DECODE, "d0")]
    path.write_text('{"seat":"decode","worker":"d0"}\n\n{"seat":"nowhere"}\n')
    with pytest.raises(ValueError, match="line 3"):
        read(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="x"):
        read(path)
