"""What a page shows, and the same figures computed from the router's `/flights` and from everybody's `/metrics`."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Page

from kvbaton.observe.metrics import exposition

UNITS_MS = {"µs": 1e-3, "ms": 1.0, "s": 1e3}
UNITS_B = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
STAGES = ("claim", "queue", "first_byte", "copy", "commit", "deliver")
MINUTE_S = 58.0
"""Of what the page calls a minute, which begins with a bucket of two seconds."""
LAG_S = 6.0
"""A figure on the page is one of this long ago, or newer: reports come every half second, states every second."""
RATE_S = 10.0
"""The window of everything that the page tells per second."""
STEP_S = 0.5
"""A sample may be this much later than what it is to show."""
CELLS = {"running": 'kvbaton_engine_requests{state="running"}', "waiting": 'kvbaton_engine_requests{state="waiting"}',
         "pinned": "kvbaton_pinned_blocks", "leases": "kvbaton_leases_held"}  # fmt: skip
RATES = {"handoffs": ("decode", "kvbaton_handoffs_total"), "bytes": ("", "kvbaton_bytes_total"),
         "tokens": ("router", "kvbaton_router_token_chunks_total"),
         "requests": ("router", "kvbaton_router_responses_total")}  # fmt: skip
"""Of each tile that tells of something per second: who counts it ("": every worker), and under which name."""
ERRORS = {"errors": ("router", 'kvbaton_router_responses_total{status="5xx"}')}
"""The same of what its tile tells below its figure."""
COUNTED = {**RATES, **ERRORS}


_OF_A_WORKER = re.compile(r'(?<=\{)role="[^"]*",worker="[^"]*",?')


def asked(url: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.load(answer)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return exposition.figures(_OF_A_WORKER.sub("", answer.read().decode()).replace("{}", ""))


# --- the page


def tile(page: Page, name: str, part: str = "value") -> str:
    return page.locator(f'[data-tile="{name}"] .{part}').inner_text()


def number(text: str) -> float:
    """The first number in it; none equals that of a text without."""
    found = re.search(r"[0-9][0-9,]*(?:\.[0-9]+)?", text)
    return math.nan if found is None else float(found[0].replace(",", ""))


def times_ms(text: str) -> list[float]:
    return [
        float(value.replace(",", "")) * UNITS_MS[unit] for value, unit in re.findall(r"([\d.,]+) (µs|ms|s)\b", text)
    ]


def per_second(text: str) -> float:
    """12.5, or 1.14 MB/s in bytes."""
    unit = re.search(r"([kMG]?B)/s", text)
    return number(text) * (UNITS_B[unit[1]] if unit else 1.0)


def cache_shares(page: Page) -> dict[str, float]:
    """Of each worker, the percentage of its KV cache that is in use."""
    script = """() => Object.fromEntries([...document.querySelectorAll("#workers tbody tr")].map((row) =>
        [row.dataset.worker, row.querySelector('[data-cell="cache"]').textContent]))"""
    found: dict[str, str] = page.evaluate(script)
    return {worker: number(text) for worker, text in found.items()}


def rows(page: Page) -> dict[str, dict[str, float]]:
    """Of each worker, what its row says."""
    script = """(names) => Object.fromEntries([...document.querySelectorAll("#workers tbody tr")].map((row) =>
        [row.dataset.worker, Object.fromEntries(names.map((name) =>
            [name, row.querySelector(`[data-cell="${name}"]`).textContent]))]))"""
    found: dict[str, dict[str, str]] = page.evaluate(script, list(CELLS))
    return {worker: {name: number(text) for name, text in cells.items()} for worker, cells in found.items()}


# --- the same from elsewhere


@dataclass
class Expected:
    """Of the journeys of the last minute."""

    ended: int = 0
    failed: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)  # milliseconds

    def percentiles(self, name: str, *shares: float) -> list[float]:
        ordered = sorted(self.times[name])
        return [ordered[max(math.ceil(share * len(ordered)) - 1, 0)] for share in shares if ordered]


def expected(url: str) -> Expected:
    """From all that `/flights` keeps, which a test must not let be more than it tells."""
    found = Expected(times={name: [] for name in ("ttft", "itl", *STAGES)})
    journeys = asked(f"{url}/flights", last="200")["journeys"]
    assert len(journeys) < 200
    now = time.time()
    since: dict[str, float] = {}  # when each request came, for its first try
    for journey in reversed(journeys):
        since.setdefault(journey["request"], journey["began"])
    for journey in journeys:
        if journey["began"] + journey["seconds"] < now - MINUTE_S or journey.get("mistake"):
            continue
        ends = [lane.get("end", "") for lane in journey["lanes"] if lane["seat"] == "decode"]
        found.failed += bool(journey.get("failed"))
        found.ended += bool(journey.get("failed")) or "delivered" in ends
        if journey.get("itl_s") is not None:
            found.times["itl"].append(1e3 * journey["itl_s"])
        if journey.get("ttft_s") is not None:
            found.times["ttft"].append(1e3 * (journey["began"] + journey["ttft_s"] - since[journey["request"]]))
        for stage in journey["stages"]:
            if stage["seat"] == "decode" and stage["name"] in STAGES:
                found.times[stage["name"]].append(1e3 * (stage["end_s"] - stage["begin_s"]))
    return found


class Sampler:
    """What the processes themselves said in the last seconds, by place and figure."""

    def __init__(self, router: str) -> None:
        listed = asked(f"{router}/workers")["workers"]
        self._places = {"router": router, **{each["name"]: each["url"] for each in listed}}
        self._roles = {"router": "router", **{each["name"]: each["role"] for each in listed}}
        self._seen: dict[tuple[str, str], deque[tuple[float, float]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def allows(self, place: str, name: str, shown: float) -> bool:
        """Whether the figure was between these values lately."""
        since = time.monotonic() - LAG_S
        values = [value for at, value in list(self._seen[place, name]) if at >= since]
        return bool(values) and min(values) <= shown <= max(values)

    def allows_rate(self, name: str, shown: float) -> bool:
        """Whether so much was counted per second, in a window of the page's rates that ended lately."""
        now, role = time.monotonic(), COUNTED[name][0]
        places = [place for place, its in self._roles.items() if role == its or (not role and its != "router")]
        ends = [now - STEP_S * step for step in range(int(LAG_S / STEP_S) + 1)]
        sums = [sum(self._counted(place, name, end) for place in places) for end in ends]
        return min(sums) * 0.994 <= shown * RATE_S <= max(sums) * 1.006

    def _counted(self, place: str, name: str, end: float) -> float:
        """What this place counted in the window before `end`; it counted nothing before the first sample."""
        samples = list(self._seen[place, name])
        first = samples[0][1]
        before = max((value for at, value in samples if at <= end - RATE_S), default=first)
        return max((value for at, value in samples if at <= end), default=first) - before

    def last(self, place: str) -> dict[str, float]:
        return {name: seen[-1][1] for (known, name), seen in self._seen.items() if known == place and name in CELLS}

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            with contextlib.suppress(OSError):  # a worker that is slow to answer is asked again
                self._look()

    def _look(self) -> None:
        for place, url in self._places.items():
            found = metrics(url)
            wanted = {"in_flight": "kvbaton_router_in_flight"} if place == "router" else CELLS
            values = {name: found[metric] for name, metric in wanted.items()}
            values |= {name: found.get(metric, 0.0) for name, (_, metric) in COUNTED.items()}
            if blocks := found.get("kvbaton_engine_blocks"):
                values["cache"] = round(100 * (1 - found["kvbaton_engine_free_blocks"] / blocks), 1)
            for name, value in values.items():
                self._seen.setdefault((place, name), deque(maxlen=1000)).append((time.monotonic(), value))

    @contextlib.contextmanager
    def running(self) -> Iterator[Sampler]:
        self._look()
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(60)


