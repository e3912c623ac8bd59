"""A finding of `kvbaton doctor`: its code in the catalogue, place, problem, and the next step for this case.

Law: a finding's severity comes from the catalogue (`kvbaton.observe.codes.findings`), so `kvbaton explain CODE` knows
every finding.
"""

from __future__ import annotations

import msgspec

from kvbaton.observe.codes.entry import Severity
from kvbaton.observe.codes.findings import SEVERITY

ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    code: str
    severity: Severity
    where: str  # file, flag or part of the machine
    found: str
    fix: str  # the next command, or the setting to change


def finding(code: str, where: str, found: str, fix: str) -> Finding:
    return Finding(code=code, severity=SEVERITY[code], where=where, found=found, fix=fix)


def ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """Each finding once, the most severe first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: ORDER.index(each.severity)))
