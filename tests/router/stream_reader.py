"""What a client makes of a stream of completions or chats with one choice."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.api import sse


class Reader:
    """What a client makes of a stream."""

    def __init__(self) -> None:
        self.texts: dict[tuple[Any, ...], str] = {}
        self.logprobs: list[float] = []
        self.ids: list[int] = []
        self.heads: set[str] = set()
        self.finishes: list[str] = []
        self.usages: list[Any] = []
        self.dones = 0
        self.events = 0
        self.errors: list[str] = []

    def read(self, data: bytes) -> None:
        assert data == b"" or data.endswith(b"\n\n")
        for payload in sse.payloads(data):
            if payload == b"[DONE]":
                self.dones += 1
                continue
            chunk = msgspec.json.decode(payload)
            if "error" in chunk:
                self.errors.append(chunk["error"]["code"])
                continue
            self.events += 1
            assert not self.dones, "nothing comes after the end"
            self.heads.add(f"{chunk.get('id')} {chunk.get('created')} {chunk.get('model')}")
            self.usages += [chunk["usage"]] if chunk.get("usage") else []
            for choice in chunk["choices"]:
                self._read(choice)

    def _read(self, choice: dict[str, Any]) -> None:
        assert not self.finishes
        self.ids += choice.get("token_ids", [])
        self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
        told = choice.get("logprobs") or {}
        self.logprobs += told.get("token_logprobs", [each["logprob"] for each in told.get("content", ())])
        if "text" in choice:
            self._say(("text",), choice["text"])
        for name, value in choice.get("delta", {}).items():
            if name != "tool_calls":
                self._say((name,), value)
                continue
            for call in value:
                at = call["index"]
                for path, text in {"id": call.get("id"), "type": call.get("type"), **call.get("function", {})}.items():
                    self._say(("call", at, path), text or "")

    def _say(self, path: tuple[Any, ...], text: str) -> None:
        assert path[-1] not in ("role", "id", "type") or not (text and self.texts.get(path)), f"{path} told twice"
        self.texts[path] = self.texts.get(path, "") + text

    @property
    def answer(self) -> Any:
        """All that it was told, whatever it was cut into; ids of calls are random."""
        texts = {path: "some id" if path[-1] == "id" else text for path, text in self.texts.items()}
        usages = [{name: count for name, count in each.items() if name.endswith("_tokens")} for each in self.usages]
        return texts, self.logprobs, self.ids, self.finishes, usages, self.errors

    @property
    def told(self) -> Any:
        return self.answer, self.heads, self.dones
