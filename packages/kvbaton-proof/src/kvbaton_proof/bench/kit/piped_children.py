"""Child processes of a benchmark, driven by lines of JSON.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

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


class PipedProgram:
    """Any program that serves while its context lasts; `line` is what it says next on standard output."""

    ends_with_input = False

    def __init__(self, what: str, command: Sequence[str], variables: Mapping[str, str] = {}) -> None:
        self.what = what
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0,
            env={**os.environ, **variables},
        )  # fmt: skip
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def line(self, deadline_s: float = ANSWER_S) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self.failed(f"said nothing within {deadline_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self.failed("ended early")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        """End it: by its input, and by force where that does not help."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if not self.ends_with_input:
            self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def failed(self, how: str) -> ChildFailed:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        tail = self._said.read().decode(errors="replace").strip()
        return ChildFailed(f"{self.what} {how}" + (f": {tail}" if tail else ""))


class PipedChild(PipedProgram):
    """`python -m module words…`, which speaks JSON and ends with its input; use it as a context manager."""

    ends_with_input = True

    def __init__(self, module: str, *words: str) -> None:
        super().__init__(" ".join((module, *words)), [sys.executable, "-m", module, *words])

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
            raise self.failed("ended early") from None

    def hear(self, answer: type[T], deadline_s: float = ANSWER_S) -> T:
        return msgspec.json.decode(self._hear(deadline_s), type=answer)

    def _hear(self, deadline_s: float) -> msgspec.Raw:
        told = msgspec.json.decode(self.line(deadline_s), type=Line)
        if told.error:
            raise ChildFailed(told.error)
        return told.answer


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
