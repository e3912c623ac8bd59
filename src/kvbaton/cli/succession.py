"""Who serves when a worker has drained: whether it is the last of its role, and who comes after it.

Laws: the last ready worker of a role is drained only by an operator who was asked, or said --force. A successor is the
next life of that name, or a ready worker of its role that was not ready before; whoever served beside it is none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from kvbaton.control.rank_names import engine_of
from kvbaton.control.registry import OperatorLine
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
    lives: Mapping[str, int] = {}  # none: it is not listed, or the registry does not know how to tell
    role: str = ""
    beside: frozenset[str] = frozenset()  # that are ready in its role
    is_ready: bool = False

    @property
    def is_last(self) -> bool:
        return self.is_ready and not self.beside


def look_at(line: OperatorLine, worker: WorkerId, timeout_s: float, say: Say) -> EngineStanding:
    """How it stands now. A young registry is given the time to hear of everybody."""
    until = time.monotonic() + timeout_s
    said = line.look(worker, min(ANSWER_S, timeout_s))
    while said is not None and said.held and said.state in ("ready", "unknown") and not (said.role and said.workers):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        say(f"{worker} waits: {said.held}")
        time.sleep(min(1.0, left_s))
        said = line.look(worker, min(ANSWER_S, max(left_s, LOOK_S)))
    if said is None:
        return EngineStanding(worker)
    ranks = [WorkerId(name) for name in said.workers if engine_of(name) == worker] if said.state == "unknown" else []
    found = [said] if not ranks else [each for rank in ranks if (each := line.look(rank, ANSWER_S)) is not None]
    found = [each for each in found if each.role]
    if not found:
        return EngineStanding(worker)
    lives = {str(each.worker): each.incarnation for each in found}
    beside = {name for each in found for name in each.workers} - lives.keys()
    return EngineStanding(worker, lives, found[0].role, frozenset(beside), any(each.state == "ready" for each in found))


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
    """The name of the successor, once ready; "" if none was in time. `same`: only the next life of that name."""
    begun = told = time.monotonic()
    waiting = dict(before.lives)
    while (now := time.monotonic()) < begun + timeout_s:
        for name, life in list(waiting.items()):
            said = line.look(WorkerId(name), min(ANSWER_S, max(begun + timeout_s - now, LOOK_S)))
            if said is not None and said.state == "ready" and said.incarnation != life:
                del waiting[name]
            elif said is not None and not same:
                fresh = set(said.workers) - before.beside - before.lives.keys()
                others = fresh if said.role else {each for each in fresh if _serves(line, each, before.role)}
                if others:
                    return min(others)
        if not waiting:
            return before.worker
        if now >= told + NEWS_S:
            told = now
            say(f"{now - begun:.0f} s: waits until a successor of {', '.join(sorted(waiting))} is ready")
        time.sleep(LOOK_S)
    return ""


def _serves(line: OperatorLine, name: str, role: str) -> bool:
    said = line.look(WorkerId(name), ANSWER_S)
    return said is not None and said.state == "ready" and said.role in (role, "both")
