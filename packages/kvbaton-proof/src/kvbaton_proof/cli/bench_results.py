"""What all kinds of `kvbaton bench` have in common: lists of names as an argument, and how results are shown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbaton.cli.progress import note
from kvbaton.cli.screen import stdout
from kvbaton.processes.operator_errors import CommandError

if TYPE_CHECKING:
    from kvbaton_proof.bench.kit.lab_pages import Findings


def names_of(known: Sequence[str], *, in_order: bool = False) -> Callable[[str], tuple[str, ...]]:
    """An argument type: some of these, with commas; `in_order`: of the known ones, whatever theirs."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(known)}")
        return tuple(name for name in known if name in names) if in_order else names

    return parse


def new_file(flag: str, given: str | None) -> Path | None:
    """A page that is there stays as it is."""
    path = None if given is None else Path(given)
    if path is not None and (path.exists() or not path.resolve().parent.is_dir()):
        raise CommandError(f"argument --{flag}: {path} exists already, or its directory does not; name a new file")
    return path


def in_folder(flag: str, given: str | None) -> Path | None:
    """A file that may be written over."""
    path = None if given is None else Path(given)
    if path is not None and not path.resolve().parent.is_dir():
        raise CommandError(f"argument --{flag}: {path}: no such folder; create it first")
    return path


def show(findings: Findings, result: Any, *, as_json: bool, page: Path | None, verdict: str | None = None) -> None:
    """`result`: what `--json` prints. `verdict`: other words than those of the findings themselves."""
    import msgspec

    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
    else:
        print(f"{findings.as_text()}\nverdict: {verdict or stdout().verdict(findings.ok)}", flush=True)
    if page is not None:
        page.write_text(findings.as_page())
        note("bench", f"wrote {page}")
