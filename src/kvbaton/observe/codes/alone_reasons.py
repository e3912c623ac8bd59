"""Why a decode engine computes a prompt itself: as planned, or although a prefill engine should have.

Law: a closed list, shared by the router that says the word, the engine that counts it, metrics and `kvbaton doctor`. A
handoff that was begun and failed is counted by its reason (`protocol.errors.Reason`) instead.
"""

from __future__ import annotations

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
