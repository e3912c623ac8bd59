"""`kv_transfer_params` of a vLLM request, typed at the door: what this engine is to do with a prompt's KV.

Laws: nothing here raises but `ProtocolError`, whatever a client sent. No address and no block id is read from the
parameters; where another system's request id holds addresses, they only select a peer that is known already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api import request_ids
from kvbaton.api.errors import ApiError
from kvbaton.api.params import Mode, TransferParams
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PROMPTS_PER_TRANSFER_MAX, TransferId, WorkerId, handoff_id
from kvbaton.protocol.ticket import Ticket, seal

_SHOWN_CHARS = 200
_PROMPTS_MAX = 256


class Source(msgspec.Struct, frozen=True):
    """Compute the prompt here and let somebody have its KV."""

    mode: Mode
    ticket: str | None = None  # streaming and push


class Target(msgspec.Struct, frozen=True):
    """Somebody has, or will have, the KV of this prompt."""

    mode: Mode
    ticket: str


Ask = Source | Target


class Lookup(msgspec.Struct, frozen=True):
    """What is needed to understand parameters that hold no ticket (routers of other systems)."""

    mode: Mode  # of requests that name none
    modes: tuple[Mode, ...]
    me: WorkerId
    ticket_key: bytes
    ttl_s: float
    peer_at: Callable[[str, int], WorkerId | None]  # by the address of its control socket


def ask_of(request: Any, lookup: Lookup) -> Ask | None:
    """What a request asks for; None when nothing is handed over. ProtocolError names the field that is wrong."""
    raw = request.kv_transfer_params
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ProtocolError(Reason.BAD_MESSAGE, f"kv_transfer_params: got {type(raw).__name__}, expected an object")
    found = _foreign(request.request_id, raw, lookup)
    if found is None:
        found = _own(raw)
    if found is not None and found.mode not in lookup.modes:
        raise ProtocolError(Reason.BAD_MESSAGE, f"kv_transfer_params.mode: this engine does not serve {found.mode}")
    return found


def _own(raw: Mapping[str, Any]) -> Ask | None:
    try:
        params = TransferParams.parse(raw)
    except ApiError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, error.message[:_SHOWN_CHARS]) from None
    if params is None:
        return None
    if params.do_remote_decode:
        return Source(params.mode, params.ticket)
    return Target(params.mode, params.ticket or "")


def _foreign(request_id: str, raw: Mapping[str, Any], lookup: Lookup) -> Ask | None:
    """A router that sends both sides off at once with a transfer id and addresses in the request id (MoRI-IO)."""
    if "ticket" in raw or lookup.mode is Mode.PULL or not isinstance(raw.get("transfer_id"), str):
        return None
    transfer = request_ids.transfer_hex(raw["transfer_id"])
    if transfer is None:
        raise ProtocolError(Reason.BAD_MESSAGE, "kv_transfer_params.transfer_id: not tx- and 32 hexadecimal digits")
    try:
        addresses = request_ids.parse(request_id)
    except ValueError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"request id: {error}"[:_SHOWN_CHARS]) from None
    if addresses is None:
        return None
    prefill = _peer(lookup, "prefill", addresses.prefill)
    decode = _peer(lookup, "decode", addresses.decode)
    ticket = Ticket(
        handoff_id(TransferId(transfer), _index(addresses)), prefill, time.time() + lookup.ttl_s, target=decode
    )
    sealed = seal(ticket, lookup.ticket_key)
    if raw.get("do_remote_decode") is True and prefill == lookup.me:
        return Source(lookup.mode, sealed)
    if raw.get("do_remote_prefill") is True and decode == lookup.me:
        return Target(lookup.mode, sealed)
    raise ProtocolError(Reason.PEER_UNKNOWN, f"request id: it is for {prefill} and {decode}, this is {lookup.me}")


def _index(addresses: request_ids.Addresses) -> int:
    """Which of a client request's handoffs this is: one for each prompt and each of n answers."""
    prompt = addresses.prompt_index + addresses.input_index
    index = addresses.sample_index * _PROMPTS_MAX + prompt
    if prompt >= _PROMPTS_MAX or index >= PROMPTS_PER_TRANSFER_MAX:
        raise ProtocolError(
            Reason.BAD_MESSAGE, f"request id: prompt {prompt}, answer {addresses.sample_index}: too many"
        )
    return index


def _peer(lookup: Lookup, side: str, address: request_ids.PeerAddress) -> WorkerId:
    port = address.handshake if isinstance(address, request_ids.MoriioAddress) else address.port
    found = lookup.peer_at(address.host, port)
    if found is None:
        raise ProtocolError(Reason.PEER_UNKNOWN, f"request id: no known peer is at the {side} address {address}")
    return found
