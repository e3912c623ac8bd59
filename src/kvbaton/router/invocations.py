"""`/invocations`, where SageMaker sends everything: a chat or a completion is handed over, all else is passed to D.

Law: as vLLM decides it: who has messages is a chat, who has a prompt is a completion.
"""

from __future__ import annotations

import msgspec

from kvbaton.api import shapes
from kvbaton.api.http.http_types import Answer, Events, Request
from kvbaton.router.openai_api import OpenAiApi
from kvbaton.router.passing import Passing
from kvbaton.router.route_table import BY_PATH

_NONE = msgspec.Raw(b"null")


class _Shape(msgspec.Struct):
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    prompt_embeds: msgspec.Raw = _NONE


class Invocations:
    """One path for several APIs."""

    def __init__(self, front: OpenAiApi, passing: Passing) -> None:
        self._front = front
        self._passing = passing

    async def answer(self, request: Request) -> Answer | Events:
        found = _shape(request.body)
        if _is_there(found.messages):
            return await self._front.chat(request)
        if _is_there(found.prompt) or _is_there(found.prompt_embeds):
            return await self._front.completions(request)
        return await self._passing.answer(BY_PATH["/invocations"], request)


def _is_there(value: msgspec.Raw) -> bool:
    return bytes(value) != b"null"


def _shape(data: bytes) -> _Shape:
    shapes.check(data)
    try:
        return msgspec.json.decode(data, type=_Shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Shape()  # whoever reads all of it says what is wrong
