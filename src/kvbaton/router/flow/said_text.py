"""A text that a client has, known by its length and a digest, and the room for the ids of its tokens."""

from __future__ import annotations

import hashlib

from kvbaton.router.flow.told_events import EventShape


class SeamError(Exception):
    """Another engine's answer is not the one that the client has begun to read."""


class HistoryRoom:
    """What the streams of a router share: how many ids may be kept of one and of all, and how their events look."""

    __slots__ = ("held", "of_all", "of_one", "shapes")

    def __init__(self, of_one: int, of_all: int) -> None:
        self.of_one = of_one
        self.of_all = of_all
        self.held = 0
        self.shapes: list[EventShape] = []


class SaidText:
    """One text that events build piece by piece."""

    __slots__ = ("_again", "_digest", "chars", "owed")

    def __init__(self) -> None:
        self.chars = 0
        self.owed = 0  # of these, how many the engine that speaks now has yet to repeat
        self._digest = hashlib.blake2b(digest_size=16)
        self._again = self._digest

    def say(self, text: str) -> None:
        self.chars += len(text)
        self._digest.update(text.encode())

    def begin_again(self) -> None:
        self.owed = self.chars
        self._again = hashlib.blake2b(digest_size=16)

    def left(self, text: str) -> str:
        """What of the next piece the client does not have."""
        if self.owed:
            known, text = text[: self.owed], text[self.owed :]
            self._again.update(known.encode())
            self.owed -= len(known)
            if not self.owed and self._again.digest() != self._digest.digest():
                raise SeamError("its text differs from what the client has")
        if text:
            self.say(text)
        return text
