"""Every metric that kvbaton exports: name, kind, labels, help and exporter. Source of docs/metrics.md.

Laws: only metrics listed here can be exported. One thing has one name everywhere: embedded workers, vLLM and the
router differ only in environment labels. Names end in base units (seconds, bytes), counters in `_total`. A help text is
read without this code beside it: it names the side, the unit and what makes the number rise.
"""

from __future__ import annotations

from kvbaton.observe.codes.reasons import MISSED, SOURCES
from kvbaton.observe.flight.flight_records import DELIVERED, STAGES
from kvbaton.observe.metrics.metric_types import OF_PROCESSES, Label, Metric, MetricError, MetricKind, Where
from kvbaton.protocol.errors import Reason
from kvbaton.transports.builtin_entries import DISTRIBUTIONS, PLANES
from kvbaton.transports.catalogue_entry import SUMS
from kvbaton.transports.core.transport import Cause

__all__ = [
    "ALONE_TOKENS", "BY_NAME", "CACHE_RESETS", "CACHE_RESET_BLOCKS", "FULL", "METRICS", "PIN_MAX", "PIN_REFUSED",
    "PIN_WAITING", "PROMPT_TOKENS", "ROUTER_TURNS", "TURNS", "TURN_BLOCKS", "TURN_LOADS", "TURN_TOKENS", "Label",
    "Metric", "MetricError", "MetricKind", "Where", "named", "of",
]  # fmt: skip

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0)
SIZES = tuple(float(1 << power) for power in range(12, 36, 2))

_REASONS = tuple(sorted(Reason))
_PLANES = tuple(name + sums for name in (*PLANES, *DISTRIBUTIONS) for sums in ("", SUMS))
MODE = Label("mode", ("pull", "stream", "push", "alone"), "how the KV moved; `alone`: D computed the prompt itself")
TRANSPORT = Label("transport", _PLANES, "the data plane")
END = Label("end", (DELIVERED, *_REASONS), "`delivered`, or the reason (`kvbaton explain REASON`)")
REASON = Label("reason", _REASONS, "the reason (`kvbaton explain REASON`)")
STAGE = Label("stage", STAGES, "see [above](#the-stages-of-a-handoff)")
ROLE = Label("role", ("prefill", "decode", "both"), "role of the worker")
WORKER = Label("worker", (), "name of the worker")
TIER = Label("tier", ("memory", "disk"), "where values are kept")

_R, _W, _V, _S, _L = Where.ROUTER, Where.WORKER, Where.VLLM, Where.STORE, Where.REGISTRY
_ENGINES, _ALL = (_W, _V), (_R, _W, _V, _S, _L)


def _counter(name: str, text: str, where: tuple[Where, ...], *labels: Label, from_zero: bool = False) -> Metric:
    return Metric(f"kvbaton_{name}_total", MetricKind.COUNTER, text, where, labels, from_zero=from_zero)


def _gauge(name: str, text: str, where: tuple[Where, ...], *labels: Label) -> Metric:
    return Metric(f"kvbaton_{name}", MetricKind.GAUGE, text, where, labels)


def _seconds(name: str, text: str, where: tuple[Where, ...], *labels: Label) -> Metric:
    return Metric(f"kvbaton_{name}_seconds", MetricKind.HISTOGRAM, text, where, labels, SECONDS)


