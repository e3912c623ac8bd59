"""What is in a LoRA adapter: a text that two engines share if, and only if, they have the same files.

Laws: an adapter is known by the names and bytes of all its files, sub-folders included, wherever they lie; its path
stands for nothing. One that cannot be looked at, or that changed since it was first asked for, is named by a text that
only this process has: the engine may compute with what was there before. Reads files: never called in a hook.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger(__name__)

ADAPTERS_MAX = 256
FILES_MAX = 1024
"""Of one adapter, which has a handful."""
ONLY_HERE = secrets.token_hex(16)

Stamp = tuple[str, int, int, int, int, int]
"""A file's name below its adapter, and what changes with its content: device, inode, size, mtime and ctime."""

_seen: dict[tuple[int, str], str] = {}
"""Adapters as they were when first asked for, which is soon after vLLM loaded them; the first `ADAPTERS_MAX`."""
_said: set[str] = set()


def adapter_text(number: int, path: str) -> str:
    """What names this adapter's content. `number` is vLLM's own of it: loaded anew, it has another."""
    now, key = _now(path), (number, path)
    if now is None:
        return f"{path}:{ONLY_HERE}"
    if key not in _seen and len(_seen) >= ADAPTERS_MAX:
        return f"{now}:{ONLY_HERE}"
    return now if _seen.setdefault(key, now) == now else f"{now}:{ONLY_HERE}"


def _now(path: str) -> str | None:
    """The digest of its files as they are now; None where that cannot be told."""
    try:
        place = _place(path)
        stamps = _stamps(place)
        found = _digest(str(place), stamps)
        if _stamps(place) == stamps:
            return found
        why = "its files changed while they were read"
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    if path not in _said and len(_said) < ADAPTERS_MAX:
        _said.add(path)
        said = (
            "[adapter-unknown] kvbaton: adapter %s cannot be told by its files (%s): KV made with it is not handed over"
        )
        log.warning(said, path, why)
    return None


def _place(path: str) -> Path:
    """Where vLLM finds an adapter: a folder, or a hub's id whose snapshot it has in this host's cache."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.exists():
        raise ValueError("it is no folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - whatever it is, there are no files to look at
        raise ValueError(f"no folder, and no snapshot in this host's cache ({type(error).__name__})") from None


def _stamps(place: Path) -> tuple[Stamp, ...]:
    """Of all its files, through links; hidden ones are a download's or a repository's own book-keeping."""
    found: list[Stamp] = []
    entered: set[tuple[int, int]] = set()
    for folder, names, files in os.walk(place, followlinks=True, onerror=_raise):
        at = os.stat(folder)
        if (at.st_dev, at.st_ino) in entered:
            raise ValueError("a folder of it is linked twice")
        entered.add((at.st_dev, at.st_ino))
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            file = Path(folder) / name
            it = file.stat()
            below = file.relative_to(place).as_posix()
            found.append((below, it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns))
            if len(found) > FILES_MAX:
                raise ValueError(f"more than {FILES_MAX} files")
    if not found:
        raise ValueError("it has no files")
    return tuple(sorted(found))


def _raise(error: OSError) -> None:
    raise error


@functools.lru_cache(maxsize=ADAPTERS_MAX)
def _digest(place: str, stamps: tuple[Stamp, ...]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for below, _, _, size, _, _ in stamps:
        name = below.encode(errors="surrogateescape")
        state.update(b"%d %b %d " % (len(name), name, size))
        with (Path(place) / below).open("rb") as file:
            state.update(hashlib.file_digest(file, "blake2b").digest())
    return state.hexdigest()
