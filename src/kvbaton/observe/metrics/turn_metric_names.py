"""The metrics of turns: what D keeps for the next turn of a conversation, and what P takes of it.

They are part of the list in `metric_names`, whose laws hold here too.
"""

from __future__ import annotations

from kvbaton.observe.metrics.metric_types import Label, Metric, MetricKind, Where
from kvbaton.protocol.errors import Reason

_REASONS = tuple(sorted(Reason))
_ENGINES = (Where.WORKER, Where.VLLM)

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
