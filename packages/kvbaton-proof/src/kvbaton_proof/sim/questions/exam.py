"""Questions with known answers, put to the production code with each world: cases too rare to arise by chance.

A bound that is met exactly, a name that is one character too long, a lie in one number of a card, a memory that is just
full: no world of a few seconds meets them all. Each world asks a sixth of the bank, with numbers of its own.

Laws: every answer is known here by other means (a model in a few lines, an arithmetic cell by cell, a list of what the
rules refuse), never by asking the code that is examined. Questions draw from a generator of their own, so what they ask
changes no world. What must be refused is refused for its reason, and its neighbour within the bound is taken.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton_proof.sim.promises import RULE, Broken

T = TypeVar("T")
Question = Callable[[random.Random], None]
TURNS = 6
"""In so many worlds every question is asked once."""


def same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Broken(RULE, f"exam: {what}: {str(found)[:120]}, not {str(expected)[:120]}")


def refused(what: str, reason: Reason, call: Callable[..., Any], *arguments: Any) -> None:
    """It is a `ProtocolError` with that reason, and nothing else."""
    try:
        found = call(*arguments)
    except ProtocolError as error:
        same(f"{what}: why it is refused ({error.detail})", error.reason, reason)
    else:
        raise Broken(RULE, f"exam: {what}: is taken ({str(found)[:80]}), and is {reason}")


def taken(what: str, call: Callable[..., T], *arguments: Any) -> T:
    """It is not refused."""
    try:
        return call(*arguments)
    except ProtocolError as error:
        raise Broken(RULE, f"exam: {what}: is refused: {error.reason} {error.detail}") from None


@contextlib.contextmanager
def lowered(module: Any, name: str, value: int) -> Iterator[None]:
    """A bound as low as can be met; afterwards it is what it was."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def asked(bank: list[Question], seed: int) -> None:
    """This world's share of the questions."""
    for number, question in enumerate(bank):
        if (number + seed) % TURNS == 0:
            question(random.Random(f"exam {seed} {question.__name__}"))
