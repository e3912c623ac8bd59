"""A running cluster, queried over HTTP: what its router says, which workers respond, their transports and clocks.

Law: every request has a timeout and a limit on the bytes read. Workers are queried several at a time, all of them
together for no longer than `ROUNDS` timeouts, and are reported in the order in which the router lists them.

Alerts of `deploy/prometheus/rules.yml` that fire now, as far as one or two looks at the figures can tell.

Law: pure. A threshold is the rule's own (`tests/doctor/test_doctor_alerts.py` compares them); what is no number fires
nothing. Alerts on what happened in the last minutes need a Prometheus, but for the share of 5xx between two looks.

Whether a running cluster really disaggregates: the share of prompt tokens that D computed for want of a P, and why.

Law: pure. Counts are a worker's own, since it started; they are read in bounds, and what is odd is left out.
"""

from __future__ import annotations

import email.utils
import http.client
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.doctor.router_checks import JudgedWorker, LeftWorker, SeenRouter
from kvbaton.observe.codes.reasons import explained
from kvbaton.observe.flight.dumps import printable, printable_all
from kvbaton.observe.metrics.exposition import Sample, samples
from kvbaton.processes.http_question import PLAIN, Way, asked, why
from kvbaton.processes.operator_errors import CommandError

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


CRITICAL, WARNING = "alert-critical", "alert-warning"
ERRORS_SHARE_MAX, ERRORS_MAX = 0.05, 2


class GaugeRule(msgspec.Struct, frozen=True):
    """Fires where a worker's gauge is more than a share of another one."""

    name: str
    gauge: str
    most: str
    share_max: float
    what: str


RULES = (
    GaugeRule("KvbatonPinsNearExpiry", "oldest_lease_seconds", "lease_hold_max_seconds", 0.8, "max_hold_s, a lease's"),
    GaugeRule("KvbatonQuarantineNearBound", "quarantined_blocks", "quarantine_max_blocks", 0.5, "the quarantine"),
)
GAUGES = frozenset(name for rule in RULES for name in (rule.gauge, rule.most))


def errors_and_all(page: str) -> tuple[float, float]:
    """5xx, and all responses that a client was still there for, since the router started."""
    told = [
        (labels.get("status"), value)
        for name, labels, value in _samples(page)
        if name.endswith("router_responses_total")
    ]
    return sum(n for status, n in told if status == "5xx"), sum(n for status, n in told if status != "gone")


def router_alerts(url: str, first: str, then: str) -> Iterator[Finding]:
    """By two pages of the router's metrics; both the same where one look was enough."""
    pairs = [value for name, _, value in _samples(then) if name == "kvbaton_router_pairs"]
    if pairs and max(pairs) == 0:
        yield _fires(CRITICAL, "KvbatonNoPair", f"router {url}", "no pair of P and D can serve")
    errors, count = (new - old for new, old in zip(errors_and_all(then), errors_and_all(first), strict=True))
    if errors > ERRORS_MAX and errors > ERRORS_SHARE_MAX * count:
        said = f"{errors:.0f} of {count:.0f} requests ended with a 5xx between two looks"
        yield _fires(CRITICAL, "KvbatonRouterErrors", f"router {url}", said)


def worker_alerts(where: str, gauges: Mapping[str, float]) -> Iterator[Finding]:
    for rule in RULES:
        value, most = gauges.get(rule.gauge, 0.0), gauges.get(rule.most, 0.0)
        if most > 0 and value > rule.share_max * most:
            yield _fires(WARNING, rule.name, where, f"{rule.gauge} is {value / most:.0%} of {rule.what} bound")


def gauges_of(page: str) -> dict[str, float]:
    """Those of a vLLM worker, by its page of metrics; of several engines the highest."""
    told = sorted((name.removeprefix("kvbaton_"), value) for name, _, value in _samples(page))
    return {name: value for name, value in told if name in GAUGES}


def _samples(page: str) -> list[Sample]:
    try:
        return samples(page)
    except ValueError:  # a value that is no number: no page of ours
        return []


def _fires(code: str, name: str, where: str, said: str) -> Finding:
    return finding(code, where, f"{name}: {said}", f"docs/alerts.md#{name.lower()} says what to do")


T = TypeVar("T")
ANSWER_BYTES_MAX = 4 << 20
CLOCK_S_MAX = 5.0
SCHEMES = ("http://", "https://")
AT_ONCE = 16
ROUNDS = 6
"""Timeouts after which no further worker is queried: enough for 96 workers that hang, or 48 with two requests each."""
LOOKS_S = 1.0
"""Between two looks at a router that has refused requests: does it still?"""


