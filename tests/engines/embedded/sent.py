"""Bodies sent to a worker, and what came of them, told apart."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvbaton.api.params import FIELD


@dataclass
class Streamed:
    """All that the chunks of one choice said."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    params: dict[str, Any] | None = None

    @property
    def all_but_logprobs(self) -> Any:
        counts = {name: (self.usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")}
        return self.text, self.tokens, self.prompt, self.finish_reason, counts

    def take(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        self.params = chunk.get(FIELD) or self.params
        self.prompt += chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            assert self.finish_reason is None, "nothing comes after the end"
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.tokens += choice.get("token_ids") or []
            self.prompt += choice.get("prompt_token_ids") or []
            self.logprobs += _rows(choice.get("logprobs"))
            self.finish_reason = choice["finish_reason"]


def _rows(logprobs: Any) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True))


async def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json(content_type=None)


async def streamed(url: str, body: dict[str, Any]) -> Streamed:
    told = Streamed()
    async with aiohttp.ClientSession() as session, session.post(url, json={**body, "stream": True}) as response:
        text = await response.text()
    assert response.status == 200, text
    events = [event[6:] for event in text.split("\n\n") if event]
    assert events[-1] == "[DONE]", events[-1]
    for event in events[:-1]:
        told.take(json.loads(event))
    return told
