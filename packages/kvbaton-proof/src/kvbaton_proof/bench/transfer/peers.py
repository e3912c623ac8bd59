"""Other libraries compared with kvbaton: each in two processes, asked for one copy at a time.

    python -m kvbaton_proof.bench.transfer.peers read nixl       D; it starts its P, `serve nixl`

Laws: the clock runs where the copy is made and around nothing else. A way's bytes are checked before it is measured,
against memory that held none of them.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any, Protocol

import msgspec

from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import Spans
from kvbaton_proof.bench.kit.bench_peers import ADVICE
from kvbaton_proof.bench.kit.piped_children import ChildFailed, Parent, PipedChild
from kvbaton_proof.bench.transfer.workload import pattern, scattered, verify


class Begin(msgspec.Struct, frozen=True, tag=True):
    region_bytes: int
    moved_bytes: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
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


class Reader(Protocol):
    """D's side of a library."""

    ways: tuple[str, ...]
    spins: frozenset[str]  # ways whose P has to be told to poll

    def prepare(self, segment_bytes: int, spans: Spans) -> None: ...
    def run(self, way: str) -> None: ...
    def close(self) -> None: ...


class Peer:
    """A library's two processes, as the benchmark sees them: some ways to copy."""

    def __init__(self, library: str, region_bytes: int, moved_bytes: int) -> None:
        self._child = PipedChild("kvbaton_proof.bench.transfer.peers", "read", library)
        try:
            self._ready = self._child.ask(Begin(region_bytes, moved_bytes), Ready)
        except ChildFailed as error:
            self._child.close()
            raise ChildFailed(f"{library}: {error}; {ADVICE}") from None
        self.names = self._ready.ways
        self.pids = self._ready.pids

    def prepare(self, segment_bytes: int, seed: int) -> None:
        self._child.order(Prepare(segment_bytes, seed))

    def check(self, way: str) -> None:
        self._child.ask(Go(way, check=True), float)

    def run(self, way: str) -> float:
        return self._child.ask(Go(way), float)

    def close(self) -> None:
        self._child.close()


def _module(library: str) -> Any:
    return importlib.import_module(f"kvbaton_proof.bench.transfer.peer_{library}")


def serve(library: str, parent: Parent) -> None:
    """P: offers its memory and waits."""
    questions = parent.questions(Begin | Spin)
    begin = next(questions)
    memory = allocate(begin.region_bytes)
    memory.view[:] = pattern(begin.region_bytes).data
    source = _module(library).Source(memory.view)
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
        reader: Reader = _module(library).Reader(memory.view, source.ask(begin, dict[str, bytes]))
        parent.answer(Ready(reader.ways, (os.getpid(), source.pid)))
        for question in questions:
            if isinstance(question, Prepare):
                spans = scattered(begin.region_bytes, begin.moved_bytes, question.segment_bytes, question.seed)
                reader.prepare(question.segment_bytes, spans)
                parent.answer(None)
                continue
            if question.check:
                memory.view[:] = bytes(begin.region_bytes)
            seconds = _timed(reader, source, question.way)
            if question.check:
                verify(question.way, memory.view, want, spans)
            parent.answer(seconds)
        reader.close()


def _timed(reader: Reader, source: PipedChild, way: str) -> float:
    if way in reader.spins:
        source.order(Spin(way))
    begun = time.perf_counter()
    reader.run(way)
    seconds = time.perf_counter() - begun
    if way in reader.spins:
        source.order(Spin(""))
    return seconds


def main(role: str, library: str) -> None:
    parent = Parent()
    try:
        {"serve": serve, "read": read}[role](library, parent)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is told to who asked
        parent.fail(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
