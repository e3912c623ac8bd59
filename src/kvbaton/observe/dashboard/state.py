"""A scene as the JSON that a browser gets.

Law: pure, and never more than `STATE_BYTES_MAX`, whatever names workers and clients choose and however many there are;
what is not shown is counted.

The dashboard's files and the headers with which they are served.

Law: only the entries of `FILES` are served, as packaged, read once. A browser that honours the headers runs and loads
nothing external on this page, and does not embed it in another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

from kvbaton.observe.codes.code_catalogue import CATALOGUE
from kvbaton.observe.codes.entry import CodeKind
from kvbaton.observe.dashboard.pulse import (
    BUCKET_S,
    MINUTE,
    RATE_S,
    RETRIES,
    Failure,
    MovingHandoff,
    Pulse,
    Scene,
    SeenHandoff,
    counts_of,
    outcome,
    percentile,
)
from kvbaton.observe.flight.flight_records import STAGES

ROOT = "/dashboard"
STATE = f"{ROOT}/state"
REASONS = f"{ROOT}/reasons"

FILES = {
    ROOT: "index.html",
    **{
        f"{ROOT}/{name}": name
        for name in (
            "style.css", "icon.svg", "theme.js", "app.js", "dom.js", "dots.js", "drawer.js", "failures.js", "format.js",
            "key.js", "stages.js", "tiles.js", "timeline.js", "topology.js", "workers.js",
        )
    },
}  # fmt: skip

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


class Page(msgspec.Struct, frozen=True):
    """A complete response."""

    body: bytes
    content_type: str
    headers: Mapping[str, str]


def json_page(body: bytes) -> Page:
    """A response that changes: never cached."""
    return Page(body, _TYPES["json"], {**HEADERS, "Cache-Control": "no-store"})


def fixed_pages() -> dict[str, Page]:
    """All static responses, by path."""
    folder = resources.files("kvbaton.observe.dashboard") / "page"
    found = {}
    for path, name in FILES.items():
        found[path] = Page((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]], HEADERS)
    kinds = (CodeKind.REASON, CodeKind.API, CodeKind.STATUS)
    known = {kind: {entry.code: entry for entry in CATALOGUE[kind]} for kind in kinds}
    found[REASONS] = Page(msgspec.json.encode(known), _TYPES["json"], HEADERS)
    return found


STATE_BYTES_MAX = 100_000
WORKERS_MAX = 64
LINKS_MAX = 64
DOTS_MAX = 60
"""Of those under way, and as many of those that ended."""
FAILURES_MAX = 30
NAME_CHARS_MAX = 64
ID_CHARS_MAX = 128
DETAIL_CHARS_MAX = 160
TROUBLE_CHARS_MAX = 400
SILENT_S = 4.0
"""A worker that told nothing for this long is called silent."""

_GAUGES = {
    "pins": "pins",
    "leases": "leases_held",
    "oldest_lease_s": "oldest_lease_seconds",
    "lease_max_s": "lease_hold_max_seconds",
    "blocks": "blocks",
    "free_blocks": "free_blocks",
    "quarantined": "quarantined_blocks",
    "running": "running",
    "waiting": "waiting",
    "loading": "loading",
    "resets": "cache_resets_total",
    "reset_blocks": "cache_reset_blocks_total",
}
"""What is shown of a worker, and what its report calls it."""
BYTES = "bytes_total"
HANDOFFS = "handoffs_total"
DELIVERED = "delivered_total"
FAILED = "failed_total"
PROMPTS = "prompt_tokens_total"
ALONE = "alone_tokens_total"
_PARTS = re.compile(r"[0-9]{1,18}|[^0-9]+")
_ROLES = {"prefill": 0, "both": 1, "decode": 2}
_RANKS = {"ready": 1, "gone": 2}
"""Which are left out first where there are too many; all other states are trouble, and come before."""


def build(scene: Scene, pulse: Pulse) -> dict[str, Any]:
    """Everything on the page."""
    drawn = _drawn(scene.workers)
    index = {worker.name: number for number, worker in enumerate(drawn)}
    known_s, handed = pulse.known_s(scene.at), _handed(scene.pairs)
    links = _links(scene, index, known_s)
    return {
        "v": 1,
        "at": round(scene.at, 3),
        "router": {
            "version": scene.version,
            "host": scene.host,
            "mode": scene.mode,
            "drain": scene.drain,
            "uptime_s": round(scene.uptime_s, 1),
            "draining": scene.own.draining,
        },
        "trouble": scene.trouble and {"text": scene.trouble.text[:TROUBLE_CHARS_MAX], "is_down": scene.trouble.is_down},
        "now": _now(scene, pulse),
        "history": {"step_s": BUCKET_S, **pulse.history(scene.at)},
        "windows": {"rates_s": RATE_S, "shares_s": MINUTE * BUCKET_S},
        "workers": [_worker(worker, handed[worker.name] / known_s) for worker in drawn],
        "workers_all": len(scene.workers),
        "states": _states(scene.workers),
        "links": links[:LINKS_MAX],
        "links_all": len(links),
        "under_way": _dots(scene.under_way[:DOTS_MAX], index),
        "ended": _dots(scene.ended[-DOTS_MAX:], index),
        "stages": _stages(pulse, scene.at),
        "failures": [_failure(each, scene.at) for each in scene.failures[:FAILURES_MAX]],
    }


def encode(state: dict[str, Any]) -> bytes:
    """The state within its size; the least important parts are dropped first, and the page is told."""
    data = msgspec.json.encode(state)
    for name in ("ended", "under_way", "links", "failures", "workers"):
        if len(data) <= STATE_BYTES_MAX:
            break
        state = {**state, name: state[name][:4], "cut": [*state.get("cut", ()), name]}
        if name == "workers":
            state |= {"links": [], "ended": [], "under_way": []}
        data = msgspec.json.encode(state)
    return data


def _drawn(workers: Sequence[SeenHandoff]) -> list[SeenHandoff]:
    """Half of the room for each role, more if the other needs less; troubled ones come first."""
    ordered = sorted(workers, key=lambda worker: (_ROLES.get(worker.role, 1), _natural(worker.name)))
    if len(ordered) <= WORKERS_MAX:
        return ordered
    urgent = sorted(ordered, key=lambda worker: _RANKS.get(worker.state, 0))  # stable
    sources = [worker for worker in urgent if worker.role != "decode"]
    targets = [worker for worker in urgent if worker.role == "decode"]
    half = WORKERS_MAX // 2
    room = max(half, WORKERS_MAX - len(targets))
    chosen = {id(worker) for worker in sources[:room]}
    chosen |= {id(worker) for worker in targets[: WORKERS_MAX - len(chosen)]}
    return [worker for worker in ordered if id(worker) in chosen]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """p2 goes before p10."""
    parts = _PARTS.findall(name[:ID_CHARS_MAX])
    return [(True, int(part), "") if part[0] in "0123456789" else (False, 0, part) for part in parts]


def _handed(pairs: Mapping[tuple[str, str], tuple[int, int]]) -> Counter[str]:
    """Handoffs of each worker, as the router saw them."""
    found: Counter[str] = Counter()
    for pair, (count, _) in pairs.items():
        for name in pair:
            found[name] += count
    return found


def _worker(worker: SeenHandoff, handed_s: float) -> dict[str, Any]:
    """`handed_s`: as the router saw it; a decode worker that counts by itself knows better."""
    shown: dict[str, Any] = {
        "name": worker.name[:NAME_CHARS_MAX],
        "role": worker.role[:NAME_CHARS_MAX],
        "state": worker.state[:NAME_CHARS_MAX],
        "incarnation": worker.incarnation[:16],
        **{name: round(worker.gauges[key], 3) for name, key in _GAUGES.items() if key in worker.gauges},
        "handoffs_s": round(_rate(worker, HANDOFFS) if worker.role == "decode" and worker.rates else handed_s, 2),
        "bytes_s": round(_rate(worker, BYTES)),
    }
    if worker.heard_s is not None:
        shown["heard_s"] = round(worker.heard_s, 1)
        shown["silent"] = _is_silent(worker)
    if any(name.startswith("store_") for name in worker.gauges):
        shown["store"] = True
    for name in ("address", "host", "version"):
        if text := getattr(worker, name):
            shown[name] = text[:NAME_CHARS_MAX]
    if worker.alone is not None:
        shown["alone"] = _share(worker.alone[1], worker.alone[0])
    if worker.note:
        shown["note"] = worker.note[:DETAIL_CHARS_MAX]
    return shown


def _is_silent(worker: SeenHandoff) -> bool:
    return worker.heard_s is not None and worker.heard_s >= SILENT_S


def _rate(worker: SeenHandoff, name: str) -> float:
    """Its current activity; unknown for an unresponsive one, whose last report is not current."""
    return 0.0 if _is_silent(worker) else worker.rates.get(name, 0.0)


def _links(scene: Scene, index: Mapping[str, int], known_s: float) -> list[dict[str, Any]]:
    """Pairs of drawn workers that have a link or used one in the last `known_s`, the busiest first.

    A worker reports the bytes that it copied with all peers together: read by D, or for push written by P. They are
    distributed by the tokens that moved in each direction.
    """
    tokens_of: dict[str, int] = {}
    for pair, (_, tokens) in scene.pairs.items():
        for name in pair:
            tokens_of[name] = tokens_of.get(name, 0) + tokens
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for worker in scene.workers:
        for source, plane in worker.links.items():
            found[source, worker.name] = {"transport": plane[:NAME_CHARS_MAX]}
    for pair in scene.pairs:
        found.setdefault(pair, {"transport": ""})
    bytes_of = {worker.name: _rate(worker, BYTES) for worker in scene.workers}
    links = []
    for (source, target), link in found.items():
        if source not in index or target not in index or source == target:
            continue
        count, tokens = scene.pairs.get((source, target), (0, 0))
        moved = sum(bytes_of.get(name, 0.0) * tokens / tokens_of[name] for name in (source, target)) if tokens else 0.0
        link |= {
            "from": index[source],
            "to": index[target],
            "handoffs_s": round(count / known_s, 2),
            "bytes_s": round(moved),
        }
        links.append(link)
    return sorted(links, key=lambda link: (-link["handoffs_s"], -link["bytes_s"], link["from"], link["to"]))


def _now(scene: Scene, pulse: Pulse) -> dict[str, Any]:
    minute = pulse.minute(scene.at)
    ended, failed = map(round, outcome(minute))
    firsts = [value for each in minute for value in each.ttft.kept]
    gaps = [value for each in minute for value in each.itl.kept]
    handoffs_s, bytes_s, tokens_s = pulse.rates(scene.at)
    counts = counts_of(minute)
    prompts = [worker.alone for worker in scene.workers if worker.alone is not None]
    return {
        "handoffs_s": round(handoffs_s, 2),
        "bytes_s": round(bytes_s),
        "tokens_s": round(tokens_s, 2),
        "ended": ended,
        "failed": failed,
        "delivered": _share(max(ended - failed, 0), ended),
        "answers_s": {name: round(per_s, 2) for name, per_s in pulse.answers(scene.at).items()},
        "errors": round(counts["5xx"]),
        "retries": round(counts[RETRIES]),
        "mistakes": round(counts["4xx"]),
        "ttft_p50_ms": _ms(percentile(firsts, 0.5)),
        "ttft_p99_ms": _ms(percentile(firsts, 0.99)),
        "itl_p50_ms": _ms(percentile(gaps, 0.5)),
        "itl_p99_ms": _ms(percentile(gaps, 0.99)),
        "in_flight": scene.own.in_flight,
        "waiting": scene.own.waiting,
        "alone_told": any(PROMPTS in worker.gauges for worker in scene.workers),
        "alone": _share(sum(each[1] for each in prompts), sum(each[0] for each in prompts)),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 5) if whole else None


def _stages(pulse: Pulse, now: float) -> list[dict[str, Any]]:
    minute = pulse.minute(now)
    found = []
    for name in STAGES:
        values = [value for each in minute for value in each.stages[name].kept]
        count = sum(each.stages[name].count for each in minute)
        p50, p95 = _ms(percentile(values, 0.5)), _ms(percentile(values, 0.95))
        found.append({"name": name, "p50_ms": p50, "p95_ms": p95, "count": count})
    return found


def _dots(moving: Sequence[MovingHandoff], index: Mapping[str, int]) -> list[dict[str, Any]]:
    found = []
    for each in moving:
        if each.source not in index or each.target not in index:
            continue
        dot: dict[str, Any] = {"from": index[each.source], "to": index[each.target]}
        if each.key:
            dot["key"] = each.key[:NAME_CHARS_MAX]
        if each.number:
            dot |= {"n": each.number, "failed": each.failed, "end": each.end[:NAME_CHARS_MAX]}
        else:
            dot["stage"] = each.stage
        found.append(dot)
    return found


def _failure(failure: Failure, now: float) -> dict[str, Any]:
    return {
        "at": round(failure.at, 3),
        "ago_s": round(max(now - failure.at, 0.0), 1),
        "reason": failure.reason[:NAME_CHARS_MAX],
        "find": failure.find[:ID_CHARS_MAX],
        "handoff": failure.handoff[:ID_CHARS_MAX],
        "request": failure.request[:ID_CHARS_MAX],
        "source": failure.source[:NAME_CHARS_MAX],
        "target": failure.target[:NAME_CHARS_MAX],
        "seen_by": failure.seen_by[:NAME_CHARS_MAX],
        "mode": failure.mode[:NAME_CHARS_MAX],
        "transport": failure.transport[:NAME_CHARS_MAX],
        "detail": failure.detail[:DETAIL_CHARS_MAX],
        "answered": failure.answered,
    }


def _states(workers: Sequence[SeenHandoff]) -> dict[str, int]:
    found: dict[str, int] = {}
    for worker in workers:
        found[worker.state] = found.get(worker.state, 0) + 1
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
