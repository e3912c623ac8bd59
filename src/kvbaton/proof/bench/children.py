"""Processes that a benchmark starts, spoken to in lines of JSON.

Laws: every answer has a deadline. A child's standard output is for answers alone: whatever a library prints goes to
standard error, of which the end is told when the child fails. A child ends with its input, so none outlives its parent.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

ANSWER_S = 120.0
END_S = 10.0
TAIL_BYTES = 1200

T = TypeVar("T")


class ChildFailed(RuntimeError):
    """A child ended, said that it failed, or said nothing in time."""


class Line(msgspec.Struct, frozen=True):
    """What a child says: an answer, or what went wrong."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class Child:
    """`python -m module words…`; use it as a context manager."""

    def __init__(self, module: str, *words: str) -> None:
        self.what = " ".join((module, *words))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        command = [sys.executable, "-m", module, *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0
        )
        self._read = b""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: object, answer: type[T], deadline_s: float = ANSWER_S) -> T:
        self.tell(question)
        return self.hear(answer, deadline_s)

    def order(self, order: object, deadline_s: float = ANSWER_S) -> None:
        """Wait until it is done."""
        self.tell(order)
        self._hear(deadline_s)

    def tell(self, value: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(value) + b"\n")
        except BrokenPipeError:
            raise self._failed("ended early") from None

    def hear(self, answer: type[T], deadline_s: float = ANSWER_S) -> T:
        return msgspec.json.decode(self._hear(deadline_s), type=answer)

    def _hear(self, deadline_s: float) -> msgspec.Raw:
        assert self._process.stdout is not None
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed(f"said nothing within {deadline_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._failed("ended early")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        told = msgspec.json.decode(line, type=Line)
        if told.error:
            raise ChildFailed(told.error)
        return told.answer

    def close(self) -> None:
        """End it: by its input, and by force where that does not help."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def _failed(self, how: str) -> ChildFailed:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        tail = self._said.read().decode(errors="replace").strip()
        return ChildFailed(f"{self.what} {how}" + (f": {tail}" if tail else ""))


class Parent:
    """The other end, in the child."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)

    def questions(self, question: Any) -> Iterator[Any]:
        """Of a type, or of a union of them, until the parent closes or is gone."""
        for line in sys.stdin:
            yield msgspec.json.decode(line, type=question)

    def answer(self, value: object) -> None:
        self._say(Line(msgspec.Raw(msgspec.json.encode(value))))

    def fail(self, error: str) -> None:
        self._say(Line(error=error))

    def _say(self, line: Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        while data:
            data = data[os.write(self._out, data) :]
