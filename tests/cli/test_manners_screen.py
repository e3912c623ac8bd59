"""Colours, the width and progress: only where somebody looks, and never instead of the words."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from kvbaton.cli import main as cli
from kvbaton.cli import progress
from kvbaton.cli import screen as screens
from kvbaton.cli.progress import StatusLine
from kvbaton.cli.screen import Color, Screen, is_terminal, wants_color


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(*words: str, **environ: str) -> str:
    """What `kvbaton` writes to a terminal."""
    ours, theirs = pty.openpty()
    base = {name: value for name, value in os.environ.items() if "COLOR" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "kvbaton.cli.main", *words], stdout=theirs, stderr=theirs, check=False, timeout=60,
        env={**base, "TERM": "xterm", **environ},
    )  # fmt: skip
    assert done.returncode in (0, 2)
    os.close(theirs)
    told = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed, and all is read
            break
        if not more:
            break
        told += more
    os.close(ours)
    return told.decode()


def test_a_real_terminal_gets_colours_unless_it_or_the_operator_cannot_have_them() -> None:
    assert "\x1b[1mrun a cluster\x1b[0m" in on_a_terminal("--help")
    assert on_a_terminal("fly").startswith("\x1b[31mkvbaton:\x1b[0m unknown command")
    assert "\x1b" not in on_a_terminal("--help", NO_COLOR="1")
    assert "\x1b" not in on_a_terminal("--help", TERM="dumb")
    assert "\x1b" not in on_a_terminal("--help", "--color", "never", FORCE_COLOR="1")


@pytest.fixture
def real() -> Iterator[TextIO]:
    """A real terminal's end for a program."""
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream:
        yield stream
    os.close(ours)


def live(environ: dict[str, str] | None = None, color: Color = "auto") -> Screen:
    return Screen(Terminal(), {"TERM": "xterm", **(environ or {})}, color)


@pytest.mark.parametrize(
    ("color", "environ", "is_live", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {"FORCE_COLOR": ""}, False, False),
        ("auto", {"CLICOLOR_FORCE": "1"}, False, True),
        ("auto", {"CLICOLOR_FORCE": "0"}, True, True),
        ("auto", {"CLICOLOR": "0"}, True, False),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_who_decides_about_colours(color: Color, environ: dict[str, str], is_live: bool, expected: bool) -> None:
    assert wants_color(color, environ, is_live) is expected


def test_a_style_is_only_ever_around_the_words() -> None:
    assert live().style("well", "good") == "\x1b[32mwell\x1b[0m"
    assert live().style("", "bad") == ""
    assert live().verdict(True) == "\x1b[32mok\x1b[0m" and live().verdict(False) == "\x1b[31mNOT ok\x1b[0m"
    for plain in (Screen(io.StringIO(), {}), live({"TERM": "dumb"}), live({"NO_COLOR": "1"})):
        assert plain.style("well", "good") == "well" and plain.verdict(False) == "NOT ok"


def test_a_terminal_is_known_and_a_closed_stream_is_none(real: TextIO) -> None:
    assert is_terminal(real) and Screen(real, {"TERM": "xterm"}).has_color
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(closed) and not is_terminal(None)


def test_the_width_is_what_was_said_or_the_terminals_or_80(real: TextIO) -> None:
    assert Screen(io.StringIO(), {}).width() == 80
    assert Screen(io.StringIO(), {"COLUMNS": "132"}).width() == 132
    assert Screen(io.StringIO(), {"COLUMNS": "3"}).width() == 20
    assert Screen(io.StringIO(), {"COLUMNS": "wide"}).width() == 80
    fcntl.ioctl(real.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 40, 97, 0, 0))
    assert Screen(real, {"TERM": "xterm"}).width() == 97
    assert live().width() == 80, "a terminal that does not tell"


def test_fancy_characters_only_where_the_encoding_has_them() -> None:
    for encoding, expected in (("utf-8", "█"), ("ascii", "#"), ("no-such-code", "#")):
        stream = type("Coded", (io.StringIO,), {"encoding": encoding})()
        assert Screen(stream, {}).either("█", "#") == expected


def test_a_table_lines_up_with_and_without_styles() -> None:
    for screen in (live(), Screen(io.StringIO(), {})):
        rows = [["p0", "3", screen.style("ok", "good")], ["decode-1", "12", ""]]
        lines = [screens._ESCAPES.sub("", line) for line in screen.table(["name", "pins", "state"], rows, right=[1])]
        assert lines == ["name      pins  state", "p0           3  ok", "decode-1    12"]


def test_progress_outlives_its_terminal() -> None:
    class Gone(Terminal):
        def write(self, _: str) -> int:
            raise OSError("the terminal went away")

    with progress.shown("requests", Screen(Gone(), {"TERM": "xterm"})) as tell:
        tell("1 of 8")


def test_the_flag_colours_help_and_complaints_and_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    for words, colored in (
        (["--color", "always"], True), (["--color=always"], True), (["--color", "never"], False), ([], False),
    ):  # fmt: skip
        assert cli.main([*words, "--help"]) == 0
        assert ("\x1b[1m" in capsys.readouterr().out) is colored
        assert cli.main(words) == 2
        assert capsys.readouterr().err.startswith("\x1b[31mkvbaton:\x1b[0m give" if colored else "kvbaton: give")
        for around in ([*words, "keys", "--help"], ["keys", *words, "--help"]):
            with pytest.raises(SystemExit):
                cli.main(around)
            assert ("\x1b[1mrotate\x1b[0m:" in capsys.readouterr().out) is colored
    assert screens._ASKED == ["auto"]


def test_a_line_of_progress_has_a_bar_the_time_and_the_last_word() -> None:
    now = [0.0]
    screen = live({"COLUMNS": "70"})
    line = StatusLine(screen, "sim", lambda: now[0])
    assert line.line() == "sim 0 s"
    now[0] = 12.4
    line.tell("50 of 200 seeds, 3 broken")
    assert line.line() == f"sim {'█' * 6}{'░' * 18} 50/200 12 s seeds, 3 broken"
    line.tell("warming\nup")
    assert line.line().endswith("50/200 12 s warming up")
    line.tell("7/7 the last one, which has a name that is longer than the line has room for")
    line.draw()
    assert isinstance(screen.stream, io.StringIO)
    drawn = screen.stream.getvalue()
    assert drawn.startswith("\r\x1b[Ksim █") and len(drawn) == len("\r\x1b[K") + 69


def test_other_words_clear_the_line_first_and_it_is_gone_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    screen = live()
    assert isinstance(screen.stream, io.StringIO)
    with progress.shown("check", screen) as tell:
        tell("1 of 2 rows")
        progress.note("up", "a note")
        assert screen.stream.getvalue().endswith("\r\x1b[K"), "cleared before the note was written"
    assert screen.stream.getvalue().endswith("\r\x1b[K")
    assert capsys.readouterr().err == "kvbaton up: a note\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_no_line_of_progress_in_a_pipe_nor_with_json(quiet: bool) -> None:
    screen = live() if quiet else Screen(io.StringIO(), {"FORCE_COLOR": "1"})
    with progress.shown("sim", screen, quiet=quiet) as tell:
        tell("1 of 2")
    assert isinstance(screen.stream, io.StringIO) and screen.stream.getvalue() == ""
