"""The command line: what an operator gets wrong is said in one line, with the next step and status 2."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kvbaton
from kvbaton.cli import main as cli
from kvbaton.control import keyring

WORKER = ["worker", "--name", "p0", "--role", "prefill", "--keys", "/nowhere", "--registry", "tcp://127.0.0.1:1"]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = cli.main(words)
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a command, such as: kvbaton up --check; see: kvbaton --help"),
        (["fly"], "unknown command 'fly'; see: kvbaton --help"),
        (["benhc"], "unknown command 'benhc', did you mean bench?; see: kvbaton --help"),
        (["bench", "transfr"], "unknown choice 'transfr', did you mean transfer? (choose from "),
        (["--color", "pink", "up"], "argument --color: invalid choice: 'pink' (choose from auto, always, never)"),
        (["--color", "never"], "give a command"),
        (["--colour=never", "up"], "unknown flag --colour, did you mean --color?"),
        (["up", "now"], "unknown argument 'now'; see: kvbaton up --help"),
        (["up", "--json=yes"], "argument --json: takes no value, got 'yes'"),
        (["up", "--prefil", "2"], "unknown flag --prefil, did you mean --prefill?"),
        (["worker", "--nam", "p0"], "unknown flag --nam, did you mean --name?"),
        (["worker", "--name", "p0"], "required: --role, --registry"),
        (["up", "--prefill", "0"], "argument --prefill: got 0, expected 1 to 16"),
        (["up", "--prefill", "two"], "argument --prefill: got 'two', expected a whole number"),
        (["up", "--mode", "smoke"], "argument --mode: invalid choice: 'smoke' (choose from pull, stream, push)"),
        (["up", "--mode", "pul"], "argument --mode: invalid choice: 'pul', did you mean pull?"),
        (["up", "--transport", "pigeon"], "argument --transport: got 'pigeon', expected auto, or some of cuda, shm"),
        (["up", "--port", "70000"], "argument --port: got 70000, expected 0 to 65535"),
        (["up", "--lease-s", "-1"], "argument --lease-s: got -1, expected seconds above 0"),
        (["up", "--lease-s", "nan"], "argument --lease-s: got nan"),
        ([*WORKER, "--modes", "pull,smoke"], "argument --modes: got 'smoke'"),
        ([*WORKER, "--tp", "65"], "argument --tp: got 65, expected 1 to 64"),
        ([*WORKER, "--name", "a b"], "argument --name: got 'a b'"),
        (
            [*WORKER, "--registry", "here"],
            "argument --registry: got 'here', expected an endpoint such as tcp://",
        ),
        (["router"], "no source of workers: give --keys DIR"),
        (["router", "--prefill-url", "p:1"], "argument --prefill-url: got 'p:1', expected http://host:port"),
        (["router", "--keys", "/nowhere"], "/nowhere: no key directory"),
        (["keys", "new", "/tmp", "p0"], "/tmp exists"),
        (["keys", "burn", "x", "y"], "invalid choice: 'burn'"),
    ],
)
def test_a_bad_command_line_is_one_line_on_stderr_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("kvbaton")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], ["--debug", "--help"], ["--color", "never", "-h"]])
def test_help_fits_on_a_small_screen_and_tells_of_every_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, *words)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for heading, commands in cli.GROUPS.items():
        at = lines.index(heading)
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(commands)]] == list(commands)
    assert [name for group in cli.GROUPS.values() for name in group] == list(cli.COMMANDS)


def test_help_needs_no_command_and_no_data_plane() -> None:
    code = "import sys; from kvbaton.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "kvbaton.cli.main" in modules
    assert not {"numpy", "msgspec", "asyncio", "zmq", "aiohttp", "logging", "kvbaton.transports"} & set(modules)


def test_help_is_also_asked_for_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "help", "keys") == call(capsys, "keys", "--help")
    assert call(capsys, "help", "bench", "transfer") == call(capsys, "bench", "transfer", "--help")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"kvbaton {kvbaton.__version__}\n", "")


def test_a_missing_key_file_is_named_with_the_next_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(tmp_path / "keys")
    assert call(capsys, "keys", "new", directory, "p0")[0] == 0
    os.remove(tmp_path / "keys" / "secret" / "router.json")
    status, _, err = call(capsys, "router", "--keys", directory, "--port", "0", "--registry-port", "0")
    assert status == 2
    assert "secret/router.json is missing; add that identity" in err


def test_keys_are_minted_with_a_router_and_added_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(tmp_path / "keys")
    status, out, _ = call(capsys, "keys", "new", directory, "p0", "d0")
    assert status == 0
    assert "minted router, operator, p0, d0" in out
    assert call(capsys, "keys", "add", directory, "d1")[0] == 0
    assert sorted(keyring.load(directory, "d1").peers) == ["d0", "d1", "operator", "p0", "router"]
    status, _, err = call(capsys, "keys", "add", directory, "d1")
    assert (status, "there is a d1 already" in err) == (2, True)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise RuntimeError("a bug")

    module: Any = types.ModuleType("kvbaton_proof.cli.bench")
    module.add_arguments = lambda _: None
    module.run = fail
    monkeypatch.setitem(sys.modules, "kvbaton_proof.cli.bench", module)


@pytest.mark.usefixtures("broken")
def test_a_bug_is_one_line_and_a_trace_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "bench")
    assert (status, err.count("\n")) == (1, 1)
    assert "RuntimeError: a bug; this is a bug, run again with --debug" in err
    for words in (["bench", "--debug"], ["--debug", "bench"]):
        status, _, err = call(capsys, *words)
        assert status == 1
        assert "Traceback" in err


def test_a_command_that_is_not_there_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "nothing", "is not there")
    status, _, err = call(capsys, "nothing")
    assert (status, err) == (2, "kvbaton nothing: nothing is not part of this build\n")


def test_the_program_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbaton.cli.main", "up", "--bogus"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvbaton up: unknown flag --bogus; see: kvbaton up --help\n"