# --- handoffs, as D sees them; exemplars carry the handoff id
HANDOFFS = _counter(
    "handoffs", "Handoffs of a prompt's KV cache to this engine as decode side that ended, well or not.",
    _ENGINES,
    MODE, TRANSPORT, END,
)  # fmt: skip
ENDS = _counter(
    "ends", "Handoffs to this engine as decode side by how they ended, also those refused before they started.",
    _ENGINES, END, from_zero=True,
)  # fmt: skip
STAGE_SECONDS = _seconds(
    "stage", "Time that a delivered handoff spent in each of its stages on the decode side.", _ENGINES, STAGE, MODE,
    TRANSPORT,
)  # fmt: skip
HANDOFF_SECONDS = _seconds(
    "handoff", "Time of a delivered handoff, from asking the prefill engine until the decode engine has the KV cache.",
    _ENGINES, MODE, TRANSPORT,
)  # fmt: skip
HANDOFF_BYTES = Metric(
    "kvbaton_handoff_bytes", MetricKind.HISTOGRAM,
    "Bytes of KV cache copied for one handoff, counted by the engine that copies.", _ENGINES, (MODE, TRANSPORT), SIZES,
)  # fmt: skip
BYTES = _counter("bytes", "Bytes of KV cache that this engine has copied, from or to other engines.", _ENGINES)
COPIES = _counter("copies", "Copies of KV cache blocks from or to other engines that completed.", _ENGINES)
INTAKES = _gauge("intakes", "Prompts whose KV cache is requested by or under way to this engine now.", _ENGINES)
QUARANTINED = _gauge(
    "quarantined_blocks", "KV cache blocks kept out of use because a copy of an ended handoff may still write them.",
    _ENGINES,
)  # fmt: skip
QUARANTINE_MAX = _gauge(
    "quarantine_max_blocks",
    "Blocks in quarantine at which new handoffs are refused, or all blocks of the cache where those are fewer.",
    _ENGINES,
)  # fmt: skip
REPEATED = _counter(
    "messages_repeated", "Control messages to other engines that were sent again for want of an answer.", _ENGINES
)

# --- leases and pins, as P sees them
PINNED = _gauge(
    "pinned_blocks", "Blocks of this engine's KV cache that handoffs keep from being reused, as source or as target.",
    _ENGINES,
)  # fmt: skip
PINNED_RATIO = _gauge("pinned_ratio", "Share of this engine's KV cache blocks that handoffs pin, 0 to 1.", _ENGINES)
LEASES_HELD = _gauge(
    "leases_held", "Prompts whose KV cache blocks this prefill engine keeps for a decode engine now.", _ENGINES
)
OLDEST_LEASE = _gauge(
    "oldest_lease_seconds", "Age of the lease that this prefill engine has held longest, 0 without one.", _ENGINES
)
LEASE_HOLD_MAX = _gauge(
    "lease_hold_max_seconds", "Longest time that a lease may be held, by the setting max_hold_s.", _ENGINES
)
LEASES = _counter(
    "leases", "Leases granted: prompts whose KV cache this prefill engine began to keep for a decode engine.", _ENGINES
)
LEASE_ENDS = _counter(
    "lease_ends", "Leases of this prefill engine that ended, by how: delivered, or the reason of the failure.",
    _ENGINES, MODE, END,
)  # fmt: skip
LEASE_HELD_SECONDS = _seconds(
    "lease_held", "Time that this prefill engine held a lease, from its grant until its blocks were released.",
    _ENGINES, MODE,
)  # fmt: skip
LEASES_EXPIRED = _counter(
    "leases_expired", "Leases of this prefill engine that ran out of time before the decode engine had read.", _ENGINES
)
LEASES_DISCARDED = _counter(
    "leases_discarded", "Leases of this prefill engine that the router gave up, since no decode engine will come.",
    _ENGINES,
)  # fmt: skip
LEASES_REFUSED = _counter(
    "leases_refused", "Prompts computed here for which no lease was granted, by reason.", _ENGINES, REASON
)
CLAIMS_PARKED = _gauge(
    "claims_parked", "Requests of decode engines that wait because this prefill engine has not begun the prompt yet.",
    _ENGINES,
)  # fmt: skip
CLAIMS_REFUSED = _counter(
    "claims_refused", "Requests of decode engines for a prompt's KV cache that this prefill engine refused, by reason.",
    _ENGINES, REASON, from_zero=True,
)  # fmt: skip
OFFERS_REFUSED = _counter(
    "offers_refused", "Offers of decode engines to have KV cache pushed to them that were refused, by reason.",
    _ENGINES, REASON,
)  # fmt: skip
ABANDONED = _counter(
    "abandoned", "Leases that the decode engine gave back without having read them to the end, by its reason.",
    _ENGINES, Label("reason", (*_REASONS, "unsaid"), "as given by the reader"), from_zero=True,
)  # fmt: skip
COMMITS_GOOD = _counter(
    "commits_good", "Copies that this prefill engine confirmed: the blocks were the prompt's all along.", _ENGINES
)
COMMITS_STALE = _counter(
    "commits_stale", "Copies that were discarded because their source blocks had been reused before the confirmation.",
    _ENGINES,
)  # fmt: skip

