"""Advice for each failure reason. Its meaning and who must act are in `protocol.errors.MEANING`.

Law: every `Reason` has a row; nothing is explained here that no code can say.
"""

from __future__ import annotations

import msgspec

from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who
from kvbaton.protocol.errors import MEANING, Reason

FAILED = "kvbaton inspect --failed"
DOCTOR_PAIR = "kvbaton doctor --prefill FILE --decode FILE says which field, before anything is started"
NETWORK = "the network between P and D"


class Advice(msgspec.Struct, frozen=True):
    """Why it usually happens, and the next step."""

    causes: tuple[str, ...]
    do: tuple[str, ...]
    look: tuple[str, ...] = ()


ADVICE: dict[Reason, Advice] = {
    Reason.ABORTED: Advice(
        ("the client closed its connection", "D's engine preempted or refused the request"),
        ("nothing, unless clients complain: then compare their time-outs with the time to the first token",),
    ),
    Reason.BAD_MESSAGE: Advice(
        ("`kv_transfer_params` came from a client or router that made them up", "a peer of another build",
         "one side insists on encryption and the other does not know it"),
        ("read the detail: it names the field", "see that P, D and router are the same release, or neighbours"),
        ("the log of the side that refused",),
    ),
    Reason.BAD_SPAN: Advice(
        ("a peer of another build", "a damaged message"),
        ("see that P and D are the same release", "if they are, keep both logs and report it"),
    ),
    Reason.BUSY: Advice(
        ("more handoffs at once than a bound allows", "blocks that wait for slow transfers fill a queue"),
        ("lower the request rate, or add a worker on the side that answered this",
         "if the rate is low, look for transfers that do not end"),
        ("leases, pins and intakes per worker on /dashboard",),
    ),
    Reason.CANCELLED: Advice(
        ("the client left, or the handoff had failed for another reason",),
        ("nothing; the reason that ended the handoff is in its timeline",),
    ),
    Reason.CHECKSUM_MISMATCH: Advice(
        ("bad memory, a bad NIC, or a network device that changes data", "a data plane with a bug"),
        ("take the two hosts out of service one after the other, and test memory and NIC",
         "keep checksum=full on the pair until it is found",
         "try another data plane: --transport tcp with encrypt=on proves every byte"),
        ("the pair and the plane in the timeline: one pair only means hardware",),
    ),
    Reason.CLAIM_TIMEOUT: Advice(
        ("P is stopped, overloaded or gone", "control messages do not pass: firewall, wrong control_host"),
        ("see that P answers: curl http://P/health", "see that D can reach P's control address and port",
         "if P is only slow, raise claim_timeout on D"),
        (NETWORK, "P's log"),
    ),
    Reason.CONTENT_MISMATCH: Advice(
        ("a router or client sends D another prompt than P saw: another template, tokenizer, adapter or image",
         "a ticket that was used for another request"),
        ("send P and D the same body but for the fields of the handoff",
         "see that both serve the same model with the same tokenizer and chat template"),
    ),
    Reason.DEFER_TIMEOUT: Advice(
        ("stream or push: the other side never got the request", "D found no free blocks within defer_timeout"),
        ("see in the timeline which side was not asked, and why in the router's log",
         "if D waited for blocks, lower its concurrency or give it more KV; or raise defer_timeout"),
        ("D's KV cache usage",),
    ),
    Reason.DISCARDED: Advice(
        ("the client left between P and D", "the router asked another pair"),
        ("nothing; if clients leave often, see why they wait",),
    ),
    Reason.DRAINING: Advice(
        ("an operator drains the worker, or it was told to stop",),
        ("wait, or add a worker; the router asks others by itself",),
        ("curl ROUTER/workers",),
    ),
    Reason.DUPLICATE: Advice(
        ("a router or client repeated a transfer id", "a request was sent twice with the same ticket"),
        ("let each request have an id of its own; kvbaton's router does",),
    ),
    Reason.FORBIDDEN: Advice(
        ("a worker was started with a key of another role: a D with a P's, or with the router's",
         "a member tries what its key is not for"),
        ("kvbaton keys show DIR tells each key's role; remove the name and add it anew as NAME:ROLE",
         "what each role may do: docs/security.md"),
    ),
    Reason.HANDSHAKE_TIMEOUT: Advice(
        ("P is not reachable at the address that the registry lists", "P and D have different keys",
         "P is so busy that it does not answer"),
        ("see that D can reach P's control address; control_host must not be loopback between hosts",
         "compare keys: kvbaton doctor --keys DIR on both hosts"),
        (NETWORK, "refused peers in P's log: [stranger-refused], metric kvbaton_connections_refused_total"),
    ),
    Reason.INCOMPATIBLE: Advice(
        ("another model, weights, dtype, KV dtype or quantization", "another block size on CPU",
         "a tensor parallelism that does not map"),
        ("read the detail: it names the field and both values", DOCTOR_PAIR),
    ),
    Reason.LEASE_EXPIRED: Advice(
        ("the request waited too long between P and D", "D was stopped or cut off, so that it did not renew",
         "D had no blocks for longer than max_hold_s"),
        ("see in the timeline where the time went",
         "if requests wait at D, add capacity there; if that is normal, raise lease_s (and max_hold_s) on P"),
        ("metric kvbaton_oldest_lease_seconds of P, and lease ages on /dashboard",),
    ),
    Reason.NO_TRANSPORT: Advice(
        ("P and D were given different `transport` lists", "one has checksums and the other has not",
         "a library is missing on one host"),
        ("kvbaton doctor on both hosts lists what each can offer", "give both the same transport and checksum"),
    ),
    Reason.OTHER: Advice(
        ("the peer is a newer release",),
        ("read the detail, and the peer's log", "bring both to one release"),
    ),
    Reason.PEER_GONE: Advice(
        ("the other engine was restarted, drained or killed",),
        ("nothing if that was meant", "otherwise see why it ended: its log's last lines, and the kernel's (OOM)"),
    ),
    Reason.PEER_UNKNOWN: Advice(
        ("the worker is not registered, or was long ago", "a request id names addresses of no known peer",
         "the name in the ticket is of another cluster"),
        ("curl ROUTER/workers: is it listed?", "if not, see its log for [not-listed] or [registry-silent]"),
    ),
    Reason.QUARANTINE_FULL: Advice(
        ("a data plane that cannot cancel (NIXL, Mooncake over TCP) has many transfers that do not end",
         "a peer that stopped in mid-transfer"),
        ("find the peer that does not answer, and restart it",
         "prefer a plane that can cancel: shm on one host, tcp between hosts"),
        ("metric kvbaton_quarantined_blocks per worker",),
    ),
    Reason.SOURCE_PREEMPTED: Advice(
        ("P ran out of KV blocks while it computed the prompt",),
        ("lower P's concurrency, or give it more KV; D computes the prompt itself meanwhile",),
        ("P's KV cache usage",),
    ),
    Reason.SOURCE_ABORTED: Advice(
        ("the client left", "P refused the request: too long, invalid"),
        ("see P's answer in the timeline",),
    ),
    Reason.STALE: Advice(
        ("a lease ran out while bytes were on the way, and P needed the blocks",),
        ("the answer is right: D computed what was stale",
         "if it is frequent, raise lease_s on P, or see why D is so slow"),
        ("metric kvbaton_commits_stale_total of P",),
    ),
    Reason.STORE_FAILED: Advice(
        ("the store is down, full or slow", "its key or address is wrong"),
        ("see that it runs: kvbaton store's log", "requests go on without it; it is tried again by itself"),
    ),
    Reason.TICKET_EXPIRED: Advice(
        ("the request waited longer than ticket_ttl_s", "clocks of two hosts are apart"),
        ("compare clocks: timedatectl on both hosts", "raise ticket_ttl_s on P if the wait is normal"),
    ),
    Reason.TICKET_FORGED: Advice(
        ("P, D and router have different tickets.json", "a rotation of ticket keys was not copied everywhere",
         "a client made the ticket up"),
        ("compare: kvbaton keys show DIR on every host, the ticket keys must be the same",
         "copy tickets.json to every host"),
    ),
    Reason.TICKET_SPENT: Advice(
        ("a request was sent to D twice", "n > 1 or several prompts behind a router that does not split them"),
        ("let the router ask P for each part; kvbaton's does",),
    ),
    Reason.TRANSFER_FAILED: Advice(
        ("the connection broke, the peer died, or a device failed",),
        ("read the detail: it is the data plane's own word", "see whether one pair or one plane only is hit"),
        (NETWORK, "both logs"),
    ),
    Reason.TRANSFER_TIMEOUT: Advice(
        ("the network is congested, or packets are lost", "the peer is stopped (SIGSTOP, a debugger, a frozen VM)"),
        ("measure the path: kvbaton bench transfer", "raise transfer_timeout only if large prompts need longer"),
        (NETWORK, "stage times on /dashboard: first byte, copy"),
    ),
    Reason.UNKNOWN_LEASE: Advice(
        ("D came after the lease had ended and was forgotten", "the ticket was for an earlier life of P"),
        ("see in the timeline how long the request was between P and D",),
    ),
    Reason.UNREACHABLE: Advice(
        ("a firewall between the two hosts", "containers that do not share memory or a network",
         "control_host is an address that D cannot reach"),
        ("kvbaton doctor --router URL shows which plane each pair took",
         "open the ports, or leave that plane out of `transport`"),
        ("metric kvbaton_planes_given_up_total of D",),
    ),
    Reason.WRONG_INCARNATION: Advice(
        ("the worker was restarted in between",),
        ("nothing: the request is computed by D or sent again", "if it goes on, see why the worker restarts"),
    ),
    Reason.WRONG_VERSION: Advice(
        ("an upgrade skipped a release",),
        ("bring P, D and router to neighbouring releases",),
    ),
}  # fmt: skip


def entries() -> tuple[CodeEntry, ...]:
    """One per reason, in the order of their names."""
    return tuple(_entry(reason) for reason in sorted(Reason))


def _entry(reason: Reason) -> CodeEntry:
    blame, means = MEANING[reason]
    advice = ADVICE[reason]
    look = (FAILED, f'metric kvbaton_ends_total{{end="{reason}"}} of D', *advice.look)
    who = Who(blame.value)
    return CodeEntry(
        code=str(reason), kind=CodeKind.REASON, who=who, means=means, causes=advice.causes, do=advice.do, look=look
    )
