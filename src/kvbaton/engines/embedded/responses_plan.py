"""A body of `/v1/responses` for the embedded engine, converted to a chat.

Law: the input becomes the messages that a chat would have sent, so both have the same prompt and the same KV. Responses
are not stored, so whatever refers to an earlier one is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbaton.api.api_errors import bad_field
from kvbaton.api.bodies import TEXT_PARTS, is_message

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"), "text": ({}, {"format": {"type": "text"}}), "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",), "previous_response_id": (), "conversation": (), "prompt": (), "n": (1,),
    "max_tokens": (), "max_completion_tokens": (),
}  # fmt: skip
"""What the engine cannot do, with the values that ask for nothing. A response's limit is `max_output_tokens` only."""
LOGPROBS = "message.output_text.logprobs"


def messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat that a checked body stands for: the instructions, then each message of its input."""
    given = fields["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    turns = [{"role": item.get("role"), "content": _text(item, f"input[{index}]")} for index, item in enumerate(items)]
    instructions = fields.get("instructions")
    return [{"role": "system", "content": instructions}, *turns] if instructions else turns


def logprobs(fields: Mapping[str, Any]) -> int | None:
    """How many of the likeliest tokens are told with each; None where no log probabilities are wanted."""
    return (fields.get("top_logprobs") or 0) if LOGPROBS in (fields.get("include") or ()) else None


def _text(item: Mapping[str, Any], where: str) -> str:
    if not is_message(item):
        raise bad_field(where, "the embedded engine supports only items of type message")
    content = item.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") not in TEXT_PARTS:
            raise bad_field(f"{where}.content", f"the embedded engine supports only parts of {', '.join(TEXT_PARTS)}")
    return "".join(part["text"] for part in content)
