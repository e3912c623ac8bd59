"""One entry of the catalogue: a code and its advice.

Law: an entry says what the code means, who must act, the usual causes, and always the next step.

Rate limits for log lines, so that no peer can fill a log.
"""

from __future__ import annotations

import enum

import msgspec

FIRST = 8


def worth_saying(count: int) -> bool:
    """Whether the `count`th report of one kind should be logged: the first few, then ever more rarely."""
    return count <= FIRST or count & (count - 1) == 0


class CodeKind(enum.StrEnum):
    """Where a code appears."""

    REASON = "reason"  # why a handoff failed
    ALONE = "alone"  # why a decode engine computed a prompt itself
    API = "api"  # `error.code` in an HTTP response
    STATUS = "status"  # HTTP status of a worker's refusal that has no such code
    LOG = "log"  # in brackets at the start of a log line
    FINDING = "finding"  # of `kvbaton doctor`


class Who(enum.StrEnum):
    """Who must act."""

    CALLER = "caller"  # the client or router that sent the request
    PEER = "peer"  # the other engine
    OPERATOR = "operator"  # configuration, capacity, network
    NOBODY = "nobody"  # part of normal operation
    MAKERS = "makers"  # the maintainers of kvbaton: a bug to report


class Severity(enum.StrEnum):
    """How severe a finding is."""

    ERROR = "error"  # it will fail or be unsafe
    WARNING = "warning"  # it may fail or be slow
    NOTE = "note"  # worth knowing


class CodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One code of the catalogue."""

    code: str
    kind: CodeKind
    who: Who
    means: str
    causes: tuple[str, ...] = ()
    do: tuple[str, ...]
    look: tuple[str, ...] = ()
    status: int = 0  # HTTP status; 0: none, or several
    severity: Severity | None = None  # of a finding


def log(
    code: str, who: Who, means: str, *do: str, causes: tuple[str, ...] = (), look: tuple[str, ...] = ()
) -> CodeEntry:
    if who is Who.MAKERS:
        look = (*look, "metric kvbaton_faults_total")
    return CodeEntry(code=code, kind=CodeKind.LOG, who=who, means=means, causes=causes, do=do, look=look)


def finding(code: str, severity: Severity, means: str, *do: str, causes: tuple[str, ...] = ()) -> CodeEntry:
    who = Who.NOBODY if severity is Severity.NOTE else Who.OPERATOR
    return CodeEntry(code=code, kind=CodeKind.FINDING, who=who, means=means, causes=causes, do=do, severity=severity)


def api(
    code: str, status: int, who: Who, means: str, *do: str, causes: tuple[str, ...] = (), look: tuple[str, ...] = ()
) -> CodeEntry:
    look = (*look, f'metric kvbaton_router_requests_total{{outcome="{code}"}}')
    return CodeEntry(code=code, kind=CodeKind.API, who=who, means=means, causes=causes, do=do, look=look, status=status)
