"""Shell-independent completion data: words and what may follow them.

Law: pure values; built from the parsers (`completion.py`), rendered by the shells' scripts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

Takes = Literal["nothing", "choice", "file", "dir", "text"]


class Taker(msgspec.Struct, frozen=True):
    """A flag, or a positional (no words)."""

    words: tuple[str, ...]
    label: str
    about: str
    takes: Takes
    choices: tuple[str, ...] = ()
    many: bool = False


class WordNode(msgspec.Struct, frozen=True):
    """A command, its flags and positionals, and the commands below it."""

    name: str
    about: str
    flags: tuple[Taker, ...] = ()
    places: tuple[Taker, ...] = ()
    below: tuple[WordNode, ...] = ()


def walk(root: WordNode) -> Iterator[tuple[str, WordNode]]:
    """Every command with the words that lead to it: "" for the program itself, `bench`, `bench router`."""
    todo = [("", root)]
    while todo:
        path, node = todo.pop(0)
        yield path, node
        todo += [(f"{path} {each.name}".strip(), each) for each in node.below]
