"""How many requests of a vLLM engine run, wait and load, by vLLM's own word: the status of each request object.

Laws: a step costs nothing here; requests are counted when a report is made, on the thread that makes it. A vLLM whose
requests say no status known here is not counted at all: no figure is better than a wrong one.
"""

from __future__ import annotations

from typing import Any

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
                found["loading"] += 1  # the others were put aside while P computes, and have no blocks (`waiting.py`)
            elif state in _QUEUED or state == _LOADING:
                found["waiting"] += 1
            elif state == "RUNNING":
                found["running"] += 1
            elif state not in _NOT_QUEUED and not state.startswith("FINISHED"):
                return {}
        return found
