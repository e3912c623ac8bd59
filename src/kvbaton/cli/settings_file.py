"""The file behind `--config`: sections, keys and texts, in a part of YAML that needs no library.

    router:
      port: 8000
      prefill_url: [http://10.0.0.2:8100, http://10.0.0.3:8100]
    worker:
      transport: "shm,tcp"     # quotes are for texts that YAML would read as something else

Laws: a value is the text that the flag of the same name would be given, so that both are judged by one parser, and `on`
or `1e3` is never turned into something else first. Every file that is read here means the same to any YAML reader; all
that YAML has beyond it (anchors, tags, documents, texts of several lines, maps within maps) is refused by its line.
Everything is bounded, and a path that would make the reader wait (a pipe, a device) is refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence

import msgspec

from kvbaton.processes.operator_errors import CommandError

FILE_BYTES_MAX = 256 << 10
ITEMS_MAX = 1024
PROBLEMS_MAX = 20
_SHOWN_CHARS = 60
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,63}):(?: +(.*))?")
_PLAIN = re.compile(r"(?!-(?: |$))[A-Za-z0-9_./:~+=$-][^'\"]*(?<!:)")  # a text that needs no quotes
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


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
    """Says what was expected; whoever catches it knows the line."""


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
    for number, line in enumerate(re.split(r"\r\n|\n", text), 1):
        try:
            reading.take(number, line)
        except _Misread as error:
            reading.problems.append(Problem(number, reading.section, reading.key_at(line), str(error)))
            if len(reading.problems) >= PROBLEMS_MAX:
                break
    reading.end()
    problems = sorted(reading.problems, key=lambda each: each.line)
    return SettingsFile(path, tuple(reading.entries), tuple(reading.sections), tuple(problems))


class _Reading:
    """Line by line: a section at the margin, its keys below it, their lists below them."""

    def __init__(self) -> None:
        self.entries: list[FileSetting] = []
        self.sections: list[tuple[int, str]] = []
        self.problems: list[Problem] = []
        self.section = ""
        self._indent = 0  # of this section's keys, once the first was seen
        self._open: tuple[int, str] | None = None  # line and name of a key whose list is to follow
        self._items: list[str] = []
        self._item_indent = 0
        self._seen: dict[tuple[str, str], int] = {}

    def take(self, number: int, line: str) -> None:
        if any((ord(char) < 32 and char != "\t") or char in "\x7f\x85\u2028\u2029" for char in line):
            raise _Misread("a control character; remove it")
        body = line.lstrip(" ")
        if not body.strip(" \t") or body.startswith("#") or (line.rstrip() == "---" and not self.sections):
            return
        indent = len(line) - len(body)
        if body.startswith("\t"):
            raise _Misread("indented with a tab; use spaces")
        if body.startswith("- ") or body.rstrip(" \t") == "-":
            self._item(indent, body[1:].strip(" \t"))
            return
        self.end()
        found = _KEY.fullmatch(body.rstrip(" \t"))
        if found is None:
            raise _Misread(f"got {_short(body)}, expected NAME: VALUE")
        rest = _without_comment(found[2] or "")
        if indent == 0:
            self._begin(number, found[1], rest)
        else:
            self._key(number, indent, found[1], rest)

    def end(self) -> None:
        """No more items for the key that has a list."""
        if self._open is None:
            return
        line, key = self._open
        self._open = None
        if not self._items:
            said = "no value; give one, or remove the line for the default"
            self.problems.append(Problem(line, self.section, key, said))
        else:
            self._add(line, key, self._items, is_list=True)
        self._items = []

    def key_at(self, line: str) -> str:
        found = _KEY.match(line.strip())
        return found[1].replace("-", "_") if found and line.startswith(" ") else ""

    def _begin(self, number: int, name: str, rest: str) -> None:
        if rest:
            said = "stands alone on its line, and its keys are indented below it"
            raise _Misread(f"got {_short(f'{name}: {rest}')} at the margin, where a section such as router: {said}")
        self._once(number, "", name)
        self.section, self._indent = name, 0
        self.sections.append((number, name))

    def _key(self, number: int, indent: int, name: str, rest: str) -> None:
        if not self.section:
            raise _Misread(f"{name} is not in a section; put it below one, such as router:")
        self._indent = self._indent or indent
        if indent != self._indent:
            raise _Misread(f"indented by {indent} spaces, expected {self._indent} as the keys above; maps have no maps")
        key = name.replace("-", "_")
        self._once(number, self.section, key)
        if not rest:
            self._open = (number, key)
        elif rest.startswith("["):
            self._add(number, key, list(_listed(rest)), is_list=True)
        else:
            self._add(number, key, [_text(rest)])

    def _item(self, indent: int, rest: str) -> None:
        if self._open is None or indent < self._indent:
            raise _Misread("an item of a list, but the line above is not KEY: without a value")
        self._item_indent = indent if not self._items else self._item_indent
        if indent != self._item_indent:
            raise _Misread(f"indented by {indent} spaces, expected {self._item_indent} as the items above")
        if len(self._items) >= ITEMS_MAX:
            raise _Misread(f"more than {ITEMS_MAX} items")
        self._items.append(_text(_without_comment(rest)))

    def _add(self, line: int, key: str, texts: Sequence[str], *, is_list: bool = False) -> None:
        if len(texts) > ITEMS_MAX:
            raise _Misread(f"more than {ITEMS_MAX} items")
        self.entries.append(FileSetting(line, self.section, key, tuple(texts), is_list))

    def _once(self, line: int, section: str, key: str) -> None:
        first = self._seen.setdefault((section, key), line)
        if first != line:
            raise _Misread(f"given before, in line {first}; remove one of them")


def _text(rest: str) -> str:
    """A scalar as it was written."""
    if rest[:1] in ("'", '"'):
        text, after = _quoted(rest)
        if after:
            raise _Misread(f"got {_short(after)} after the closing quote")
        return text
    if not rest or rest in ("~", "null", "Null", "NULL"):
        raise _Misread("no value; give one, or remove the line for the default")
    if not _PLAIN.fullmatch(rest) or ": " in rest:
        raise _Misread(f"got {_short(rest)}, expected a text, a number or [a, list]; quote it if it is a text")
    return rest


def _listed(rest: str) -> Iterator[str]:
    """A list in brackets, on one line."""
    left = rest[1:].lstrip()
    while left != "]":
        if left[:1] in ("'", '"'):
            text, left = _quoted(left)
            yield text
        else:
            end = re.search(r"[,\]\[{}]", left)
            if end is None:
                raise _Misread("a list that does not end; close it with ] on the same line")
            yield _text(left[: end.start()].strip())
            left = left[end.start() :]
        if left[:1] == ",":
            left = left[1:].lstrip()
        elif left != "]":
            raise _Misread(f"got {_short(left)}, expected , or ]")


def _quoted(rest: str) -> tuple[str, str]:
    """What is in quotes, and what follows."""
    quote = rest[0]
    pattern = r"'((?:[^']|'')*)'" if quote == "'" else r'"((?:[^"\\]|\\.)*)"'
    found = re.match(pattern, rest)
    if found is None:
        raise _Misread("a quote that does not end; close it on the same line")
    after = rest[found.end() :].lstrip()
    return (found[1].replace("''", "'") if quote == "'" else _ESCAPE.sub(_unescaped, found[1])), after


def _unescaped(found: re.Match[str]) -> str:
    said = found[1]
    if said[0] == "u" and len(said) == 5 and not 0xD800 <= int(said[1:], 16) <= 0xDFFF:
        return chr(int(said[1:], 16))
    if said in _ESCAPES:
        return _ESCAPES[said]
    raise _Misread(f'got the escape \\{said}, expected one of \\n \\t \\" \\\\ \\uXXXX; or use single quotes')


def _without_comment(rest: str) -> str:
    """A comment begins with # after a space, outside of quotes."""
    quote = ""
    for at, char in enumerate(rest):
        if quote:
            quote = "" if char == quote and not (quote == '"' and _is_escaped(rest, at)) else quote
        elif char in "'\"" and (at == 0 or rest[at - 1] in " [,"):
            quote = char
        elif char == "#" and (at == 0 or rest[at - 1] in " \t"):
            return rest[:at].rstrip(" \t")
    return rest.rstrip(" \t")


def _is_escaped(text: str, at: int) -> bool:
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
