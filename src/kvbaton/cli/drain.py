"""`kvbaton drain`: have a worker, or all ranks of an engine, finish what it has and go, and wait until it is gone.

Law: the exit status is the verdict: 0 when that life of the worker is gone from every registry that answers, or idle
where it does not end by itself (vLLM), and its successor is ready where that was asked for; 1 when it is not, with what
is still held. A worker that is started again meanwhile is another life, and left alone.

Who serves when a worker has drained: whether it is the last of its role, and who comes after it.

Laws: the last ready worker of a role is drained only by an operator who was asked, or said --force; only a registry of
the release before cannot tell which one is the last. A successor is the next life of that name, or a ready worker of
its role that was not ready before; a worker that served beside it is none.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from kvbaton.cli.arguments import registries, seconds
from kvbaton.cli.progress import note
from kvbaton.control import keyring as keys
from kvbaton.control.keyring import engine_of
from kvbaton.control.registry import DrainState, OperatorLine, registry_places
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.ids import WorkerId, is_worker_id

ANSWER_S = 5.0  # a healthy registry answers in milliseconds
LOOK_S = 0.25
NEWS_S = 3.0
_WITHOUT = {
    "prefill": "nobody computes prompts for decode workers until another joins",
    "decode": "every request is refused until another joins",
    "both": "requests are refused until another joins",
}

Say = Callable[[str], None]


class EngineStanding(msgspec.Struct, frozen=True):
    """A worker, or the data-parallel ranks of an engine, before it drains."""

    worker: str
    lives: Mapping[str, int] = {}  # none: it is not listed, or nobody told
    role: str = ""
    beside: frozenset[str] = frozenset()  # that are ready in its role
    is_ready: bool = False
    is_last: bool = False  # nobody beside it does all that it does
    is_answered: bool = True
    is_told: bool = True  # False: a registry of the release before, which knows no look


def look_at(line: OperatorLine, worker: WorkerId, timeout_s: float, say: Say) -> EngineStanding:
    """How it stands now. A young registry is given the time to hear of everybody."""
    until = time.monotonic() + timeout_s
    said = _look(line, worker, until)
    while said is not None and said.held and said.state in ("ready", "unknown") and not (said.role and said.workers):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        say(f"{worker} waits: {said.held}")
        time.sleep(min(1.0, left_s))
        said = _look(line, worker, until) or said
    looks = [said] if said is None else [_look(line, rank, until) for rank in _ranks(said)] or [said]
    answers = [each for each in looks if each is not None]
    if said is None or len(answers) < len(looks):
        return EngineStanding(worker, is_answered=False)
    found = [each for each in answers if each.role]
    if not found:
        return EngineStanding(worker, is_told=said.state == "unknown")
    lives, role = {str(each.worker): each.incarnation for each in found}, found[0].role
    beside = frozenset(name for each in found for name in each.workers) - lives.keys()
    is_ready = any(each.state == "ready" for each in found)
    # what the registry says of one rank counts the others of its engine
    stays = bool(beside) and (role != "both" or len(lives) == 1 or _are_both(line, beside, until))
    return EngineStanding(worker, lives, role, beside, is_ready, is_ready and not stays)


def _look(line: OperatorLine, name: str, until: float) -> DrainState | None:
    left_s = until - time.monotonic()
    return line.look(WorkerId(name), min(ANSWER_S, left_s)) if left_s > 0 else None


def _ranks(said: DrainState) -> list[str]:
    """The ranks of the name that was asked for, if it is an engine's."""
    return [name for name in said.workers if engine_of(name) == said.worker] if said.state == "unknown" else []


def _are_both(line: OperatorLine, names: Iterable[str], until: float) -> bool:
    """Whether together they compute prompts and answers."""
    missing = {"prefill", "decode"}
    for name in sorted(names):
        said = _look(line, name, until)
        if said is not None and said.state == "ready":
            missing -= {"prefill", "decode"} if said.role == "both" else {said.role}
        if not missing:
            return True
    return False


