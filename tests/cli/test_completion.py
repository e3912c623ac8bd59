"""Completion: made from the parsers by shtab. Tried in a real bash; the other scripts must have all words."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbaton.cli import completion
from kvbaton.cli import main as cli
from kvbaton.processes.operator_errors import CommandError


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "kvbaton.bash"
    path.write_text(completion.script("bash"))
    return path


def press_tab(script: Path, *words: str, here: Path | None = None) -> list[str]:
    """What bash would offer for the last word."""
    line = " ".join(shlex.quote(word) for word in words)
    code = f"""
    source {shlex.quote(str(script))}
    COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
    _shtab_kvbaton kvbaton {shlex.quote(words[-1])} {shlex.quote(words[-2])}
    for each in "${{COMPREPLY[@]}}"; do printf '%s\\n' "$each"; done
    """
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", code], capture_output=True, text=True, check=True, cwd=here, timeout=60
    )
    return done.stdout.splitlines()


ROWS = {
    "kvbaton be": ["bench"],
    "kvbaton --color never do": ["doctor"],
    "kvbaton --debug dr": ["drain"],
    "kvbaton zz": [],
    "kvbaton bench rou": ["router"],
    "kvbaton up --mo": ["--mode", "--model"],
    "kvbaton up --registry": [],
    "kvbaton store --by": ["--bytes"],
    "kvbaton bench store --ba": ["--backends"],
    "kvbaton --ver": ["--version"],
    "kvbaton worker --stop-on": [],  # what no help shows
    "kvbaton up --prefill 2 --mode pu": ["pull", "push"],
    "kvbaton --color al": ["always"],
    "kvbaton keys ro": ["rotate"],
    "kvbaton keys --settle-s 3 re": ["remove"],
    "kvbaton completion ba": ["bash"],
    "kvbaton explain checksum_mis": ["checksum_mismatch"],
}


@pytest.mark.parametrize("line", ROWS)
def test_the_last_word_is_completed(script: Path, line: str) -> None:
    assert press_tab(script, *line.split()) == ROWS[line]


def test_an_empty_word_gets_every_command_or_value(script: Path) -> None:
    assert set(press_tab(script, "kvbaton", "")) == set(cli.COMMANDS)
    assert press_tab(script, "kvbaton", "up", "--mode", "") == ["pull", "stream", "push"]
    assert "staged-tcp" in press_tab(script, "kvbaton", "worker", "--transport", "")
    assert press_tab(script, "kvbaton", "up", "--port", "") == [], "nobody can guess it"


def test_paths_are_completed_as_files_or_directories(script: Path, tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plan.json").touch()
    assert sorted(press_tab(script, "kvbaton", "inspect", "--files", "pl", here=tmp_path)) == ["plan.json", "plans"]
    assert press_tab(script, "kvbaton", "worker", "--keys", "pl", here=tmp_path) == ["plans"]
    assert press_tab(script, "kvbaton", "keys", "rotate", "pl", here=tmp_path) == ["plans"]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_has_every_command_and_flag_and_its_shell_takes_it(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    one = cli.build_parser("worker", cli.module_of("worker"))
    flags = {word for action in _shown(one) for word in action.option_strings}
    assert {"--registry", "--turn-s"} < flags
    for word in (*cli.COMMANDS, *flags):
        assert word.removeprefix("--") in text, word
    if shutil.which(shell) is not None:
        (tmp_path / shell).write_text(text)
        subprocess.run([shell, "-n", tmp_path / shell], check=True, capture_output=True)
    assert shutil.which("bash") is not None


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in completion._actions(parser) if action.help != argparse.SUPPRESS]


def test_a_command_that_this_build_lacks_is_completed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise CommandError(f"{name} is not part of this build")

    monkeypatch.setattr(cli, "module_of", lacking)
    text = completion.script("bash")
    assert all(name in text for name in cli.COMMANDS) and "--registry" not in text
