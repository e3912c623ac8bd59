"""What each leg is asked: the client's own fields, changed only where the handoff needs it.

Law: P computes the prompt and one token, whatever the client wants; D gets the client's fields as they came.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.params import FIELD
from kvbaton.protocol.ids import TransferId, handoff_id
from kvbaton.protocol.ticket import Ticket, seal
from kvbaton.router.policy import Pair

_encode = msgspec.json.Encoder().encode


def prefill_body(fields: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """Asks P for the prompt's KV and one token, which nobody reads."""
    body = {**fields, "max_tokens": 1, "stream": False, FIELD: params}
    body.pop("stream_options", None)
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = 1
    if body.get("min_tokens"):
        body["min_tokens"] = 1
    return _encode(body)


def decode_body(fields: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """Asks D for the client's answer."""
    return _encode({**fields, FIELD: params})


def without_params(answer: bytes) -> bytes:
    """D's answer as the client may see it. Inside a text the quotes would be escaped, so this finds only the field."""
    if b'"kv_transfer_params"' not in answer:
        return answer
    fields = msgspec.json.decode(answer)
    fields.pop(FIELD, None)
    return _encode(fields)


def random_transfer_id() -> TransferId:
    return TransferId(secrets.token_hex(16))


class TicketMinter:
    """Signs the tickets of handoffs that begin on both sides at once."""

    def __init__(
        self,
        key: bytes,
        ttl_s: float,
        *,
        wall: Callable[[], float] = time.time,
        new_id: Callable[[], TransferId] = random_transfer_id,
    ) -> None:
        self._key = key
        self._ttl_s = ttl_s
        self._wall = wall
        self._new_id = new_id

    def mint(self, pair: Pair) -> str:
        """A ticket for one handoff between the two; never given out twice."""
        expires_unix_s = self._wall() + self._ttl_s
        ticket = Ticket(handoff_id(self._new_id()), pair.prefill.name, expires_unix_s, target=pair.decode.name)
        return seal(ticket, self._key)
