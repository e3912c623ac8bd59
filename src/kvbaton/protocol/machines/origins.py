"""Origins of an engine's cached KV: the members from whom KV came since its prefix cache was last empty.

Laws: an origin is noted before a block of its KV can be found, and every grant names all of them, so D knows also the
members from whom its P took. KV of a member that is gone (removed, or its key no longer allows it to grant) is not
taken; once one of the origins is gone, the engine forgets its cache: once, until it says that it has. Beyond
`ORIGINS_MAX` names any removal counts. A name that is wrong costs a reset at that member's removal, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from kvbaton.protocol.wire.messages import ORIGINS_MAX

MARK_BYTES = 8
ANYBODY = "*"
"""Stands for more members than there is room for."""


def mark_of(origin: str) -> bytes:
    """An origin as values of the store name it: by a hash of its name, or the very mark of one that only they named."""
    if origin.startswith("#"):
        return bytes.fromhex(origin[1:])
    name = origin.partition(" ")[0]
    return hashlib.blake2b(name.encode(), digest_size=MARK_BYTES, person=b"kvbaton-origin").digest()


def marked(mark: bytes) -> str:
    """An origin of which only a value's mark is known."""
    return f"#{mark.hex()}"


class Origins:
    """Of one engine."""

    __slots__ = ("_forgetting", "_names")

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # in order, so that equal histories give equal messages
        self._forgetting = False

    @property
    def names(self) -> tuple[str, ...]:
        """As a grant tells them."""
        return tuple(self._names) if len(self._names) <= ORIGINS_MAX else (ANYBODY,)

    def note(self, names: Iterable[str]) -> None:
        if len(self._names) <= ORIGINS_MAX:  # one more than that is as good as all
            self._names.update(dict.fromkeys(filter(None, names)))

    def gone(self, is_gone: Callable[[str], bool]) -> tuple[str, ...]:
        """Those for whom the cache must be forgotten now; none while the engine is already about to."""
        if self._forgetting or not self._names:
            return ()
        found = (ANYBODY,) if ANYBODY in self.names else tuple(name for name in self._names if is_gone(name))
        self._forgetting = bool(found)
        return found

    def forgotten(self) -> None:
        """The engine's cache is empty: nothing in it is of anybody."""
        self._names.clear()
        self._forgetting = False
