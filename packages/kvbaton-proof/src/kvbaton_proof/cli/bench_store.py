"""`kvbaton bench store`: throughput of stores as an engine sees it, compared; and what a hit saves a request.

Law: the exit status is the verdict: 0 when every requested backend could be measured, every byte and answer was right,
everything that was put was found, and a hit beat computing the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbaton import __version__
from kvbaton.cli import progress
from kvbaton.cli.progress import note
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.kit.bench_peers import BACKENDS, MOONCAKE
from kvbaton_proof.bench.store import store_moves, store_page, store_sites, store_ttft
from kvbaton_proof.bench.store.store_page import Report
from kvbaton_proof.bench.store.store_sites import SiteError

ROOM_BYTES = 1 << 30

_say = functools.partial(note, "bench")


def run(args: argparse.Namespace) -> int:
    with progress.shown("bench store", quiet=args.json):
        report = _measured(args)
    return _told(args, report)


def _measured(args: argparse.Namespace) -> Report:
    names = args.backends or tuple(name for name in BACKENDS if store_sites.is_installed(name))
    if args.out is not None and not Path(args.out).resolve().parent.is_dir():
        raise CommandError(f"argument --out: {Path(args.out).parent} is not a directory; create it first")
    begun, load = time.monotonic(), os.getloadavg()[0]
    moves, ttfts, failures = [], [], []
    parts = len(names) * (len(store_moves.SHAPES) + 1)
    done = itertools.count(1)
    for name in names:
        try:
            with store_sites.site(name, ROOM_BYTES) as site:
                for shape in store_moves.SHAPES:
                    _say(f"{next(done)} of {parts}, {name}: {shape}, {args.rounds} rounds")
                    source, target = (site.clients(who) for who in store_sites.CLIENTS)
                    with _hushed(name):
                        moves.append(store_moves.measure(name, source, target, shape, args.rounds, site.trusts))
                said = f"time to first token of {args.prompt_tokens} tokens, recomputed and loaded"
                _say(f"{next(done)} of {parts}, {name}: {said}")
                with _hushed(name):
                    ttfts.append(store_ttft.measure(site, args.prompt_tokens, args.rounds))
        except (SiteError, RuntimeError) as error:
            failures.append(f"{name}: {error}")
            _say(failures[-1])
    return Report(
        moves=tuple(moves),
        ttft=tuple(ttfts),
        failures=tuple(failures),
        rounds=args.rounds,
        seconds=time.monotonic() - begun,
        load=(load, os.getloadavg()[0]),
        machine=run_facts.machine(),
        version=__version__,
    )


def _told(args: argparse.Namespace, report: Report) -> int:
    verdict = [*report.failures, *store_page.complaints(report, strict=not args.no_verdict)]
    if args.out is not None:
        Path(args.out).write_text(store_page.page(report, verdict, _command(args)))
    if args.json:
        print(json.dumps({**msgspec.to_builtins(report), "complaints": verdict, "ok": not verdict}), flush=True)
    else:
        print("\n".join(store_page.tables(report)), flush=True)
    for each in verdict:
        _say(each)
    return 1 if verdict else 0


def _command(args: argparse.Namespace) -> str:
    backends = f" --backends {','.join(args.backends)}" if args.backends else ""
    return f"kvbaton bench store{backends} --rounds {args.rounds} --prompt-tokens {args.prompt_tokens}"


@contextlib.contextmanager
def _hushed(name: str) -> Iterator[None]:
    """Mooncake's library writes to stderr regardless of its settings; nothing else needs stderr meanwhile."""
    if name != MOONCAKE:
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
