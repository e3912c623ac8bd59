"""Completion: made from the parsers, tried in a real bash; for shells that are not here, the text must have it all."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbaton.cli import completion
from kvbaton.cli import main as cli
from kvbaton.cli.completion import node_of, tree
from kvbaton.cli.completion_bash import bash
from kvbaton.cli.completion_others import fish, zsh
from kvbaton.cli.completion_words import Taker, WordNode, walk


@pytest.fixture(scope="module")
def whole() -> WordNode:
    return tree()


@pytest.fixture(scope="module")
def script(whole: WordNode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "kvbaton.bash"
    path.write_text(bash(whole))
    return path


def press_tab(script: Path, *words: str, here: Path | None = None) -> list[str]:
    """What bash would offer for the last word."""
    line = " ".join(shlex.quote(word) for word in words)
    code = f"""
    set -u
    source {shlex.quote(str(script))}
    COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
    set +u
    _kvbaton
    for each in "${{COMPREPLY[@]}}"; do printf '%s\\n' "$each"; done
    """
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", code], capture_output=True, text=True, check=True, cwd=here, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_are_completed(script: Path) -> None:
    assert press_tab(script, "kvbaton", "") == list(cli.COMMANDS)
    assert press_tab(script, "kvbaton", "be") == ["bench"]
    assert press_tab(script, "kvbaton", "--color", "never", "do") == ["doctor"]
    assert press_tab(script, "kvbaton", "--debug", "dr") == ["drain"]
    assert press_tab(script, "kvbaton", "zz") == []


def test_kinds_of_a_command_are_completed(script: Path) -> None:
    assert {"transfer", "store", "vllm", "router"} <= set(press_tab(script, "kvbaton", "bench", ""))
    assert press_tab(script, "kvbaton", "bench", "rou") == ["router"]


def test_flags_are_those_of_the_command_and_of_no_other(script: Path) -> None:
    assert press_tab(script, "kvbaton", "up", "--mo") == ["--mode", "--model"]
    assert press_tab(script, "kvbaton", "up", "--registry") == []
    assert "--check" in press_tab(script, "kvbaton", "up", "")
    assert press_tab(script, "kvbaton", "store", "--by") == ["--bytes"]
    assert press_tab(script, "kvbaton", "bench", "store", "--ba") == ["--backends"]
    assert press_tab(script, "kvbaton", "bench", "store", "--by") == []
    assert press_tab(script, "kvbaton", "--ver") == ["--version"]
    assert press_tab(script, "kvbaton", "worker", "--stop-on") == [], "what is not in the help is not offered"


def test_values_are_completed_from_the_choices(script: Path) -> None:
    assert press_tab(script, "kvbaton", "up", "--mode", "") == ["pull", "stream", "push"]
    assert press_tab(script, "kvbaton", "up", "--prefill", "2", "--mode", "pu") == ["pull", "push"]
    assert press_tab(script, "kvbaton", "up", "--mode", "=", "st") == ["stream"], "bash splits at ="
    assert press_tab(script, "kvbaton", "up", "--mode", "=") == ["pull", "stream", "push"]
    assert press_tab(script, "kvbaton", "up", "--mode", "=", "pull", "--enc") == ["--encrypt"]
    assert press_tab(script, "kvbaton", "--color", "al") == ["always"]
    assert "staged-tcp" in press_tab(script, "kvbaton", "worker", "--transport", "")
    assert press_tab(script, "kvbaton", "up", "--port", "") == [], "nobody can guess it"


def test_positionals_are_counted_past_flags_and_their_values(script: Path, tmp_path: Path) -> None:
    (tmp_path / "keys dir").mkdir()
    (tmp_path / "keys.txt").touch()
    assert press_tab(script, "kvbaton", "keys", "ro") == ["rotate"]
    assert press_tab(script, "kvbaton", "keys", "rotate", "ke", here=tmp_path) == ["keys dir"]
    assert press_tab(script, "kvbaton", "keys", "--settle-s", "3", "re") == ["remove"]
    assert press_tab(script, "kvbaton", "keys", "--settle-s", "=", "3", "re") == ["remove"]
    assert press_tab(script, "kvbaton", "keys", "rotate", "keys dir", "p", here=tmp_path) == []
    assert press_tab(script, "kvbaton", "conformance", "") == ["vllm"]
    assert press_tab(script, "kvbaton", "completion", "") == ["bash", "zsh", "fish"]
    assert press_tab(script, "kvbaton", "explain", "checksum_mis") == ["checksum_mismatch"]


def test_paths_are_completed_as_files_or_directories(script: Path, tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plan.json").touch()
    assert sorted(press_tab(script, "kvbaton", "chaos", "--replay", "pl", here=tmp_path)) == ["plan.json", "plans"]
    assert press_tab(script, "kvbaton", "chaos", "--out", "pl", here=tmp_path) == ["plans"]
    assert press_tab(script, "kvbaton", "worker", "--keys", "pl", here=tmp_path) == ["plans"]


def test_bash_registers_the_function_and_takes_the_script_without_a_word(script: Path) -> None:
    code = f"source {shlex.quote(str(script))}; complete -p kvbaton"
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("complete -F _kvbaton kvbaton\n", "")


def test_the_command_prints_the_script(
    capsys: pytest.CaptureFixture[str], whole: WordNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "tree", lambda: whole)
    for shell, made in (("bash", bash), ("zsh", zsh), ("fish", fish)):
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == made(whole)


# --- what the parsers know


def test_everything_the_help_shows_is_in_the_tree() -> None:
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("place", metavar="DIR")
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("-q", "--quick", action="store_true", help="50%% faster")
    parser.add_argument("--mode", choices=["a", "b"])
    parser.add_argument("--out", metavar="FILE", help="where")
    parser.add_argument("--url", action="append", default=[])
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    below = parser.add_subparsers(metavar="WHAT")
    below.add_parser("one", help="the first").add_argument("--deep", type=int)
    node = node_of(parser, "x", "about")
    flags = {flag.words[0]: flag for flag in node.flags}
    assert sorted(flags) == ["--help", "--mode", "--out", "--quick", "--url"]
    assert flags["--quick"] == Taker(("--quick", "-q"), "quick", "50% faster", "nothing")
    assert flags["--mode"] == Taker(("--mode",), "mode", "", "choice", ("a", "b"))
    assert flags["--out"].takes == "file" and flags["--url"].many
    assert [(place.label, place.takes, place.many) for place in node.places] == [
        ("dir", "dir", False), ("name", "text", True),
    ]  # fmt: skip
    assert [(path, each.about) for path, each in walk(node)] == [("", "about"), ("one", "the first")]


def test_a_command_that_this_build_lacks_is_completed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_importable", lambda name: None)
    names = {path: [flag.words[0] for flag in node.flags] for path, node in walk(tree())}
    assert set(cli.COMMANDS) < set(names)
    assert names["up"] == ["--help", "--debug", "--color"]


# --- the other shells


def hostile() -> WordNode:
    """Help texts that would run something, or end a quote, if they were not quoted."""
    about = 'it\'s `boom` $(boom) $boom "boom" [a:b] back\\'
    flag = Taker(("--flag", "-f"), "LABEL:[x]", about, "choice", ("a", "b"))
    return WordNode("kvbaton", "", (flag,), (), (WordNode("one", about, (flag,), (Taker((), "dir", "", "dir"),)),))


@pytest.mark.parametrize("make", [zsh, fish])
def test_every_word_is_in_the_script_and_every_quote_is_closed(whole: WordNode, make: object) -> None:
    assert callable(make)
    for root in (whole, hostile()):
        text = make(root)
        for line in text.splitlines():
            assert line.count("'") % 2 == 0, line
            outside = "".join(line.split("'")[::2])
            assert "`" not in outside and "boom" not in outside, "what comes from a help text stands in quotes"
        for path, node in walk(root):
            assert node.name in text
            for flag in node.flags:
                word = flag.words[0] if make is zsh else f"-l {flag.words[0][2:]}"
                assert word in text, (path, flag.words)
                assert " ".join(flag.choices) in text


def test_zsh_has_a_function_for_every_command_and_calls_it(whole: WordNode) -> None:
    text = zsh(whole)
    assert text.startswith("#compdef kvbaton\n")
    for path, _ in walk(whole):
        name = "_".join(["_kvbaton", *path.split()])
        assert f"\n{name}() {{\n" in text
        if path:
            assert f"{path.split()[-1]}) {name} ;;" in text
    assert "'--mode=[handoff mode, if the client requests none (default\\: pull)]:mode:(pull stream push)'" in text
    assert "'2:dir:_files -/'" in text and "'*--prefill-url=[" in text
    bare = "".join(text.split("'")[::2])
    assert bare.count("{") == bare.count("}") == len(list(walk(whole)))
    assert bare.count("case ") == bare.count("esac") == 2 * sum(bool(node.below) for _, node in walk(whole))


def test_fish_asks_where_the_line_stands_for_every_word(whole: WordNode) -> None:
    text = fish(whole)
    lines = text.splitlines()
    assert text.count("\nend\n") == 1 and lines.count("function __kvbaton_at") == 1
    for line in lines:
        if line.startswith("complete") and line != "complete -c kvbaton -f":
            assert line.startswith("complete -c kvbaton -n '__kvbaton_at"), line
    assert "complete -c kvbaton -n '__kvbaton_at up' -l mode -r -x -a 'pull stream push' -d 'handoff mode" in text
    assert "complete -c kvbaton -n '__kvbaton_at keys' -a '(__fish_complete_directories)'" in lines
    assert "            case 'bench store'" in lines and "                set path 'bench store'" in lines


def test_shells_that_are_here_take_their_script(whole: WordNode, tmp_path: Path) -> None:
    """bash is always here; zsh and fish, where they are."""
    for shell, make in (("bash", bash), ("zsh", zsh), ("fish", fish)):
        for root in (whole, hostile()):
            path = tmp_path / shell
            path.write_text(make(root))
            if shutil.which(shell) is not None:
                subprocess.run([shell, "-n", path], check=True, capture_output=True)
    assert shutil.which("bash") is not None
