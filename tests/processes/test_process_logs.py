"""Log lines: level, format, the request they are about; and a reader of stderr that does not read."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import Callable, Iterator

import pytest

from kvbaton.cli.main import main
from kvbaton.processes import process_logs
from kvbaton.processes.process_logs import LogSettings, serving_request

log = logging.getLogger("kvbaton.tests")

Logs = Callable[..., io.StringIO]


@pytest.fixture
def logs() -> Iterator[Logs]:
    """Configures, and gives what is written."""
    root = logging.getLogger()
    level, handlers, before = root.level, list(root.handlers), process_logs.current()

    def configure(**settings: str) -> io.StringIO:
        out = io.StringIO()
        process_logs.configure(LogSettings(**settings), out)  # type: ignore[arg-type]
        return out

    yield configure
    process_logs.configure(before, io.StringIO())
    root.setLevel(level)
    root.handlers[:] = handlers


async def test_a_line_has_time_level_logger_and_the_request_that_the_task_serves(logs: Logs) -> None:
    out = logs(level="info")

    async def serve(request: str) -> None:
        with serving_request(request):
            await asyncio.sleep(0)
            await asyncio.create_task(asyncio.sleep(0))
            log.info("[worker-failing] asked p0")

    await asyncio.gather(serve("req-1"), serve("req-2"))
    log.info("[stopping] of none")
    lines = out.getvalue().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO kvbaton.tests: [worker-failing] asked p0 request=req-1",
        "INFO kvbaton.tests: [worker-failing] asked p0 request=req-2",
        "INFO kvbaton.tests: [stopping] of none",
    ]
    assert len(lines[0].split(" ")[1]) == len("16:00:00,123")


def test_json_has_code_request_fields_and_traceback_as_keys(logs: Logs) -> None:
    out = logs(level="info", format="json")
    with serving_request("req-1"):
        log.info("[no-kv] %s", "p0\nforged", extra={"fields": {"status": 502}})
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("[thread-fault] it failed")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["level"] == "INFO" and first["code"] == "no-kv" and first["request"] == "req-1"
    assert first["status"] == 502 and first["message"] == "[no-kv] p0\nforged" and first["time"].endswith("Z")
    assert second["level"] == "ERROR" and "ValueError: inside" in second["traceback"] and "request" not in second


def test_no_message_makes_a_second_line_or_moves_the_cursor(logs: Logs) -> None:
    out = logs(level="info")
    log.info("%s", "a\n2026-11-17 ERROR forged\x1b[2J\r")
    assert out.getvalue().count("\n") == 1 and "\\n2026" in out.getvalue() and "\x1b" not in out.getvalue()


def test_below_the_level_nothing_is_said_and_of_libraries_only_warnings(logs: Logs) -> None:
    out = logs(level="info")
    log.debug("quiet")
    logging.getLogger("some.library").info("quiet")
    logging.getLogger("some.library").warning("said")
    assert [line.rpartition(" ")[2] for line in out.getvalue().splitlines()] == ["said"]
    out = logs(level="debug")
    logging.getLogger("some.library").info("heard")
    assert "heard" in out.getvalue()


def test_a_pipe_that_is_not_read_costs_lines_and_no_time(logs: Logs) -> None:
    logs(level="info")
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as out, os.fdopen(writing, "w") as stream:
        process_logs.configure(LogSettings(level="info"), stream)
        for number in range(2000):
            log.info("line %d %s", number, "x" * 100)  # more than a pipe holds: a write that waited would never return
        whole = os.read(out.fileno(), 1 << 20)
        log.info("after")
        later = os.read(out.fileno(), 1 << 20).decode().splitlines()
    lines = whole.decode().splitlines()
    assert all("x" * 100 in line for line in lines) and 0 < len(lines) < 2000
    assert f"[log-lines-lost] {2000 - len(lines)} lines" in later[0] and later[1].endswith("after")


def test_the_environment_says_how_and_a_bad_value_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"KVBATON_LOG_LEVEL": "DEBUG", "KVBATON_LOG_FORMAT": "json", "KVBATON_ACCESS_LOG": "errors"}
    found = process_logs.from_environment(given)
    assert found == LogSettings(level="debug", format="json", access="errors")
    assert process_logs.from_environment(found.environment) == found  # as a child reads it
    monkeypatch.setenv("KVBATON_LOG_LEVEL", "loud")
    assert main(["explain", "stale"]) == 2
    error = capsys.readouterr().err
    assert "KVBATON_LOG_LEVEL: got 'loud', expected one of debug, info, warning, error" in error
