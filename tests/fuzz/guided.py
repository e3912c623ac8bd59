"""A small coverage-guided fuzzer of our own: where no libFuzzer can be had, `make test` explores with this one.

It runs a target on mutated inputs and keeps those that reach something new: a pair of lines of kvbaton that follow each
other, or a refusal that reads differently. The latter shows how far an input got inside msgspec, which is C and not
traced. Plain `sys.settrace`: a few ten thousand inputs a minute, where atheris (`make fuzz`) does more.

Laws: the same seed, target and kept inputs give the same inputs in the same order. Inputs that ran are counted, not
those asked for. An input that raises, or takes `INPUT_S_MAX` of CPU, ends the exploration and is made smaller first.
"""

from __future__ import annotations

import enum
import gc
import hashlib
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mutators import Shape, mutated

import kvbaton

ROOT = f"{Path(kvbaton.__file__).parent}/"
TRACED: tuple[str, ...] = (ROOT,)
INPUT_BYTES_MAX = 8192
INPUT_S_MAX = 5.0
"""Of CPU. Inputs take milliseconds; one that takes this long grows with the square of something."""
KEPT_MAX = 512
TEXTS_MAX = 32
"""Refusals of one line that are told apart."""
SHRINKING_MAX = 400
WARM_ROUNDS = 4
_DIGITS = re.compile(r"0x[0-9a-f]+|(?<![\[$])\d+|'[^']*'|\"[^\"]*\"")  # addresses too: they differ from run to run

Run = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A pure function that asserts its law, what it is seeded with, and how many inputs `make test` gives it."""

    name: str
    run: Run
    seeds: Callable[[], list[bytes]]
    shape: Shape
    inputs: int


class Found(AssertionError):
    """An input that broke a target's law."""

    def __init__(self, target: str, data: bytes, cause: BaseException) -> None:
        super().__init__(f"{target}: {data!r} gives {type(cause).__name__}: {cause}")
        self.data = data
        self.cause = cause


class SlowError(Exception):
    """An input took too long."""


@dataclass(slots=True)
class Explored:
    """What an exploration did."""

    inputs: int = 0
    kept: list[bytes] = field(default_factory=list)
    features: int = 0
    digest: str = ""  # of all inputs in their order


class News(enum.IntEnum):
    """What a run reached for the first time."""

    NONE = 0
    WORDS = 1  # a refusal that reads differently
    PLACES = 2  # lines of code


