"""What clients send: bodies, parameters of handoffs, request ids, and the streams that go back to them."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from guided import Target
from laws import HEX, looked_at
from mutators import Shape

from kvbaton.api import params as kv_transfer_params
from kvbaton.api import request_ids, sse
from kvbaton.api.api_errors import ApiError, read_error
from kvbaton.api.bodies import PARTS_MAX, Body, BodyKind, json_object, parse
from kvbaton.api.merge import split
from kvbaton.api.params import FIELD, LEASE_FOR_PULL, Mode, TransferParams, source_params, target_params
from kvbaton.api.responses import Asked, ResponseShape
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, unseal
from kvbaton.router import openai_api
from kvbaton.router.flow import kv_params, request_admission
from kvbaton.router.workers.prefixes import pieces
from kvbaton.router.workers.worker_load import ANSWER_TOKENS_MAX, answer_tokens, prompt_tokens

KEY = b"the key of the fuzzed cluster..."
JSON = msgspec.json.encode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


MESSAGES: list[dict[str, Any]] = [
    {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["x"]},
    {"max_tokens": 4, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": []}],
     "stream": True, "tools": [{"name": "t"}], "thinking": {"type": "enabled"}, "cache_salt": "s", "top_k": 3},
]  # fmt: skip


def refused(error: ApiError) -> None:
    assert 400 <= error.status < 500 and error.param and len(error.message) < 2000, error.message[:200]


# --- bodies


def body_of(kind: BodyKind, data: bytes) -> None:
    """A refusal that names a field, or a body of bounded parts whose two legs say what the client said."""
    try:
        body = parse(kind, data)
        request_admission.check_steering(body.fields)
    except ApiError as error:
        refused(error)
        return
    assert 1 <= body.parts <= PARTS_MAX
    openai_api.alone_reason(body)
    parts = split(body)
    assert len(parts) == body.parts and [part.index for part in parts] == list(range(len(parts)))
    assert prompt_tokens(kind, body.fields, 4.0) >= 1 and 1 <= answer_tokens(body.fields) <= ANSWER_TOKENS_MAX
    pieces(kind, body.fields)
    if kind is BodyKind.RESPONSES:
        _response(body)
    for part in (parts[0], parts[-1]):
        _legs(kind, part.fields, data if len(parts) == 1 else None)


def _legs(kind: BodyKind, fields: Any, data: bytes | None) -> None:
    params = JSON(target_params(Mode.PULL, "ticket"))
    asked = msgspec.json.decode(kv_params.decode_body(data, fields, params))
    assert asked.pop(FIELD) == msgspec.json.decode(params)
    assert asked == {name: value for name, value in msgspec.json.decode(JSON(fields)).items() if name != FIELD}
    first = msgspec.json.decode(kv_params.prefill_body(kind, fields, JSON(LEASE_FOR_PULL)))
    assert first["stream"] is False and first[FIELD] == LEASE_FOR_PULL
    assert first["max_output_tokens" if kind is BodyKind.RESPONSES else "max_tokens"] == 1


def passed_body(data: bytes) -> None:
    """A body that goes to one worker as it came steers nothing: no object within has a field of the router's."""
    try:
        fields = json_object(data)
        request_admission.check_steering_anywhere(data, fields)
    except ApiError as error:
        refused(error)
        return
    assert not _steers(fields)


def _steers(value: Any) -> bool:
    if isinstance(value, dict):
        own = any(value.get(name) is not None for name in (FIELD, request_admission.ENCODER_FIELD))
        return own or any(map(_steers, value.values()))
    return isinstance(value, list) and any(map(_steers, value))


def passed_seeds() -> list[bytes]:
    inner = {"sampling_params": {"extra_args": {FIELD: {"ticket": "t"}}}, "token_ids": [1, 2]}
    return [JSON({"input": ["a", "b"], "model": "m"}), JSON(inner), b'{"a": [{"\\u006bv_transfer_params": 1}]}']


