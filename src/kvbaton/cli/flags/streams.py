"""Flags of streams that outlive their decode worker."""

from __future__ import annotations

import argparse
from typing import Any

from kvbaton.cli.arguments import seconds, whole
from kvbaton.router.router_settings import RouterSettings

_DEFAULT = RouterSettings()
_ON_OFF = {True: "on", False: "off"}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--streams-continue",
        choices=list(_ON_OFF.values()),
        default=_ON_OFF[_DEFAULT.streams_continue],
        help="have another decode worker go on with a stream whose worker dies, stands still or drains",
    )
    group.add_argument(
        "--first-token",
        choices=list(_ON_OFF.values()),
        default=_ON_OFF[_DEFAULT.first_token],
        help="send a stream's first token as soon as the prefill worker has it; with --streams-continue on",
    )
    group.add_argument(
        "--stall-s",
        metavar="S",
        type=seconds,
        default=_DEFAULT.stall_s,
        help="a decode worker that owes an event and sends nothing for so long is left",
    )
    for flag, field, what in (
        ("--moves-max", "moves_max", "moves of one stream from worker to worker"),
        ("--history-max", "history_max", "tokens of one stream that are remembered; a longer one cannot move"),
        ("--histories-max", "histories_max", "tokens of all streams of a process, 4 bytes each"),
    ):
        group.add_argument(flag, type=whole(1, 1 << 30), default=getattr(_DEFAULT, field), metavar="N", help=what)
    group.add_argument(
        "--moves-per-s",
        metavar="N",
        type=whole(1, 1 << 20),
        default=round(_DEFAULT.moves_per_s),
        help="moves of all streams in a second; more wait for their turn",
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "streams_continue": args.streams_continue == "on",
        "first_token": args.first_token == "on",
        "stall_s": args.stall_s,
        "moves_max": args.moves_max,
        "moves_per_s": float(args.moves_per_s),
        "history_max": args.history_max,
        "histories_max": args.histories_max,
    }
