"""An adapter is known by all that is in its files, and what cannot be known is shared with nobody (promise 1)."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvbaton.engines.vllm.content import request_content
from kvbaton.engines.vllm.content.request_content import ONLY_HERE, adapter_text

NUMBERS = itertools.count(1)


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_content, "_seen", {})
    monkeypatch.setattr(request_content, "_said", set())


def made(place: Path, **files: bytes) -> Path:
    for name, data in {"adapter_model.safetensors": b"weights", **files}.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return place


def text(place: Path | str, number: int | None = None) -> str:
    return adapter_text(next(NUMBERS) if number is None else number, str(place))


def is_shared(found: str) -> bool:
    return ONLY_HERE not in found


def test_it_is_known_by_its_content_not_by_its_path(tmp_path: Path) -> None:
    one, same = text(made(tmp_path / "a")), text(made(tmp_path / "b"))
    other = text(made(tmp_path / "c", **{"adapter_model.safetensors": b"wEights"}))
    assert one == same != other and is_shared(one) and is_shared(other)


@pytest.mark.parametrize("more", [{"sub/extra.bin": b"x"}, {"sub/deep/extra.bin": b"y"}, {"extra.bin": b"x"}])
def test_what_lies_in_its_folders_counts_by_name_and_bytes(tmp_path: Path, more: dict[str, bytes]) -> None:
    plain, rich, again = made(tmp_path / "a"), made(tmp_path / "b", **more), made(tmp_path / "c", **more)
    changed = made(tmp_path / "d", **{name: data + b"!" for name, data in more.items()})
    moved = made(tmp_path / "e", **{f"other-{name.replace('/', '-')}": data for name, data in more.items()})
    found = [text(each) for each in (plain, rich, changed, moved)]
    assert len(set(found)) == 4 and text(again) == found[1]


def test_links_are_followed_and_where_they_point_does_not_matter(tmp_path: Path) -> None:
    """A hub's snapshot is made of links."""
    real, linked = made(tmp_path / "real"), tmp_path / "linked"
    linked.mkdir()
    (linked / "adapter_model.safetensors").symlink_to(real / "adapter_model.safetensors")
    (tmp_path / "whole").symlink_to(real)
    assert text(real) == text(linked) == text(tmp_path / "whole")


def test_hidden_files_are_no_part_of_it(tmp_path: Path) -> None:
    assert text(made(tmp_path / "a")) == text(made(tmp_path / "b", **{".cache/at": b"1", ".lock": b"2"}))


@pytest.mark.parametrize("how", ["in place", "same size and time", "another file of that name", "one more file"])
def test_one_that_changed_under_a_running_engine_is_shared_with_nobody(tmp_path: Path, how: str) -> None:
    """The engine may still compute with what it loaded; another may have loaded the new files."""
    file = made(tmp_path) / "adapter_model.safetensors"
    loaded, before = text(tmp_path, 1), file.stat()
    if how == "one more file":
        made(tmp_path, **{"sub/more.bin": b"1"})
    elif how == "another file of that name":
        (tmp_path / ".new").write_bytes(b"WEIGHTS")
        os.replace(tmp_path / ".new", file)
    else:
        file.write_bytes(b"WEIGHTS" if how == "same size and time" else b"others")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = text(tmp_path, 1)
    assert is_shared(loaded) and not is_shared(now)
    assert is_shared(text(tmp_path, 2)) and text(tmp_path, 2) == text(tmp_path, 3) != loaded, "loaded after the change"


def hub(monkeypatch: pytest.MonkeyPatch, snapshots: dict[str, Path]) -> None:
    theirs = ModuleType("huggingface_hub")

    def snapshot_download(name: str, *, local_files_only: bool) -> str:
        assert local_files_only, "nothing is fetched"
        return str(snapshots[name])

    theirs.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", theirs)


def test_two_revisions_of_a_hub_s_adapter_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is the same at P and at D; what each of them has of it need not be."""
    hub(monkeypatch, {"org/sql": made(tmp_path / "one")})
    p = text("org/sql")
    hub(monkeypatch, {"org/sql": made(tmp_path / "two", **{"adapter_model.safetensors": b"newer"})})
    assert is_shared(p) and text("org/sql") != p and p == text(tmp_path / "one")


def test_what_cannot_be_looked_at_is_shared_with_nobody_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub(monkeypatch, {})
    (tmp_path / "empty").mkdir()
    file = made(tmp_path / "a") / "adapter_model.safetensors"
    loop = made(tmp_path / "loop")
    (loop / "again").symlink_to(loop)
    for place in ("org/unknown", tmp_path / "empty", file, loop):
        assert not is_shared(text(place)) and not is_shared(text(place))
    said = [record for record in caplog.records if "[adapter-unknown]" in record.msg]  # threads of other tests log too
    assert len(said) == 4 and "org/unknown" in caplog.text


def test_a_folder_of_too_many_files_and_an_adapter_too_many_are_shared_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_content, "FILES_MAX", 2)
    monkeypatch.setattr(request_content, "ADAPTERS_MAX", 1)
    assert not is_shared(text(made(tmp_path / "a", b=b"", c=b"")))
    assert is_shared(text(made(tmp_path / "b"), 1)) and is_shared(text(tmp_path / "b", 1))
    assert not is_shared(text(tmp_path / "b", 2))
