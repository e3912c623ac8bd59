"""The file behind `--config`: sections, keys and texts, in YAML.

    router:
      port: 8000
      prefill_url: [http://10.0.0.2:8100, http://10.0.0.3:8100]
    worker:
      transport: "shm,tcp"     # quotes are for texts that YAML would read as something else

Laws: a value is the text that the flag of the same name would be given, so that both are judged by one parser, and `on`
or `1e3` is never turned into something else first. What settings do not need of YAML (anchors, tags, documents, texts
of several lines, maps within maps) is refused by its line. Everything is bounded, and a path that would make the reader
wait (a pipe, a device) is refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Any

import msgspec

from kvbaton.processes.operator_errors import CommandError

FILE_BYTES_MAX = 256 << 10
ITEMS_MAX = 1024
DEPTH_MAX = 8
PROBLEMS_MAX = 20
_SHOWN_CHARS = 60
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_NO_VALUE = "no value; give one, or remove the line for the default"
_ONE_LINE = "expected a text, a number or [a, list], in one line; quote it if it is a text"
_CARE = "indent with spaces, close quotes and brackets; a text with ': ' or ' #' in it: quote it"
_SECTION = "where a section such as router: stands alone on its line, and its keys are indented below it"


class Problem(msgspec.Struct, frozen=True):
    """One mistake in a file, or in a variable of the environment (then line 0)."""

    line: int
    section: str
    key: str
    message: str


class FileSetting(msgspec.Struct, frozen=True):
    """One key as it stands in the file."""

    line: int
    section: str
    key: str
    texts: tuple[str, ...]
    is_list: bool = False


class SettingsFile(msgspec.Struct, frozen=True):
    path: str
    entries: tuple[FileSetting, ...] = ()
    sections: tuple[tuple[int, str], ...] = ()
    problems: tuple[Problem, ...] = ()


class _Misread(Exception):
    """Says what was expected, and in which line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def read(path: str) -> SettingsFile:
    """`CommandError` if there is no such file to read; mistakes in it are in the result."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would wait for its writer
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CommandError(f"{path}: not a regular file; give the path of one")
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise CommandError(f"{path}: larger than {FILE_BYTES_MAX >> 10} KiB; expected a configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return SettingsFile(path, problems=(Problem(line, "", "", "not UTF-8; save the file as UTF-8"),))
    return parse(path, text)


def parse(path: str, text: str) -> SettingsFile:
    reading = _Reading()
    try:
        root = _composed(text)
        if root is not None:
            reading.take(root)
    except _Misread as error:  # nothing below is known
        reading.problems.append(Problem(error.line, "", "", str(error)))
    problems = sorted(reading.problems, key=lambda problem: problem.line)[:PROBLEMS_MAX]
    return SettingsFile(path, tuple(reading.entries), tuple(reading.sections), tuple(problems))


class _Reading:
    """What the nodes of a file say, and what is wrong with them."""

    def __init__(self) -> None:
        self.entries: list[FileSetting] = []
        self.sections: list[tuple[int, str]] = []
        self.problems: list[Problem] = []

    def take(self, root: Any) -> None:
        if root.id != "mapping":
            raise _Misread(_line(root), f"got {_short(root)}, expected NAME: VALUE")
        for line, name, node in self._pairs(root, ""):
            if node.id == "mapping":
                self.sections.append((line, name))
                for at, key, value in self._pairs(node, name):
                    self._setting(at, name, key, value)
            elif _is_empty(node):
                self.sections.append((line, name))
            else:
                self.problems.append(Problem(line, "", "", f"got {_short(node, name)} {_SECTION}"))

    def _pairs(self, node: Any, section: str) -> Iterator[tuple[int, str, Any]]:
        """Keys of a mapping with their lines, none of them twice."""
        first: dict[str, int] = {}
        for key_node, value in node.value:
            line = _line(key_node)
            if key_node.id != "scalar" or not _KEY.fullmatch(key_node.value):
                self.problems.append(Problem(line, section, "", f"got {_short(key_node)}, expected NAME: VALUE"))
                continue
            key = key_node.value.replace("-", "_") if section else key_node.value
            if key in first:
                message = f"given before, in line {first[key]}; remove one of them"
                self.problems.append(Problem(line, section, key if section else "", message))
                continue
            first[key] = line
            yield line, key, value

    def _setting(self, line: int, section: str, key: str, node: Any) -> None:
        try:
            if node.id == "sequence" and len(node.value) > ITEMS_MAX:
                raise _Misread(line, f"more than {ITEMS_MAX} items")
            items = node.value if node.id == "sequence" else [node]
            texts = tuple(map(_text, items))
        except _Misread as error:
            self.problems.append(Problem(line if node.id == "scalar" else error.line, section, key, str(error)))
        else:
            self.entries.append(FileSetting(line, section, key, texts, node.id == "sequence"))


def _composed(text: str) -> Any:
    """The root of the document; None if it is empty."""
    import yaml  # not for commands without --config

    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH_MAX:  # of which the library's time grows with the square
                raise _Misread(_line(event), f"lists in lists; {_ONE_LINE}")
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise _Misread(_line(event), f"an anchor or a tag; {_ONE_LINE}")
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _Misread(line, "a control character; remove it") from None
    except yaml.MarkedYAMLError as error:
        raise _Misread(*_explained(text, error)) from None
    except (ValueError, OverflowError, RecursionError):  # escapes beyond Unicode, and lists in lists in lists
        raise _Misread(1, f"this is beyond what settings can be; {_ONE_LINE}") from None


def _explained(text: str, error: Any) -> tuple[int, str]:
    """What a text that is no YAML lacks: the line, the library's words for it, and what to do."""
    is_open = error.context is not None and ("quoted" in error.context or "flow" in error.context)
    mark = error.context_mark if is_open else error.problem_mark or error.context_mark
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1)
    got = _cut(lines[number].strip(" "))
    return number + 1, f"got {got}: {error.problem}; {_CARE}"


def _text(node: Any) -> str:
    """A scalar as it was written."""
    if node.id != "scalar" or node.style in ("|", ">") or node.start_mark.line != node.end_mark.line:
        what = "maps have no maps" if node.id == "mapping" else f"got {_short(node)}"
        raise _Misread(_line(node), f"{what}, {_ONE_LINE}")
    if _is_empty(node):
        raise _Misread(_line(node), _NO_VALUE)
    if any(0xD800 <= ord(char) <= 0xDFFF for char in node.value):
        raise _Misread(_line(node), "an escape in quotes that is no character; use single quotes")
    return str(node.value)


def _is_empty(node: Any) -> bool:
    return node.id == "scalar" and node.style is None and node.value in ("", "~", "null", "Null", "NULL")


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _short(node: Any, key: str = "") -> str:
    text = node.value if node.id == "scalar" else "a list" if node.id == "sequence" else "a map"
    return _cut(f"{key}: {text}" if key else str(text))


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
