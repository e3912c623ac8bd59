"""The router's counters: JSON at `/stats`, Prometheus at `/metrics` by the names of `observe/metrics/metric_names.py`.

Law: codes come from workers, so a label that is odd, or one too many, is counted as `other`: no series grows for ever.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbaton.api.http.client_quotas import ClientQuotas
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family, family
from kvbaton.observe.metrics.handoff_metrics import Histograms
from kvbaton.observe.metrics.metric_names import BY_NAME, Metric, Where
from kvbaton.observe.metrics.process_metrics import ProcessFigures, process_families, samples

LABELS_MAX = 128
LEGS_MAX = 4096
"""Workers by what they were asked, as `LABELS_MAX`."""
_LABEL = re.compile(r"[A-Za-z0-9_.:-]{1,80}")
_RENAMED: Mapping[str, Metric] = {"ends_total": metric_names.ROUTER_REQUESTS}
NOT_METRICS = frozenset({"first_byte_seconds_sum_total", "first_byte_count_total"})


def count(counter: Counter[str], label: str, side: str = "", most: int = LABELS_MAX) -> None:
    """One more of `label`, or of `side:label` where there are two labels: `side` is from a closed list, and stays."""
    front = f"{side}:" if side else ""
    key = f"{front}{label}"
    if key not in counter and (len(counter) >= most or _LABEL.fullmatch(key) is None):
        key = f"{front}other"
    counter[key] += 1


class Waits:
    """How long clients waited for answers, of how many tokens, and for which workers.

    A request waits for P, then for what it takes to hand over, which is all from P's answer to D's first byte: where
    D is asked at once (stream, push) most of it lies before P's answer, and costs the client nothing.
    """

    def __init__(self) -> None:
        self.first_byte = Histograms(metric_names.ROUTER_FIRST_BYTE)
        self.prefill = Histograms(metric_names.ROUTER_PREFILL)
        self.handover = Histograms(metric_names.ROUTER_HANDOVER)
        self.whole = Histograms(metric_names.ROUTER_REQUEST_SECONDS)
        self.between = Histograms(metric_names.ROUTER_INTER_TOKEN_SECONDS)
        self.tokens: Counter[str] = Counter()  # by what (prompt, output; chunks of streams that bear one) and mode
        self.turns: Counter[str] = Counter()  # of conversations, by what became of them
        self.legs: Counter[str] = Counter()  # by what (asked, failed; passed over as full), side and worker
        self.first_tokens: Counter[str] = Counter()  # P's that clients were told, by mode
        self.moves: Counter[str] = Counter()  # of streams to another D, by reason
        self.moves_failed: Counter[str] = Counter()  # streams that could not, by what hindered them
        self.waiting = 0  # requests that wait for the first byte of their answer
        self.sum_s = 0.0
        self.count = 0

    def note(self, mode: str, first_byte_s: float, prefill: tuple[float, float] | None, transfer: str = "") -> None:
        """One answer has begun. `prefill`: seconds from the request to asking P and to its answer, infinite if that
        has not come yet; None if no P was asked."""
        who = (transfer, time.time())
        self.sum_s += first_byte_s
        self.count += 1
        self.first_byte.observe((mode,), first_byte_s, *who)
        if prefill is not None:
            asked, answered = prefill[0], min(prefill[1], first_byte_s)
            self.prefill.observe((mode,), max(answered - asked, 0.0), *who)
            self.handover.observe((mode,), first_byte_s - answered, *who)

    def ended(self, mode: str, seconds: float, prompt_tokens: int, output_tokens: int, transfer: str = "") -> None:
        """An answer has come to its end, so long after its request."""
        self.whole.observe((mode,), seconds, transfer, time.time())
        self.tokens[f"prompt:{mode}"] += prompt_tokens
        self.tokens[f"output:{mode}"] += output_tokens

    def leg(self, what: Literal["asked", "failed"], side: str, worker: str) -> None:
        """A worker was asked for its part of a request, or failed at it."""
        count(self.legs, worker, f"{what}:{side}", LEGS_MAX)

    def passed_full(self) -> None:
        """A choice passed over a worker that said that it is full."""
        self.legs["passed:full"] += 1

    @property
    def histograms(self) -> tuple[Histograms, ...]:
        return (self.first_byte, self.prefill, self.handover, self.whole, self.between)

    def families(self) -> list[Family]:
        return [each.family() for each in self.histograms]


def _of(what: str, counter: Counter[str]) -> dict[str, int]:
    """Of counts by several labels, those whose first is `what`, by the others."""
    front = f"{what}:"
    return {key.removeprefix(front): number for key, number in list(counter.items()) if key.startswith(front)}


@dataclass(slots=True)
class RouterStats:
    """Counters of one router."""

    in_flight: int = 0
    tries: Counter[str] = field(default_factory=Counter)  # of pairs, by mode
    alone: Counter[str] = field(default_factory=Counter)  # tries on D alone, by reason
    ends: Counter[str] = field(default_factory=Counter)  # by outcome: ok, gone, or an error's code
    responses: Counter[str] = field(default_factory=Counter)  # by who is at fault
    failures: Counter[str] = field(default_factory=Counter)  # of legs, by side and code
    retries: Counter[str] = field(default_factory=Counter)  # by side
    probes: Counter[str] = field(default_factory=Counter)  # of broken workers, by outcome
    tickets: int = 0
    discards: int = 0  # tickets given up, of which P was told
    dropped: int = 0  # legs broken off because their worker left the list
    waits: Waits = field(default_factory=Waits)
    room: ClientQuotas = field(default_factory=ClientQuotas)  # what is held for clients
    elsewhere: Callable[[], Mapping[str, Any]] = dict  # figures of what stands beside it, such as the registry's door

    @property
    def under_way(self) -> int:
        """Calls of all processes of this router."""
        return self.in_flight

    @property
    def of_processes(self) -> ProcessFigures | None:
        """What all processes of this router use; None where there is only this one."""
        return None

    def enter(self, calls: int, most: int) -> bool:
        """Let so many more calls in, unless there would be more than `most` under way."""
        if self.in_flight + calls > most:
            return False
        self.in_flight += calls
        return True

    def leave(self, calls: int) -> None:
        self.in_flight -= calls

    def ended(self, outcome: str, status: int) -> None:
        """A request is over; with status 0 because its client went."""
        count(self.ends, outcome)
        self.responses["gone" if not status else "429" if status == 429 else f"{status // 100}xx"] += 1

    def as_numbers(self) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "waiting": self.waits.waiting,
            "processes": 1,
            "process_restarts_total": 0,
            "tries_total": dict(self.tries),
            "alone_total": dict(self.alone),
            "ends_total": dict(self.ends),
            "responses_total": dict(self.responses),
            "leg_failures_total": dict(self.failures),
            "retries_total": dict(self.retries),
            "first_tokens_total": dict(self.waits.first_tokens),
            "moves_total": dict(self.waits.moves),
            "moves_failed_total": dict(self.waits.moves_failed),
            "probes_total": dict(self.probes),
            "token_chunks_total": sum(_of("chunks", self.waits.tokens).values()),
            "worker_asked_total": _of("asked", self.waits.legs),
            "worker_failures_total": {
                **dict.fromkeys(_of("asked", self.waits.legs), 0),
                **_of("failed", self.waits.legs),
            },
            "prompt_tokens_total": _of("prompt", self.waits.tokens),
            "output_tokens_total": _of("output", self.waits.tokens),
            "turns_total": dict(self.waits.turns),
            "tickets_minted_total": self.tickets,
            "tickets_discarded_total": self.discards,
            "legs_dropped_total": self.dropped,
            "passed_full_total": sum(_of("passed", self.waits.legs).values()),
            "held_bytes": self.room.bytes,
            "held_refused_total": dict(self.room.refused),
            "connections_turned_away_total": dict(self.room.turned_away),
            "first_byte_seconds_sum_total": round(self.waits.sum_s, 6),
            "first_byte_count_total": self.waits.count,
        }

    def families(self, numbers: Mapping[str, Any]) -> list[Family]:
        """The page of `/metrics`. `numbers`: these and what the desk knows besides."""
        found = process_families(Where.ROUTER, figures=self.of_processes)
        for key, value in numbers.items():
            if key not in NOT_METRICS:
                metric = (
                    _RENAMED.get(key) or BY_NAME.get(f"kvbaton_router_{key}") or metric_names.named(f"kvbaton_{key}")
                )
                found.append(family(metric, samples(metric, value)))
        return [*found, *self.waits.families()]
