"""`kvbaton keys`: mint a cluster's keys, or one more identity for it. Existing keys are never overwritten."""

from __future__ import annotations

import argparse

from kvbaton.cli.arguments import CommandError
from kvbaton.control import keys

ALWAYS = ("router", "operator")
"""Whom every cluster has: its registry, and whoever may tell workers to go (kvbaton drain)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new", "add"), help="new: a new key directory; add: one more name in it")
    parser.add_argument("directory", metavar="DIR", help="where the keys are; keep DIR/secret to yourself")
    parser.add_argument("names", metavar="NAME", nargs="+", help=f"workers; new adds {' and '.join(ALWAYS)}")


def run(args: argparse.Namespace) -> int:
    names: list[str] = args.names
    if args.action == "new":
        names = [*(name for name in ALWAYS if name not in names), *names]
        keys.mint(args.directory, names)
    else:
        if len(set(names)) != len(names):
            raise CommandError("names: one is given twice; give each once")
        for name in names:
            keys.add(args.directory, name)
    print(f"minted {', '.join(names)} in {args.directory}")
    print("next: copy public/ and tickets.json to every host, secret/NAME.json only to where NAME runs")
    return 0
