"""Parts of the rank links, each alone on a bench: whatever it is asked, it does what its laws say, and nothing else.

A world brings together ends that are honest and alike, so some of what a part must withstand never comes to it: a torn
table, an end that is told twice, a bound that is met to the last byte, a plane that throws at the worst moment. On the
bench a part meets all of that, by chance, and beside it runs a *model*: what its laws demand, written down as plainly
as can be. Everything that can be seen of the two (what is said, called, told, counted, raised) is compared after each
step.

Laws: a model knows the laws, not the code. What differs is a broken rule. Which benches a seed sets up is in
`rank_benches`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec

from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton_proof.sim.promises import RULE, Broken

SHOWN_CHARS_MAX = 160

PEERS = tuple(PeerId(WorkerId(name), Incarnation(number)) for number, name in enumerate(("d0", "d0", "d1"), 1))
"""Two of them are lives of one worker."""


class Raised(msgspec.Struct, frozen=True):
    """That a call raised, and what kind of error."""

    kind: str


class _Anything:
    """Equal to everything: what the laws leave open."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "anything"


ANYTHING: Any = _Anything()


def outcome(act: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """What a call returns, or which of these errors it raised."""
    try:
        return act()
    except kinds as error:
        return Raised(next(kind.__name__ for kind in kinds if isinstance(error, kind)))


def same(what: str, found: object, expected: object) -> None:
    """Objects unless a part and its model agree."""
    if found != expected:
        raise Broken(RULE, f"bench: {what}: found {_shown(found)}, the laws say {_shown(expected)}")


@contextlib.contextmanager
def replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    """With other bounds, or somebody else in the place of a class that has threads."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class _Lines:
    """A log that only counts its lines."""

    def __init__(self) -> None:
        self.count = 0

    def error(self, *what: object) -> None:
        self.count += 1

    warning = error


def listened(module: ModuleType, bench: Callable[[random.Random], int]) -> Callable[[random.Random], None]:
    """A bench that says how many lines its part must have logged; no more are, and no fewer."""

    def bench_and_count(rng: random.Random) -> None:
        lines = _Lines()
        with replaced(module, log=lines):
            expected = bench(rng)
        same(f"lines in the log of {module.__name__}", lines.count, expected)

    return bench_and_count


def worth(count: int) -> int:
    """Of so many times, how often it is said."""
    return sum(worth_saying(number) for number in range(1, count + 1))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
