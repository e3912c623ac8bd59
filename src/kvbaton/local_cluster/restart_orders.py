"""Orders to start workers of `kvbaton up` again, as files in its room: one for each worker that it can start, and an
order is a file beside it.

Laws: only who may write to the room can order, and the room is its user's alone. An order is taken once. It is given
when the worker has drained: what is still inside one that is started again is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_PLACE = "workers"
_ORDER = "~restart"
"""Behind the name: no worker's name has such a character."""


def offer(room: Path, names: Iterable[str]) -> None:
    place = room / _PLACE
    place.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        (place / name).touch()


def take(room: Path) -> list[str]:
    """The workers that are to be started again."""
    ordered = []
    for file in sorted((room / _PLACE).glob(f"*{_ORDER}")):
        with contextlib.suppress(OSError):
            file.unlink()
            ordered.append(file.name.removesuffix(_ORDER))
    return ordered


def is_offered(keys: str, name: str) -> bool:
    """Whether the owner of this key directory can start that worker again."""
    return _place(keys, name).exists()


def order(keys: str, name: str) -> None:
    _place(keys, name + _ORDER).touch()


def _place(keys: str, name: str) -> Path:
    return Path(keys).resolve().parent / _PLACE / name
