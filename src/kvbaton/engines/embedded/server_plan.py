"""A client's body as jobs of the embedded engine: prompts as tokens, sampling as numbers, each checked.

Law: what the engine does not support is refused by name, never ignored: the answer would differ from the request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api.answers import AnswerShape
from kvbaton.api.anthropic_shape import MessageShape
from kvbaton.api.api_errors import ApiError, bad_field, unknown_model
from kvbaton.api.bodies import TEXT_PARTS, Body, BodyKind, is_message, json_object, parse
from kvbaton.api.merge import AnswerPart, split
from kvbaton.api.params import FIELD, ForeignLookup, TransferParams, one_of, translated
from kvbaton.api.responses import Asked, ResponseShape
from kvbaton.engines.embedded import tokenizer
from kvbaton.node.prompt_account import word_of
from kvbaton.observe.codes.reasons import UNASKED
from kvbaton.protocol.errors import ProtocolError

EventShape = ResponseShape | MessageShape
LOGPROBS_MAX = 20
RESPONSE_LOGPROBS = "message.output_text.logprobs"
MAX_TOKENS_DEFAULT = {BodyKind.COMPLETION: 16, BodyKind.CHAT: 128, BodyKind.RESPONSES: 128}  # messages must say it
_PROMPT_FIELD = {BodyKind.COMPLETION: "prompt", BodyKind.RESPONSES: "input"}  # else "messages"
_LIMIT_FIELD = {BodyKind.RESPONSES: "max_output_tokens"}  # else "max_tokens"

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "prompt_embeds": (), "prompt_logprobs": (),
    "tools": ([],), "functions": ([],), "response_format": ({"type": "text"},), "use_beam_search": (False,),
}  # fmt: skip
"""What the embedded engine cannot do, with the values that ask for nothing: refused otherwise, never ignored."""
_NEUTRAL_OF: Mapping[BodyKind, Mapping[str, tuple[Any, ...]]] = {
    BodyKind.RESPONSES: {
        "tool_choice": ("auto", "none"), "text": ({}, {"format": {"type": "text"}}),
        "reasoning": ({}, {"effort": "none"}), "truncation": ("disabled",), "previous_response_id": (),
        "conversation": (), "prompt": (), "n": (1,), "max_tokens": (), "max_completion_tokens": (),
    },
    BodyKind.MESSAGES: {
        "tool_choice": ({"type": "auto"}, {"type": "none"}), "thinking": ({"type": "disabled"},), "mcp_servers": ([],),
        "stop": (), "n": (1,), "max_completion_tokens": (),
    },
}  # fmt: skip


class ModelCard(msgspec.Struct, frozen=True):
    """A model by the name that clients use."""

    id: str
    context_tokens_max: int


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to answer; `request_id` is unique in this worker."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 1.0
    seed: int = 0
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: of the k likeliest too
    cache_salt: str = ""
    handoff: TransferParams | None = None
    said: str = UNASKED  # why nothing is handed over

    @property
    def history(self) -> tuple[int, ...]:
        """What other engines generated of the answer before."""
        told = None if self.handoff is None else self.handoff.history
        return () if told is None else told.tokens


class PlannedJob(msgspec.Struct, frozen=True):
    """One request to the backend and the form of its answer."""

    part: AnswerPart
    request: GenerateRequest
    shape: AnswerShape | EventShape
    stops: tuple[str, ...]


def card_of(body: Body, cards: Sequence[ModelCard]) -> ModelCard:
    """The model that a body means; `ApiError` (404) if it is not here."""
    wanted = body.fields.get("model")
    for card in cards:
        if wanted in (None, "", card.id):
            return card
    raise unknown_model(str(wanted), [card.id for card in cards])


def plan(body: Body, name: str, cards: Sequence[ModelCard], lookup: ForeignLookup | None = None) -> list[PlannedJob]:
    """The jobs that `body` stands for; `ApiError` names what cannot be done. `lookup` is for requests of others."""
    card = card_of(body, cards)
    for field, neutral in {**_NEUTRAL, **_NEUTRAL_OF.get(body.kind, {})}.items():
        value = body.fields.get(field)
        if value is not None and value not in neutral and not (field == "best_of" and value == body.n):
            raise bad_field(field, "the embedded engine does not support this; remove the field")
    handoffs = handoffs_of(body, name, lookup)
    is_typed = body.kind in (BodyKind.RESPONSES, BodyKind.MESSAGES)  # whose events have no place for a ticket
    if handoffs[0] is not None and handoffs[0].do_remote_decode and body.stream and is_typed:
        raise bad_field("stream", "a prompt computed for another worker is not streamed here; remove it")
    created_unix_s = int(time.time())
    jobs = []
    for part, handoff in zip(split(body), handoffs, strict=True):
        request = _request(part.fields, body.kind, name, card, handoff)
        request = msgspec.structs.replace(request, said=word_of(body.fields.get(FIELD)))
        shape = _shape(body, card.id, name, created_unix_s, request)
        is_source = handoff is not None and handoff.do_remote_decode  # its one token is nobody's answer
        if is_source and request.max_tokens > 1:
            limit = _LIMIT_FIELD.get(body.kind, "max_tokens")
            raise bad_field(limit, "a prompt computed for another worker is computed for one token; give 1")
        if not is_source and len(request.history) > request.max_tokens:
            raise bad_field(f"{FIELD}.history.tokens", f"{len(request.history)} tokens, the answer ends before")
        jobs.append(PlannedJob(part, request, shape, () if is_source else _stops(part.fields, body.kind)))
    return jobs


def handoffs_of(body: Body, name: str, lookup: ForeignLookup | None) -> list[TransferParams | None]:
    """One for each part of `body`, in order, None where nothing is handed over; `ApiError` names the error.

    `name` is the request's id as it came; without `lookup` it is not read. Law: a ticket is for one prompt and one
    choice; a body with several has one for each, or is refused.
    """
    raw = body.fields.get(FIELD)
    try:
        found = [_handoff(raw, name, lookup, index, body.parts) for index in range(body.parts)]
    except ProtocolError as error:
        raise ApiError(400, error.detail, param=FIELD, code=str(error.reason)) from None
    asked = [each for each in found if each is not None]
    if asked and lookup is not None and asked[0].mode not in lookup.modes:
        raise bad_field(f"{FIELD}.mode", f"this worker does not serve {asked[0].mode}; see its --modes")
    tickets = [each.ticket for each in asked if each.ticket is not None]
    if len(set(tickets)) < len(tickets) or (len(found) > 1 and any(each.history is not None for each in asked)):
        raise bad_field(FIELD, "a handoff has one prompt and one choice; send them one by one")
    return found


def _handoff(raw: Any, name: str, lookup: ForeignLookup | None, index: int, count: int) -> TransferParams | None:
    if not isinstance(raw, Mapping):
        return TransferParams.parse(raw)
    params = None if lookup is None else translated(name, raw, lookup, index)
    return params or TransferParams.parse(one_of(raw, index, count))


def _shape(
    body: Body, model: str, name: str, created_unix_s: int, request: GenerateRequest
) -> AnswerShape | EventShape:
    top = request.logprobs
    if body.kind is BodyKind.MESSAGES:
        return MessageShape(model=model, request_id=name, prompt_tokens=len(request.prompt))
    if body.kind is not BodyKind.RESPONSES:
        return AnswerShape(
            body.kind, model=model, request_id=name, created_unix_s=created_unix_s, token_text=token_text, top=top,
            prompt_ids=request.prompt if body.fields.get("return_token_ids") else None,
        )  # fmt: skip
    asked = Asked.of(body.fields)
    return ResponseShape(
        model=model, request_id=name, created_unix_s=created_unix_s, asked=asked, token_text=token_text, top=top
    )


def _request(
    fields: Mapping[str, Any], kind: BodyKind, name: str, card: ModelCard, handoff: TransferParams | None
) -> GenerateRequest:
    prompt = tokens_of(fields, kind)
    limit = _LIMIT_FIELD.get(kind, "max_tokens")
    max_tokens = fields.get("max_completion_tokens") or fields.get(limit)
    room = card.context_tokens_max - len(prompt)
    if room < (max_tokens or 1):
        asked = f"{len(prompt)} tokens and {max_tokens or 1} to answer"
        raise bad_field(_PROMPT_FIELD.get(kind, "messages"), f"{asked}, at most {card.context_tokens_max} together")
    min_tokens = fields.get("min_tokens") or 0
    max_tokens = max_tokens or min(MAX_TOKENS_DEFAULT[kind], room)
    if min_tokens > max_tokens:
        raise bad_field("min_tokens", f"got {min_tokens}, more than {limit} {max_tokens}")
    seed = fields.get("seed")
    temperature = fields.get("temperature")
    return GenerateRequest(
        request_id=f"{name}-{secrets.token_hex(8)}",
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.get("ignore_eos")),
        temperature=1.0 if temperature is None else float(temperature),
        seed=secrets.randbits(63) if seed is None else seed % (1 << 63),
        logprobs=_logprobs(fields, kind),
        cache_salt=fields.get("cache_salt") or "",
        handoff=handoff,
    )


def _logprobs(fields: Mapping[str, Any], kind: BodyKind) -> int | None:
    for name in ("logprobs", "top_logprobs"):
        wanted = fields.get(name)
        if type(wanted) is int and not 0 <= wanted <= LOGPROBS_MAX:
            raise bad_field(name, f"got {wanted}, the embedded engine supports 0 to {LOGPROBS_MAX}")
    if kind is BodyKind.RESPONSES:
        return _response_logprobs(fields)
    wanted = fields.get("logprobs")
    if kind is BodyKind.COMPLETION:
        return wanted
    return (fields.get("top_logprobs") or 0) if wanted else None


def _stops(fields: Mapping[str, Any], kind: BodyKind) -> tuple[str, ...]:
    if kind is BodyKind.MESSAGES:
        return tuple(text for text in fields.get("stop_sequences") or () if text)
    stop = fields.get("stop")
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def tokens_of(fields: Mapping[str, Any], kind: BodyKind) -> tuple[int, ...]:
    """What the engine computes for a body's prompt."""
    if kind is BodyKind.COMPLETION:
        return _prompt_tokens(fields["prompt"])
    if kind is BodyKind.RESPONSES:
        return _chat_tokens(_response_messages(fields))
    return _chat_tokens(fields["messages"], fields.get("system") if kind is BodyKind.MESSAGES else None)


