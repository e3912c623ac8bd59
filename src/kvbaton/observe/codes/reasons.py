"""Advice for each failure reason. Its meaning and who must act are in `protocol.errors.MEANING`.

Law: every `Reason` has a row, and there are no other rows.

Values of `error.code` in HTTP responses of the router and of workers, besides the failure reasons.

Law: exactly the codes that the sources can return, no more and no fewer; `tests/cli/test_explain.py` checks it.

Why a decode engine computes a prompt itself: as planned, or although a prefill engine should have.

Law: a closed list, shared by the router or Ray's replica that says the word, the engine that counts it, metrics,
`kvbaton doctor` and `kvbaton explain`. A handoff that was begun and failed is counted by its reason
(`protocol.errors.Reason`) instead.
"""

from __future__ import annotations

import msgspec

from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who, api
from kvbaton.protocol.errors import MEANING, Reason

FIELD = "alone"
"""Of `kv_transfer_params`: the router's word for D."""

SOURCES = ("cached", "handoff", "store", "planned", "alone")
"""Of a prompt token: D's own prefix cache, a P, the shared store; computed here as planned, or for want of a P."""

PLANNED: dict[str, str] = {
    "short": "shorter than disagg_min_tokens",
    "cached": "D knows most of the prompt",
    "prompt_logprobs": "the answer has log probabilities of the prompt",
    "echo": "the answer has log probabilities of the prompt",
    "prompt_embeds": "the prompt is embeddings",
    "search": "one engine must make all candidates",
    "nothing": "P had nothing to hand over",
}
"""As the operator or the request wants it: no prefill engine should have computed these."""

UNASKED = "unasked"
NOT_TAKEN = "not_taken"
MISSED: dict[str, tuple[str, str]] = {
    UNASKED: (
        "requests reach D without a handoff: whatever stands in front of it asks no P",
        "send requests to the kvbaton router; behind another router or gateway, check that it asks P first and passes "
        "kv_transfer_params on (docs/llm-d.md)",
    ),
    "no_prefill": (
        "no prefill worker is registered",
        "start one, or find out why it is not listed: [not-listed] or [registry-silent] in its log",
    ),
    "prefill_draining": ("every prefill worker drains", "start others before the last one is drained"),
    "prefill_broken": (
        "the circuit breaker of every prefill worker is open",
        "curl each one's /health, and read its log: it failed several requests in a row",
    ),
    "prefill_full": (
        "prefill workers refuse: their queue or the part of their cache that handoffs may pin is full",
        "add prefill or decode capacity; kvbaton explain pins_full",
    ),
    "prefill_failed": (
        "prefill workers fail requests",
        'read their logs; kvbaton_router_leg_failures_total{side="prefill"} has the error codes',
    ),
    NOT_TAKEN: (
        "under Ray Serve, no prefill replica took the request in time: none is running, or all are busy",
        "serve status shows the replicas; give the prefill deployment more of them, or a larger max_ongoing_requests, "
        "or raise choose_timeout_s (docs/ray.md)",
    ),
    "no_pair": (
        "no prefill worker can hand over to this decode worker",
        "curl ROUTER/health says why: modes, transports or compatibility keys differ; kvbaton doctor compares",
    ),
    "handoff_failed": (
        "handoffs fail, and the router lets D compute",
        "kvbaton inspect --failed; kvbaton_ends_total has the reasons",
    ),
}
"""A prefill engine should have computed these: what is wrong, and the next step."""

WORDS = frozenset((*PLANNED, *MISSED))


def explained(reason: str) -> tuple[str, str]:
    """What is wrong where prompts are computed by D for this reason, and the next step."""
    if reason in MISSED:
        return MISSED[reason]
    try:
        meaning = MEANING[Reason(reason)][1]
    except ValueError:
        return reason, "kvbaton inspect --failed"
    return f"handoffs end as {reason}: {meaning}", f"kvbaton explain {reason}; kvbaton inspect --failed"


