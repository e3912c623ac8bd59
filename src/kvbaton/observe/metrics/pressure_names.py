"""Metrics of who computes prompts, and of room for more: part of `metric_names`, which lists all.

Laws: as there.
"""

from __future__ import annotations

from kvbaton.observe.codes.alone_reasons import MISSED, SOURCES
from kvbaton.observe.metrics.metric_types import Label, Metric, MetricKind, Where
from kvbaton.protocol.errors import Reason

ENGINES = (Where.WORKER, Where.VLLM)
REASONS = tuple(sorted(Reason))


def _counter(name: str, text: str, *labels: Label, from_zero: bool = False) -> Metric:
    return Metric(f"kvbaton_{name}_total", MetricKind.COUNTER, text, ENGINES, labels, from_zero=from_zero)


def _gauge(name: str, text: str) -> Metric:
    return Metric(f"kvbaton_{name}", MetricKind.GAUGE, text, ENGINES)


# --- who computed the prompts, by D's own account
PROMPT_TOKENS = _counter(
    "prompt_tokens",
    "Prompt tokens of requests that this engine began to decode, by where their KV cache came from.",
    Label("source", SOURCES, "`cached`: its own prefix cache; `planned`: computed here, as it should be (the last "
          "token, short prompts); `alone`: computed here although a prefill engine should have"),
    from_zero=True,
)  # fmt: skip
ALONE_TOKENS = _counter(
    "alone_tokens",
    "Prompt tokens that this decode engine computed although a prefill engine should have, by reason.",
    Label("reason", (*MISSED, *REASONS), "see [above](#is-it-really-disaggregating)"), from_zero=True,
)  # fmt: skip
FULL = _gauge(
    "full", "1 while this engine tells routers that it has no room for more: KV cache blocks, or blocks it may pin.",
)  # fmt: skip

PIN_MAX = _gauge(
    "pin_max_blocks", "KV cache blocks that handoffs may pin at this prefill engine, by the setting pin_share."
)
PIN_WAITING = _gauge(
    "pin_waiting", "Requests that wait at this prefill engine until handoffs pin fewer of its KV cache blocks.",
)  # fmt: skip
PIN_REFUSED = _counter(
    "pin_refused", "Requests that this prefill engine refused, since handoffs pinned all blocks that they may pin.",
)  # fmt: skip

# --- what members that are gone cost
CACHE_RESETS = _counter(
    "cache_resets", "Resets of this engine's prefix cache, since KV of a member that was removed may have been in it.",
)  # fmt: skip
CACHE_RESET_BLOCKS = _counter("cache_reset_blocks", "Cached blocks that those resets dropped, to be computed again.")
