"""What a router says of its cluster: whether it can serve, which role lacks workers, who left, who fits nobody.

Law: pure. What cannot be served is an error, whoever is to blame; a worker that is missed while others of its role
serve is a warning, and one that drains is as the operator wanted it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvbaton.doctor.config_reading import Finding, finding

NAMES_MAX = 4
_NEVER = ("draining", "broken")  # asked for nothing, though listed


class JudgedWorker(msgspec.Struct, frozen=True):
    """A worker by `/workers`."""

    name: str
    url: str
    role: str = ""
    state: str = ""
    transports: tuple[str, ...] = ()
    unpaired: str = ""  # why it is in no pair


class LeftWorker(msgspec.Struct, frozen=True):
    """One that left the list without a drain, and is not back."""

    name: str
    role: str = ""
    ago_s: float = 0.0


class SeenRouter(msgspec.Struct, frozen=True, kw_only=True):
    """A router by `/health` and `/workers`."""

    url: str
    problem: str = ""  # it does not answer, or not like a router; then the rest is empty
    status: str = ""
    reason: str = ""  # why no pair can serve
    pairs: dict[str, int] = {}
    left: tuple[LeftWorker, ...] = ()
    listed: tuple[JudgedWorker, ...] = ()
    alerts: tuple[Finding, ...] = ()


def findings(seen: SeenRouter) -> Iterator[Finding]:
    where = f"router {seen.url}"
    if seen.problem:
        fix = "start it, or give its own address: scheme, host and port that clients use; its log says why it ended"
        yield finding("router-silent", where, seen.problem, fix)
        return
    if seen.status == "draining":
        fix = "send requests to another router, or start it again when it has ended"
        yield finding("router-draining", where, "it was told to stop, and takes no new requests", fix)
    lacking = [each for role in ("prefill", "decode") for each in _lacking(seen, role)]
    yield from lacking
    has_pair = any(seen.pairs.values())
    if not has_pair and not lacking and seen.listed:
        fix = "make their modes, transports and models agree; kvbaton doctor --prefill FILE --decode FILE compares them"
        yield finding("cluster-unpaired", where, f"{seen.reason or 'no two workers fit'}; {_served(seen)}", fix)
    for worker in seen.listed:
        if has_pair and worker.unpaired and worker.state not in ("draining", "no_http"):
            fix = f"curl {worker.url}/health and read its log; curl {seen.url}/workers shows what each offers"
            yield finding("worker-unpaired", f"worker {worker.name}", worker.unpaired, fix)
    for gone in seen.left:
        found = f"{gone.role} worker left the list {gone.ago_s:.0f} s ago without a drain: killed, hanging, or cut off"
        fix = f"read its log and start it again under the name {gone.name}; if it runs: can it reach the registry?"
        yield finding("worker-lost", f"worker {gone.name}", found, fix)
    yield from seen.alerts


def lines(seen: SeenRouter) -> Iterator[str]:
    """The router, as text."""
    if not seen.problem:
        pairs = ", ".join(f"{mode} {count}" for mode, count in seen.pairs.items()) or "none"
        yield f"router {seen.url}: {seen.status}; pairs: {pairs}"


def _lacking(seen: SeenRouter, role: str) -> Iterator[Finding]:
    of_it = [worker for worker in seen.listed if worker.role in (role, "both")]
    if any(worker.state not in _NEVER for worker in of_it):
        return
    states = ", ".join(f"{worker.name} {worker.state}" for worker in of_it[:NAMES_MAX])
    found = f"no {role} worker can be asked: {states or 'none is listed'}; {_served(seen)}"
    gone = ", ".join(each.name for each in seen.left if each.role in (role, "both"))
    fix = f"start {gone} again, or another" if gone else f"start one: kvbaton worker --role {role}, or vLLM"
    yield finding("role-missing", f"role {role}", found, f"{fix}; one that runs says in its log why it is not listed")


def _served(seen: SeenRouter) -> str:
    helped = seen.status == "degraded"
    return "decode workers compute prompts themselves (degraded)" if helped else f"requests are refused ({seen.status})"