# --- peers
PEERS = _gauge("peers", "Other workers of the cluster that this worker knows from the registry.", (_W,))
LINKS = _gauge(
    "links_open", "Prefill engines that this decode engine is connected with, by the transport that moves KV cache.",
    (_W,), TRANSPORT,
)  # fmt: skip
LINKS_TOTAL = _counter(
    "links", "Connections that this decode engine made to prefill engines, by transport.", _ENGINES, TRANSPORT
)
PLANES_GIVEN_UP = _counter(
    "planes_given_up", "Times that a transport could not be opened to a peer and the next best was taken.",
    _ENGINES,
    TRANSPORT, from_zero=True,
)  # fmt: skip
SESSIONS = _counter(
    "sessions", "Connections of decode engines that this prefill engine accepted, by protocol version.",
    _ENGINES,
    Label("version", (), "negotiated protocol version"),
)  # fmt: skip
HELLO_REFUSED = _counter(
    "hello_refused", "Decode engines that could not be paired with this prefill engine, by reason.", _ENGINES, REASON,
    from_zero=True,
)  # fmt: skip
FRAMES_REFUSED = _counter(
    "frames_refused", "Control messages of authenticated peers that were malformed or too large, by reason.",
    _ENGINES,
    REASON, from_zero=True,
)  # fmt: skip
OVER_QUOTA = _counter(
    "over_quota", "Control messages and connection attempts of peers that exceeded their quota and were dropped.",
    _ENGINES, Label("what", ("frames", "greetings", "sessions"), "what exceeded its quota"), from_zero=True,
)  # fmt: skip
CONNECTIONS = _counter("connections", "Connections to this process's control port, authenticated or not.", _ALL)
CONNECTIONS_ADMITTED = _counter(
    "connections_admitted", "Connections to this process's control port that proved the key of a member.", _ALL
)
CONNECTIONS_REFUSED = _counter(
    "connections_refused", "Connections to this process's control port with a key that is no member's.", _ALL
)
DATA_REFUSED = _counter(
    "data_refused", "Connections and requests refused at this engine's data ports, by transport and cause.",
    _ENGINES,
    TRANSPORT, Label("reason", tuple(Cause), "see [above](#refused-connections-at-data-ports)"),
)  # fmt: skip
MAPPED = _gauge(
    "mapped_bytes", "GPU memory of other processes that this engine has mapped and thus keeps in use.", (_V,)
)
HTTP_MALFORMED = _counter(
    "http_malformed", "Requests to this worker's HTTP port that were not HTTP/1.1 or exceeded a limit.", (_W,)
)

# --- the shared store
STORE_LOOKUPS = _counter("store_lookups", "Prompts that this engine looked up in the shared KV store.", _ENGINES)
STORE_GETS = _counter("store_gets", "Loads of KV cache from the shared store that this engine began.", _ENGINES)
STORE_HITS = _counter(
    "store_hits_blocks", "KV cache blocks that this engine loaded from the shared store instead of computing.", _ENGINES
)
STORE_PUTS = _counter("store_puts", "Prompts, or their tails, that this engine wrote to the shared store.", _ENGINES)
STORE_ERRORS = _counter(
    "store_errors", "Look-ups, loads and writes at the shared store that failed or timed out; each is a miss.",
    _ENGINES,
)  # fmt: skip
STORE_PINS = _gauge(
    "store_pins", "KV cache blocks of this engine in transfer from or to the shared store now.", _ENGINES
)
SECOND_SOURCE = _counter(
    "second_source", "Failed handoffs whose prompt was loaded from the shared store instead, in whole or in part.",
    _ENGINES,
)  # fmt: skip
STORE_COPIED = _counter(
    "store_copied_blocks", "KV cache blocks of answers that went to the shared store while they were generated.",
    _ENGINES,
)  # fmt: skip

