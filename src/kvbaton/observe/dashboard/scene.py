"""The dashboard's state as values: workers, links, handoffs in flight, failures.

Law: nothing here is bounded yet; `state` draws what a browser is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class SeenHandoff(msgspec.Struct, frozen=True):
    """A worker: what the list says of it, and what it told itself."""

    name: str
    role: str  # prefill, decode, both
    state: str  # ready, draining, suspect, broken, gone
    incarnation: str = ""
    heard_s: float | None = None  # since its last report; None: it sends none
    gauges: Mapping[str, float] = {}
    rates: Mapping[str, float] = {}  # per second, of what ends in _total
    links: Mapping[str, str] = {}  # source worker: data plane
    note: str = ""  # why it serves nobody, where that is known


class MovingHandoff(msgspec.Struct, frozen=True):
    """A handoff on its way, or one that has just come to its end."""

    number: int  # rises; of one that is under way 0
    source: str
    target: str
    stage: str = ""  # of one under way
    end: str = ""
    failed: bool = False
    tokens: int = 0
    key: str = ""  # of one under way: the same for as long as it is


class Failure(msgspec.Struct, frozen=True):
    """A handoff that did not arrive, or a try that came to nothing."""

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


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a cluster."""

    at: float
    version: str = ""
    mode: str = ""
    uptime_s: float = 0.0
    draining: bool = False
    in_flight: int = 0
    workers: Sequence[SeenHandoff] = ()
    under_way: Sequence[MovingHandoff] = ()
    ended: Sequence[MovingHandoff] = ()
    failures: Sequence[Failure] = ()
    pairs: Mapping[tuple[str, str], tuple[int, int]] = {}  # P and D: handoffs and tokens in `pairs_s`
    pairs_s: float = 10.0
