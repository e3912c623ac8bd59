"""Handoff parameters of a body, per prompt: our own, or those of another system's router.

Law: a ticket is for one prompt and one choice. A body with several has one for each, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbaton.api.api_errors import ApiError, bad_field
from kvbaton.api.bodies import Body
from kvbaton.api.foreign import ForeignLookup, one_of, translated
from kvbaton.api.params import FIELD, TransferParams
from kvbaton.protocol.errors import ProtocolError


def handoffs_of(body: Body, name: str, lookup: ForeignLookup | None) -> list[TransferParams | None]:
    """One for each part of `body`, in order, None where nothing is handed over; `ApiError` names the error.

    `name` is the request's id as it came; without `lookup` it is not read.
    """
    raw = body.fields.get(FIELD)
    try:
        found = [_one(raw, name, lookup, index, body.parts) for index in range(body.parts)]
    except ProtocolError as error:
        raise ApiError(400, error.detail, param=FIELD, code=str(error.reason)) from None
    asked = [each for each in found if each is not None]
    if asked and lookup is not None and asked[0].mode not in lookup.modes:
        raise bad_field(f"{FIELD}.mode", f"this worker does not serve {asked[0].mode}; see its --modes")
    tickets = [each.ticket for each in asked if each.ticket is not None]
    if len(set(tickets)) < len(tickets):
        raise bad_field(FIELD, "a handoff has one prompt and one choice; send them one by one")
    return found


def _one(raw: Any, name: str, lookup: ForeignLookup | None, index: int, count: int) -> TransferParams | None:
    if not isinstance(raw, Mapping):
        return TransferParams.parse(raw)
    params = None if lookup is None else translated(name, raw, lookup, index)
    return params or TransferParams.parse(one_of(raw, index, count))
