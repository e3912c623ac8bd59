"""Ways to copy, compared with each other: each library in two processes of its own, asked for one copy at a time.

    python -m kvbaton_proof.bench.transfer.peers read nixl       D; it starts its P, `serve nixl`

A library is a module `ways_NAME` beside this one, or `idle-NAME`: one transport of the catalogue and nothing else.
Laws: the clock runs where the copy is made and around nothing else. A way's bytes are checked before it is measured,
against memory that held none of them.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.transports import catalogue
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import HostTransport, Spans
from kvbaton_proof.bench.kit.cpu_meter import scheduled_s
from kvbaton_proof.bench.kit.piped_children import ChildFailed, Parent, PipedChild
from kvbaton_proof.bench.kit.run_facts import ADVICE, PACKAGES
from kvbaton_proof.bench.transfer.workload import (
    DrivenReader,
    DrivenSource,
    WrongBytes,
    pattern,
    scattered,
    verify,
)

IDLE = "idle-"


class Begin(msgspec.Struct, frozen=True, tag=True):
    region_bytes: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    moved_bytes: int
    segment_bytes: int
    seed: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """Make one copy; `check` its bytes."""

    way: str
    check: bool = False


class Spin(msgspec.Struct, frozen=True, tag=True):
    """To P: drive this way by polling, until the next of these."""

    way: str


class Ready(msgspec.Struct, frozen=True):
    ways: tuple[str, ...]
    pids: tuple[int, ...]


class Took(msgspec.Struct, frozen=True):
    """What one copy cost; CPU of both processes together."""

    seconds: float
    cpu_s: float = 0.0
    wrong: str = ""  # what its bytes are not


class Source(Protocol):
    """P's side of a library."""

    def offer(self) -> dict[str, bytes]: ...
    def spin(self, way: str) -> None: ...
    def close(self) -> None: ...


class Reader(Protocol):
    """D's side of a library."""

    ways: tuple[str, ...]
    spins: frozenset[str]  # ways whose P has to be told to poll

    def prepare(self, segment_bytes: int, spans: Spans) -> None: ...
    def run(self, way: str) -> None: ...
    def close(self) -> None: ...
    def moved(self, way: str) -> Spans:
        """What a copy by this way moves: those that were prepared."""


class Peer:
    """A library's two processes, as the benchmark sees them: some ways to copy."""

    def __init__(self, library: str, region_bytes: int) -> None:
        self._child = PipedChild("kvbaton_proof.bench.transfer.peers", "read", library)
        try:
            self._ready = self._child.ask(Begin(region_bytes), Ready)
        except ChildFailed as error:
            self._child.close()
            advice = f"; {ADVICE}" if library in PACKAGES else ""
            raise ChildFailed(f"{library}: {error}{advice}") from None
        self.names = self._ready.ways
        self.pids = self._ready.pids

    def prepare(self, moved_bytes: int, segment_bytes: int, seed: int) -> None:
        self._child.order(Prepare(moved_bytes, segment_bytes, seed))

    def check(self, way: str) -> None:
        wrong = self._child.ask(Go(way, check=True), Took).wrong
        if wrong:
            raise WrongBytes(wrong)

    def run(self, way: str) -> Took:
        return self._child.ask(Go(way), Took)

    def close(self) -> None:
        self._child.close()


def _sides(library: str) -> tuple[Any, Any]:
    """What makes P's side and D's."""
    if library.startswith(IDLE):
        ways, make = [library.removeprefix(IDLE)], _of_catalogue
        return functools.partial(DrivenSource, ways=ways, make=make), functools.partial(
            DrivenReader, ways=ways, make=make
        )
    module = importlib.import_module(f"kvbaton_proof.bench.transfer.ways_{library}")
    return module.Source, module.Reader


def _of_catalogue(name: str, me: PeerId, regions: Sequence[memoryview]) -> HostTransport:
    return catalogue.make(name, me, catalogue.PlaneSettings(), list(regions))


def serve(library: str, parent: Parent) -> None:
    """P: offers its memory and waits."""
    questions = parent.questions(Begin | Spin)
    begin = next(questions)
    memory = allocate(begin.region_bytes)
    memory.view[:] = pattern(begin.region_bytes).data
    source: Source = _sides(library)[0](memory.view)
    parent.answer(source.offer())
    for question in questions:
        source.spin(question.way)
        parent.answer(None)
    source.close()


def read(library: str, parent: Parent) -> None:
    """D: copies when it is told to."""
    questions = parent.questions(Begin | Prepare | Go)
    begin = next(questions)
    memory, want = allocate(begin.region_bytes), pattern(begin.region_bytes)
    with PipedChild("kvbaton_proof.bench.transfer.peers", "serve", library) as source:
        reader: Reader = _sides(library)[1](memory.view, source.ask(begin, dict[str, bytes]))
        parent.answer(Ready(reader.ways, (os.getpid(), source.pid)))
        for question in questions:
            if isinstance(question, Prepare):
                spans = scattered(begin.region_bytes, question.moved_bytes, question.segment_bytes, question.seed)
                reader.prepare(question.segment_bytes, spans)
                parent.answer(None)
            elif question.check:
                memory.view[:] = bytes(begin.region_bytes)
                took = _timed(reader, source, question.way)
                try:
                    verify(question.way, memory.view, want, reader.moved(question.way))
                except WrongBytes as error:
                    took = msgspec.structs.replace(took, wrong=str(error))
                parent.answer(took)
            else:
                parent.answer(_timed(reader, source, question.way))
        reader.close()


def _timed(reader: Reader, source: PipedChild, way: str) -> Took:
    if way in reader.spins:
        source.order(Spin(way))
    cpu_s = time.process_time() + scheduled_s(source.pid)
    begun = time.perf_counter()
    reader.run(way)
    seconds = time.perf_counter() - begun
    cpu_s = time.process_time() + scheduled_s(source.pid) - cpu_s
    if way in reader.spins:
        source.order(Spin(""))
    return Took(seconds, cpu_s)


def main(role: str, library: str) -> None:
    parent = Parent()
    try:
        {"serve": serve, "read": read}[role](library, parent)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is told to who asked
        parent.fail(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
