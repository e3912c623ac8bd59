"""Whether a running cluster really disaggregates: the share of prompt tokens that D computed for want of a P, and why.

Law: pure. Counts are a worker's own, since it started; they are read in bounds, and what is odd is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvbaton.doctor.finding import Finding, finding
from kvbaton.observe.codes.alone_reasons import explained
from kvbaton.observe.flight.sanitize import printable

SHARE_MAX = 0.1
TOKENS_MIN = 100
"""Fewer say nothing."""
REASONS_MAX = 3


def alone_findings(where: str, prompts: Mapping[str, int], alone: Mapping[str, int]) -> Iterator[Finding]:
    """One for each of the main reasons, where D computes more than a tenth of its prompts for want of a P."""
    total, missed = sum(prompts.values()), sum(alone.values())
    if total < TOKENS_MIN or missed <= SHARE_MAX * total:
        return
    for reason in sorted(alone, key=lambda each: (-alone[each], each))[:REASONS_MAX]:
        if alone[reason]:
            what, fix = explained(reason)
            share = f"{alone[reason] / total:.0%} of {total} prompt tokens"
            yield finding("decode-alone", where, f"it computed {share} itself ({reason}): {what}", fix)


def share_line(prompts: Mapping[str, int], alone: Mapping[str, int]) -> str:
    """The figure as a line; "" where nothing is counted."""
    total, missed = sum(prompts.values()), sum(alone.values())
    if not total:
        return ""
    main = sorted((each for each in alone if alone[each]), key=lambda each: (-alone[each], each))[:REASONS_MAX]
    why = f" ({', '.join(f'{each} {alone[each] / total:.1%}' for each in main)})" if main else ""
    return f"prompt tokens computed by D although a P should have: {missed / total:.1%} of {total}{why}"


def by_label(text: str, metric: str, label: str) -> dict[str, int]:
    """One counter of a page of metrics by one of its labels. `ValueError` where a value is no number."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith(f"kvbaton_{metric}{{"):
            labels, _, value = line.partition(" # ")[0].rpartition(" ")
            name = printable(labels.partition(f'{label}="')[2].partition('"')[0])
            found[name] = found.get(name, 0) + int(float(value))
    return {name: count for name, count in found.items() if count}
