"""Every metric that kvbaton exports: name, kind, labels, help, and who exports it. docs/metrics.md is made of it.

Laws: what is not listed here cannot be exported. One thing has one name everywhere: embedded workers, vLLM and the
router differ in labels of their surroundings only. A label's values are a closed list, or counted by something that
has a bound; a client never makes a series. Base units, at the end of the name: seconds, bytes; `_total` for counters.
"""

from __future__ import annotations

import enum

import msgspec

from kvbaton.observe.flight.flight_records import DELIVERED, STAGES
from kvbaton.protocol.errors import Reason
from kvbaton.transports.catalogue import ORDER, SUMS
from kvbaton.transports.core.refusals import Cause

OTHER = "other"
"""Stands for a value that is not on a closed list."""
NONE = "none"
"""Stands for what had not been settled yet when it ended: an empty label would be no label."""


class MetricError(Exception):
    """Something was to be exported that is not on the list, or not as the list says. A bug."""


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Where(enum.StrEnum):
    """Whose `/metrics` has it."""

    ROUTER = "router"
    WORKER = "worker"  # of the embedded engine
    VLLM = "vllm"


class Label(msgspec.Struct, frozen=True):
    name: str
    values: tuple[str, ...] = ()  # (): not a closed list, but of bounded length where it is counted
    meaning: str = ""


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: MetricKind
    help: str
    where: tuple[Where, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    from_zero: bool = False  # every label value is shown from the start: Prometheus does not see a series' first step

    @property
    def unit(self) -> str:
        base = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes") if base.endswith(f"_{unit}")), "")

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a scrape shows."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)

    def labelled(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """The values as they are exported; MetricError where there are more or fewer than labels."""
        if len(values) != len(self.labels):
            raise MetricError(f"{self.name}: {len(values)} label values, expected {self.label_names}")
        return tuple(_checked(label, value) for label, value in zip(self.labels, values, strict=True))


def _checked(label: Label, value: str) -> str:
    if not label.values or value in label.values or value == NONE:
        return value or NONE
    return OTHER if value else NONE


SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0)
SIZES = tuple(float(1 << power) for power in range(12, 36, 2))

_REASONS = tuple(sorted(Reason))
_PLANES = tuple(name + sums for name in ORDER for sums in ("", SUMS))
MODE = Label("mode", ("pull", "stream", "push", "alone"), "how KV went over; `alone`: D computed the prompt itself")
TRANSPORT = Label("transport", _PLANES, "the data plane")
END = Label("end", (DELIVERED, *_REASONS), "`delivered`, or the reason (`kvbaton explain REASON`)")
REASON = Label("reason", _REASONS, "the reason (`kvbaton explain REASON`)")
STAGE = Label("stage", STAGES, "see [above](#the-stages-of-a-handoff)")
ROLE = Label("role", ("prefill", "decode", "both"), "what the worker is for")

_R, _W, _V = Where.ROUTER, Where.WORKER, Where.VLLM
_ENGINES, _ALL, _OWN = (_W, _V), (_R, _W, _V), (_R, _W)


def _counter(name: str, text: str, where: tuple[Where, ...], *labels: Label, from_zero: bool = False) -> Metric:
    return Metric(f"kvbaton_{name}_total", MetricKind.COUNTER, text, where, labels, from_zero=from_zero)


def _gauge(name: str, text: str, where: tuple[Where, ...], *labels: Label) -> Metric:
    return Metric(f"kvbaton_{name}", MetricKind.GAUGE, text, where, labels)


def _seconds(name: str, text: str, where: tuple[Where, ...], *labels: Label) -> Metric:
    return Metric(f"kvbaton_{name}_seconds", MetricKind.HISTOGRAM, text, where, labels, SECONDS)


# --- handoffs, as D sees them; exemplars name the transfer
HANDOFFS = _counter("handoffs", "Handoffs that ended in this engine as decoder.", _ENGINES, MODE, TRANSPORT, END)
ENDS = _counter(
    "ends", "The same by end alone, with those that were refused before anything began.", _ENGINES, END,
    from_zero=True,
)  # fmt: skip
STAGE_SECONDS = _seconds(
    "stage", "How long delivered handoffs spent in each stage at D.", _ENGINES, STAGE, MODE, TRANSPORT
)
HANDOFF_SECONDS = _seconds(
    "handoff", "Of delivered ones: from asking P to the engine's taking it.", _ENGINES, MODE, TRANSPORT
)
HANDOFF_BYTES = Metric(
    "kvbaton_handoff_bytes", MetricKind.HISTOGRAM, "Bytes of a handoff, told by the side that copied: D, in push P.",
    _ENGINES, (MODE, TRANSPORT), SIZES,
)  # fmt: skip
BYTES = _counter("bytes", "Bytes that arrived whole.", _ENGINES)
COPIES = _counter("copies", "Copies that arrived whole.", _ENGINES)
INTAKES = _gauge("intakes", "Prompts whose KV is on its way here, or claimed.", _ENGINES)
QUARANTINED = _gauge("quarantined_blocks", "Blocks of ended handoffs that something may still write to.", _ENGINES)
QUARANTINE_MAX = _gauge("quarantine_max_blocks", "At so many of them no new handoff is taken.", _ENGINES)
REPEATED = _counter("messages_repeated", "Messages that had to be said again, and greetings.", _ENGINES)

# --- leases and pins, as P sees them
PINNED = _gauge("pinned_blocks", "Blocks that kvbaton holds in this engine's cache, as source or target.", _ENGINES)
LEASES_HELD = _gauge("leases_held", "Prompts whose blocks are kept for a reader.", _ENGINES)
OLDEST_LEASE = _gauge("oldest_lease_seconds", "How long the oldest lease has been held.", _ENGINES)
LEASE_HOLD_MAX = _gauge("lease_hold_max_seconds", "How long a lease may be held at most (max_hold_s).", _ENGINES)
LEASES = _counter("leases", "Leases granted.", _ENGINES)
LEASE_ENDS = _counter("lease_ends", "Leases that ended.", _ENGINES, MODE, END)
LEASE_HELD_SECONDS = _seconds("lease_held", "How long leases were held.", _ENGINES, MODE)
LEASES_EXPIRED = _counter("leases_expired", "Leases that ran out.", _ENGINES)
LEASES_DISCARDED = _counter("leases_discarded", "Leases that the router gave back.", _ENGINES)
LEASES_REFUSED = _counter("leases_refused", "Prompts that got no lease.", _ENGINES, REASON)
CLAIMS_PARKED = _gauge("claims_parked", "Claims that came before P knew the request.", _ENGINES)
CLAIMS_REFUSED = _counter("claims_refused", "Claims of readers that were refused.", _ENGINES, REASON, from_zero=True)
OFFERS_REFUSED = _counter("offers_refused", "Offers of readers (push) that were refused.", _ENGINES, REASON)
ABANDONED = _counter(
    "abandoned", "Leases that their reader left without a commit.", _ENGINES,
    Label("reason", (*_REASONS, "unsaid"), "why, as the reader said"), from_zero=True,
)  # fmt: skip
COMMITS_GOOD = _counter("commits_good", "Copies that were proven right.", _ENGINES)
COMMITS_STALE = _counter(
    "commits_stale", "Copies that were refused because their source blocks had been reused.", _ENGINES
)

# --- peers
PEERS = _gauge("peers", "Other workers that are listed.", (_W,))
LINKS = _gauge("links_open", "Pairings of this engine as decoder now, by data plane.", (_W,), TRANSPORT)
LINKS_TOTAL = _counter("links", "Pairings that this engine made as decoder, by data plane.", _ENGINES, TRANSPORT)
PLANES_GIVEN_UP = _counter(
    "planes_given_up", "Data planes that could not be opened, so that another was taken.", _ENGINES, TRANSPORT,
    from_zero=True,
)  # fmt: skip
SESSIONS = _counter(
    "sessions", "Sessions granted to readers.", _ENGINES, Label("version", (), "of the protocol that they talk in")
)
HELLO_REFUSED = _counter("hello_refused", "Peers whose greeting was refused.", _ENGINES, REASON, from_zero=True)
FRAMES_REFUSED = _counter(
    "frames_refused", "Messages that could not be read or broke a bound.", _ENGINES, REASON, from_zero=True
)
OVER_QUOTA = _counter(
    "over_quota", "What peers sent beyond their share, and was dropped.", _ENGINES,
    Label("what", ("frames", "greetings", "sessions"), "of what there was too much"), from_zero=True,
)  # fmt: skip
CONNECTIONS = _counter("connections", "Connections to the control port, by whomever.", _ALL)
CONNECTIONS_ADMITTED = _counter("connections_admitted", "Of these, those that proved a known key.", _ALL)
CONNECTIONS_REFUSED = _counter("connections_refused", "Of these, those that proved a key that is not listed.", _ALL)
DATA_REFUSED = _counter(
    "data_refused", "Strangers that were turned away at data ports, and bad requests of peers.", _ENGINES, TRANSPORT,
    Label("reason", tuple(Cause), "see [above](#refused-connections-at-data-ports)"),
)  # fmt: skip
MAPPED = _gauge(
    "mapped_bytes", "Device memory of other processes that this engine keeps open; it is not free before.", (_V,)
)
HTTP_MALFORMED = _counter("http_malformed", "Requests at the HTTP port that were not HTTP/1.1 or broke a bound.", (_W,))

# --- the shared store
STORE_LOOKUPS = _counter("store_lookups", "Prompts that the shared store was asked for.", _ENGINES)
STORE_GETS = _counter("store_gets", "Loads from the shared store that were begun.", _ENGINES)
STORE_HITS = _counter("store_hits_blocks", "Blocks that came from the shared store.", _ENGINES)
STORE_PUTS = _counter("store_puts", "Prompts, or their ends, that were put into the shared store.", _ENGINES)
STORE_ERRORS = _counter(
    "store_errors", "Look-ups, loads and puts that failed or took too long; each costs a miss.", _ENGINES
)
STORE_PINS = _gauge("store_pins", "Of the pinned blocks, those on their way to or from the shared store.", _ENGINES)
SECOND_SOURCE = _counter(
    "second_source", "Handoffs that failed and whose prompt came from the shared store, as far as it had it.", _ENGINES
)

# --- the embedded engine
ENGINE_REQUESTS = _gauge(
    "engine_requests", "Requests in the engine.", (_W,),
    Label("state", ("running", "waiting", "loading"), "loading: their KV is on its way"),
)  # fmt: skip
ENGINE_BLOCKS = _gauge("engine_blocks", "KV blocks that the engine has.", (_W,))
ENGINE_FREE_BLOCKS = _gauge("engine_free_blocks", "KV blocks that are free.", (_W,))

DRAINING = _gauge("draining", "1 while this process finishes what it has and takes nothing new.", _OWN)

# --- the router
ROUTER_IN_FLIGHT = _gauge("router_in_flight", "Requests under way.", (_R,))
ROUTER_REQUESTS = _counter(
    "router_requests", "Requests that ended.", (_R,), Label("outcome", (), "`ok`, `client_gone`, or the error's code")
)
ROUTER_RESPONSES = _counter(
    "router_responses", "The same by who is at fault.", (_R,),
    Label("status", ("2xx", "4xx", "429", "5xx", "gone"), "class of the HTTP status; `gone`: the client went"),
    from_zero=True,
)  # fmt: skip
ROUTER_TRIES = _counter("router_tries", "Pairs that were asked.", (_R,), MODE, from_zero=True)
ROUTER_ALONE = _counter(
    "router_alone", "Times that D was asked alone.", (_R,),
    Label("reason", ("short", "cached", "fallback", "prompt_logprobs", "echo", "prompt_embeds", "search"), "why"),
    from_zero=True,
)  # fmt: skip
ROUTER_LEG_FAILURES = _counter(
    "router_leg_failures", "Requests to workers that failed.", (_R,),
    Label("side", ("prefill", "decode", "mid_stream"), "which worker's; `mid_stream`: D's, after its first byte"),
    Label("code", (), "of the error"),
)  # fmt: skip
ROUTER_RETRIES = _counter(
    "router_retries", "Times that others were asked.", (_R,), Label("side", ("prefill", "decode"), "whose failure"),
    from_zero=True,
)  # fmt: skip
ROUTER_FIRST_BYTE = _seconds(
    "router_first_byte", "From a request to its first byte (TTFT), of streamed answers.", (_R,), MODE
)
ROUTER_PREFILL = _seconds("router_prefill", "P's leg: from asking P to its answer, of streamed answers.", (_R,), MODE)
ROUTER_HANDOVER = _seconds(
    "router_handover", "From P's answer to D's first byte, 0 if that came before; of streamed answers.", (_R,), MODE
)
ROUTER_WORKERS = _gauge(
    "router_workers", "Workers that are listed.", (_R,), ROLE, Label("state", (), "`serving`, `suspect`, `broken`, …")
)
ROUTER_PAIRS = _gauge("router_pairs", "Pairs of P and D that could be asked now.", (_R,), MODE)
ROUTER_BREAKERS = _counter("router_breakers_opened", "Times that a worker was no longer asked.", (_R,))
ROUTER_PROBES = _counter(
    "router_probes", "Broken workers that were probed.", (_R,), Label("outcome", ("answered", "silent"))
)
ROUTER_TICKETS = _counter("router_tickets_minted", "Tickets that the router signed (stream, push).", (_R,))
ROUTER_DISCARDS = _counter("router_tickets_discarded", "Tickets that were given back to P.", (_R,))
ROUTER_DROPPED = _counter(
    "router_legs_dropped", "Requests that were broken off because their worker left the list.", (_R,)
)
ROUTER_HELD = _gauge("router_held_bytes", "Bytes of requests and answers that are held, as they are counted.", (_R,))
ROUTER_HELD_REFUSED = _counter(
    "router_held_refused", "Times that there was no room for more of them.", (_R,),
    Label("what", ("request", "answer"), "what there was no room for"), from_zero=True,
)  # fmt: skip
ROUTER_TURNED_AWAY = _counter(
    "router_connections_turned_away", "Connections of clients that were closed because there were too many.", (_R,),
    Label("which", ("idle", "new"), "the oldest that was not being answered, or a new one where all were"),
    from_zero=True,
)  # fmt: skip

# --- every process
FAULTS = _counter("faults", "Exceptions caught in hooks, loops and ports; each is a bug.", _ENGINES)
BUILD = Metric(
    "kvbaton_build_info", MetricKind.INFO, "Which kvbaton this is, and who.", _ALL,
    (Label("version"), Label("component", tuple(Where)), Label("worker", (), "its name; `none` at the router")),
)  # fmt: skip
STARTED = Metric(
    "process_start_time_seconds", MetricKind.GAUGE, "Unix time at which this process began to count.", _OWN
)  # in vLLM the Prometheus client tells it

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def of(where: Where) -> tuple[Metric, ...]:
    """What that one's `/metrics` shows."""
    return tuple(metric for metric in METRICS if where in metric.where)


def named(name: str) -> Metric:
    """The metric of that name; MetricError where there is none."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise MetricError(f"{name}: no such metric; list it in observe/metrics/metric_names.py") from None
