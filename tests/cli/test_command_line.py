"""Every command, given what it cannot use: one line on stderr that names it and the next step, nothing on stdout."""

from __future__ import annotations

import argparse
import errno
import importlib
import re
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.cli.arguments import HelpFormatter, Parser, endpoint, host_port, minutes, url

NEXT_STEP = re.compile(r"; |see: |expected |is not installed|meant\?| and was | is there already")
UNGROUPED_MAX = 16


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every parser below `kvbaton`, by the words that lead to it."""
    modules = {name: cli.module_of(name) for name in cli.COMMANDS}
    todo: list[tuple[str, argparse.ArgumentParser]] = [("", cli.parser_of(modules))]
    while todo:
        path, parser = todo.pop()
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        todo += [(f"{path} {name}".strip(), one) for action in below for name, one in action.choices.items()]
        if path:
            yield path, parser


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = cli.main(words)
    except SystemExit as left:
        status = int(str(left.code or 0))
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A directory with a key directory, an empty one and a file that is neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVBATON_VLLM_PYTHON", raising=False)
    assert cli.main(["keys", "new", "keys", "p0", "store"]) == 0
    capsys.readouterr()
    Path("empty").mkdir()
    Path("file").write_text("{")
    return tmp_path


WORKER = "worker --name p0 --role prefill"
WRONG = [
    "router", "router --keys empty", "router --keys file", "router --keys keys --name nobody",
    "router --plain-discovery nonsense", "router --plain-discovery 127.0.0.1:x", "router --prefill-url p:1",
    "router --prefill-url http://x:99999", "router --prefill-url http://x --host 256.1.1.1 --port 0",
    "router --keys keys --registry-host 999.9.9.9 --port 0", "router --deadline-s soon",
    "router --keys keys --allow-origin https://x/ --port 0", "router --keys keys --worker-networks 10.0.0.1/8",
    "registry", "registry --keys empty", "registry --keys keys --name p0", "registry --keys keys --host 999.9.9.9",
    "worker", f"{WORKER} --keys empty --registry tcp://127.0.0.1:1", f"{WORKER} --keys keys --registry here",
    f"{WORKER} --keys keys --registry tcp://127.0.0.1:1 --store bogus://x",
    f"{WORKER} --keys keys --registry tcp://127.0.0.1:1 --block-tokens 0",
    f"{WORKER} --keys keys --registry tcp://127.0.0.1:1 --control-host 256.1.1.1",
    "store", "store --keys empty", "store --keys keys --name nobody", "store --keys keys --bytes lots",
    "store --keys keys --disk file --port 0", "store --keys keys --host 256.1.1.1 --port 0",
    "keys", "keys show", "keys show nowhere", "keys show file", "keys new keys p0", "keys new file/x p0",
    "keys add empty p9", "keys rotate keys nobody", "keys remove keys nobody", "keys burn keys",
    "drain", "drain p0 --keys empty --registry tcp://127.0.0.1:1", "drain p0 --keys keys --registry here",
    "drain p0 --keys keys --registry tcp://0.0.0.0:1", "drain p0 --keys keys --registry tcp://[::1]:1 --name p0",
    "drain p0 --keys keys --registry tcp://127.0.0.1:1 --timeout-s soon",
    "restart", "restart p0 --keys empty --registry tcp://127.0.0.1:1", "restart p0 --keys keys --registry here",
    "restart p0 --keys keys --registry tcp://127.0.0.1:1",
    "doctor --router notaurl", "doctor --transport pigeon",
    "explain no-such-reason", "inspect --last x", "inspect --router notaurl", "inspect --router http://127.0.0.1:1",
    "inspect a b", "plan", "plan nowhere", "plan file --rate x",
    "bench serve --url x", "bench serve --trace nowhere", "bench serve --rate x",
    "sim --seeds 5..1", "sim --replay x", "sim --replay -3", "sim --mutant zz", "sim --jobs 0",
    "chaos --minutes 0", "chaos --minutes soon", "chaos --replay nowhere", "chaos --replay file",
    "chaos --replay empty", "chaos --faults bogus", "chaos --out file --seed 1", "chaos --seed x",
    "conformance", "conformance sglang", "conformance vllm --vllm-python /nowhere", "conformance vllm --seeds x",
    "bench", "bench nothing", "bench transfer --repetitions x", "bench transfer --repetitions 0",
    "bench transfer --out /nowhere/x", "bench store --backends zz", "bench store --out /nowhere/x",
    "bench vllm --targets zz", "bench vllm --vllm-python /nowhere", "bench vllm --out /nowhere/x",
    "bench router --targets zz", "bench router --out /nowhere/x", "bench router --vllm-router /nowhere",
    "up --store bogus://x --port 0", "up --model x", "up --engine vllm --model x --vllm-python /nowhere",
    "up --host 256.1.1.1 --port 0", "up --prefill many", "completion", "completion tcsh",
    "config", "config --check nowhere", "config --check empty", "router --config nowhere", "up --config file",
]  # fmt: skip


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line_that_names_the_command_and_the_next_step(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith(f"kvbaton {words[0]}")
    assert NEXT_STEP.search(err), err
    assert "Traceback" not in err and "this is a bug" not in err and "\x1b" not in err


def test_every_command_is_given_something_wrong() -> None:
    assert {line.split()[0] for line in WRONG} == set(cli.COMMANDS)


def test_every_command_refuses_an_unknown_flag_and_tells_of_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for path, _ in parsers():
        status, out, err = call(capsys, *path.split(), "--bogus-flag")
        assert (status, out) == (2, ""), path
        assert err == f"kvbaton {path}: unknown flag --bogus-flag; see: kvbaton {path} --help\n"


def test_a_port_in_use_is_one_line_for_every_server(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words in (
            ["router", "--keys", "keys", "--registry-port", "0", "--port", port],
            ["router", "--keys", "keys", "--registry-port", port, "--port", "0"],
            ["router", "--prefill-url", "http://x", "--decode-url", "http://x", "--port", port],
            ["up", "--port", port],
            ["store", "--keys", "keys", "--port", port],
            [*WORKER.split(), "--keys", "keys", "--registry", "tcp://127.0.0.1:1", "--control-port", port],
            [*WORKER.split(), "--keys", "keys", "--registry", "tcp://127.0.0.1:1", "--http-port", port],
        ):
            status, out, err = call(capsys, *words)
            assert (status, out, err.count("\n")) == (2, "", 1), (words, err)
            assert port in err and ";" in err


@pytest.mark.usefixtures("place")
def test_the_environment_is_named_where_it_is_to_blame(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBATON_VLLM_PYTHON", "/nowhere/python")
    for words in (["up", "--engine", "vllm"], ["bench", "vllm"], ["conformance", "vllm"]):
        status, out, err = call(capsys, *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "KVBATON_VLLM_PYTHON: '/nowhere/python' is not a program" in err


# --- what comes from below


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """`kvbaton bench` raises what is put in here."""
    found: list[BaseException] = []

    def fail(_: Any) -> int:
        raise found[0]

    module: Any = types.ModuleType("kvbaton_proof.cli.bench")
    module.add_arguments = lambda _: None
    module.run = fail
    monkeypatch.setitem(sys.modules, "kvbaton_proof.cli.bench", module)
    return found


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x/y"), 2, "/x/y: No such file or directory; "),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 2, "/x/y: Permission denied; "),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device; free some space"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), 1, "this is a bug, run again with --debug"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "this is a bug, run again with --debug"),
        (ValueError("two\nlines"), 1, "ValueError: two lines; this is a bug"),
        (AssertionError(), 1, "kvbaton bench: AssertionError; this is a bug"),
    ],
)
def test_what_a_command_lets_through_is_one_line(
    error: Exception, status: int, said: str, failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    found, out, err = call(capsys, "bench")
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert said in err


def test_an_interrupt_is_silent(failing: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    failing.append(KeyboardInterrupt())
    assert call(capsys, "bench") == (130, "", "")


def test_a_missing_library_is_named_with_the_way_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> types.ModuleType:
        raise ModuleNotFoundError(f"No module named {lacks!r}", name=lacks)

    monkeypatch.setattr(importlib, "import_module", missing)
    for lacks in ("httptools", "uvloop"):
        status, _, err = call(capsys, "router")
        assert (status, err.count("\n")) == (2, 1)
        assert f"needs {lacks}: pip install 'kvbaton[serve]'" in err


# --- help


def test_every_commands_help_is_80_wide_and_grouped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for path, parser in parsers():
        status, out, err = call(capsys, *path.split(), "--help")
        assert (status, err) == (0, ""), path
        assert out.startswith(f"usage: kvbaton {path}")
        wide = [line for line in out.splitlines() if len(line) > 80 and not line.startswith("  kvbaton ")]
        assert wide == [], path
        assert "None" not in out and "==SUPPRESS==" not in out
        options = next(group for group in parser._action_groups if group.title in ("options", "optional arguments"))
        shown = [action for action in options._group_actions if action.help is not argparse.SUPPRESS]
        assert len(shown) <= UNGROUPED_MAX, f"{path}: give its options groups (parser.add_argument_group)"


def test_the_usage_lists_what_must_be_given_and_not_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    parser = Parser(prog="kvbaton x", formatter_class=HelpFormatter)
    for name in "abcdef":
        parser.add_argument(f"--{name}", help="50%% of it", default=1.5 if name == "a" else None)
    parser.add_argument("--must", required=True, metavar="IT")
    parser.add_argument("place", metavar="PLACE")
    parser.epilog = "words\n  kvbaton x --must have --and be not wrapped however long this line is, to be copied"
    told = parser.format_help()
    assert told.splitlines()[0] == "usage: kvbaton x [OPTIONS] --must IT PLACE"
    assert told.endswith(f"\n\n{parser.epilog}\n")


# --- argument types


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (
            url,
            ["http://h:1", "https://[::1]:8000/x"],
            ["h:1", "ftp://h", "http://", "http://h:99999", ""],
        ),
        (host_port, ["h:1", "[::1]:0", "127.0.0.1:65535"], ["h", ":1", "h:", "h:x", "h:65536", "::1:5", "h:-1"]),
        (endpoint, ["tcp://h:1", "tcp://[::1]:5"], ["h:1", "tcp://h", "tcp://0.0.0.0:1", "tcp://h:0"]),
        (minutes, ["0.5"], ["0", "-1", "nan", "inf", "soon"]),
    ],
)
def test_an_argument_is_taken_or_refused_with_what_was_expected(parse: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert str(parse(text)).rstrip("/") == text.rstrip("/")
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected|give"):
            parse(text)


def test_a_slash_at_the_end_of_a_url_is_taken_off() -> None:
    assert url("http://h:1/") == "http://h:1"
