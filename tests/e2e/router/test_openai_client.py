"""An unmodified `openai` client behind `kvbaton up` is told what one engine alone would tell it, field by field.

The one engine is the decode worker, asked directly and without parameters: it then computes the prompt itself. Every
request has a salt of its own, so that no cache of an earlier one spares the handoff.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from kvbaton.api import sse
from tests.e2e.cluster import Up, all_at_rest, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MODEL = "kvbaton-tiny"
MODES = ("pull", "stream", "push")
PROMPT = "Tell me about shared memory, sockets and batons. "
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a baton?"}]
LIKELIEST: Any = {"logprobs": True, "top_logprobs": 3}
BY_CHANCE: Any = {"temperature": 0.9, "seed": 11}
Ask = Callable[[openai.OpenAI, str], Any]


def completion(**more: Any) -> Ask:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    body = asked.pop("extra_body", {})
    return lambda client, salt: client.completions.create(model=MODEL, extra_body={**body, "cache_salt": salt}, **asked)


def chat(**more: Any) -> Ask:
    asked: dict[str, Any] = {"messages": CHAT, "max_tokens": 12, "temperature": 0, **more}
    body = asked.pop("extra_body", {})
    return lambda client, salt: client.chat.completions.create(
        model=MODEL, extra_body={**body, "cache_salt": salt}, **asked
    )


def response(**more: Any) -> Ask:
    asked: dict[str, Any] = {"input": "What is a baton?", "max_output_tokens": 12, "temperature": 0, **more}
    body = asked.pop("extra_body", {})
    return lambda client, salt: client.responses.create(model=MODEL, extra_body={**body, "cache_salt": salt}, **asked)


ASKS: dict[str, tuple[Ask, int]] = {  # with the number of handoffs it takes
    "completion": (completion(), 1),
    "completion of token ids": (completion(prompt=[5, 6, 7] * 20), 1),
    "completion, streamed": (completion(stream=True), 1),
    "completion, streamed with usage": (completion(stream=True, stream_options={"include_usage": True}), 1),
    "completion, n=2": (completion(n=2, **BY_CHANCE), 2),
    "completion, n=2, streamed": (completion(n=2, stream=True, **BY_CHANCE), 2),
    "completion of several prompts": (completion(prompt=[PROMPT, "Another. " * 9, "Third?"]), 3),
    "completion of several prompts, n=2": (completion(prompt=[PROMPT, "Another. " * 9], n=2, **BY_CHANCE), 4),
    "completion of several prompts, streamed": (completion(prompt=[PROMPT, "Another. " * 9], stream=True), 2),
    "completion with log probabilities": (completion(logprobs=3), 1),
    "completion with log probabilities, streamed": (completion(logprobs=3, stream=True), 1),
    "completion with a stop": (completion(stop=["e"], max_tokens=40), 1),
    "completion with a least length": (completion(extra_body={"min_tokens": 5, "ignore_eos": True}), 1),
    "completion of one token": (completion(max_tokens=1), 1),
    "chat": (chat(), 1),
    "chat, streamed": (chat(stream=True), 1),
    "chat, n=2": (chat(n=2, **BY_CHANCE), 2),
    "chat, n=2, streamed": (chat(n=2, stream=True, **BY_CHANCE), 2),
    "chat with log probabilities": (chat(**LIKELIEST), 1),
    "chat with log probabilities, streamed": (chat(stream=True, **LIKELIEST), 1),
    "chat with max_completion_tokens": (chat(max_tokens=None, max_completion_tokens=7), 1),
    "response": (response(), 1),
    "response, streamed": (response(stream=True), 1),
    "response with instructions": (response(instructions="Be brief."), 1),
}


@dataclass
class Clients:
    cluster: Up
    routed: openai.OpenAI
    alone: openai.OpenAI

    def delivered(self) -> int:
        stats = asyncio.run(self.cluster.workers())
        return int(str(stats["d0"]["delivered_total"]))


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with up(tmp_path_factory.mktemp("openai")) as cluster:
        workers = openai.OpenAI(base_url=cluster.url, api_key="none", max_retries=0).get("/workers", cast_to=object)
        url = next(worker["url"] for worker in workers["workers"] if worker["name"] == "d0")  # type: ignore[index]
        make = lambda base: openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60)  # noqa: E731
        yield Clients(cluster, make(cluster.url), make(url))
        asyncio.run(all_at_rest(cluster, {"p0", "d0"}))


def told(answer: Any) -> Any:
    """An answer as a value; of a stream its events by choice, since those of several choices may interleave."""
    if not isinstance(answer, openai.Stream):
        return cleaned(answer.to_dict())
    events = [cleaned(event.to_dict()) for event in answer]
    if events and "sequence_number" in events[0]:
        return events
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices, [event.get("usage") for event in events if event.get("usage")]


def cleaned(value: Any) -> Any:
    """Without what differs between two answers to one request: names, and the time."""
    if isinstance(value, dict):
        drawn = ("id", "item_id", "created", "created_at", "cached_tokens", "prompt_tokens_details")
        return {name: cleaned(each) for name, each in value.items() if name not in drawn}
    return [cleaned(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ASKS)
def test_the_client_is_told_what_one_engine_would_tell_it(clients: Clients, name: str, mode: str) -> None:
    ask, handoffs = ASKS[name]
    before = clients.delivered()
    routed = told(ask(clients.routed.with_options(default_headers={"x-kvbaton-mode": mode}), f"{name} {mode}"))
    assert clients.delivered() - before == handoffs, "each by a handoff of its own"
    assert routed == told(ask(clients.alone, f"{name} {mode} alone"))
    assert routed


@pytest.mark.parametrize("mode", MODES)
def test_anthropics_messages_are_handed_over_too(clients: Clients, mode: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": CHAT[1:]}
    before = clients.delivered()
    whole = message(clients.routed, {**asked, "cache_salt": f"message {mode}"}, mode)
    assert clients.delivered() - before == 1
    assert whole["content"] == message(clients.alone, {**asked, "cache_salt": f"message {mode} alone"})["content"]
    assert whole["content"][0]["text"] and whole["stop_reason"] == "max_tokens" and "kv_transfer_params" not in whole
    events = message(clients.routed, {**asked, "cache_salt": f"message {mode} streamed", "stream": True}, mode)
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert clients.delivered() - before == 2 and "".join(deltas) == whole["content"][0]["text"]
    assert events[-1] == {"type": "message_stop"}


def message(client: openai.OpenAI, body: dict[str, Any], mode: str = "pull") -> Any:
    """A whole message, or a stream's events."""
    data, headers = json.dumps(body).encode(), {"x-kvbaton-mode": mode}
    url = str(client.base_url).removesuffix("/v1/") + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        told = answer.read()
    return [json.loads(each) for each in sse.payloads(told)] if body.get("stream") else json.loads(told)


def test_errors_are_those_of_the_engine(clients: Clients) -> None:
    for client in (clients.routed, clients.alone):
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=-1)
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.completions.create(model=MODEL, prompt=PROMPT, top_p=0.5)
        with pytest.raises(openai.NotFoundError, match="another"):
            client.completions.create(model="another", prompt=PROMPT)
    card = clients.routed.models.list().data[0]
    assert card.id == MODEL and card.created > 0