# --- the store's own process
STORE_SERVER_VALUES = _gauge(
    "store_server_values", "Values, each the KV cache of one block, that the store holds.", (_S,), TIER
)
STORE_SERVER_BYTES = _gauge("store_server_bytes", "Bytes of values that the store holds.", (_S,), TIER)
STORE_SERVER_MAX = _gauge(
    "store_server_max_bytes", "Bytes of values that the store may hold; beyond it the least recently used are evicted.",
    (_S,), TIER,
)  # fmt: skip
STORE_SERVER_EVICTED = _counter(
    "store_server_evicted", "Values evicted for want of room; from memory they go to the disk, if there is one.", (_S,),
    TIER,
)  # fmt: skip
STORE_SERVER_HITS = _counter("store_server_hits", "Values that engines read and the store had.", (_S,))
STORE_SERVER_MISSES = _counter("store_server_misses", "Values that engines asked for and the store had not.", (_S,))
STORE_SERVER_MOVED = _counter(
    "store_server_moved_bytes", "Bytes of values that engines wrote to the store or read from it.", (_S,),
    Label("direction", ("in", "out"), "`in`: written by engines"), from_zero=True,
)  # fmt: skip
STORE_SERVER_LINES = _counter("store_server_lines", "Connections for values that engines opened to the store.", (_S,))
STORE_SERVER_OPEN = _gauge("store_server_lines_open", "Connections for values that engines have open now.", (_S,))
STORE_SERVER_REFUSED = _counter(
    "store_server_refused", "Requests and connections that the store refused.", (_S,),
    Label("reason", ("forbidden", "malformed", "turned_away"),
          "`forbidden`: the member's key is not for this; `turned_away`: too many connections"),
    from_zero=True,
)  # fmt: skip

# --- a registry in a process of its own
REGISTRY_WORKERS = _gauge(
    "registry_workers", "Workers registered at this registry.", (_L,), ROLE,
    Label("state", ("ready", "suspect", "draining"), "`suspect`: has not pinged for a while"),
)  # fmt: skip
REGISTRY_ROUTERS = _gauge("registry_routers", "Routers that read the list of workers from this registry.", (_L,))
REGISTRY_COMPLETE = _gauge(
    "registry_complete", "1 once all workers have had the time to register since this registry started.", (_L,)
)
REGISTRY_MESSAGES = _counter("registry_messages", "Messages of members that this registry accepted.", (_L,))
REGISTRY_BAD = _counter(
    "registry_bad_messages", "Messages of members that this registry ignored: malformed, or not theirs to send.", (_L,)
)

# --- the embedded engine
ENGINE_REQUESTS = _gauge(
    "engine_requests", "Requests in the embedded engine: computing, queued, or waiting for KV cache.", (_W,),
    Label("state", ("running", "waiting", "loading"), "`loading`: waiting for KV"),
)  # fmt: skip
ENGINE_BLOCKS = _gauge("engine_blocks", "KV cache blocks that the embedded engine has.", (_W,))
ENGINE_FREE_BLOCKS = _gauge(
    "engine_free_blocks", "KV cache blocks of the embedded engine that no request and no handoff holds.", (_W,)
)
ENGINE_PROMPT_TOKENS = _counter(
    "engine_prompt_tokens", "Prompt tokens of requests that the embedded engine began to answer, cached ones included.",
    (_W,),
)  # fmt: skip
ENGINE_OUTPUT_TOKENS = _counter("engine_output_tokens", "Tokens that the embedded engine generated.", (_W,))
ENGINE_QUEUE_SECONDS = _seconds(
    "engine_queue", "Time that a request waited in the embedded engine before it was first computed, loading included.",
    (_W,),
)  # fmt: skip
ENGINE_FIRST_TOKEN_SECONDS = _seconds(
    "engine_first_token", "Time from a request's arrival in the embedded engine to its first token (TTFT there).", (_W,)
)
ENGINE_INTER_TOKEN_SECONDS = _seconds(
    "engine_inter_token", "Time between two successive tokens of one request in the embedded engine (ITL).", (_W,)
)
ENGINE_REQUEST_SECONDS = _seconds(
    "engine_request", "Time from a request's arrival in the embedded engine to its last token (E2E there).", (_W,)
)

DRAINING = _gauge("draining", "1 while this process drains: it finishes its work and takes no new work.", (_R, _W))

