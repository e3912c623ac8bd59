"""A reader who has seen enough, a closed stream, a full disk, Ctrl-C: a command ends as any other program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbaton.cli import main as cli

KVBATON = [sys.executable, "-m", "kvbaton.cli.main"]
WAIT_S = 60.0
SAYS_MUCH = [
    sys.executable,
    "-c",
    "import sys, types\n"
    "from kvbaton.cli.main import main\n"
    "module = types.ModuleType('kvbaton_proof.cli.bench')\n"
    "module.add_arguments = lambda parser: None\n"
    "module.run = lambda args: print('a line\\n' * 100_000) or 0\n"
    "sys.modules['kvbaton_proof.cli.bench'] = module\n"
    "sys.exit(main(['bench']))\n",
]


def shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `line` in bash, in which "$@" is a program."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *words], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_a_reader_who_leaves_ends_a_command_without_a_word() -> None:
    done = shell('"$@" | head -1; echo "${PIPESTATUS[0]}"', *SAYS_MUCH)
    assert (done.stdout, done.stderr) == ("a line\n141\n", "")


def test_help_is_silent_too_when_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for words in (["--help"], ["keys", "--help"], ["--version"]):
        for buffered in ("", "1"):
            environ = {**os.environ, "PYTHONUNBUFFERED": buffered}
            ended = subprocess.run([*KVBATON, *words], stdout=writer, stderr=subprocess.PIPE, check=False, env=environ)
            assert (ended.returncode, ended.stderr) == (141, b""), words
    os.close(writer)


def test_complaints_that_nobody_reads_keep_their_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*KVBATON, "keys", "--bogus"], stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.parametrize(
    ("words", "closed", "status"),
    [
        (["--help"], ">&-", 0),
        (["--help"], "<&- >&- 2>&-", 0),
        (["keys", "show", "/nowhere"], "2>&-", 2),
        (["keys", "show", "/nowhere"], ">&-", 2),
        (["chaos", "--list", "--json"], ">&-", 0),
    ],
)
def test_a_closed_stream_changes_no_status(words: list[str], closed: str, status: int) -> None:
    done = shell(f'"$@" {closed}', *KVBATON, *words)
    assert done.returncode == status
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stdout == ""


def test_no_socket_takes_the_number_of_a_closed_stream() -> None:
    code = (
        "import os\nfrom kvbaton.cli import main\nmain._open_all_streams()\n"
        "import socket\nwith socket.socket() as one:\n"
        "    os._exit(0 if one.fileno() > 2 else 1)"
    )
    assert shell('"$@" <&- >&- 2>&-', sys.executable, "-c", code).returncode == 0


def test_a_full_disk_is_told_in_one_line() -> None:
    done = shell('"$@" > /dev/full', *KVBATON, "chaos", "--list")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "kvbaton chaos: the results cannot be written: No space left on device; free some space" in done.stderr


def test_an_interrupt_ends_a_command_at_once_and_without_a_word(tmp_path: Path) -> None:
    where = str(tmp_path / "keys")
    assert cli.main(["keys", "new", where, "p0"]) == 0
    words = ["keys", "rotate", where, "--tickets", "--settle-s", "600"]
    before = (tmp_path / "keys" / "tickets.json").read_bytes()
    waiting = subprocess.Popen([*KVBATON, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + WAIT_S
        while (tmp_path / "keys" / "tickets.json").read_bytes() == before:  # changed: it has begun to wait
            assert time.monotonic() < until
            time.sleep(0.02)
        waiting.send_signal(signal.SIGINT)
        assert waiting.communicate(timeout=WAIT_S) == ("", "")
        assert waiting.returncode == 130
    finally:
        waiting.kill()
        waiting.wait()


def test_words_that_the_terminal_does_not_have_do_not_lose_a_result() -> None:
    for variable in ("ascii", "latin-1", "utf-8"):
        done = subprocess.run(
            [*KVBATON, "drain", "--help"], capture_output=True, check=False,
            env={**os.environ, "PYTHONIOENCODING": variable},
        )  # fmt: skip
        assert done.returncode == 0 and b"operator-" in done.stdout, done.stderr


def test_a_path_of_odd_bytes_is_printed_as_it_is(tmp_path: Path) -> None:
    where = os.fsencode(tmp_path) + b"/k\xff"
    words: list[str | bytes] = [*KVBATON, "keys", "new", where, "p0"]
    done = subprocess.run(words, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0 and b"in " + where in done.stdout, done.stderr


def test_a_stream_that_somebody_reads_is_left_alone() -> None:
    assert cli._nobody_reads() is False
