"""Advice for each failure reason. Its meaning and who must act are in `protocol.errors.MEANING`.

Law: every `Reason` has a row, and there are no other rows.
"""

from __future__ import annotations

import msgspec

from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who
from kvbaton.protocol.errors import MEANING, Reason

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
