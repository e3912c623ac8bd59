"""`kvbaton explain WORD`: meaning and remedy of a failure reason, error code, log code or doctor finding, and of the
reasons why a decode engine computes a prompt itself.

Law: it explains every code that the product can emit (`kvbaton.observe.codes`), and needs no running process.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator

import msgspec

from kvbaton.observe.codes.code_catalogue import CATALOGUE, TITLES, close, find
from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who
from kvbaton.processes.operator_errors import CommandError

WIDTH = 100
ACTS: dict[Who, str] = {
    Who.CALLER: "the sender of the request: the client, or the router in front",
    Who.PEER: "the other engine, and its operator",
    Who.OPERATOR: "you, the operator: configuration, capacity or network",
    Who.NOBODY: "no one: this is normal operation",
    Who.MAKERS: "the maintainers of kvbaton: this is a bug",
}
MET: dict[CodeKind, str] = {
    CodeKind.REASON: "failure reason of a handoff",
    CodeKind.ALONE: "why D computes a prompt itself",
    CodeKind.API: "error code of an HTTP response",
    CodeKind.STATUS: "HTTP status of a worker's refusal",
    CodeKind.LOG: "code of a log line",
    CodeKind.FINDING: "finding of kvbaton doctor",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", metavar="WORD", nargs="?", help="a reason or code; lists all without it")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(args: argparse.Namespace) -> int:
    if args.word is None:
        print(json.dumps(_listing()) if args.json else "\n".join(_list_lines()))
        return 0
    found = find(args.word)
    if not found:
        meant = close(args.word)
        hint = f"did you mean {meant[0]}?" if meant else "kvbaton explain lists all"
        raise CommandError(f"argument WORD: {args.word[:80]!r} is not a reason or code; {hint}")
    if args.json:
        print(json.dumps({"word": found[0].code, "entries": [msgspec.to_builtins(entry) for entry in found]}))
    else:
        print("\n\n".join("\n".join(_lines(entry)) for entry in found))
    return 0


def _listing() -> dict[str, list[dict[str, object]]]:
    return {kind.value: [msgspec.to_builtins(entry) for entry in entries] for kind, entries in CATALOGUE.items()}


def _list_lines() -> Iterator[str]:
    width = max(len(entry.code) for entries in CATALOGUE.values() for entry in entries)
    for kind, entries in CATALOGUE.items():
        yield f"{TITLES[kind]}:"
        for entry in entries:
            yield f"  {entry.code:<{width}}  {entry.means}"
        yield ""
    yield "next: kvbaton explain WORD"


def _lines(entry: CodeEntry) -> Iterator[str]:
    is_api = entry.kind is CodeKind.API and entry.status
    more = f", HTTP {entry.status}" if is_api else f", {entry.severity}" if entry.severity else ""
    yield f"{entry.code} ({MET[entry.kind]}{more})"
    yield from _wrapped(entry.means, "  ", "  ")
    yield f"  who must act: {ACTS[entry.who]}"
    for title, items in (("likely causes", entry.causes), ("what to do", entry.do), ("where to look", entry.look)):
        if items:
            yield f"  {title}:"
            for item in items:
                yield from _wrapped(item, "    - ", "      ")


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
