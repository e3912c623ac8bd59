"""State of mori's mover: peers, the copies that wait for them, and the parts in flight.

Law: touched only by the mover's thread. A part keeps every status that mori was given for it, and its session.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.transport import Spans
from kvbaton_mori.endpoint import MoriEndpoint
from kvbaton_mori.engine import Far

SESSIONS_MAX = 1024


@dataclass(slots=True, eq=False)
class MoriLink:
    """One peer as it was connected, and the copies that wait for it."""

    far: Far
    there: MoriEndpoint
    waiting: deque[CopyJob] = field(default_factory=deque)
    held: MoriPart | None = None  # the next part: no room for it yet, here or in mori
    sessions: dict[tuple[int, int], Any] = field(default_factory=dict)  # by region here and there; last used, last
    parts: int = 0  # under way
    rows: int = 0  # of these
    met: bool = False
    problem: str = ""  # why it could not be reached
    shut_until: float = 0.0  # no reconnect before this

    def keep(self, regions: tuple[int, int], session: Any) -> None:
        self.sessions.pop(regions, None)
        while len(self.sessions) >= SESSIONS_MAX:
            self.sessions.pop(next(iter(self.sessions)))
        self.sessions[regions] = session


@dataclass(slots=True, eq=False)
class MoriPart:
    """One batch, or none for an empty copy: started for its job, and not known to be over."""

    job: CopyJob
    link: MoriLink
    here: list[int]
    there: list[int]
    sizes: list[int]
    session: Any = None
    uid: int = -1
    statuses: list[Any] = field(default_factory=list)  # one for each time that it was handed over; the last one counts
    refused_at: float | None = None  # when mori's queue was first full for it
    again_at: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.sizes)


def part_of(job: CopyJob, link: MoriLink, spans: Spans) -> MoriPart:
    rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    rows = rows[rows[:, 2] > 0]
    return MoriPart(job, link, *(rows[:, column].tolist() for column in range(3)))
