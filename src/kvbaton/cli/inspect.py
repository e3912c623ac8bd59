"""`kvbaton inspect`: one request's timeline over router, P and D.

Law: the exit status is the verdict: 0 when something was found, 1 when nothing matches, 2 when no router responds. It
only reads. With --files no router is needed: the records are those that processes wrote to disk.
"""

from __future__ import annotations

import argparse
import http.client
import urllib.error
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbaton.cli import screen
from kvbaton.cli.arguments import url, whole
from kvbaton.cli.flags import router_way
from kvbaton.doctor.cluster_checks import share_line
from kvbaton.observe.flight import dumps, terminal_timeline
from kvbaton.observe.flight.collector import LAST_MAX
from kvbaton.observe.flight.dumps import printable, printable_all
from kvbaton.observe.flight.journey import Journey, joined
from kvbaton.observe.flight.terminal_timeline import Ink
from kvbaton.observe.flight.worker_reports import PromptShare
from kvbaton.processes.http_question import PLAIN, Way, asked, why
from kvbaton.processes.operator_errors import CommandError

ROUTER = "http://127.0.0.1:8000"
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 64 << 20
FILE_BYTES_MAX = 256 << 20
PICTURES_MAX = 3
"""More journeys than this are shown as a list, unless one was requested by its id."""


class InspectAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The router's response."""

    journeys: tuple[Journey, ...]
    prompts: PromptShare | None = None  # who computed them, in the whole cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        metavar="ID",
        nargs="?",
        help="a request id, or a handoff id or its prefix; without it: the latest",
    )
    parser.add_argument("--last", metavar="N", type=whole(1, LAST_MAX), help="how many, newest first (default: 1)")
    parser.add_argument(
        "--failed", action="store_true", help="only failed ones; what a worker refused as the client's mistake is none"
    )
    parser.add_argument("--router", metavar="URL", type=url, default=ROUTER, help="the router to query")
    router_way.add_arguments(parser)
    parser.add_argument(
        "--files", metavar="FILE", nargs="+", type=Path, help="join these dumps instead of querying a router"
    )
    parser.add_argument("--list", action="store_true", help="one line each instead of a timeline")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    last = args.last or (LAST_MAX if args.id else 1)
    prompts: PromptShare | None = None
    if args.files:
        found = from_files(args.files, last, args.failed, args.id or "")
    else:
        way = router_way.way_to(args.router, args)
        answer = from_router(args.router, last, args.failed, args.id or "", way)
        found = list(answer.journeys)
        prompts = msgspec.convert(printable_all(msgspec.to_builtins(answer.prompts)), PromptShare | None)
    found = msgspec.convert(printable_all(msgspec.to_builtins(found)), list[Journey])  # files may hold anything
    if args.json:
        print(msgspec.json.encode(InspectAnswer(tuple(found), prompts)).decode(), flush=True)
    elif found:
        _show(found, is_list=args.list or (len(found) > PICTURES_MAX and not args.id))
    else:
        print(_nothing(args), flush=True)
    if prompts and not args.json and (said := share_line({"all": prompts.tokens}, _by_reason(prompts))):
        print(f"\nin the cluster: {said}")
    if prompts and prompts.resets and not args.json:
        dropped = f"{prompts.resets} times, {prompts.reset_blocks} cached blocks dropped"
        print(f"in the cluster: prefix caches reset since a member was removed: {dropped}")
    return 0 if found else 1


def from_files(paths: Sequence[Path], last: int, failed: bool, find: str) -> list[Journey]:
    """The journeys in these dumps."""
    flights = []
    for path in paths:
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise CommandError(f"argument --files: {path} is larger than {FILE_BYTES_MAX} bytes; split it")
            flights += dumps.read(path)
        except OSError as error:
            raise CommandError(f"argument --files: {path}: {error.strerror}") from None
        except ValueError as error:
            raise CommandError(f"argument --files: {error}; expected records dumped by kvbaton") from None
    return joined(flights, last=last, failed=failed, find=find)


def _by_reason(prompts: PromptShare) -> dict[str, int]:
    """All that was computed alone; reasons that a report has no room for are one."""
    other = prompts.alone - sum(prompts.reasons.values())
    return {**prompts.reasons, **({"other": other} if other > 0 else {})}


def from_router(router: str, last: int, failed: bool, find: str, way: Way = PLAIN) -> InspectAnswer:
    """The records of the router, and those that it can still get from its workers."""
    query = {"last": str(last), **({"failed": "1"} if failed else {}), **({"id": find} if find else {})}
    question = f"{router}/flights?{urllib.parse.urlencode(query)}"
    try:
        data = asked(question, ANSWER_S, ANSWER_BYTES_MAX, way).body
    except urllib.error.HTTPError as error:
        said = _said(error)
        step = "; here: --operator-key-file FILE" if "operator's key" in said and not way.key else ""
        raise CommandError(f"the router at {router} returned {error.code}: {said}{step}") from None
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(
            f"no response from a router at {router} ({why(error)}); give --router URL, or --files with dumps of its "
            "processes"
        ) from None
    try:
        return msgspec.json.decode(data, type=InspectAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{router} is not a kvbaton router of this release: {error}") from None


class _InspectFault(msgspec.Struct, frozen=True):
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    error: _InspectFault = _InspectFault()


def _said(error: urllib.error.HTTPError) -> str:
    try:
        said = msgspec.json.decode(error.read(1 << 16), type=_Refusal).error.message or error.reason
        return printable(said, 300)[:300]  # it may not be a router
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError, http.client.HTTPException):
        return f"{error.reason}; is that a kvbaton router?"


def _show(found: Sequence[Journey], is_list: bool) -> None:
    shown = screen.stdout()
    if is_list:
        rows = [terminal_timeline.brief(journey) for journey in found]
        for row, journey in zip(rows, found, strict=True):
            row[-1] = shown.style(row[-1], "bad" if journey.failed else "good" if journey.is_over else "dim")
        print("\n".join(shown.table(terminal_timeline.BRIEF_HEADER, rows, right=[4, 5])))
        print(f"{len(found)} shown; one of them: kvbaton inspect ID")
        return
    ink = Ink(shown.style, fancy=shown.either("█▏─·→µ", "") != "")
    pictures = ["\n".join(terminal_timeline.draw(journey, shown.width(), ink)) for journey in found]
    print("\n\n".join(pictures))


def _nothing(args: argparse.Namespace) -> str:
    what = "failed handoff" if args.failed else "handoff"
    where = "in these files" if args.files else f"at {args.router}"
    if args.id:
        return (
            f"kvbaton inspect: no {what} matches {args.id[:80]!r} {where}: it was refused before a worker was chosen "
            "(its answer says why), or is forgotten; kvbaton inspect --last 20 lists the last"
        )
    return f"kvbaton inspect: no {what} is known {where}"