def _prompt_tokens(prompt: Any) -> tuple[int, ...]:
    """Of a text, of token ids, or of a list of one of these."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    if isinstance(prompt[0], str | list):
        return _prompt_tokens(prompt[0])
    if max(prompt) >= tokenizer.VOCAB:
        raise bad_field("prompt", f"a token id is above the highest, {tokenizer.VOCAB - 1}")
    return tuple(prompt)


def _chat_tokens(messages: Sequence[Mapping[str, Any]], system: Any = None) -> tuple[int, ...]:
    """The template: each turn behind the mark of its role, the answer's mark last."""
    roles = {"developer": "system", "tool": "user", "function": "user"}
    turns = [("system", _content_text(system, "system"))] if system else []
    for index, message in enumerate(messages):
        role = message["role"]
        turns.append((roles.get(role, role), _content_text(message.get("content"), f"messages[{index}].content")))
    return tuple(tokenizer.encode_chat(turns))


def _content_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise bad_field(where, "the embedded engine supports only parts of type text")
    return "".join(part["text"] for part in content)


def token_text(token: int) -> str:
    """A token as log probabilities show it; marks by their number."""
    return tokenizer.decode([token]) or f"<{token}>"


def _response_messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat that a checked body of `/v1/responses` stands for: the instructions, then each message of its input.

    Law: these are the messages that a chat would have sent, so both have the same prompt and the same KV. Responses are
    not stored, so whatever refers to an earlier one is refused by name.
    """
    given = fields["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    turns = [
        {"role": item.get("role"), "content": _item_text(item, f"input[{index}]")} for index, item in enumerate(items)
    ]
    instructions = fields.get("instructions")
    return [{"role": "system", "content": instructions}, *turns] if instructions else turns


def _response_logprobs(fields: Mapping[str, Any]) -> int | None:
    """How many of the likeliest tokens are told with each; None where no log probabilities are wanted."""
    return (fields.get("top_logprobs") or 0) if RESPONSE_LOGPROBS in (fields.get("include") or ()) else None


def _item_text(item: Mapping[str, Any], where: str) -> str:
    if not is_message(item):
        raise bad_field(where, "the embedded engine supports only items of type message")
    content = item.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") not in TEXT_PARTS:
            raise bad_field(f"{where}.content", f"the embedded engine supports only parts of {', '.join(TEXT_PARTS)}")
    return "".join(part["text"] for part in content)


def tokenized(data: bytes, cards: Sequence[ModelCard]) -> dict[str, Any]:
    """`/tokenize`, in vLLM's form: of `{"prompt": …}` or `{"messages": …}`, the tokens that the engine computes."""
    kind = BodyKind.CHAT if "messages" in json_object(data) else BodyKind.COMPLETION
    body = parse(kind, data)
    if len(body.prompts) > 1 or (body.prompts and not isinstance(body.prompts[0], str)):
        raise bad_field("prompt", "expected one text")
    card = card_of(body, cards)
    tokens = tokens_of(body.fields, kind)
    if body.fields.get("add_special_tokens") is False and kind is BodyKind.COMPLETION:
        tokens = tokens[1:]
    strs = [token_text(token) for token in tokens] if body.fields.get("return_token_strs") else None
    return {"count": len(tokens), "max_model_len": card.context_tokens_max, "tokens": tokens, "token_strs": strs}


def counted(data: bytes, cards: Sequence[ModelCard]) -> dict[str, Any]:
    """`/v1/messages/count_tokens`: of a body of `/v1/messages`, which needs no limit here."""
    body = parse(BodyKind.MESSAGES, msgspec.json.encode({**json_object(data), "max_tokens": 1}))
    card_of(body, cards)
    return {"input_tokens": len(tokens_of(body.fields, body.kind))}


def detokenized(data: bytes) -> dict[str, Any]:
    """`/detokenize`: of `{"tokens": […]}`."""
    tokens = json_object(data).get("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < tokenizer.VOCAB for each in tokens):
        raise bad_field("tokens", f"expected a list of token ids, 0 to {tokenizer.VOCAB - 1}")
    return {"prompt": tokenizer.decode(tokens)}