class SeenWorkerState(msgspec.Struct, frozen=True):
    """One worker of a cluster: the transports that it offers, and those of its pairs."""

    worker: str
    url: str
    planes: tuple[str, ...] = ()
    links: dict[str, str] = {}  # source worker -> current transport
    links_total: dict[str, int] = {}
    given_up_total: dict[str, int] = {}
    prompt_tokens: dict[str, int] = {}  # by where their KV came from
    alone_tokens: dict[str, int] = {}  # computed by D although a P should have, by reason
    gauges: dict[str, float] = {}  # that alerts judge
    problem: str = ""
    clock_off_s: float = 0.0  # its clock minus ours, by the Date header of its response


class ClusterAnswer(msgspec.Struct, frozen=True):
    body: bytes
    clock_off_s: float


class _List(msgspec.Struct, frozen=True):
    workers: tuple[JudgedWorker, ...]
    left: tuple[LeftWorker, ...] = ()


class _ToldHealth(msgspec.Struct, frozen=True):
    status: str
    reason: str = ""
    pairs: dict[str, int] = {}


class _Stats(msgspec.Struct, frozen=True):
    links: dict[str, str] = {}
    links_total: dict[str, int] = {}
    planes_given_up_total: dict[str, int] = {}
    prompt_tokens_total: dict[str, int] = {}
    alone_tokens_total: dict[str, int] = {}


def router(url: str, timeout_s: float, way: Way = PLAIN) -> SeenRouter:
    """What the router says; that it does not, or says nonsense, is its `problem`."""
    try:
        health = _told(f"{url}/health", timeout_s, way, _ToldHealth)
        listed = _told(f"{url}/workers", timeout_s, way, _List)
        first = then = _page(f"{url}/metrics", timeout_s, way)
        if errors_and_all(first)[0]:
            time.sleep(LOOKS_S)
            then = _page(f"{url}/metrics", timeout_s, way)
    except urllib.error.HTTPError as error:
        step = "it wants a key: --operator-key-file FILE" if error.code == 401 else "is it a kvbaton router?"
        problem = f"{error.filename}: HTTP {error.code}; {step}"
    except (OSError, http.client.HTTPException) as error:
        problem = f"no HTTP response from {url} ({why(error)}); is the router up?"
    except (ValueError, RecursionError) as error:  # of msgspec too
        problem = f"{url} is not a kvbaton router: {error}"
    else:
        alerts = tuple(router_alerts(url, first, then))
        return SeenRouter(
            url=url, status=health.status, reason=health.reason, pairs=health.pairs, left=listed.left,
            listed=listed.workers, alerts=alerts,
        )  # fmt: skip
    return SeenRouter(url=url, problem=printable(problem))


def workers(listed: Sequence[JudgedWorker], timeout_s: float, way: Way = PLAIN) -> Iterator[SeenWorkerState]:
    """The workers that a router lists."""
    until = time.monotonic() + ROUNDS * timeout_s
    with ThreadPoolExecutor(AT_ONCE, "doctor") as pool:
        yield from pool.map(lambda each: _worker(each, timeout_s, until, way), listed)


def findings(states: tuple[SeenWorkerState, ...]) -> Iterator[Finding]:
    for state in states:
        where = f"worker {state.worker}"
        if state.problem:
            fix = f"curl {state.url}/health, and read its log"
            yield finding("worker-silent", where, f"{state.url}: {state.problem}", fix)
        if abs(state.clock_off_s) > CLOCK_S_MAX:
            way = "ahead of" if state.clock_off_s > 0 else "behind"
            found = f"its clock is {abs(state.clock_off_s):.0f} s {way} this machine's; tickets expire by the clock"
            yield finding("clock-off", where, found, "timedatectl set-ntp true on both hosts")
        yield from alone_findings(where, state.prompt_tokens, state.alone_tokens)
        yield from worker_alerts(where, state.gauges)


def lines(state: SeenWorkerState) -> Iterator[str]:
    """One worker, as text."""
    if state.problem:
        yield f"worker {state.worker} ({state.url}): {state.problem}"
        return
    took = ", ".join(f"{source} over {plane}" for source, plane in sorted(state.links.items()))
    offers = ", ".join(state.planes) or "what it was told"
    yield f"worker {state.worker}: offers {offers}; reads from {took or 'no peer now'}"
    yield f"  pairings so far: {_said(state.links_total)}; given up: {_said(state.given_up_total)}"
    if said := share_line(state.prompt_tokens, state.alone_tokens):
        yield f"  {said}"