def differing(page: Page, found: Expected) -> list[str]:
    """The figures on the page that are not those expected."""
    wrong = []
    shown = {"ttft": times_ms(tile(page, "ttft")) + times_ms(tile(page, "ttft", "sub")),
             "itl": times_ms(tile(page, "tokens", "sub"))}  # fmt: skip
    shares: Mapping[str, Sequence[float]] = {"ttft": (0.5, 0.99), "itl": (0.5, 0.99)}
    for stage in STAGES:
        shown[stage] = times_ms(page.locator(f'[data-stage="{stage}"] .times').inner_text())
    for name, values in shown.items():
        wanted = found.percentiles(name, *shares.get(name, (0.5, 0.95)))
        if len(values) != 2 or len(wanted) != 2 or not all(map(near, values, wanted)):
            wrong.append(f"{name}: {values}, expected {wanted}")
    staged = page.locator("#stages-note").inner_text().rpartition(" of ")[2]
    counts = {
        "ended": (number(tile(page, "handoffs", "sub")), found.ended),
        "stages": (number(staged), max(len(found.times[stage]) for stage in STAGES)),
    }
    wrong += [f"{name}: {here}, expected {there}" for name, (here, there) in counts.items() if here != there]
    verdict = f"{found.failed} not delivered" if found.failed else "every one"
    if (said := tile(page, "delivered", "sub")) != verdict:
        wrong.append(f"delivered: {said}, expected {verdict}")
    return wrong


def agree(page: Page, url: str, seconds: float) -> None:
    """Wait until the page shows what `/flights` says; a look at both takes a moment, in which a minute may go on."""
    deadline = time.monotonic() + seconds
    while wrong := differing(page, expected(url)):
        assert time.monotonic() < deadline, wrong
        time.sleep(0.1)


def near(shown: float, exact: float) -> bool:
    """Up to the three figures that are shown."""
    return math.isclose(shown, exact, rel_tol=0.006, abs_tol=0.002)
