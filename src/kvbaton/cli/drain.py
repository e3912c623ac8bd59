"""`kvbaton drain`: have a worker, or all ranks of an engine, finish what it has and go, and wait until it is gone.

Law: the exit status is the verdict: 0 when that life of the worker is gone from every registry that answers, or idle
where it does not end by itself (vLLM); 1 when it is not, with what is still held. A worker that is started again
meanwhile is another life, and left alone.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from kvbaton.cli.arguments import registries, seconds
from kvbaton.cli.screen import note
from kvbaton.control import keyring as keys
from kvbaton.control.rank_names import engine_of
from kvbaton.control.registry import DrainState, OperatorLine, registry_places
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.ids import WorkerId, is_worker_id

ANSWER_S = 5.0  # a healthy registry answers in milliseconds
POLL_S = 0.25
NEWS_S = 3.0

_note = functools.partial(note, "drain")


class DrainOutcome(msgspec.Struct, frozen=True):
    """The outcome for the worker."""

    worker: str
    outcome: Literal["gone", "idle", "held", "unknown", "no_answer"]
    seconds: float
    incarnation: str = ""
    held: str = ""  # what the worker was still waiting for
    workers: tuple[str, ...] = ()  # those registered, if the name is unknown

    @property
    def status(self) -> int:
        return 0 if self.outcome in ("gone", "idle") else 1


class RanksDrained(DrainOutcome, frozen=True):
    """Of an engine with data-parallel ranks; the outcome is that of the rank that fared worst."""

    ranks: tuple[DrainOutcome, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name, as in /workers; NAME for all NAME.dpI")
    parser.add_argument("--keys", metavar="DIR", required=True, default=argparse.SUPPRESS, help="the key directory")
    parser.add_argument(
        "--registry", type=registries, metavar="ENDPOINTS", required=True, default=argparse.SUPPRESS,
        help="where the router's registry listens, tcp://host:port; of several registries all, with commas",
    )  # fmt: skip
    parser.add_argument(
        "--registry-name", default="router", help="name in the key directory of registries given without one"
    )
    parser.add_argument("--name", default="operator", help="your name in the key directory: operator or operator-…")
    parser.add_argument(
        "--timeout-s", type=seconds, default=60.0, metavar="SECONDS", help="how long to wait for it to stop"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, all else on stderr")


def run(args: argparse.Namespace) -> int:
    if not is_worker_id(args.worker):
        raise CommandError(f"argument WORKER: got {args.worker[:80]!r}, expected letters, digits, '.', '_' and '-'")
    keyring = keys.load(args.keys, args.name)
    with OperatorLine(keyring, registry_places(args.registry, args.registry_name)) as line:
        found = drain_engine(line, WorkerId(args.worker), args.timeout_s, _note)
    if args.json:
        print(msgspec.json.encode(found).decode(), flush=True)
    _note(_verdict(found, args))
    return found.status


def drain_engine(line: OperatorLine, worker: WorkerId, timeout_s: float, say: Callable[[str], None]) -> DrainOutcome:
    """A worker, or all data-parallel ranks of the engine that has this name."""
    until = time.monotonic() + timeout_s
    found = drain(line, worker, timeout_s, say)
    if found.outcome != "unknown":
        return found
    ranks = [WorkerId(name) for name in found.workers if engine_of(name) == worker]
    if not ranks:
        return found
    for rank in ranks:  # all of them at once, before any is waited for
        line.drain(rank, 0, ANSWER_S)
    ends = tuple(drain(line, rank, max(until - time.monotonic(), POLL_S), say) for rank in ranks)
    worst = max(ends, key=lambda each: each.status)
    held = "; ".join(f"{each.worker}: {each.held}" for each in ends if each.held)
    seconds = round(timeout_s - (until - time.monotonic()), 3)
    return RanksDrained(worker, worst.outcome, seconds, held=held, ranks=ends)


def drain(
    line: OperatorLine,
    worker: WorkerId,
    timeout_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> DrainOutcome:
    """Poll until the worker is gone, or the time is over."""
    begun = told = clock()
    until = begun + timeout_s
    said = line.drain(worker, 0, min(ANSWER_S, timeout_s))
    while said is not None and said.state == "unknown" and said.held and clock() < until:
        say(f"{worker} is not registered yet: {said.held}")  # the registry is young
        time.sleep(min(1.0, max(until - clock(), 0.0)))
        said = line.drain(worker, 0, min(ANSWER_S, max(until - clock(), POLL_S)))
    if said is None:
        return DrainOutcome(worker, "no_answer", clock() - begun)
    if said.state == "unknown":
        return DrainOutcome(worker, "unknown", clock() - begun, workers=said.workers)
    life, held = said.incarnation, said.held
    say(f"{worker} drains")
    while said is None or said.state == "draining":
        now = clock()
        if now >= until:
            return _outcome("held", worker, life, held, now - begun)
        if now >= told + NEWS_S:
            told = now
            say(f"{now - begun:.0f} s: {_waits(worker, said, held)}")
        time.sleep(min(POLL_S, until - now))
        said = line.drain(worker, life, min(ANSWER_S, max(until - clock(), POLL_S)))
        held = said.held if said is not None and said.held else held
    return _outcome("gone" if said.state == "gone" else "idle", worker, life, "", clock() - begun)


def _outcome(
    how: Literal["gone", "idle", "held"], worker: WorkerId, life: int, held: str, seconds: float
) -> DrainOutcome:
    return DrainOutcome(worker, how, round(seconds, 3), f"{life:016x}", held)


def _waits(worker: WorkerId, said: DrainState | None, held: str) -> str:
    if said is None:
        return "the registry does not respond"
    return f"{worker} waits for {held}" if held else f"{worker} has not reported what it waits for"


def _verdict(found: DrainOutcome, args: argparse.Namespace) -> str:
    if found.outcome == "gone":
        return f"{found.worker} is gone after {found.seconds:.1f} s"
    if found.outcome == "idle":
        return f"{found.worker} is idle and gets no new requests; stop its process now, it does not exit by itself"
    if found.outcome == "unknown":
        names = ", ".join(found.workers) or "none"
        return f"no worker {found.worker} is registered; registered: {names}"
    if found.outcome == "no_answer":
        return (
            f"the registry at {args.registry} does not respond; is that its address, and was the router started with "
            f"{args.name} in its key directory?"
        )
    held = found.held or "it has not reported what"
    return f"{found.worker} is still draining after {found.seconds:.0f} s, with: {held}; it continues, try again"
