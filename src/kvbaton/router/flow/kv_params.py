"""Request bodies for P and D, and what P answers for D: the client's fields, changed only where the handoff needs it.

SGLang's fields stand in the body itself, and a client's own never go along.

Laws: P computes the prompt and one token, whatever the client wants; D gets the client's body as it came, with one
field added. What P says for D is read in bounds, and never reaches the client.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.api import bodies
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import BOOTSTRAP, FIELD
from kvbaton.protocol.ids import is_handoff_id
from kvbaton.protocol.numbers import Version
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, Ticket
from kvbaton.router.workers.directory import ListedEngine

_encode = msgspec.json.Encoder().encode
_KEY = b',"kv_transfer_params":'
_BOOTSTRAP = b'{"bootstrap_host":'
_OURS = frozenset((FIELD, *BOOTSTRAP))
PARAMS_BYTES_MAX = 1 << 20
"""Of P's parameters for D: NIXL's name each block of the prompt, which for a million tokens is half of this."""
PARAMS_NESTING_MAX = 16
_MAC_BYTES = 16  # of a ticket, before what it says
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


Written = dict[str, bytes]
"""Bodies that were written once, for all choices of one prompt: a long prompt costs milliseconds to write."""


def prefill_body(
    kind: BodyKind,
    fields: Mapping[str, Any],
    params: bytes,
    written: Written | None = None,
    first: bytes | None = None,
) -> bytes:
    """Asks P for the prompt's KV and one token. Choices of one prompt ask for the same.

    `first`: the token is the answer's first one, to be sampled by these fields of JSON besides. Else nobody reads it.
    """
    name = "prefill" if first is None else "first"
    body = None if written is None else written.get(name)
    if body is None:
        body = _prefill_body(kind, fields, is_first=first is not None)
        if written is not None:
            written[name] = body
    return _added(body if first is None else _with(body, first, b""), params)


def _prefill_body(kind: BodyKind, fields: Mapping[str, Any], *, is_first: bool) -> bytes:
    body: dict[str, Any] = {**fields, "stream": False}
    for name in (FIELD, *BOOTSTRAP, "stream_options", "stop", "stop_sequences"):
        body.pop(name, None)
    if is_first:  # with `stop_token_ids`: P refuses those that D would refuse, and masks those that D masks
        body["return_token_ids"] = True
        body.pop("seed", None)
    else:
        body.pop("stop_token_ids", None)
        # MoRI-IO hands over only what ended by its length, and a prompt may be answered with EOS
        body["ignore_eos"] = True
    if body.get("min_tokens"):
        body["min_tokens"] = 1
    if kind is BodyKind.RESPONSES:
        return _encode(body | {"max_output_tokens": 1, "store": False})
    body["max_tokens"] = 1
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = 1
    return _encode(body)


def decode_body(
    data: bytes | None, fields: Mapping[str, Any], params: bytes | None, written: Written | None = None
) -> bytes:
    """Asks D for the client's answer. `data` is the client's own JSON object, None where it stood for several."""
    if data is None or not _OURS.isdisjoint(fields):
        data = _decode_body(fields, {} if written is None else written)
    return data if params is None else _added(data, params)


def _decode_body(fields: Mapping[str, Any], written: Written) -> bytes:
    """Choices of one prompt differ by their seeds alone."""
    data = written.get("decode")
    if data is None:
        data = _encode({name: value for name, value in fields.items() if name not in _OURS and name != "seed"})
        written["decode"] = data
    return data if fields.get("seed") is None else _with(data, b',"seed":', _encode(fields["seed"]))


def _added(data: bytes, params: bytes) -> bytes:
    return _with(data, b",", params[1:-1]) if params.startswith(_BOOTSTRAP) else _with(data, _KEY, params)


def _with(data: bytes, key: bytes, value: bytes) -> bytes:
    """An object that is not empty, with one field more."""
    return b"".join((memoryview(data)[: data.rindex(b"}")], key, value, b"}"))


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Handover(msgspec.Struct, frozen=True):
    """What P says about the KV that it holds; other systems' fields pass unread."""

    do_remote_prefill: bool = False
    ticket: str | None = None
    refused: str | None = None  # P keeps nothing, for this reason


_ticket = msgspec.msgpack.Decoder(tuple[Version, Ticket])
_prefilled = msgspec.json.Decoder(_Prefilled)
_handover = msgspec.json.Decoder(Handover)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ParamsError(ValueError):
    """P's parameters are such that D cannot be asked with them."""


def handover(answer: bytes) -> tuple[bytes, Handover] | None:
    """P's parameters for D, as they came and as they read; None if there are none. `ValueError` if it is no answer.

    They are read in full, though D alone understands all of them: what D cannot read it would hold against the client.
    """
    raw = _prefilled.decode(answer).kv_transfer_params
    if isinstance(raw, msgspec.UnsetType):
        return None
    params = bytes(raw)
    if params == b"null":
        return None
    if len(params) > PARAMS_BYTES_MAX:
        raise ParamsError(f"of {len(params)} bytes, at most {PARAMS_BYTES_MAX}")
    costly = bodies.too_costly(params, PARAMS_NESTING_MAX)
    if costly:
        raise ParamsError(f"with {costly}")
    msgspec.json.decode(params)
    return params, _handover.decode(params)


def handoff_of(ticket: str | None) -> str:
    """Which handoff a ticket of ours names; "" for anything else. Not verified: good for records, and nothing else."""
    if ticket is None or len(ticket) > TICKET_CHARS_MAX:
        return ""
    try:
        raw = binascii.a2b_base64(ticket.encode("ascii").translate(_URL_SAFE) + b"==")
        handoff = _ticket.decode(raw[_MAC_BYTES:])[1].handoff
    except (ValueError, RecursionError):  # also msgspec's and binascii's
        return ""
    return handoff if is_handoff_id(handoff) else ""


def traced(params: bytes, traceparent: str, worker: ListedEngine) -> bytes:
    """The parameters with the span that they belong to, for workers of ours; others' get the header alone."""
    if not traceparent or not worker.is_own:
        return params
    end = params.rindex(b"}")
    comma = b"" if params[:end].strip() == b"{" else b","
    return b'%b%b"traceparent":"%b"}' % (params[:end], comma, traceparent.encode())


def without_params(answer: bytes) -> bytes:
    """D's answer as the client may see it; `ValueError` if it is not a JSON object."""
    if isinstance(_prefilled.decode(answer).kv_transfer_params, msgspec.UnsetType):
        return answer
    fields = _fields.decode(answer)  # as they are: nobody here reads them
    fields.pop(FIELD, None)
    return _encode(fields)