FALLBACK = "fallback"
"""The router's own word where none of the above is meant: it counts attempts before it knows why."""
_COUNTED = 'metric kvbaton_alone_tokens_total{reason="%s"}'
_TRIED = 'metric kvbaton_router_alone_total{reason="%s"}'


def alone_entries() -> tuple[CodeEntry, ...]:
    """All words for `kvbaton explain`."""
    missed = [_alone_entry(word, Who.OPERATOR, means, do, _COUNTED % word) for word, (means, do) in MISSED.items()]
    fallback = _alone_entry(
        FALLBACK, Who.OPERATOR, "no prefill worker could compute the prompt, and the router lets D compute it",
        "find the reason in D's own account: kvbaton_alone_tokens_total, or kvbaton doctor --router URL",
        _TRIED % FALLBACK,
    )  # fmt: skip
    planned = [
        _alone_entry(word, Who.NOBODY, f"as planned: {means}", "nothing", _TRIED % word)
        for word, means in PLANNED.items()
    ]
    return tuple(sorted([*missed, fallback, *planned], key=lambda entry: entry.code))


def _alone_entry(word: str, who: Who, means: str, do: str, look: str) -> CodeEntry:
    sentence = f"D computes a prompt itself; {means}."
    looks = (look, "docs/metrics.md, Is it really disaggregating?")
    return CodeEntry(code=word, kind=CodeKind.ALONE, who=who, means=sentence, do=(do,), look=looks)


CALLER, OPERATOR, MAKERS = Who.CALLER, Who.OPERATOR, Who.MAKERS
WORKERS = ("curl ROUTER/workers lists the workers and their states",)
INSPECT = ("kvbaton inspect REQUEST, with the id in the response's x-request-id header or its error.request_id",)

