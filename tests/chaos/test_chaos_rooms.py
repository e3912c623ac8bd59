"""Small rooms that can be full, and what is done where none can be made. Nothing of the machine's own is filled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvbaton_proof.chaos.network import rooms

END_S = 30.0

WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab") as out:
            out.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def _run(folder: Path, how_full: bool, script: str) -> subprocess.CompletedProcess[bytes]:
    words = rooms.command(str(folder), 65536, ["sh", "-c", script], full=how_full)
    return subprocess.run(words, capture_output=True, timeout=END_S, check=False)


def test_a_room_has_space_a_full_one_has_none_and_both_are_gone_with_their_process(tmp_path: Path) -> None:
    roomy = _run(tmp_path, False, f"echo word > {tmp_path}/file && cat {tmp_path}/file")
    full = _run(tmp_path, True, f"echo word > {tmp_path}/file")
    if rooms.are_allowed():
        assert roomy.stdout == b"word\n"
    assert (roomy.returncode == 0) == rooms.are_allowed()
    assert full.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_room_is_filled_and_cleared_from_outside(tmp_path: Path) -> None:
    if not rooms.are_allowed():
        return  # then `allow_no_writes` is what is used, below
    script = f"echo here; while read -r _; do echo word > {tmp_path}/file && echo written || echo full; done"
    words = rooms.command(str(tmp_path), 65536, ["sh", "-c", script])
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        assert process.stdout.readline() == "here\n"
        assert rooms.fill(process.pid, str(tmp_path)) == 65536
        assert ask() == "full"
        rooms.clear(process.pid, str(tmp_path))
        rooms.clear(process.pid, str(tmp_path))
        assert ask() == "written"
        process.stdin.close()
        assert process.wait(END_S) == 0
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_rooms_a_process_may_write_nothing_for_a_while(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        assert ask() == "written"
        rooms.allow_no_writes(process.pid)
        assert ask() == "27"  # EFBIG
        rooms.allow_writes(process.pid)
        assert ask() == "written"
        process.stdin.close()
        assert process.wait(END_S) == 0
