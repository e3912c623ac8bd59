"""How many requests run, wait and load, counted from vLLM's own request objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvbaton.engines.vllm.counting import RequestStates


def request(name: str, state: object, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, status=SimpleNamespace(name=state), num_computed_tokens=computed)


def states(*requests: Any) -> RequestStates:
    found = RequestStates()
    for each in requests:
        found.came(each)
    return found


def test_requests_are_counted_by_the_status_that_vllm_gave_them() -> None:
    found = states(
        request("a", "RUNNING"),
        request("b", "WAITING"),
        request("c", "PREEMPTED"),
        request("d", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
        request("e", "WAITING_FOR_REMOTE_KVS", computed=20),
        request("f", "WAITING_FOR_STREAMING_REQ"),
        request("g", "FINISHED_ABORTED"),
    )
    assert found.figures() == {"running": 1, "waiting": 3, "loading": 1}


def test_what_was_put_aside_without_blocks_waits_and_does_not_load() -> None:
    assert states(request("a", "WAITING_FOR_REMOTE_KVS")).figures() == {"running": 0, "waiting": 1, "loading": 0}


def test_who_left_is_not_counted_and_not_kept() -> None:
    found = states(request("a", "RUNNING"))
    found.left("a")
    found.left("never came")
    assert not len(found) and found.figures() == {"running": 0, "waiting": 0, "loading": 0}


def test_a_vllm_whose_requests_say_something_else_is_not_counted_at_all() -> None:
    assert states(request("a", "RUNNING"), request("b", "PONDERING")).figures() == {}
    assert states(SimpleNamespace(request_id="a")).figures() == {}
    assert states(SimpleNamespace(request_id="a", status="RUNNING")).figures() == {}
