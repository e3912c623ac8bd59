"""`--json` everywhere: one object on stdout and nothing else there, for every command that prints results."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.cli.worker import _ReadyAsJson
from kvbaton.engines.embedded.worker_options import WorkerOptions

EXEMPT = {
    "completion": "prints a script for a shell, which reads nothing else",
    "bench": "only leads to its kinds, which all have it",
}
READY_S = 60.0
KVBATON = [sys.executable, "-m", "kvbaton.cli.main"]


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    modules = {name: cli.module_of(name) for name in cli.COMMANDS}
    todo: list[tuple[str, argparse.ArgumentParser]] = [("", cli.parser_of(modules))]
    while todo:
        path, parser = todo.pop()
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        todo += [(f"{path} {name}".strip(), one) for action in below for name, one in action.choices.items()]
        yield path, parser


def test_every_command_has_the_flag_or_a_reason_not_to() -> None:
    without = {
        path
        for path, parser in parsers()
        if path and not any("--json" in action.option_strings for action in parser._actions)
    }
    assert without == set(EXEMPT)


@pytest.fixture
def key_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    directory = str(tmp_path / "keys")
    assert cli.main(["keys", "new", directory, "p0", "store"]) == 0
    capsys.readouterr()
    return directory


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    """What a command prints, which must be one object on one line."""
    assert cli.main([*words, "--json"]) == status
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1 and out.endswith("\n")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_every_action_on_keys_is_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = str(tmp_path / "keys")
    new = told(capsys, "keys", "new", where, "p0")
    assert new["names"] == ["router", "operator", "p0"] and new["action"] == "new" and new["dir"] == where
    assert "copy public/" in new["next"][0]
    assert told(capsys, "keys", "add", where, "d0")["did"] == [f"minted d0 in {where}"]
    assert {one["name"] for one in told(capsys, "keys", "show", where)["identities"]} >= {"p0", "d0"}
    assert "has a new key" in told(capsys, "keys", "rotate", where, "p0")["did"][0]
    assert "only its new key" in told(capsys, "keys", "rotate", where, "p0", "--finish")["did"][0]
    both = told(capsys, "keys", "rotate", where, "d0", "--tickets", "--prepare")
    assert len(both["did"]) == len(both["next"]) == 2
    assert told(capsys, "keys", "rotate", where, "--tickets", "--settle-s", "0.01")["names"] == []
    assert told(capsys, "keys", "remove", where, "d0")["names"] == ["d0"]


def test_the_cheap_commands_print_one_object(capsys: pytest.CaptureFixture[str], key_directory: str) -> None:
    assert told(capsys, "sim", "--seeds", "3", "--jobs", "1")["holds"] is True
    assert told(capsys, "sim", "--replay", "3")["seed"] == 3
    assert told(capsys, "chaos", "--list")["faults"]
    assert "planes" in told(capsys, "doctor")
    gone = ["drain", "p0", "--keys", key_directory, "--registry", "tcp://127.0.0.1:9", "--timeout-s", "0.2"]
    assert told(capsys, *gone, status=1)["outcome"] == "no_answer"


def first_line(words: list[str], stop: signal.Signals = signal.SIGTERM) -> tuple[dict[str, Any], str, int, int]:
    """A server's first line on stdout; then it is told to stop: what else it printed there, its pid and its status."""
    running = subprocess.Popen([*KVBATON, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        running.send_signal(stop)
        rest, _ = running.communicate(timeout=READY_S)
    finally:
        running.kill()
        running.wait()
    return json.loads(line), rest, running.pid, running.returncode


def test_a_router_says_in_one_object_where_it_serves(key_directory: str) -> None:
    words = ["router", "--keys", key_directory, "--port", "0", "--registry-port", "0", "--json"]
    found, rest, pid, status = first_line([*words, "--prefill-url", "http://127.0.0.1:9"])
    assert (rest, status) == ("", 0)
    assert found["pid"] == pid and found["name"] == "router" and found["prefill_urls"] == ["http://127.0.0.1:9"]
    assert found["url"].startswith("http://127.0.0.1:") and found["registry"].startswith("tcp://127.0.0.1:")


def test_a_worker_says_in_one_object_where_it_serves(key_directory: str) -> None:
    where = ["--keys", key_directory, "--registry", "tcp://127.0.0.1:9", "--blocks", "16"]
    words = ["worker", "--name", "p0", "--role", "prefill", *where, "--json"]
    found, rest, pid, status = first_line(words, signal.SIGHUP)  # at once: there is no registry to take leave of
    assert (rest, status) == ("", 0)
    assert (found["name"], found["role"], found["pid"]) == ("p0", "prefill", pid)
    assert found["url"].startswith("http://127.0.0.1:") and int(found["incarnation"], 16) > 0
    assert found["registry"] == "tcp://127.0.0.1:9"


def test_what_else_an_engine_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    ready = _ReadyAsJson(WorkerOptions(name="p0", role="prefill", keys="k", registry="tcp://127.0.0.1:9"), out)
    for piece in ("a note\np0 00ff ser", "ves http://h:1", "\n", "serves nobody\n", "not yet a line"):
        print(piece, end="", file=ready)
    assert json.loads(out.getvalue())["url"] == "http://h:1" and out.getvalue().count("\n") == 1
    assert capsys.readouterr().err == "a note\nserves nobody\n"


def test_a_store_says_in_one_object_where_it_serves(key_directory: str) -> None:
    found, rest, pid, status = first_line(
        ["store", "--keys", key_directory, "--port", "0", "--bytes", "1MiB", "--json"]
    )
    assert (status, found["pid"], found["name"]) == (0, pid, "store") and found["endpoint"].startswith(
        "tcp://127.0.0.1:"
    )
    assert [json.loads(line)["values"] for line in rest.splitlines()] == [0], "the figures at its end"


def test_no_command_colours_what_a_program_reads(
    capsys: pytest.CaptureFixture[str], key_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "FORCE_COLOR", "1")
    for words in (["keys", "show", key_directory], ["chaos", "--list"], ["sim", "--replay", "3"]):
        assert cli.main([*words, "--json"]) == 0
        out, _ = capsys.readouterr()
        assert "\x1b" not in out and json.loads(out)
