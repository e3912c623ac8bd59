"""The shapes of responses: OpenAI's own types read every one, and the stream builds what the whole answer says."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from kvbaton.api import sse
from kvbaton.api.answers import Token
from kvbaton.api.api_errors import unavailable
from kvbaton.api.responses import Asked, ResponseShape, error_event, usage

EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
TOKENS = [Token("a", ((97, -1e-7), (97, -1e-7), (98, -2.0))), Token("", ((98, -0.5),)), Token("c", ((99, -1.0),))]


def shape(top: int | None = None, **asked: Any) -> ResponseShape:
    return ResponseShape(model="m", request_id="r", created_unix_s=5, asked=Asked.of(asked), token_text=chr, top=top)


def told(of: ResponseShape, tokens: list[Token], rest: str, reason: str) -> list[dict[str, Any]]:
    events = of.opening()
    for token in tokens:
        events += of.token(token)
    return events + of.ending(rest, reason, usage(2, 3, 1))


@pytest.mark.parametrize("top", [None, 0, 1])
@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_openais_types_read_every_event_and_the_last_one_holds_the_whole_answer(
    reason: str, status: str, top: int | None
) -> None:
    events = told(shape(top), TOKENS, "!", reason)
    read = [EVENTS.validate_json(json.dumps(event)) for event in events]
    assert [event.sequence_number for event in read] == list(range(len(events)))
    assert "".join(event.delta for event in read if event.type == "response.output_text.delta") == "ac!"
    assert events[-1]["type"] == f"response.{status}"
    whole = shape(top).whole(TOKENS, "ac!", reason, usage(2, 3, 1))
    assert events[-1]["response"] == whole
    response = Response.model_validate_json(json.dumps(whole))
    assert (response.output_text, response.status, response.id) == ("ac!", status, "resp_r")
    assert whole["incomplete_details"] == (None if reason == "stop" else {"reason": "max_output_tokens"})


def test_a_stream_opens_and_closes_its_one_message_around_the_text() -> None:
    names = [event["type"].removeprefix("response.") for event in told(shape(), TOKENS, "", "stop")]
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip


def test_log_probabilities_are_told_once_for_each_token_and_without_exponents() -> None:
    events = told(shape(1), TOKENS, "", "stop")
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in delta] for delta in deltas] == [["a"], ["b"], ["c"]]
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert part["logprobs"] == [each for delta in deltas for each in delta]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "a", "logprob": 0.0, "bytes": [97]}]


def test_a_response_repeats_what_was_asked() -> None:
    asked = {"instructions": "i", "max_output_tokens": 9, "metadata": {"a": "b"}, "user": "u", "temperature": 1e-9}
    whole = shape(**asked).whole(TOKENS, "ac", "stop", usage(2, 3, 1))
    assert {name: whole[name] for name in asked} == {**asked, "temperature": 0.0}
    unasked = shape(temperature=None).whole(TOKENS, "ac", "stop", usage(2, 3, 1))
    assert (unasked["temperature"], unasked["instructions"], unasked["max_output_tokens"]) == (1.0, None, None)


def test_an_error_ends_a_stream_with_the_next_number_and_in_both_of_openais_forms() -> None:
    failing = shape()
    count = len(failing.opening())
    data = failing.failed(unavailable("gone", "worker_died"))
    assert data.startswith(b"event: error\ndata: ")
    (payload,) = sse.payloads(data)
    read = EVENTS.validate_json(payload)
    assert (read.type, read.message, read.code, read.sequence_number) == ("error", "gone", "worker_died", count)
    assert json.loads(payload)["error"] == unavailable("gone", "worker_died").body["error"]
    relay = sse.Relay()
    relay.feed(error_event(unavailable("gone")))
    assert relay.ended
