"""Why a decode engine computes a prompt itself: as planned, or although a prefill engine should have.

Law: a closed list, shared by the router or Ray's replica that says the word, the engine that counts it, metrics,
`kvbaton doctor` and `kvbaton explain`. A handoff that was begun and failed is counted by its reason
(`protocol.errors.Reason`) instead.
"""

from __future__ import annotations

from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who
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


def entries() -> tuple[CodeEntry, ...]:
    """All words for `kvbaton explain`."""
    missed = [_entry(word, Who.OPERATOR, means, do, _COUNTED % word) for word, (means, do) in MISSED.items()]
    fallback = _entry(
        FALLBACK, Who.OPERATOR, "no prefill worker could compute the prompt, and the router lets D compute it",
        "find the reason in D's own account: kvbaton_alone_tokens_total, or kvbaton doctor --router URL",
        _TRIED % FALLBACK,
    )  # fmt: skip
    planned = [
        _entry(word, Who.NOBODY, f"as planned: {means}", "nothing", _TRIED % word) for word, means in PLANNED.items()
    ]
    return tuple(sorted([*missed, fallback, *planned], key=lambda entry: entry.code))


def _entry(word: str, who: Who, means: str, do: str, look: str) -> CodeEntry:
    sentence = f"D computes a prompt itself; {means}."
    looks = (look, "docs/metrics.md, Is it really disaggregating?")
    return CodeEntry(code=word, kind=CodeKind.ALONE, who=who, means=sentence, do=(do,), look=looks)
