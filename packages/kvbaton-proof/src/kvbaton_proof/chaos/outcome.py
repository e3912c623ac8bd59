"""The observations of a chaos run, and whether the promises held.

Laws: what cannot be measured is not reported as zero: it is None. `ok` says that every promise held, of whatever
connector ran; a peer is judged by the same line.
"""

from __future__ import annotations

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of the plan, from the moment it was done until the cluster was well again.

    Counts of answers are of requests that ended meanwhile. `late`: not ended by their deadline, hangs among them.
    """

    at_s: float
    title: str
    fault: str
    promises: tuple[int, ...]
    requests: int = 0
    right: int = 0
    errors: int = 0  # told so, with a status or by a closed connection
    wrong: int = 0
    late: int = 0
    dead: int = 0  # engines that died, though nobody killed them
    left_over: int | None = 0  # pins, used blocks and leases that stayed; None: could not be asked
    recover_s: float | None = None  # from the end of the fault until answers were right again; None: never
    note: str = ""
    seconds: float | None = None  # from the fault until the cluster was well again, or was no longer waited for

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.late or self.dead or self.left_over) and self.recover_s is not None


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process at rest, before the first fault and after the last one. Zeros before: it was not there then."""

    name: str
    fds: tuple[int, int]
    threads: tuple[int, int]
    rss_mib: tuple[float, float]
    lives: int  # how often it was started
    pins: int
    used_blocks: int
    rss_mib_per_minute: float | None = None  # over the second half of its longest life; None: too short to tell


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run; this is what --json prints, with `ok` beside it."""

    plan: str
    seed: int
    engine: str
    connector: str
    seconds: float
    requests: int
    right: int
    errors: int
    wrong: int
    late: int
    dead: int
    left_over: int
    rows: tuple[Row, ...]
    members: tuple[Member, ...] = ()
    problems: tuple[str, ...] = ()  # each breaks the verdict: what grew, what stayed, what could not be done
    errors_by_kind: dict[str, int] = {}
    handoffs: dict[str, int] = {}  # after all of it, by mode: of some prompts that nobody had, so many came over
    moments: dict[str, int] = {}  # named ones that were reached, and missed
    stolen: int = 0  # prompts that reached a process which no one should have sent them to
    lies: dict[str, dict[str, int]] = {}  # of a liar, by name: how often told, refused and believed
    network: str = ""  # namespaces or relay
    replay: str = ""  # the command that repeats it

    @property
    def ok(self) -> bool:
        broken = self.wrong or self.late or self.dead or self.left_over or self.stolen or self.problems
        return not broken and all(row.ok for row in self.rows)
