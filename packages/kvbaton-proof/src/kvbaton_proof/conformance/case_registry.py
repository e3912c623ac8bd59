"""Named cases: a sentence each, found by its function's name; some hold for several modes, transports or shapes.

Law: a case gets a fresh lab and leaves it at rest; `verdict_of` tells what broke and of which kind.
While this process is not run, a case that demands something of real time proves nothing: only what was *not in time* is
excused by that, and only to be run again; a wrong answer or an assertion never is.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton_proof.conformance.conformance_oracle import WrongKvError
from kvbaton_proof.conformance.lab import BrokenLabError, Lab

CaseFunction = Callable[..., None]
CASE_MODULES = (
    "cases_moving", "cases_ending", "cases_waiting", "cases_resting", "cases_storing",
    "cases_features", "cases_pressure", "cases_turns", "cases_continuing",
)  # fmt: skip
MODES = ("pull", "stream", "push")
OVERLAPPED = "overlapped"
IN_FLIGHT = (False, True)
_CASES: list[tuple[CaseFunction, dict[str, tuple[Any, ...]], bool, tuple[bool, ...]]] = []


class Case(msgspec.Struct, frozen=True):
    """One function with one set of arguments, with one step in flight or with two (overlapped)."""

    name: str
    function: CaseFunction
    arguments: dict[str, Any]
    settles: bool
    overlapped: bool

    @property
    def sentence(self) -> str:
        return self.name.replace("_", " ")


class SwallowedFaultError(Exception):
    """The connector raised where nothing made it, and only the guard stood between that and the engine."""


class CaseVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """How one case or seed went."""

    name: str
    what: str = ""  # empty: it holds
    kind: str = ""  # wrong, assertion, broken, error
    trace: str = ""
    seconds: float = 0.0
    steps: int = 0
    handoffs: int = 0
    delivered: int = 0
    failed: int = 0
    stale: int = 0  # of the failed
    blocks_left: int = 0
    hook_errors: int = 0
    faults: int = 0  # exceptions that the connector's guard swallowed
    run_again: int = 0  # times, see `stalls`

    @property
    def holds(self) -> bool:
        return not self.what


def case(
    *, settles: bool = True, overlapped: tuple[bool, ...] = IN_FLIGHT, **variants: tuple[Any, ...]
) -> Callable[[CaseFunction], CaseFunction]:
    """Make a function a case, once for each combination of `variants`, and where steps overlap and where not."""

    def note(function: CaseFunction) -> CaseFunction:
        missing = [name for name in variants if name not in inspect.signature(function).parameters]
        assert not missing, f"{function.__name__} has no {missing}"
        _CASES.append((function, variants, settles, overlapped))
        return function

    return note


def all_cases(*, spread: bool = False) -> list[Case]:
    """Every case with every combination of its arguments, or with every value of them; in the order of the files."""
    for module in CASE_MODULES:  # they register themselves
        importlib.import_module(f"kvbaton_proof.conformance.{module}")

    return [
        Case(_name(function, chosen, overlaps), function, chosen, settles, overlaps)
        for function, variants, settles, overlapped in _CASES
        for choices in [(overlapped, *variants.values())]
        for overlaps, *values in (each_value(function.__name__, *choices) if spread else itertools.product(*choices))
        for chosen in [dict(zip(variants, values, strict=True))]
    ]


def each_value(name: str, *choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As few combinations as hold every value of every argument, other ones for each name.

    So of two arguments that many cases have, every two values meet in some case, and none costs every case a run.
    """
    shifts = [zlib.crc32(f"{name} {at}".encode()) for at in range(len(choices))]
    return [
        tuple(values[(at + shift) % len(values)] for values, shift in zip(choices, shifts, strict=True))
        for at in range(max(map(len, choices)))
    ]


def _name(function: CaseFunction, chosen: dict[str, Any], overlaps: bool) -> str:
    told = ",".join([*(str(value) for value in chosen.values()), *([OVERLAPPED] if overlaps else [])])
    return f"{function.__name__}[{told}]" if told else function.__name__