class Coverage:
    """What runs have reached in kvbaton's own modules."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int | str]] = set()
        self._codes: dict[CodeType, int] = {}
        self._texts: dict[int, int] = {}
        self._now: set[tuple[int, int | str]] = set()
        self._before = 0

    def news(self, run: Run, data: bytes) -> News:
        """Run it; what of it nobody had reached before."""
        self._now = set()
        self._before = 0
        outer = sys.gettrace()
        sys.settrace(self._called)
        try:
            run(data)
        finally:
            sys.settrace(outer)
        fresh = self._now - self.seen
        self.seen |= fresh
        if any(isinstance(there, int) for _, there in fresh):
            return News.PLACES
        return News.WORDS if fresh else News.NONE

    def path(self) -> frozenset[tuple[int, int | str]]:
        """The pairs of lines of the last run."""
        return frozenset(pair for pair in self._now if isinstance(pair[1], int))

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        base = self._codes.get(code)
        if base is None:
            ours = code.co_filename.startswith(TRACED)
            base = self._codes[code] = (len(self._codes) + 1) << 20 if ours else 0
        return self._within if base else None

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        here = self._codes[frame.f_code] + frame.f_lineno
        if event == "line":
            self._now.add((self._before, here))
            self._before = here
        elif event == "exception":
            text = here, _DIGITS.sub("#", str(arg[1]))[:200]
            if text not in self.seen and self._texts.get(here, 0) < TEXTS_MAX:
                self._texts[here] = self._texts.get(here, 0) + 1
                self._now.add(text)
        return self._within


def explore(target: Target, *, inputs: int, seed: int = 0, kept: Sequence[bytes] = (), blind: bool = False) -> Explored:
    """Run seeds, kept inputs and then mutations of them, `inputs` in all; `Found` for the first that breaks the law.

    `blind` mutates only what was given, as a fuzzer without feedback would.
    """
    rng = random.Random(f"{target.name}/{seed}")
    told, digest = Explored(), hashlib.blake2b(digest_size=16)
    coverage = Coverage()
    given = [*target.seeds(), *kept]
    for data in given:
        checked(target, data)  # untraced: what is only done once must not look like news
    strong: list[int] = []  # of what was found: that which reached new places, in its order
    paths: dict[frozenset[tuple[int, int | str]], int] = {}  # what each of those reached

    def trial(data: bytes) -> News:
        told.inputs += 1
        digest.update(len(data).to_bytes(4, "little") + data)
        return checked(target, data, coverage)

    def chosen() -> bytes:
        """Half the time what was given, else what was found, lately found places most: they are the deepest.

        Drawing from all alike drowns a finding among dozens of seeds, and a second step is never made from it.
        """
        if len(told.kept) == len(given) or rng.random() < 0.5:
            return told.kept[rng.randrange(len(given))]
        if strong and rng.random() < 0.8:
            return told.kept[strong[-1 - int(rng.random() ** 2 * len(strong))]]
        return told.kept[rng.randrange(len(given), len(told.kept))]

    for data in given:
        trial(data)
        told.kept.append(data)
    while told.inputs < inputs:
        data = mutated(rng, target.shape, chosen(), told.kept)[:INPUT_BYTES_MAX]
        news = trial(data)
        if blind:
            continue
        if news is News.NONE:
            index = paths.get(coverage.path())
            if index is not None and len(data) < len(told.kept[index]):
                told.kept[index] = data  # a change to a short input hits the byte that counts
        elif len(told.kept) < KEPT_MAX:
            if news is News.PLACES:
                strong.append(len(told.kept))
                paths[coverage.path()] = len(told.kept)
            told.kept.append(data)
    told.features, told.digest = len(coverage.seen), digest.hexdigest()
    return told


def checked(target: Target, data: bytes, coverage: Coverage | None = None) -> News:
    """Run one input; `Found`, with a small input, when it breaks the law."""
    try:
        began = time.process_time()
        if coverage is None:
            target.run(data)
            news = News.NONE
        else:
            news = coverage.news(target.run, data)
        if time.process_time() - began > INPUT_S_MAX:
            raise SlowError(f"{len(data)} bytes took more than {INPUT_S_MAX} s")
    except SlowError as error:
        raise Found(target.name, data, error) from error
    except Exception as error:  # the law allows none
        small = shrunk(target, data, type(error))
        raise Found(target.name, small, error) from error
    return news


def shrunk(target: Target, data: bytes, kind: type[BaseException]) -> bytes:
    """The input with all left out that is not needed to raise the same kind of error."""
    tries, size = 0, max(len(data) // 2, 1)
    while size and tries < SHRINKING_MAX:
        at = 0
        while at < len(data) and tries < SHRINKING_MAX:
            tries += 1
            less = data[:at] + data[at + size :]
            try:
                target.run(less)
            except kind:
                data = less
            except Exception:  # noqa: BLE001 - another error is another finding
                at += size
            else:
                at += size
        size //= 2
    return data


def grown_bytes(target: Target, inputs: Sequence[bytes], rounds: int = 8) -> float:
    """How much more memory each input leaves behind, in the round over the same inputs that left least.

    The least, since a leak shows in every round, and caches and free lists that fill up show in ever fewer.
    """
    for _ in range(WARM_ROUNDS):
        _round(target, inputs)
    gc.freeze()  # what was there before is none of its business, and would be looked through each time
    tracemalloc.start(1)
    try:
        _round(target, inputs)
        held = [tracemalloc.get_traced_memory()[0]]
        for _ in range(rounds):
            _round(target, inputs)
            held.append(tracemalloc.get_traced_memory()[0])
        return min(after - before for before, after in pairwise(held)) / len(inputs)
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def _round(target: Target, inputs: Sequence[bytes]) -> None:
    for data in inputs:
        target.run(data)
    gc.collect()
    # Each `case Class(...)` looks up a new string "__match_args__", and the interpreter's cache of attributes holds up
    # to 4096 of those, 63 bytes each. It fills for hundreds of rounds, and is nothing that the target keeps.
    sys._clear_type_cache()