def _worker(listed: JudgedWorker, timeout_s: float, until: float, way: Way) -> SeenWorkerState:
    name, url, offers = printable(listed.name), printable(listed.url), tuple(map(printable, listed.transports))
    if not url.startswith(SCHEMES):
        return SeenWorkerState(name, url, problem="is listed with an unusable address; expected http://host:port")
    try:
        answer = _get(f"{url}/stats", _left(timeout_s, until), way)
        told = printable_all(msgspec.json.decode(answer.body))
        stats = msgspec.convert(told, _Stats)
    except urllib.error.HTTPError:
        return _vllm_worker(name, url, offers, timeout_s, until, way)
    except (OSError, http.client.HTTPException) as error:
        return SeenWorkerState(name, url, problem=printable(f"does not respond: {error}"))
    except (ValueError, RecursionError) as error:  # of msgspec too
        return SeenWorkerState(name, url, problem=printable(f"does not respond like a worker: {error}"))
    return SeenWorkerState(
        name,
        url,
        planes=offers,
        links=stats.links,
        links_total=stats.links_total,
        given_up_total=stats.planes_given_up_total,
        prompt_tokens=stats.prompt_tokens_total,
        alone_tokens=stats.alone_tokens_total,
        gauges={name: value for name, value in told.items() if name in GAUGES and isinstance(value, int | float)},
        clock_off_s=answer.clock_off_s,
    )


def _vllm_worker(
    name: str, url: str, offers: tuple[str, ...], timeout_s: float, until: float, way: Way
) -> SeenWorkerState:
    """vLLM exports the connector's counters among its own metrics."""
    try:
        answer = _get(f"{url}/metrics", _left(timeout_s, until), way)
        text = answer.body.decode()
        links, given_up = _by_plane(text, "links_total"), _by_plane(text, "planes_given_up_total")
        prompts, alone = by_label(text, "prompt_tokens_total", "source"), by_label(text, "alone_tokens_total", "reason")
    except (OSError, http.client.HTTPException) as error:
        return SeenWorkerState(name, url, problem=printable(f"does not respond: {error}"))
    except (ValueError, OverflowError) as error:
        return SeenWorkerState(name, url, problem=printable(f"does not respond like a worker: {error}"))
    return SeenWorkerState(
        name, url, planes=offers, links_total=links, given_up_total=given_up, clock_off_s=answer.clock_off_s,
        prompt_tokens=prompts, alone_tokens=alone, gauges=gauges_of(text),
    )  # fmt: skip


def _by_plane(text: str, metric: str) -> dict[str, int]:
    """Sums by transport, under the names and labels of this release and of the one before."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith((f"kvbaton:{metric}{{", f"kvbaton_{metric}{{")):
            labels, _, value = line.partition(" # ")[0].rpartition(" ")
            label = 'transport="' if 'transport="' in labels else 'plane="'
            plane = printable(labels.partition(label)[2].partition('"')[0])
            found[plane] = found.get(plane, 0) + int(float(value))
    return {plane: count for plane, count in found.items() if count}


def _left(timeout_s: float, until: float) -> float:
    """How long the next request may take; TimeoutError when no time is left."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time left after the other workers; try again with a shorter --timeout-s")
    return min(timeout_s, left)


def _told(url: str, timeout_s: float, way: Way, kind: type[T]) -> T:
    """The object at a URL, also if it comes with status 503: a router that cannot serve says why."""
    try:
        body = _get(url, timeout_s, way).body
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        body = error.read()
    return msgspec.convert(printable_all(msgspec.json.decode(body)), kind)


def _page(url: str, timeout_s: float, way: Way) -> str:
    """Figures that may be missing, or somebody else's: alerts are judged by those that are there."""
    try:
        return _get(url, timeout_s, way).body.decode()
    except (urllib.error.HTTPError, UnicodeDecodeError):
        return ""


def _get(url: str, timeout_s: float, way: Way) -> ClusterAnswer:
    if not url.startswith(SCHEMES):
        raise CommandError(f"argument --router: got {url.rpartition('/')[0]!r}, expected http://host:port")
    answer = asked(url, timeout_s, ANSWER_BYTES_MAX, way)
    return ClusterAnswer(answer.body, _clock_off_s(answer.headers.get("Date", "")))


def _clock_off_s(date: str) -> float:
    """How far ahead of ours the clock is that wrote a header; 0 where it cannot be determined."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _said(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
