"""State of NIXL's mover: agents, peers, the copies that wait for them, and the parts in flight.

Law: touched only by the mover's thread. A peer that is connected again shares the agent that NIXL still knows, so what
is in flight with it is counted in one place and NIXL forgets it only when nothing needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.nixl.nixl_endpoint import NixlEndpoint
from kvbaton.transports.nixl.nixl_lists import ListChoice, Lists


@dataclass(slots=True, eq=False)
class NixlRemote:
    """An agent that NIXL knows, and what is under way with it."""

    there: NixlEndpoint
    lists: Lists
    links: set[NixlLink] = field(default_factory=set)
    parts: int = 0
    lost: bool = False  # NIXL has given up the connection
    reached: bool = False  # something arrived, so there was a connection


@dataclass(slots=True, eq=False)
class NixlPlan:
    """How the parts of one copy, from the first that was begun with `remote`, are named to NIXL."""

    job: CopyJob
    remote: NixlRemote
    here: ListChoice
    there: ListChoice
    done: int = 0  # spans


@dataclass(slots=True, eq=False)
class NixlLink:
    """One peer as it was connected, and the copies that wait for it."""

    there: NixlEndpoint
    waiting: deque[CopyJob] = field(default_factory=deque)
    remote: NixlRemote | None = None
    plan: NixlPlan | None = None


@dataclass(slots=True, eq=False)
class NixlPart:
    """A request that NIXL has not ended."""

    job: CopyJob
    remote: NixlRemote
    request: int


def plan_of(link: NixlLink, remote: NixlRemote, job: CopyJob, parts: Sequence[Spans], mine: Lists) -> NixlPlan:
    """The plan of `job`, made when its first part begins; `parts` are those that have not begun yet."""
    plan = link.plan
    if plan is None or plan.job is not job or plan.remote is not remote:
        rows = np.concatenate([np.frombuffer(part, np.int64).reshape(-1, 3) for part in parts])
        here = mine.choose(job.copy.local_region, rows[:, 0], rows[:, 2])
        there = remote.lists.choose(job.copy.remote_region, rows[:, 1], rows[:, 2])
        plan = link.plan = NixlPlan(job, remote, here, there)
    return plan