# --- the router
ROUTER_IN_FLIGHT = _gauge("router_in_flight", "Requests of clients that the router is answering now.", (_R,))
ROUTER_WAITING = _gauge("router_waiting", "Of those, requests that wait for the first byte of their answer.", (_R,))
ROUTER_PROCESSES = _gauge("router_processes", "Processes of this router that serve clients.", (_R,))
ROUTER_PROCESS_RESTARTS = _counter(
    "router_process_restarts", "Processes of this router that ended by themselves and were started again.", (_R,)
)
ROUTER_REQUESTS = _counter(
    "router_requests", "Requests of clients that ended, by outcome.", (_R,),
    Label("outcome", (), "`ok`, `client_gone`, or the error's code"),
)  # fmt: skip
ROUTER_RESPONSES = _counter(
    "router_responses", "Requests of clients that ended, by class of the HTTP status.", (_R,),
    Label("status", ("2xx", "4xx", "429", "5xx", "gone"), "class of the HTTP status; `gone`: the client disconnected"),
    from_zero=True,
)  # fmt: skip
ROUTER_TRIES = _counter(
    "router_tries", "Attempts to answer a request with one pair of prefill and decode worker, retries included.", (_R,),
    MODE, from_zero=True,
)  # fmt: skip
ROUTER_ALONE = _counter(
    "router_alone", "Attempts to answer a request with a decode worker alone, without a prefill worker, by reason.",
    (_R,),
    Label("reason", ("short", "cached", "fallback", "prompt_logprobs", "echo", "prompt_embeds", "search"), "why"),
    from_zero=True,
)  # fmt: skip
ROUTER_PASSED_FULL = _counter(
    "router_passed_full", "Attempts in which a worker that said that it is full was passed over for another.", (_R,)
)
ROUTER_LEG_FAILURES = _counter(
    "router_leg_failures", "Requests of the router to workers that failed, by side and error code.", (_R,),
    Label("side", ("prefill", "decode", "mid_stream"), "the worker that failed; `mid_stream`: D, after its first byte"),
    Label("code", (), "error code"),
)  # fmt: skip
ROUTER_RETRIES = _counter(
    "router_retries", "Attempts that failed and were followed by one with other workers, by the side that failed.",
    (_R,), Label("side", ("prefill", "decode"), "failed side"), from_zero=True,
)  # fmt: skip
ROUTER_FIRST_TOKENS = _counter(
    "router_first_tokens",
    "First tokens of streams that clients got from the prefill worker.",
    (_R,),
    MODE,
    from_zero=True,
)
ROUTER_MOVES = _counter(
    "router_moves", "Streams that went on at another decode worker, by why they left theirs.", (_R,),
    Label("reason", ("died", "stalled", "left", "draining", "differed", "refused"), "what became of their worker; "
          "`differed`: it sampled another first token than the prefill worker, which the client has; `refused`: none "
          "would answer behind that token"), from_zero=True,
)  # fmt: skip
ROUTER_MOVES_FAILED = _counter(
    "router_moves_failed", "Streams that lost their decode worker and ended there, by what hindered them.", (_R,),
    Label("reason", (), "a name of the table in docs/router.md, or the error code of the workers that were asked"),
)  # fmt: skip
ROUTER_CHUNKS = _counter(
    "router_token_chunks", "Chunks of streamed answers that bear a token; an engine may put several in one.", (_R,)
)
ROUTER_FIRST_BYTE = _seconds(
    "router_first_byte", "Time from a client's request to the first byte of its streamed answer (TTFT).", (_R,), MODE
)
ROUTER_PREFILL = _seconds(
    "router_prefill", "Time that a prefill worker took to answer the router, of streamed answers.", (_R,), MODE
)
ROUTER_HANDOVER = _seconds(
    "router_handover",
    "Time from the prefill worker's answer to the decode worker's first byte, of streamed answers; not below 0.",
    (_R,), MODE,
)  # fmt: skip
ROUTER_REQUEST_SECONDS = _seconds(
    "router_request", "Time from a client's request to the end of its answer (E2E), of requests answered whole.", (_R,),
    MODE,
)  # fmt: skip
ROUTER_INTER_TOKEN_SECONDS = _seconds(
    "router_inter_token", "Time between two successive chunks of a streamed answer, mostly one token each (ITL).",
    (_R,), MODE,
)  # fmt: skip
ROUTER_PROMPT_TOKENS = _counter(
    "router_prompt_tokens", "Prompt tokens of answered requests: counted where sent as ids, else estimated from text.",
    (_R,), MODE, from_zero=True,
)  # fmt: skip
ROUTER_OUTPUT_TOKENS = _counter(
    "router_output_tokens", "Tokens answered to clients: by the usage of a whole answer, else the events of a stream.",
    (_R,), MODE, from_zero=True,
)  # fmt: skip
ROUTER_WORKERS = _gauge(
    "router_workers", "Workers that the router knows, by role and state.", (_R,), ROLE,
    Label("state", (), "`serving`, `suspect`, `broken`, …"),
)  # fmt: skip
ROUTER_WORKER_QUEUE = _gauge(
    "router_worker_requests", "Requests in each worker's engine, as the worker reports them: the queue is `waiting`.",
    (_R,), ROLE, WORKER, Label("state", ("running", "waiting", "loading"), "`loading`: waiting for KV"),
)  # fmt: skip
ROUTER_WORKER_TOKENS = _gauge(
    "router_worker_tokens", "Tokens, estimated, of requests that the router has under way at each worker.", (_R,), ROLE,
    WORKER,
)  # fmt: skip
ROUTER_WORKER_ASKED = _counter(
    "router_worker_asked", "Requests that the router sent to each worker.", (_R,),
    Label("role", ("prefill", "decode"), "the part that the worker was asked to play"), WORKER,
)  # fmt: skip
ROUTER_WORKER_FAILURES = _counter(
    "router_worker_failures", "Requests that the router sent to each worker and that failed there.", (_R,),
    Label("role", ("prefill", "decode"), "the part that the worker was asked to play"), WORKER,
)  # fmt: skip
ROUTER_PAIRS = _gauge(
    "router_pairs", "Pairs of a prefill and a decode worker that could serve a request now, by mode.", (_R,), MODE
)
ROUTER_BREAKERS = _counter(
    "router_breakers_opened", "Times that a worker failed so often in a row that the router stopped asking it.", (_R,)
)
ROUTER_PROBES = _counter(
    "router_probes", "Health probes that the router sent to workers whose circuit breaker is open.", (_R,),
    Label("outcome", ("answered", "silent")),
)  # fmt: skip
ROUTER_TICKETS = _counter(
    "router_tickets_minted", "Tickets that the router signed, which let a decode worker fetch a prompt (stream, push).",
    (_R,),
)  # fmt: skip
ROUTER_DISCARDS = _counter(
    "router_tickets_discarded",
    "Tickets that the router gave back, so that prefill workers release their blocks.",
    (_R,),
)
ROUTER_DROPPED = _counter(
    "router_legs_dropped", "Requests to workers that the router broke off because the worker left the registry.", (_R,)
)
ROUTER_HELD = _gauge(
    "router_held_bytes", "Bytes of requests and answers in the router's memory, bounded by --held-bytes-max.", (_R,)
)
ROUTER_HELD_REFUSED = _counter(
    "router_held_refused", "Requests and answers that the router refused because --held-bytes-max was reached.", (_R,),
    Label("what", ("request", "answer"), "what was refused"), from_zero=True,
)  # fmt: skip
ROUTER_TURNED_AWAY = _counter(
    "router_connections_turned_away", "Connections of clients that the router closed because there were too many.",
    (_R,),
    Label("which", ("idle", "new"), "`idle`: the oldest idle connection; `new`: the new one, when none was idle"),
    from_zero=True,
)  # fmt: skip

