"""Where a router keeps what it knows of turns: by name, bounded, each for as long as D keeps it.

Laws: memory is bounded, the oldest go first. `secret` keys the names of all who share the table. What is found may be
wrong: P and D compare digests of the tokens themselves.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

import msgspec

from kvbaton.protocol.ids import HandoffId, PeerId

TURNS_MAX = 16_384


class KnownTurn(msgspec.Struct, frozen=True):
    """What the router knows of a turn that a D keeps."""

    peer: PeerId  # the D
    handoff: HandoffId
    tokens: int  # of prompt and answer
    until: float
    whole: bytes  # the name of the whole prompt
    length: int  # of its text, where it has one


class TurnTable:
    """Of one process."""

    def __init__(self, secret: bytes = b"", turns_max: int = TURNS_MAX) -> None:
        self.secret = secret or secrets.token_bytes(32)
        self._turns: OrderedDict[bytes, KnownTurn] = OrderedDict()
        self._turns_max = turns_max

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, key: bytes, turn: KnownTurn, now: float) -> int:
        """Note a turn; how many others were forgotten for it, or were too old."""
        self._turns[key] = turn
        self._turns.move_to_end(key)
        before = len(self._turns)
        while len(self._turns) > self._turns_max or next(iter(self._turns.values())).until < now:
            self._turns.popitem(last=False)
        return before - len(self._turns)

    def get(self, key: bytes) -> KnownTurn | None:
        return self._turns.get(key)

    def drop(self, key: bytes) -> None:
        """It was used, or is worth nothing."""
        self._turns.pop(key, None)
