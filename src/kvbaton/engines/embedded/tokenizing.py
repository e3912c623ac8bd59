"""`/tokenize`, `/detokenize` and `/v1/messages/count_tokens` of the embedded engine, in vLLM's forms.

Law: a text or a chat has here the tokens that the engine computes for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvbaton.api.api_errors import bad_field
from kvbaton.api.bodies import BodyKind, json_object, parse
from kvbaton.engines.embedded import server_plan, tokenizer
from kvbaton.engines.embedded.server_plan import ModelCard


def tokenized(data: bytes, cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Of `{"prompt": …}` or `{"messages": …}`."""
    kind = BodyKind.CHAT if "messages" in json_object(data) else BodyKind.COMPLETION
    body = parse(kind, data)
    if len(body.prompts) > 1 or (body.prompts and not isinstance(body.prompts[0], str)):
        raise bad_field("prompt", "expected one text")
    card = server_plan.card_of(body, cards)
    tokens = server_plan.tokens_of(body.fields, kind)
    if body.fields.get("add_special_tokens") is False and kind is BodyKind.COMPLETION:
        tokens = tokens[1:]
    strs = [server_plan.token_text(token) for token in tokens] if body.fields.get("return_token_strs") else None
    return {"count": len(tokens), "max_model_len": card.context_tokens_max, "tokens": tokens, "token_strs": strs}


def counted(data: bytes, cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Of a body of `/v1/messages`, which needs no limit here."""
    body = parse(BodyKind.MESSAGES, msgspec.json.encode({**json_object(data), "max_tokens": 1}))
    server_plan.card_of(body, cards)
    return {"input_tokens": len(server_plan.tokens_of(body.fields, body.kind))}


def detokenized(data: bytes) -> dict[str, Any]:
    """Of `{"tokens": […]}`."""
    tokens = json_object(data).get("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < tokenizer.VOCAB for each in tokens):
        raise bad_field("tokens", f"expected a list of token ids, 0 to {tokenizer.VOCAB - 1}")
    return {"prompt": tokenizer.decode(tokens)}