def run_case(one: Case) -> CaseVerdict:
    """Run a case in a lab of its own."""
    from kvbaton.engines.side import guard

    lab, begun, before = Lab(overlapped=one.overlapped), time.monotonic(), sum(guard.faults.values())
    what, kind, trace = "", "", ""
    try:
        one.function(lab, **one.arguments)
        if one.settles:
            lab.settle()
            demand_no_faults(before)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this case's verdict
        what, kind = f"{type(error).__name__}: {error}", kind_of(error)
        trace = traceback.format_exc(limit=-12)
    finally:
        lab.close()
    return verdict_of(one.name, lab, time.monotonic() - begun, before, what=what, kind=kind, trace=trace)


def demand_no_faults(before: int) -> None:
    """Where no fault was put in, an exception that the guard had to swallow is a bug."""
    from kvbaton.engines.side import guard

    swallowed = sum(guard.faults.values()) - before
    if swallowed:
        raise SwallowedFaultError(f"the guard swallowed {swallowed} exceptions: {dict(guard.faults)}")


def kind_of(error: Exception) -> str:
    if isinstance(error, WrongKvError):
        return "wrong"
    if isinstance(error, AssertionError):
        return "assertion"
    return "broken" if isinstance(error, BrokenLabError) else "error"


def verdict_of(
    name: str, lab: Lab, seconds: float, faults_before: int, *, what: str = "", kind: str = "", trace: str = ""
) -> CaseVerdict:
    from kvbaton.engines.side import guard

    everyone = [*lab.engines.values(), *lab.retired]
    failed = sum(len(engine.watch.failed) for engine in everyone)
    received = sum(len(engine.watch.received) for engine in everyone)
    return CaseVerdict(
        name=name,
        what=what,
        kind=kind,
        trace=trace,
        seconds=round(seconds, 3),
        steps=sum(engine.steps for engine in everyone),
        handoffs=sum(len(engine.watch.loads) for engine in everyone),
        delivered=received - failed,
        failed=failed,
        stale=sum(engine.ends["stale"] for engine in everyone),
        blocks_left=sum(engine.blocks_left for engine in lab.engines.values()),
        hook_errors=sum(len(engine.watch.errors) for engine in everyone),
        faults=sum(guard.faults.values()) - faults_before,
    )


BEAT_S = 0.02
STALL_S = 0.1
"""A quarter of the shortest time-out that a case sets."""
WINDOW_BEATS = 20
"""About that time-out: to have waited a little now and then over a long case is no stall."""
THREADS = Path("/proc/self/task")
TRIES = 4
"""How often a case is run that was not in time on a machine that stood still."""
NOT_IN_TIME = "broken"  # of a verdict's kinds


def unstalled(run: Callable[[], CaseVerdict]) -> CaseVerdict:
    """What it comes to on a machine that runs it: while this process stands still, leases and time-outs run out."""
    for again in range(TRIES):
        with StallMeter() as meter:
            verdict = run()
        verdict = msgspec.structs.replace(verdict, run_again=again)
        if verdict.kind != NOT_IN_TIME or not meter.stalled:
            break
    return verdict


class StallMeter:
    """Measures, while it is entered, how long this process was kept waiting for a processor.

    `worst_s`: by how much the worst of its short sleeps was too long; then all of it stood still. `queued_s`: how long
    one of its threads was ready and not run, within the shortest time-out, as the kernel says (Linux): others may wait
    for long while one that sleeps is run whenever it wakes.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.queued_s = 0.0
        self._lately = deque([_waited_s()], maxlen=WINDOW_BEATS)
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._measure, name="stall-meter", daemon=True)

    def __enter__(self) -> StallMeter:
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._beats.join()

    @property
    def stalled(self) -> bool:
        return max(self.worst_s, self.queued_s) >= STALL_S

    def _measure(self) -> None:
        over = False
        while not over:
            begun = time.monotonic()
            over = self._over.wait(BEAT_S)
            self.worst_s = max(self.worst_s, time.monotonic() - begun - BEAT_S)
            waited, before = _waited_s(), self._lately[0]
            self._lately.append(waited)
            grown = (each - before.get(thread, 0.0) for thread, each in waited.items())
            self.queued_s = max(self.queued_s, *grown, 0.0)


def _waited_s() -> dict[str, float]:
    """Of each thread the seconds it has waited in a run queue."""
    waited = {}
    with contextlib.suppress(OSError):
        for thread in THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waited
