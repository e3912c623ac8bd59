"""`kv_transfer_params` of a vLLM request, typed at the door: what this engine is to do with a prompt's KV.

Law: nothing here raises but `ProtocolError`, whatever a client sent. Routers of other systems are `api.params`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.api.api_errors import ApiError
from kvbaton.api.params import FIELD, SHOWN_CHARS, ForeignLookup, Mode, TransferParams, TurnOffer, translated
from kvbaton.observe.flight.flight_records import TRACE_HEADER, parse_trace
from kvbaton.protocol.errors import ProtocolError, Reason

__all__ = ["Ask", "ForeignLookup", "ParamsSource", "Target", "ask_of", "wants_kv"]


class ParamsSource(msgspec.Struct, frozen=True):
    """Compute the prompt here and let somebody have its KV."""

    mode: Mode
    ticket: str | None = None  # streaming and push
    trace: str = ""  # W3C traceparent
    turn: TurnOffer | None = None  # what some D has of the prompt


class Target(msgspec.Struct, frozen=True):
    """Somebody has, or will have, the KV of this prompt."""

    mode: Mode
    ticket: str
    trace: str = ""


Ask = ParamsSource | Target


def ask_of(request: Any, lookup: ForeignLookup) -> Ask | None:
    """What a request asks for; None when nothing is handed over. ProtocolError names the field that is wrong."""
    raw = request.kv_transfer_params
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}: got {type(raw).__name__}, expected an object")
    params = translated(request.request_id, raw, lookup) or _own(raw)
    if params is None or not params.hands_over:
        return None
    if params.mode not in lookup.modes:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.mode: this engine does not serve {params.mode}")
    trace = params.trace or _trace_of(request)
    if params.do_remote_decode:
        return ParamsSource(params.mode, params.ticket, trace, params.turn)
    return Target(params.mode, params.ticket or "", trace)


def wants_kv(raw: object) -> bool:
    """Whether parameters that cannot be read were meant for a D: then the failure policy decides."""
    return isinstance(raw, dict) and raw.get("do_remote_decode") is not True


def _trace_of(request: Any) -> str:
    """What the request's own header said, where a router of another system put nothing into the parameters."""
    headers = getattr(request, "trace_headers", None)
    found = parse_trace(str(headers.get(TRACE_HEADER, ""))) if isinstance(headers, Mapping) else None
    return "" if found is None else str(found)


def _own(raw: Mapping[str, Any]) -> TransferParams | None:
    try:
        return TransferParams.parse(raw)
    except ApiError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, error.message[:SHOWN_CHARS]) from None