CODES: tuple[CodeEntry, ...] = (
    api("bad_answer", 502, OPERATOR, "A worker returned a response that the router cannot use.",
        "read its log at that time", "check that it serves the OpenAI API and has a KV connector",
        causes=("the worker is not an OpenAI server", "P has no BatonConnector, so it returns no kv_transfer_params",
                "a proxy between router and worker changed the response"), look=INSPECT),
    api("bad_request", 400, CALLER, "What came was not HTTP/1.1.",
        "see that the client speaks HTTP/1.1: https:// where the router has --tls-cert, else http://"),
    api("body_timeout", 408, CALLER, "The request body was not complete in time.",
        "send the body faster, or find what delays it between client and router"),
    api("body_too_large", 413, CALLER, "The body is larger than the bound in the message.",
        "send less, or start the router with a larger --body-limit"),
    api("deadline", 504, OPERATOR, "The request did not complete within the router's deadline.",
        "find the slow stage in the timeline", "add workers, or raise the deadline",
        causes=("the workers are overloaded", "a worker is stopped"), look=INSPECT),
    api("draining", 503, OPERATOR, "This router is shutting down and takes no new requests.",
        "send the request to another router, or wait for the restart"),
    api("encoded_body", 415, CALLER, "The body is compressed; compressed bodies are not supported.",
        "send it uncompressed: no Content-Encoding, and no Transfer-Encoding other than chunked"),
    api("foreign_origin", 403, CALLER, "The browser's Origin header names another site.",
        "send the request from a page of the same origin, or not from a browser",
        "start the router with --allow-origin to allow the page",
        causes=("a web page uses its visitors' browsers to reach this port",
                "a proxy in front of the router rewrites Host: make it keep the client's")),
    api("full", 429, OPERATOR, "Too many requests are in flight; the same request may succeed later.",
        "let clients wait for Retry-After and retry", "add workers if it persists",
        causes=("more concurrent requests than the router's limits allow",), look=("queue lengths on /dashboard",)),
    api("headers_timeout", 408, CALLER, "The request headers were not complete in time.",
        "find what delays the client; an idle connection should send nothing at all"),
    api("headers_too_large", 431, CALLER, "The request headers exceed the limit in the message.",
        "send fewer or shorter headers"),
    api("internal", 500, MAKERS, "A bug: an unexpected exception was raised.",
        "look for [request-crashed] or [stream-crashed] in the log, and report it with the traceback"),
    api("invalid_api_key", 401, CALLER, "This router wants an API key, and none of its own was shown.",
        "send Authorization: Bearer KEY, as OpenAI's clients do with their api_key; x-api-key: KEY is taken too",
        causes=("the client has no key, or another cluster's", "the operator has taken the key out of --api-key-file")),
    api("invalid_json", 400, CALLER, "The body is not a JSON object.",
        "send a JSON object with Content-Type: application/json"),
    api("invalid_value", 400, CALLER, "A field of the body has an invalid value.",
        "read the message: it starts with the field's name and says what was expected"),
    api("method_not_allowed", 405, CALLER, "The path does not support this method.",
        "use the method in the message; for chat and completions it is POST"),
    api("model_not_found", 404, CALLER, "No worker here serves that model.",
        "use one of the names in the message; curl ROUTER/v1/models lists them"),
    api("no_pair", 503, OPERATOR, "No P and D that can serve this mode are available now.",
        "see in the message which role is missing", "start a worker of that role, or wait until one is back",
        causes=("a role has no worker", "all of a role are draining, suspect or broken",
                "no pair supports the requested mode"), look=WORKERS),
    api("no_room", 503, OPERATOR, "No memory or no worker connection is left for this request.",
        "let clients wait for Retry-After and retry", "raise --held-bytes-max, or ulimit -n, if it persists",
        causes=("one client address has reached its own limit",
                "clients send large bodies slowly, or do not read their responses"),
        look=("kvbaton_router_held_bytes, kvbaton_router_held_refused_total",)),
    api("no_worker", 503, OPERATOR, "No worker is registered.",
        "start workers with this router's registry: kvbaton worker, or vLLM with BatonConnector", look=WORKERS),
    api("not_found", 404, CALLER, "The path does not exist.",
        "see the message for the paths that exist"),
    api("not_here", 403, CALLER, "The path is vLLM's, and the router does not pass it on.",
        "read the message: it says why, and where to ask instead",
        causes=("the path changes one engine, or tells of its inside", "it needs answers that are kept")),
    api("not_the_router", 401, OPERATOR, "The worker accepts requests only from its cluster's router.",
        "send the request to the router", "if the router itself gets this: copy tickets.json to both hosts",
        causes=("a client sent its request to a worker directly", "router and worker have different tickets.json")),
    api("operators_only", 403, OPERATOR,
        "The page is for operators: it is served to the router's own machine, and elsewhere with an operator's key.",
        "open it there, or start the router with --operator-key-file and show one of its keys",
        "start the router with --operator-pages open where only operators can reach it",
        causes=("no operator's key was shown, or a client's", "the page was opened by a name, or through a proxy")),
    api("request_loop", 508, OPERATOR, "A router's request came back to it, or passed too many routers.",
        "remove from the list of workers what is a router: see http_address under /workers",
        causes=("a member registered the router's own address", "two routers list each other as workers"),
        look=WORKERS),
    api("wrong_type", 415, CALLER, "The path takes a form, and something else was sent.",
        "send multipart/form-data, as OpenAI's clients do for audio"),
    api("worker_died", 502, OPERATOR, "A worker disconnected before its response was complete.",
        "find out why: the end of its log and of the kernel's (OOM)", "retry; other workers serve meanwhile",
        look=(*INSPECT, *WORKERS)),
    api("worker_failed", 502, OPERATOR, "A worker returned an error.",
        "read the message, which quotes the error, and the worker's log", look=INSPECT),
    api("worker_left", 502, OPERATOR, "A worker left the registry while the router waited for its response.",
        "retry the request", "if it was not stopped on purpose, look for [registry-silent] in its log", look=WORKERS),
    api("worker_timeout", 504, OPERATOR, "A worker did not respond in time.",
        "check whether it is overloaded or stopped: curl http://WORKER/health", look=(*INSPECT, *WORKERS)),
    api("worker_unreachable", 502, OPERATOR, "The router cannot connect to a worker.",
        "check that the router can reach http_address, and that no firewall blocks it",
        causes=("the worker is gone but stays listed for a few seconds", "http_address is wrong"), look=WORKERS),
)  # fmt: skip


