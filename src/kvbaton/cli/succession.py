"""Who serves when a worker has drained: whether it is the last of its role, and who comes after it.

Laws: the last ready worker of a role is drained only by an operator who was asked, or said --force; only a registry of
the release before cannot tell which one is the last. A successor is the next life of that name, or a ready worker of
its role that was not ready before; a worker that served beside it is none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvbaton.control.addressing import engine_of
from kvbaton.control.registry import DrainState, OperatorLine
from kvbaton.protocol.ids import WorkerId

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
