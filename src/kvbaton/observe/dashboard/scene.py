"""The dashboard's state as values: workers, links, handoffs in flight, failures.

Law: nothing here is bounded yet; `state` selects what a browser gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class SeenHandoff(msgspec.Struct, frozen=True):
    """A worker: its registry entry and its own reports."""

    name: str
    role: str  # prefill, decode, both
    state: str  # ready, draining, suspect, broken, gone
    incarnation: str = ""
    heard_s: float | None = None  # since its last report; None: it sends none
    gauges: Mapping[str, float] = {}
    rates: Mapping[str, float] = {}  # per second, in the window of all rates
    links: Mapping[str, str] = {}  # source worker: data plane
    note: str = ""  # why it is not used, where that is known
    address: str = ""  # where it is asked
    host: str = ""
    version: str = ""
    alone: tuple[float, float] | None = None  # prompt tokens of the last minute, and those computed for want of a P


class MovingHandoff(msgspec.Struct, frozen=True):
    """A handoff in flight, or one that has just ended."""

    number: int  # rises; of one that is under way 0
    source: str
    target: str
    stage: str = ""  # of one under way
    end: str = ""
    failed: bool = False
    tokens: int = 0
    key: str = ""  # of one under way: the same for as long as it is


class Failure(msgspec.Struct, frozen=True):
    """A handoff that did not arrive, or an attempt that failed."""

    at: float
    reason: str
    find: str  # what opens its timeline: an id that `/flights` knows
    handoff: str = ""
    request: str = ""
    source: str = ""
    target: str = ""
    seen_by: str = ""
    mode: str = ""
    transport: str = ""
    detail: str = ""
    answered: bool = False  # all the same: by a later try, or since D computed the prompt itself


class Figures(msgspec.Struct, frozen=True):
    """The router's own figures: those of now, and counts since it started, by the names of `pulse`."""

    in_flight: int = 0
    waiting: int = 0  # of those, for a first byte
    draining: bool = False
    counts: Mapping[str, int] = {}


class Trouble(msgspec.Struct, frozen=True):
    """What the router cannot serve, or only otherwise than it should, and why."""

    text: str
    is_down: bool  # requests are refused


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a cluster."""

    at: float
    version: str = ""
    host: str = ""
    mode: str = ""
    drain: str = ""  # the command that drains a worker, but for its name; "" where there is none
    uptime_s: float = 0.0
    own: Figures = Figures()
    trouble: Trouble | None = None
    workers: Sequence[SeenHandoff] = ()
    under_way: Sequence[MovingHandoff] = ()
    ended: Sequence[MovingHandoff] = ()
    failures: Sequence[Failure] = ()
    pairs: Mapping[tuple[str, str], tuple[int, int]] = {}  # P and D: handoffs and tokens in the window of rates