def _response(body: Body) -> None:
    shape = ResponseShape(
        model="m", request_id="r", created_unix_s=1, asked=Asked.of(body.fields), token_text=str, top=None
    )
    for event in [*shape.opening(), *shape.ending("text", "length", {})]:
        JSON(event)


COMPLETIONS: list[dict[str, Any]] = [
    {"model": "m", "prompt": "a", "max_tokens": 3, "temperature": 0, "seed": -5, "n": 2, "stop": ["x"]},
    {"prompt": ["a", "b"], "n": 2, "stream": True, "stream_options": {"include_usage": True}, "user": "u"},
    {"prompt": [1, 2, 3], "logprobs": 2, "echo": True, "best_of": 2, "top_p": 0.5, "min_tokens": 1},
    {"prompt": [[1, 2], [3]], "ignore_eos": True, "cache_salt": "s", "request_id": "r", "vllm_xargs": {"a": 1}},
    {"prompt_embeds": "AAAA", "prompt_logprobs": 1, "use_beam_search": True, "seed": 9_223_372_036_854_775_807},
]
MESSAGE = {"role": "user", "content": "a"}
CHATS: list[dict[str, Any]] = [
    {"model": "m", "messages": [{"role": "system", "content": "s"}, MESSAGE], "max_completion_tokens": 4, "n": 2},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}], "top_logprobs": 1, "logprobs": True},
    {"messages": [MESSAGE, {"role": "tool", "content": None, "tool_call_id": "c"}], "tools": [{"type": "function"}]},
]
RESPONSES: list[dict[str, Any]] = [
    {"model": "m", "input": "a", "instructions": "i", "max_output_tokens": 4, "metadata": {"k": "v"}, "user": "u"},
    {"input": [MESSAGE, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]}]},
    {"input": [{"type": "reasoning", "summary": []}, MESSAGE], "include": ["x"], "store": True, "temperature": 0.5},
    {"input": "a", "text": {}, "reasoning": {}, "truncation": "auto", "tools": [], "parallel_tool_calls": True},
]


# --- parameters


def params(data: bytes) -> None:
    """Nothing, a refusal that names the field, or parameters with a ticket where one is needed."""
    try:
        value = msgspec.json.decode(data)
    except UNREADABLE:
        return
    try:
        found = TransferParams.parse(value)
    except ApiError as error:
        refused(error)
        return
    if found is not None:
        assert found.do_remote_decode != found.do_remote_prefill
        assert found.ticket is None or len(found.ticket) <= TICKET_CHARS_MAX
        assert TransferParams.parse(msgspec.to_builtins(found)) == found


LOOKUPS = tuple(
    kv_transfer_params.ForeignLookup(
        mode, tuple(Mode), WorkerId(me), KEY, 60.0,
        lambda host, port: WorkerId("p0") if host == "10.0.0.1" else WorkerId("d0") if host == "10.0.0.2" else None,
        named,
    )
    for mode, named in ((Mode.PULL, False), (Mode.PUSH, False), (Mode.PULL, True))
    for me in ("p0", "d0")
)  # fmt: skip
REQUEST_ID = request_ids.build(
    request_ids.parse_address("host:10.0.0.1,handshake:6301,notify:61005"),
    request_ids.parse_address("host:10.0.0.2,handshake:6301,notify:61005"),
    HEX * 2,
)


def foreign_params(data: bytes) -> None:
    """`ProtocolError`, nothing, or parameters whose ticket we have signed for the workers that the id names."""
    try:
        said = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE:
        return
    name, raw, index = said.get("id"), said.get("params"), said.get("index", 0)
    if not isinstance(name, str) or not isinstance(raw, dict) or type(index) is not int or not 0 <= index < 4096:
        return
    for lookup in LOOKUPS:
        with contextlib.suppress(ProtocolError):
            found = kv_transfer_params.translated(name, kv_transfer_params.one_of(raw, min(index, 3), 4), lookup, index)
            if found is not None:
                ticket = unseal(found.ticket or "", (KEY,), 0.0)
                assert lookup.me in (ticket.source, ticket.target)
                assert ticket.source == "p0" or lookup.named_pairs
    kv_transfer_params.together([raw, said, None][: 1 + index % 3])


