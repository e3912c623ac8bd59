"""Keys in a room go with the process that made it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvbaton.control import key_room as rooms
from tests.waiting import until

MAKER = """
import subprocess, sys
from kvbaton.control import key_room, keyring
if sys.argv[1] == "alone":  # its helper is killed with it
    key_room._helped = lambda room: __import__("contextlib").nullcontext()
with key_room.key_room() as room:
    keyring.mint(room / "keys", ["router", "p0"])
    print(room, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def made(how: str = "helped") -> tuple[subprocess.Popen[str], Path]:
    words = [sys.executable, "-c", MAKER, how]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def ended(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_the_keys_of_a_process_that_was_killed_are_gone() -> None:
    process, room = made()
    assert (room / "keys" / "secret" / "p0.json").exists() and room.stat().st_mode & 0o777 == 0o700
    ended(process)
    until(lambda: not (room / "keys").exists())


def test_what_a_killed_helper_could_not_remove_goes_with_the_next_room_and_what_is_in_use_stays() -> None:
    process, dead = made("alone")
    ended(process)
    other, living = made()
    try:
        assert living.exists() and not dead.exists(), "the second one swept"
        assert rooms.sweep() == 0 and (living / "keys" / "tickets.json").exists()
    finally:
        ended(other)


def test_a_room_is_gone_after_its_context_with_its_helper(elsewhere: Path) -> None:
    with rooms.key_room() as room:
        (room / "keys").mkdir()
        assert list(elsewhere.iterdir()) == [room]
    assert list(elsewhere.iterdir()) == []


def test_nothing_but_rooms_of_this_user_is_swept(elsewhere: Path) -> None:
    (elsewhere / "target").mkdir()
    (elsewhere / "target" / "lock").touch()
    (elsewhere / f"{rooms.PREFIX}link").symlink_to(elsewhere / "target")
    (elsewhere / f"{rooms.PREFIX}file").touch()
    (elsewhere / "kvbaton-other").mkdir()
    assert rooms.sweep() == 0
    assert len(list(elsewhere.iterdir())) == 4 and (elsewhere / "target" / "lock").exists()
    (elsewhere / f"{rooms.PREFIX}half").mkdir()
    assert rooms.sweep() == 1 and not (elsewhere / f"{rooms.PREFIX}half").exists()


def test_without_a_shell_a_room_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("/bin/sh")

    monkeypatch.setattr(rooms.subprocess, "Popen", missing)
    with rooms.key_room() as room:
        assert room.is_dir()
    assert not room.exists() and os.listdir(room.parent) == []