FAILED = "kvbaton inspect --failed"
DOCTOR_PAIR = "kvbaton doctor --prefill FILE --decode FILE names the field, before anything is started"
NETWORK = "the network between P and D"


class Advice(msgspec.Struct, frozen=True):
    """Usual causes, next steps, and where to look."""

    causes: tuple[str, ...]
    do: tuple[str, ...]
    look: tuple[str, ...] = ()


ADVICE: dict[Reason, Advice] = {
    Reason.ABORTED: Advice(
        ("the client closed its connection", "D's engine preempted or refused the request"),
        ("nothing, unless clients complain: then compare their timeouts with TTFT",),
    ),
    Reason.BAD_MESSAGE: Advice(
        ("a client or router made up `kv_transfer_params`", "a peer of another build",
         "one side requires encryption and the other does not support it"),
        ("read the detail: it names the field", "check that P, D and router run the same or neighbouring releases"),
        ("the log of the side that refused",),
    ),
    Reason.BAD_SPAN: Advice(
        ("a peer of another build", "a damaged message"),
        ("check that P and D run the same release", "if they do, keep both logs and report it"),
    ),
    Reason.BUSY: Advice(
        ("more concurrent handoffs than a limit allows", "blocks that wait for slow transfers fill a queue"),
        ("lower the request rate, or add a worker on the side that returned this",
         "if the rate is low, look for transfers that never finish"),
        ("leases, pins and intakes per worker on /dashboard",),
    ),
    Reason.CANCELLED: Advice(
        ("the client disconnected, or the handoff had failed for another reason",),
        ("nothing; the reason that ended the handoff is in its timeline",),
    ),
    Reason.CHECKSUM_MISMATCH: Advice(
        ("bad memory, a bad NIC, or a network device that changes data", "a data plane with a bug"),
        ("take the two hosts out of service one at a time, and test memory and NIC",
         "keep checksum=full on the pair until the cause is found",
         "try another data plane: --transport tcp with encrypt=on authenticates every byte"),
        ("the pair and the plane in the timeline: a single pair points to hardware",),
    ),
    Reason.CLAIM_TIMEOUT: Advice(
        ("P is stopped, overloaded or gone", "control messages are blocked: firewall, wrong control_host"),
        ("check that P responds: curl http://P/health", "check that D can reach P's control address and port",
         "if P is only slow, raise claim_timeout on D"),
        (NETWORK, "P's log"),
    ),
    Reason.CONTENT_MISMATCH: Advice(
        ("a router or client sent D a different prompt than P: template, tokenizer, adapter or image",
         "a ticket of another request was used"),
        ("send P and D the same body except for the handoff's fields",
         "check that both serve the same model with the same tokenizer and chat template"),
    ),
    Reason.DEFER_TIMEOUT: Advice(
        ("stream or push: the other side never received the request", "D found no free blocks within defer_timeout"),
        ("find in the timeline which side got no request, and why in the router's log",
         "if D waited for blocks, lower its concurrency or give it more KV; or raise defer_timeout"),
        ("D's KV cache usage",),
    ),
    Reason.DISCARDED: Advice(
        ("the client disconnected between P and D", "the router chose another pair"),
        ("nothing; if clients disconnect often, find out why they wait",),
    ),
    Reason.DRAINING: Advice(
        ("an operator drains the worker, or it is shutting down",),
        ("wait, or add a worker; the router uses the others meanwhile",),
        ("curl ROUTER/workers",),
    ),
    Reason.DUPLICATE: Advice(
        ("a router or client reused a transfer id", "a request was sent twice with the same ticket"),
        ("give each request its own id; kvbaton's router does",),
    ),
    Reason.FORBIDDEN: Advice(
        ("a worker was started with a key of another role: a D with a P's, or with the router's",
         "a member tries something that its role does not allow"),
        ("kvbaton keys show DIR lists each key's role; remove the name and add it again as NAME:ROLE",
         "permissions of each role: docs/security.md"),
    ),
    Reason.HANDSHAKE_TIMEOUT: Advice(
        ("P is not reachable at the address that the registry lists", "P and D have different keys",
         "P is too busy to answer"),
        ("check that D can reach P's control address; control_host must not be loopback between hosts",
         "compare keys: kvbaton doctor --keys DIR on both hosts"),
        (NETWORK, "refused peers: [stranger-refused] in P's log, metric kvbaton_connections_refused_total"),
    ),
    Reason.INCOMPATIBLE: Advice(
        ("different model, weights, dtype, KV dtype or quantization", "different block sizes on CPU",
         "tensor parallel sizes that do not map onto each other"),
        ("read the detail: it names the field and both values", DOCTOR_PAIR),
    ),
    Reason.LEASE_EXPIRED: Advice(
        ("the request waited too long between P and D", "D was stopped or cut off and did not renew",
         "D had no free blocks for longer than max_hold_s"),
        ("find in the timeline where the time went",
         "if requests wait on D, add capacity there; if that is normal, raise lease_s (and max_hold_s) on P"),
        ("metric kvbaton_oldest_lease_seconds of P, and lease ages on /dashboard",),
    ),
    Reason.NO_TRANSPORT: Advice(
        ("P and D were given different `transport` lists", "one has checksums and the other does not",
         "a library is missing on one host"),
        ("kvbaton doctor on each host lists its transports", "give both the same transport and checksum"),
    ),
    Reason.NOT_WRITTEN: Advice(
        ("P runs something else than it says, or its memory or transport is broken",
         "a member lies: its key may have been stolen"),
        ("look at that P's host and release; remove its key if nothing explains it: kvbaton keys remove",
         "D had nothing of it: the request was computed or failed, by kv_load_failure_policy"),
        ("the P that the detail names, and how often: one P among many points to that host",),
    ),
    Reason.ORIGIN_GONE: Advice(
        ("a member was removed, or its key got another role, after P had taken KV from it; P resets its cache as soon "
         "as it learns of that",),
        ("nothing, for a few seconds; where it goes on, P's host still has public/NAME.json: remove it there too",),
        ("kvbaton keys show DIR on P's host; [cache-reset] in P's log",),
    ),
    Reason.OTHER: Advice(
        ("the peer is a newer release",),
        ("read the detail, and the peer's log", "run the same release on both"),
    ),
    Reason.PEER_GONE: Advice(
        ("the other engine was restarted, drained or killed",),
        ("nothing if that was intended", "otherwise find out why: the end of its log and of the kernel's (OOM)"),
    ),
    Reason.PEER_UNKNOWN: Advice(
        ("the worker is not registered, or its entry expired", "a request id names addresses of no known peer",
         "the ticket is from another cluster"),
        ("curl ROUTER/workers: is it listed?", "if not, look for [not-listed] or [registry-silent] in its log"),
    ),
    Reason.PINS_FULL: Advice(
        ("P computes faster than D's read: leases pile up", "a D that claims and does not finish",
         "a pin_share that is too small for the prompts"),
        ("add decode capacity, or find the D whose handoffs do not end: kvbaton inspect --failed",
         "raise pin_share on P (or --pin-share); pin_wait_s is how long a request waits for room"),
        ("metrics kvbaton_pinned_ratio, kvbaton_pin_waiting and kvbaton_pin_refused_total of P",),
    ),
    Reason.QUARANTINE_FULL: Advice(
        ("a data plane that cannot cancel (NIXL, Mooncake over TCP) has many transfers that never finish",
         "a peer that stopped in mid-transfer"),
        ("find the unresponsive peer and restart it",
         "prefer a data plane that can cancel: shm on one host, tcp between hosts"),
        ("metric kvbaton_quarantined_blocks per worker",),
    ),
    Reason.SOURCE_PREEMPTED: Advice(
        ("P ran out of KV blocks during prefill",),
        ("lower P's concurrency, or give it more KV; meanwhile D recomputes the prompt",),
        ("P's KV cache usage",),
    ),
    Reason.SOURCE_ABORTED: Advice(
        ("the client disconnected", "P refused the request: too long, invalid"),
        ("see P's response in the timeline",),
    ),
    Reason.STALE: Advice(
        ("a lease expired during the transfer, and P reused the blocks",),
        ("the output is correct: D recomputed the stale part",
         "if it is frequent, raise lease_s on P, or find out why D is slow"),
        ("metric kvbaton_commits_stale_total of P",),
    ),
    Reason.STORE_FAILED: Advice(
        ("the store is down, full or slow", "its key or address is wrong"),
        ("check that it runs, and its log", "requests continue without it; it is retried automatically"),
    ),
    Reason.TICKET_EXPIRED: Advice(
        ("the request waited longer than ticket_ttl_s", "the clocks of two hosts differ"),
        ("compare clocks: timedatectl on both hosts", "raise ticket_ttl_s on P if the wait is normal"),
    ),
    Reason.TICKET_FORGED: Advice(
        ("P, D and router have different tickets.json", "rotated ticket keys were not copied everywhere",
         "a client forged the ticket"),
        ("compare kvbaton keys show DIR on every host: the ticket keys must be the same",
         "copy tickets.json to every host"),
    ),
    Reason.TICKET_SPENT: Advice(
        ("a request was sent to D twice", "n > 1 or several prompts behind a router that does not split them"),
        ("let the router send each part to P; kvbaton's does",),
    ),
    Reason.TRANSFER_FAILED: Advice(
        ("the connection broke, the peer died, or a device failed",),
        ("read the detail, the data plane's own error", "check whether only one pair or data plane is affected"),
        (NETWORK, "both logs"),
    ),
    Reason.TRANSFER_TIMEOUT: Advice(
        ("the network is congested, or packets are lost", "the peer is stopped (SIGSTOP, a debugger, a frozen VM)"),
        ("measure the path: kvbaton bench transfer", "raise transfer_timeout only if large prompts need longer"),
        (NETWORK, "stage times on /dashboard: first byte, copy"),
    ),
    Reason.UNKNOWN_LEASE: Advice(
        ("D came after the lease had ended and was forgotten", "the ticket was for an earlier incarnation of P"),
        ("find in the timeline how long the request spent between P and D",),
    ),
    Reason.UNREACHABLE: Advice(
        ("a firewall between the two hosts", "containers that do not share memory or a network",
         "control_host is an address that D cannot reach"),
        ("kvbaton doctor --router URL shows the transport of each pair",
         "open the ports, or remove that transport from `transport`"),
        ("metric kvbaton_planes_given_up_total of D",),
    ),
    Reason.WRONG_INCARNATION: Advice(
        ("the worker restarted in the meantime",),
        ("nothing: D recomputes the request or it is retried", "if it persists, find out why the worker restarts"),
    ),
    Reason.WRONG_VERSION: Advice(
        ("an upgrade skipped a release",),
        ("run the same or neighbouring releases on P, D and router",),
    ),
}  # fmt: skip


def entries() -> tuple[CodeEntry, ...]:
    """One entry per reason, sorted by name."""
    return tuple(_entry(reason) for reason in sorted(Reason))


def _entry(reason: Reason) -> CodeEntry:
    blame, means = MEANING[reason]
    advice = ADVICE[reason]
    look = (FAILED, f'metric kvbaton_ends_total{{end="{reason}"}} of D', *advice.look)
    who = Who(blame.value)
    return CodeEntry(
        code=str(reason), kind=CodeKind.REASON, who=who, means=means, causes=advice.causes, do=advice.do, look=look
    )
