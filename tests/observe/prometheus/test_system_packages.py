"""tools/system_packages.sh: takes what is there, and says in one line what is to be installed where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.observe.prometheus.server import ROOT

NEEDED = ("sh", "dirname", "mkdir", "ln", "id", "rm")


def run(tmp_path: Path, programs: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """The script, in a project of its own, with these programs of nobody's on a PATH that has little else."""
    script, path = tmp_path / "tools" / "system_packages.sh", tmp_path / "path"
    script.parent.mkdir()
    path.mkdir()
    shutil.copy(ROOT / "tools" / "system_packages.sh", script)
    for name in NEEDED:
        (path / name).symlink_to(os.path.realpath(str(shutil.which(name))))
    for name in programs:
        (path / name).write_text("#!/bin/sh\n")
        (path / name).chmod(0o755)
    environment = {"PATH": str(path)}
    command = [str(path / "sh"), str(script), *words]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=30)


def test_programs_that_are_on_path_are_taken(tmp_path: Path) -> None:
    done = run(tmp_path, ("prometheus", "promtool", "chromium"), "prometheus", "chromium")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("prometheus", "promtool", "chromium"):
        assert (tmp_path / ".tools" / "bin" / name).readlink() == tmp_path / "path" / name


def test_what_cannot_be_had_is_said_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, ("promtool",), "prometheus")
    assert done.returncode == 1
    assert done.stderr.endswith("(Debian: apt-get install prometheus)\n") and done.stderr.count("\n") == 1


def test_other_words_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, (), "emacs")
    assert (done.returncode, done.stderr) == (2, "system_packages.sh: emacs: expected prometheus or chromium\n")
