"""The table of docs/faults.md: two runs of the standard plan side by side, one per connector.

    python -m kvbaton_proof.chaos.vllm.fault_table kvbaton.json nixl.json             the table alone
    python -m kvbaton_proof.chaos.vllm.fault_table kvbaton.json nixl.json --into docs/faults.md     put in place of
    the one there

Laws: pure, but for the files that are named. Every row of either run is in the table, and what speaks against kvbaton
is told in the same words as what speaks for it. What was not run is "-", never 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.outcome import Outcome, Row

BEGIN, END = "<!-- table: kvbaton_proof.chaos.vllm.fault_table -->", "<!-- end of the table -->"
THEIRS = "NixlConnector"
HEAD = ("fault", "promises", "kvbaton", "well after", THEIRS, "well after", "seen")
NOT_RUN = "-"


def read(text: bytes) -> Outcome:
    """What `kvbaton chaos --json` printed; ValueError if it is something else."""
    try:
        return msgspec.json.decode(text, type=Outcome)
    except msgspec.DecodeError as error:
        raise ValueError(f"not an outcome of kvbaton chaos --json: {error}") from None


def table(ours: Outcome, theirs: Outcome, date: str) -> str:
    """Both runs, row by row, and what they came to."""
    if ours.connector != "kvbaton" or theirs.connector == "kvbaton" or {ours.engine, theirs.engine} != {"vllm"}:
        found = [f"{each.connector} on {each.engine}" for each in (ours, theirs)]
        raise ValueError(f"connector: got {' and '.join(found)}, expected kvbaton and another one on vllm")
    head = tuple(theirs.connector if cell == THEIRS and theirs.connector != "nixl" else cell for cell in HEAD)
    drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines(ours, theirs)))
    minutes = f"{ours.seconds / 60:.0f} and {theirs.seconds / 60:.0f} minutes"
    seeds = f"seed {ours.seed}" if ours.seed == theirs.seed else f"seeds {ours.seed} and {theirs.seed}"
    return (
        f"Run on {date}, {seeds}, {minutes}. A cell counts requests: right, then what went wrong. "
        "*errors* are answers that say so; *late* had no answer by the deadline; *left* counts blocks and pins that "
        "were held 45 s later; *dead* are engines that nobody killed.\n\n"
        f"{drawn}\n"
    )


def lines(ours: Outcome, theirs: Outcome | None) -> list[tuple[str, ...]]:
    """The cells of the table, row by row, and last what all came to; pure."""
    left = {row.title: row for row in ours.rows}
    right = {row.title: row for row in theirs.rows} if theirs is not None else {}
    who = "NIXL" if theirs is None or theirs.connector == "nixl" else theirs.connector
    found = [_cells(title, left.get(title), right.get(title), who) for title in dict.fromkeys([*left, *right])]
    their_sum = (f"**{_sum(theirs)}**", _verdict(theirs)) if theirs is not None else (NOT_RUN, NOT_RUN)
    return [*found, ("**all**", "", f"**{_sum(ours)}**", _verdict(ours), *their_sum, "")]


def _cells(title: str, ours: Row | None, theirs: Row | None, who: str) -> tuple[str, ...]:
    known = ours or theirs
    assert known is not None
    said = [f"{name}: {row.note}" for name, row in (("kvbaton", ours), (who, theirs)) if row is not None and row.note]
    promises = ", ".join(str(number) for number in known.promises)
    return (title, promises, *_half(ours), *_half(theirs), _plain(" / ".join(said)))


def _half(row: Row | None) -> tuple[str, str]:
    if row is None:
        return NOT_RUN, NOT_RUN
    left = "left unknown" if row.left_over is None else _bad(row.left_over, "left")
    counts = [f"{row.right} right", f"{row.errors} errors" if row.errors else ""]
    counts += [_bad(row.wrong, "wrong"), _bad(row.late, "late"), left, _bad(row.dead, "dead")]
    return ", ".join(filter(None, counts)), "**never**" if row.recover_s is None else f"{row.recover_s:.1f} s"


def _bad(count: int, word: str) -> str:
    return f"**{count} {word}**" if count else ""


def _sum(outcome: Outcome) -> str:
    counts = {"right": outcome.right, "errors": outcome.errors, "wrong": outcome.wrong, "late": outcome.late}
    counts |= {"left": outcome.left_over, "dead": outcome.dead}
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _verdict(outcome: Outcome) -> str:
    kept = sum(row.ok for row in outcome.rows)
    return f"{kept} of {len(outcome.rows)} kept"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def put_into(page: str, drawn: str) -> str:
    """`page` with the table between its two marks; ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table: it needs {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{drawn}{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbaton_proof.chaos.vllm.fault_table", description="the table of two runs"
    )
    parser.add_argument("kvbaton", type=Path, help="JSON of the run with kvbaton")
    parser.add_argument("other", type=Path, help="JSON of the run with --connector nixl, or with another")
    parser.add_argument("--date", required=True, help="when it was run, and on what, as the page is to say it")
    parser.add_argument("--into", type=Path, default=None, metavar="PAGE", help="a page with marks (default: print)")
    args = parser.parse_args(argv)
    try:
        drawn = table(read(args.kvbaton.read_bytes()), read(args.other.read_bytes()), args.date)
        if args.into is None:
            print(drawn, end="")
        else:
            args.into.write_text(put_into(args.into.read_text(), drawn))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
