"""Every command that the documentation shows, found in its Markdown.

Laws: a command is a line that begins with `$ ` in a fence called `console`; it goes on while a quote is open or the
line ends in a backslash. A comment right before the fence, `<!-- run: needs=WHAT -->` or `<!-- run: fails -->`, says
what the whole block needs, or that it is shown because it is refused. An indented line that begins like a command is
one too, as the pages of `docs/lab` have them, which programs write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")
NEEDS = {
    "cluster": "a live cluster: it is run on one that the test starts",
    "minutes": "more time than a test has, or what it measures or installs",
    "vllm": "vLLM",
    "vllm-page": "vLLM: tests/vllm/pairs/test_pages.py runs the page, in its order",
    "two-hosts": "several hosts",
    "gpu": "a GPU",
    "k8s": "a Kubernetes cluster",
}
"""What a block may need. What needs anything but a live cluster is checked, not run."""

_MARK = re.compile(r"<!-- run: (?:needs=(?P<needs>[\w-]+)|(?P<fails>fails)) -->")
_FENCE = re.compile(r"^( {0,3})(`{3,})\s*(\S*)\s*$")
_INDENTED = re.compile(r"^ {4,}((?:kvbaton|make|vllm|curl|pytest|python|git|\.venv\S*) .*)$")


class Command(msgspec.Struct, frozen=True):
    page: str
    line: int
    text: str
    needs: str = ""
    fails: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        return shlex.split(without_remarks(self.text).replace("\\\n", " "))

    @property
    def program(self) -> str:
        """Its name, whichever environment it is taken from; variables before it are left out."""
        return Path(next(word for word in self.words if not re.match(r"^[A-Z_]+=", word))).name


class Block(msgspec.Struct, frozen=True):
    """A fence: the language, the lines within, and the line before it."""

    language: str
    line: int
    lines: tuple[str, ...]
    before: str


def pages() -> list[Path]:
    return [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == opened[2]), len(lines))
        yield Block(opened[3], at + 2, tuple(lines[at + 1 : end]), lines[at - 1].strip() if at else "")
        at = end + 1


def commands_of(page: str, text: str) -> list[Command]:
    found = []
    for block in blocks(text):
        if block.language == "console":
            mark = _MARK.fullmatch(block.before)
            needs, fails = (mark["needs"] or "", bool(mark["fails"])) if mark else ("", False)
            found += [Command(page, line, said, needs, fails) for line, said in _said(block)]
    return found + list(_indented(page, text))


def _said(block: Block) -> Iterator[tuple[int, str]]:
    lines = iter(enumerate(block.lines, block.line))
    for number, line in lines:
        if not line.startswith("$ "):
            continue
        said = line.removeprefix("$ ")
        while _goes_on(said):
            following = next(lines, None)
            if following is None:
                raise ValueError(f"line {number}: a command that does not end: {said[:60]}")
            said = f"{said}\n{following[1]}"
        yield number, said


def _goes_on(said: str) -> bool:
    if said.endswith("\\"):
        return True
    try:
        shlex.split(without_remarks(said))
    except ValueError:
        return True
    return False


def without_remarks(text: str) -> str:
    """A shell's comments begin with # where a word does, unlike those of `shlex`."""
    kept, quote, before = [], "", " "
    rest = iter(text)
    for char in rest:
        if char == "#" and not quote and before.isspace():
            char = next((each for each in rest if each == "\n"), "")  # what ends the remark
        elif char in "'\"" and before != "\\" and quote in ("", char):
            quote = "" if quote else char
        kept.append(char)
        before = char
    return "".join(kept)


def _indented(page: str, text: str) -> Iterator[Command]:
    """Of code blocks that are not fences; lists are indented as well, so a blank line must be before it."""
    inside, before = False, ""
    for number, line in enumerate(text.split("\n"), 1):
        if _FENCE.match(line):
            inside = not inside
        found = _INDENTED.match(line)
        if found and not inside and not before.strip():
            yield Command(page, number, found[1], "minutes")
        else:
            before = line


def all_commands() -> list[Command]:
    return [
        command
        for page in pages()
        for command in commands_of(page.relative_to(ROOT).as_posix(), page.read_text())
    ]  # fmt: skip


def spans(text: str) -> Iterator[str]:
    """Code within lines of text, outside of fences."""
    outside, inside = [], False
    for line in text.split("\n"):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            outside.append(line)
    yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(outside)))