def agrees(standing: EngineStanding, verb: str, *, force: bool) -> bool:
    """Whether the operator wants this worker to go; asks one at a terminal if it is the last."""
    if force or not standing.is_last:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(
        f"kvbaton {verb}: {last_words(standing)}. {verb.capitalize()} it? [y/N] ", end="", file=sys.stderr, flush=True
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def last_words(standing: EngineStanding) -> str:
    role = "worker" if standing.role == "both" else f"{standing.role} worker"
    return f"{standing.worker} is the last ready {role}: {_WITHOUT.get(standing.role, _WITHOUT['both'])}"


def await_successor(
    line: OperatorLine, before: EngineStanding, timeout_s: float, say: Say, *, same: bool = False
) -> str:
    """The name of the successor, once ready; "" if none was in time. `same`: only the next life of that name, or any
    if none was listed."""
    begun = told = time.monotonic()
    until, others = begun + timeout_s, set[str]()
    waiting = dict(before.lives) or ({before.worker: 0} if same else {})
    while waiting and (now := time.monotonic()) < until:
        for name, life in list(waiting.items()):
            said = _look(line, name, until)
            if said is None:
                continue
            if said.state == "ready" and said.incarnation != life:
                del waiting[name]
            elif not same:
                new = sorted(set(said.workers) - before.beside - before.lives.keys() - others)
                if found := _first_of_role(line, new, before.role, others, until):
                    return found
            elif not life and (ranks := _ranks(said)):
                waiting = dict.fromkeys(ranks, 0)
        if not waiting:
            return before.worker
        if now >= told + NEWS_S:
            told = now
            say(f"{now - begun:.0f} s: waits until a successor of {', '.join(sorted(waiting))} is ready")
        time.sleep(min(LOOK_S, max(until - time.monotonic(), 0.0)))
    return ""


def _first_of_role(line: OperatorLine, names: Iterable[str], role: str, others: set[str], until: float) -> str:
    """The first that is ready. Those of another role are put to the `others`, and need not be asked again."""
    for name in names:
        said = _look(line, name, until)
        if said is not None and said.role and said.role not in (role, "both"):
            others.add(name)
        elif said is not None and said.state == "ready":
            return name
    return ""


_note = functools.partial(note, "drain")


class DrainOutcome(msgspec.Struct, frozen=True):
    """The outcome for the worker."""

    worker: str
    outcome: Literal["gone", "idle", "held", "unknown", "no_answer", "last", "no_successor"]
    seconds: float
    incarnation: str = ""
    held: str = ""  # what the worker was still waiting for
    workers: tuple[str, ...] = ()  # those registered, if the name is unknown
    successor: str = ""  # where it was waited for

    @property
    def status(self) -> int:
        return 0 if self.outcome in ("gone", "idle") else 1


class RanksDrained(DrainOutcome, frozen=True):
    """The outcome for an engine with data-parallel ranks: that of the rank that fared worst."""

    ranks: tuple[DrainOutcome, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_worker(parser, "how long to wait for it to stop; for a successor as long again")
    parser.add_argument(
        "--wait-for-successor", action="store_true",
        help="then wait until its next life is ready, or a new worker of its role",
    )  # fmt: skip


def add_worker(parser: argparse.ArgumentParser, timeout: str) -> None:
    """What says which worker, and where."""
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
    parser.add_argument("--timeout-s", type=seconds, default=60.0, metavar="SECONDS", help=timeout)
    parser.add_argument("--force", action="store_true", help="also the last ready worker of its role")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, all else on stderr")


def run(args: argparse.Namespace) -> int:
    with line_of(args) as line:
        before = look_at(line, WorkerId(args.worker), args.timeout_s, _note)
        found = drain_if_agreed(line, before, args, "drain", _note, follows=args.wait_for_successor)
        if args.wait_for_successor and found.status == 0:
            _note(verdict(found, args, before))
            found = followed(found, await_successor(line, before, args.timeout_s, _note))
    return told(found, verdict(found, args, before), args, _note)


def line_of(args: argparse.Namespace) -> OperatorLine:
    if not is_worker_id(args.worker):
        raise CommandError(f"argument WORKER: got {args.worker[:80]!r}, expected letters, digits, '.', '_' and '-'")
    keyring = keys.load(args.keys, args.name)
    return OperatorLine(keyring, registry_places(args.registry, args.registry_name))


def drain_if_agreed(
    line: OperatorLine,
    before: EngineStanding,
    args: argparse.Namespace,
    verb: str,
    say: Callable[[str], None],
    *,
    follows: bool,
) -> DrainOutcome:
    """`follows`: a successor will be waited for, who is known only by who serves now."""
    if not before.is_answered and (follows or not args.force):
        return DrainOutcome(before.worker, "no_answer", 0.0)
    if follows and not before.is_told:
        raise CommandError(
            "the registry did not say who serves: it is of the release before, and nothing was drained; upgrade it, or "
            f"use kvbaton drain {before.worker} without --wait-for-successor, and watch /workers"
        )
    if not agrees(before, verb, force=args.force):
        return DrainOutcome(before.worker, "last", 0.0)
    return drain_engine(line, WorkerId(args.worker), args.timeout_s, say)


def followed(found: DrainOutcome, successor: str) -> DrainOutcome:
    if successor:
        return msgspec.structs.replace(found, successor=successor)
    return msgspec.structs.replace(found, outcome="no_successor")


def told(found: DrainOutcome, text: str, args: argparse.Namespace, say: Callable[[str], None]) -> int:
    if args.json:
        print(msgspec.json.encode(found).decode(), flush=True)
    say(text)
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
    ends = tuple(drain(line, rank, max(until - time.monotonic(), LOOK_S), say) for rank in ranks)
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
        said = line.drain(worker, 0, min(ANSWER_S, max(until - clock(), LOOK_S)))
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
        time.sleep(min(LOOK_S, until - now))
        said = line.drain(worker, life, min(ANSWER_S, max(until - clock(), LOOK_S)))
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


def verdict(found: DrainOutcome, args: argparse.Namespace, before: EngineStanding) -> str:
    if found.outcome == "last":
        return f"{last_words(before)}; start another first, or add --force"
    if found.outcome == "no_successor":
        return f"{found.worker} has drained, and nobody has come after it in time: start it again; read its log"
    if found.successor:
        return f"{found.worker} is succeeded: {found.successor} is ready"
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