# --- every process
FAULTS = _counter(
    "faults", "Unexpected exceptions that were caught; the process continues, and each is a bug to report.",
    (_W, _V, _S),
)  # fmt: skip
BUILD = Metric(
    "kvbaton_build_info", MetricKind.INFO, "Always 1; the labels have kvbaton's version, the component and its name.",
    _ALL, (Label("version"), Label("component", tuple(Where)), Label("worker", (), "its name; `none` for the router")),
)  # fmt: skip

# --- who computed the prompts, by D's own account
PROMPT_TOKENS = _counter(
    "prompt_tokens",
    "Prompt tokens of requests that this engine began to decode, by where their KV cache came from.", _ENGINES,
    Label("source", SOURCES, "`cached`: its own prefix cache; `planned`: computed here, as it should be (the last "
          "token, short prompts); `alone`: computed here although a prefill engine should have"),
    from_zero=True,
)  # fmt: skip
ALONE_TOKENS = _counter(
    "alone_tokens",
    "Prompt tokens that this decode engine computed although a prefill engine should have, by reason.", _ENGINES,
    Label("reason", (*MISSED, *_REASONS), "see [above](#is-it-really-disaggregating)"), from_zero=True,
)  # fmt: skip
FULL = _gauge(
    "full", "1 while this engine tells routers that it has no room for more: KV cache blocks, or blocks it may pin.",
    _ENGINES,
)  # fmt: skip