def foreign_seeds() -> list[bytes]:
    moriio = {"transfer_id": f"tx-{HEX * 2}", "do_remote_decode": True, "remote_block_ids": None, "remote_dp_size": 1}
    return [
        JSON({"id": REQUEST_ID, "params": moriio, "index": 0}),
        JSON(
            {"id": f"cmpl-{REQUEST_ID}-1", "params": {**moriio, "do_remote_prefill": True, "do_remote_decode": False}}
        ),
        JSON({"id": "plain", "params": {"ticket": "t", "tickets": ["a", "b", "c", "d"]}, "index": 2}),
    ]


def param_seeds() -> list[bytes]:
    given = (LEASE_FOR_PULL, source_params(Mode.PUSH, "t"), target_params(Mode.STREAM, "t"), {"remote_engine_id": "e"})
    return [JSON(each) for each in given] + [b"null"]


def request_id(data: bytes) -> None:
    looked_at(data.decode("utf-8", "surrogateescape"))


# --- streams


def relayed(data: bytes) -> None:
    """Whole events leave, in order and nothing else, and the same ones however the bytes are cut."""
    cut = 1 + data[0] % 40 if data else 1
    relay, whole = sse.Relay(), sse.Relay()
    out = b"".join(relay.feed(data[at : at + cut]) for at in range(0, len(data), cut))
    at_once = whole.feed(data)
    assert data.startswith(out) and data.startswith(at_once)
    assert [*sse.payloads(out)] == [*sse.payloads(at_once)]
    assert not out or out.endswith((b"\n\n", b"\r\n\r\n"))
    assert isinstance(whole.ended, bool) and isinstance(relay.ended, bool)
    for payload in sse.payloads(out):
        error = read_error(500, payload)
        assert len(error.message) <= 2000
    most = sum(1 for _ in sse.payloads(out))
    assert not sse.only_opens(out, most) or sse.only_opens(out, most // 2), "fewer events open no less"


def stream_seeds() -> list[bytes]:
    chunk = sse.event({"id": "x", "choices": [{"index": 0, "text": "a"}], "usage": None})
    typed = sse.typed_event({"type": "response.created", "sequence_number": 0})
    last = sse.typed_event({"type": "response.completed", "response": {}})
    failed = sse.event({"error": {"message": "m", "type": "t", "code": 400, "param": None}})
    return [chunk + sse.DONE, typed + last, chunk + failed, b": ping\r\n\r\ndata: {}\r\n\r\n"]


def _bodies(kind: BodyKind, name: str, bodies: list[dict[str, Any]]) -> Target:
    return Target(name, lambda data: body_of(kind, data), lambda: [*map(JSON, bodies)], Shape.JSON, 2500)


def id_seeds() -> list[bytes]:
    return [REQUEST_ID.encode(), b"tx-" + HEX.encode() * 2, b"[::1]:80"]


TARGETS = (
    _bodies(BodyKind.COMPLETION, "body_completion", COMPLETIONS),
    _bodies(BodyKind.CHAT, "body_chat", CHATS),
    _bodies(BodyKind.RESPONSES, "body_responses", RESPONSES),
    _bodies(BodyKind.MESSAGES, "body_messages", MESSAGES),
    Target("body_passed", passed_body, passed_seeds, Shape.JSON, 2500),
    Target("params", params, param_seeds, Shape.JSON, 2500),
    Target("foreign", foreign_params, foreign_seeds, Shape.JSON, 2500),
    Target("request_id", request_id, id_seeds, Shape.TEXT, 2500),
    Target("sse", relayed, stream_seeds, Shape.TEXT, 2000),
)
