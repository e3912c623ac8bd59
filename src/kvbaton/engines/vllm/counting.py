"""What a vLLM engine counts as it goes: flights on their way to its metrics, its requests by state, its prompts.

Flights go from the node's thread to vLLM's metrics, which live in another process. Laws: bounded; the oldest are lost
first, which costs a histogram some counts and nothing else. What crosses is plain msgpack data, of metrics that are on
the list.

How many requests run, wait and load is by vLLM's own word: the status of each request object. Laws: a step costs
nothing here; requests are counted when a report is made, on the thread that makes it. A vLLM whose requests say no
status known here is not counted at all: no figure is better than a wrong one.

Prompts are accounted for as the scheduler sees them: by what a request has when it is first scheduled. Law: nothing
here changes what becomes of a request, and what cannot be read of one costs its own count alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvbaton.engines.side.guard import guarded, returns
from kvbaton.node.prompt_account import PromptAccount, word_of
from kvbaton.observe.flight.flight_records import Flight
from kvbaton.observe.metrics.handoff_metrics import observations

FLIGHTS_MAX = 512
Row = list[Any]
"""A metric's name, its labels, the value."""


class Tray:
    """Flights that were not told yet. Give `add` to `recorder.on_flight`."""

    def __init__(self) -> None:
        self._flights: deque[list[Row]] = deque(maxlen=FLIGHTS_MAX)

    def add(self, flight: Flight) -> None:
        """On the node's thread, which does the work: a scheduler's step must not wait for it."""
        self._flights.append([[each.metric.name, list(each.labels), each.value] for each in observations(flight)])

    def take(self) -> list[Row]:
        """What is new since the last time; the other thread may add meanwhile."""
        rows: list[Row] = []
        for _ in range(len(self._flights)):
            rows += self._flights.popleft()
        return rows


_QUEUED = ("WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "PREEMPTED")
_LOADING = "WAITING_FOR_REMOTE_KVS"
_NOT_QUEUED = ("WAITING_FOR_STREAMING_REQ",)
"""A session that waits for its client."""


class RequestStates:
    """Of one engine. Its scheduler's thread says who comes and leaves; any thread may ask for the figures."""

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}

    def came(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def left(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._requests)

    def figures(self) -> dict[str, float]:
        """By the names of an embedded engine's report; nothing where vLLM's states are others."""
        found = {"running": 0.0, "waiting": 0.0, "loading": 0.0}
        for request in list(self._requests.values()):
            state = str(getattr(getattr(request, "status", None), "name", ""))
            if state == _LOADING and getattr(request, "num_computed_tokens", None):
                found["loading"] += 1  # the others were put aside while P computes, and have no blocks (`Waiting`)
            elif state in _QUEUED or state == _LOADING:
                found["waiting"] += 1
            elif state == "RUNNING":
                found["running"] += 1
            elif state not in _NOT_QUEUED and not state.startswith("FINISHED"):
                return {}
        return found


NOTHING = "nothing"


def came(account: PromptAccount, request: Any) -> None:
    """A request is in the engine. One for embeddings or scores has no answer that another engine could go on with."""
    pooled = getattr(request, "pooling_params", None) is not None
    word = NOTHING if pooled else word_of(request.kv_transfer_params)
    account.came(request.request_id, request.num_prompt_tokens, word)


@guarded(returns(None))
def begun(account: PromptAccount, scheduled: Any) -> None:
    """A step is about to run: requests that are in it for the first time are computed from here on."""
    for new in scheduled.scheduled_new_reqs:
        account.begun(new.req_id, new.num_computed_tokens)
