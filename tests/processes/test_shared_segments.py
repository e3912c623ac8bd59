"""Which segments of /dev/shm a group of processes has made, and what is removed when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.local_cluster import vllm_child
from kvbaton.local_cluster.vllm_child import SegmentWatch

MAPS = """
import mmap, sys
file = open(sys.argv[1], sys.argv[2])
file.truncate(4096) if sys.argv[2] == "w+b" else None
held = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(vllm_child, "ROOT", f"{tmp_path}/")
    yield tmp_path


def mapper(path: Path, mode: str = "w+b", *, group: bool = True) -> subprocess.Popen[str]:
    """A process that maps a file; in a group of its own, or in ours."""
    words = [sys.executable, "-c", MAPS, str(path), mode]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0 if group else None
    )
    assert process.stdout is not None and process.stdout.readline() == "mapped\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_a_group_made_is_removed_and_what_was_there_before_is_not(root: Path) -> None:
    (root / "psm_before").write_bytes(bytes(4096))
    process = mapper(root / "other")  # leads the group
    watch = SegmentWatch(os.getpgid(process.pid))
    made = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(root / "psm_made"), "w+b"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=process.pid,
    )  # fmt: skip
    assert made.stdout is not None and made.stdout.readline() == "mapped\n"
    watch.look()
    ended(made)
    ended(process)
    watch.remove()
    assert sorted(each.name for each in root.iterdir()) == ["other", "psm_before"]


def test_a_segment_that_another_group_has_mapped_is_left_to_it(root: Path) -> None:
    process = mapper(root / "other")
    watch = SegmentWatch(os.getpgid(process.pid))
    owner = mapper(root / "psm_shared", group=False)
    found = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(root / "psm_shared"), "r+b"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=process.pid,
    )  # fmt: skip
    assert found.stdout is not None and found.stdout.readline() == "mapped\n"
    watch.look()
    assert watch.names == {"psm_shared"}
    ended(found)
    ended(process)
    watch.remove()
    assert (root / "psm_shared").exists()
    ended(owner)


def test_a_name_that_has_gone_is_not_removed_when_somebody_uses_it_again(root: Path) -> None:
    process = mapper(root / "psm_once")
    watch = SegmentWatch(os.getpgid(process.pid))
    watch._looks = {}  # the watch began before the segment
    watch.look()
    assert watch.names == {"psm_once"}
    ended(process)
    (root / "psm_once").unlink()
    watch.look()
    (root / "psm_once").write_bytes(b"of somebody else")
    watch.remove()
    assert (root / "psm_once").exists()
