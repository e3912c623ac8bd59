"""`pip install kvbaton` without an extra: every command works, or says what to install.

The environment is real but for the index: a venv that holds what `project.dependencies` brings and nothing else, by
links. `tools/try_wheel.py` does the same with a wheel and pip.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbaton as kvbaton_itself
from kvbaton.cli.main import COMMANDS, PROOF

ROOT = Path(__file__).parents[2]
GET = "pip install 'kvbaton[serve]'"
GET_PROOF = f"pip install kvbaton-proof=={kvbaton_itself.__version__}"
DEADLINE_S = 120
ENGINE = "--role prefill --name p0 --registry tcp://127.0.0.1:7700 --keys keys"

WORKS: dict[str, tuple[str, int]] = {
    "config": ("config --list", 0),
    "drain": ("drain p0 --keys keys --registry tcp://127.0.0.1:9 --timeout-s 0.2", 1),
    "restart": ("restart p0 --keys keys --registry tcp://127.0.0.1:9 --timeout-s 0.2", 2),
    "inspect": ("inspect --router http://127.0.0.1:9", 2),
    "explain": ("explain numpy-missing", 0),
    "doctor": ("doctor", 0),
    "keys": ("keys list keys", 0),
    "completion": ("completion bash", 0),
}
SERVES = {"router": "router --port 0 --registry-port 0 --keys keys", "registry": "registry --port 0 --keys keys"}
NEEDS_MORE = {
    "up": ["up", "up --check"],
    "worker": [f"worker {ENGINE}"],
    "store": ["store --keys keys"],
}


def dependencies(named: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """What pip would install for these requirements, extras aside."""
    seen: set[str] = set()
    while named:
        name = re.match(r"[\w.-]+", named.pop())
        assert name is not None
        key = name[0].lower().replace("_", "-")
        try:
            found = importlib.metadata.distribution(key)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another Python, or another machine
        if key not in seen:
            seen.add(key)
            yield found
            named += [each for each in found.requires or [] if "extra ==" not in each]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment in `env`, and the keys of a cluster."""
    place = tmp_path_factory.mktemp("plain")
    venv.create(place / "env", with_pip=False)
    (packages,) = (place / "env" / "lib").glob("python3*/site-packages")
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for found in dependencies(told):
        for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(found.locate_file(name))))
    (packages / "kvbaton.pth").write_text(f"{ROOT / 'src'}\n")
    assert kvbaton(place, "keys new keys p0:prefill d0:decode").returncode == 0
    return place


def words_of(place: Path, line: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVBATON_"))}
    command = [str(place / "env" / "bin" / "python"), "-m", "kvbaton.cli.main", *line.split()]
    return {"args": command, "cwd": place, "env": clean, "text": True}


def kvbaton(place: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**words_of(place, line), capture_output=True, timeout=DEADLINE_S, check=False)


def test_every_command_is_tried_here() -> None:
    assert {*WORKS, *SERVES, *NEEDS_MORE, *PROOF} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_nothing_or_says_what(plain: Path, command: str) -> None:
    done = kvbaton(plain, f"{command} --help")
    if command in PROOF:
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(f"kvbaton-proof: {GET_PROOF}\n")
    else:
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", WORKS)
def test_what_looks_at_a_cluster_works(plain: Path, command: str) -> None:
    line, status = WORKS[command]
    done = kvbaton(plain, line)
    assert done.returncode == status, done.stderr
    assert "bug" not in done.stderr and "Traceback" not in done.stderr


def test_every_setting_is_listed(plain: Path) -> None:
    listed = json.loads(kvbaton(plain, "config --list --json").stdout)["settings"]
    whole = subprocess.run(
        [sys.executable, "-m", "kvbaton.cli.main", "config", "--list", "--json"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=words_of(plain, "")["env"],
    )  # fmt: skip
    assert listed == json.loads(whole.stdout)["settings"]


def test_doctor_names_what_a_host_of_engines_lacks(plain: Path) -> None:
    notes = json.loads(kvbaton(plain, "doctor --json").stdout)["notes"]
    assert {"numpy-missing": GET}.items() <= {each["code"]: each["fix"] for each in notes}.items()


@pytest.mark.parametrize("command", SERVES)
def test_routers_and_registries_serve(plain: Path, command: str) -> None:
    with subprocess.Popen(**words_of(plain, f"{SERVES[command]} --json"), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["pid"] == process.pid
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("line", [line for lines in NEEDS_MORE.values() for line in lines])
def test_what_needs_more_says_what_to_install(plain: Path, line: str) -> None:
    done = kvbaton(plain, line)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvbaton {line.split(maxsplit=1)[0]}: this needs numpy: {GET}\n"