PIN_MAX = _gauge(
    "pin_max_blocks",
    "KV cache blocks that handoffs may pin at this prefill engine, by the setting pin_share.",
    _ENGINES,
)
PIN_WAITING = _gauge(
    "pin_waiting", "Requests that wait at this prefill engine until handoffs pin fewer of its KV cache blocks.",
    _ENGINES,
)  # fmt: skip
PIN_REFUSED = _counter(
    "pin_refused", "Requests that this prefill engine refused, since handoffs pinned all blocks that they may pin.",
    _ENGINES,
)  # fmt: skip

# --- what members that are gone cost
CACHE_RESETS = _counter(
    "cache_resets", "Resets of this engine's prefix cache, since KV of a member that was removed may have been in it.",
    _ENGINES,
)  # fmt: skip
CACHE_RESET_BLOCKS = _counter(
    "cache_reset_blocks", "Cached blocks that those resets dropped, to be computed again.", _ENGINES,
)  # fmt: skip


# --- turns: what D keeps for the next one of a conversation, and what P takes of it
TURNS = Metric(
    "kvbaton_turns_total", MetricKind.COUNTER,
    "Ended requests that this decode engine kept for the next turn, and what became of them: taken, or why not.",
    _ENGINES, (Label("outcome", ("kept", "taken", *_REASONS), "`kept`: all; `taken`: read by a prefill engine"),),
)  # fmt: skip
TURN_BLOCKS = Metric(
    "kvbaton_turn_blocks", MetricKind.GAUGE,
    "Blocks of this decode engine's KV cache that are kept for next turns now, bounded by turn_percent.", _ENGINES,
)  # fmt: skip
TURN_LOADS = Metric(
    "kvbaton_turn_loads_total", MetricKind.COUNTER,
    "Prompts whose beginning a decode engine had kept, by whether this prefill engine took it from there.", _ENGINES,
    (
        Label(
            "outcome", ("taken", "late", "known", "unfit", *_REASONS),
            "`known`: it had as much itself; `late`: no answer in time; `unfit`: not this prompt's beginning",
        ),
    ),
)  # fmt: skip
TURN_TOKENS = Metric(
    "kvbaton_turn_tokens_total", MetricKind.COUNTER,
    "Prompt tokens that this prefill engine did not compute, because it took their KV cache from a decode engine.",
    _ENGINES,
)  # fmt: skip
ROUTER_TURNS = Metric(
    "kvbaton_router_turns_total", MetricKind.COUNTER,
    "Turns of conversations that the router knows to be kept by a decode worker, and what it did with them.",
    (Where.ROUTER,),
    (
        Label(
            "outcome", ("noted", "offered", "forgotten"),
            "`noted`: kept by D; `offered`: told to the next turn's P; `forgotten`: too old, too many, or D is gone",
        ),
    ),
    from_zero=True,
)  # fmt: skip

METRICS: tuple[Metric, ...] = (*(each for each in list(globals().values()) if isinstance(each, Metric)), *OF_PROCESSES)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def of(where: Where) -> tuple[Metric, ...]:
    """The metrics of that process's `/metrics`."""
    return tuple(metric for metric in METRICS if where in metric.where)


def named(name: str) -> Metric:
    """The metric of that name; MetricError where there is none."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise MetricError(f"{name}: no such metric; list it in observe/metrics/metric_names.py") from None
