"""Handoff parameters of other systems: requests of their routers, turned into what kvbaton's router would have sent.

vllm-router and vLLM's proxies know nothing of tickets. Where P answers before D is asked (NIXL, MoRI-IO READ, P2pNccl)
they carry P's answer to D, ticket and all. Where both are asked at once (MoRI-IO WRITE) each side makes the same
handoff out of the transfer id and of the two addresses in the request id.

Laws: nothing here raises but `ProtocolError`, whatever a client sent. No address and no block id is read from the
parameters; the addresses in a request id only select workers that are known already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import request_ids
from kvbaton.api.params import FIELD, Mode, TransferParams
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PROMPTS_PER_TRANSFER_MAX, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal

SHOWN_CHARS = 200
_PROMPTS_MAX = 256


class ForeignLookup(msgspec.Struct):
    """What is needed to understand parameters that hold no ticket. Only the key may change, when it is rotated."""

    mode: Mode  # of requests that name none
    modes: tuple[Mode, ...]
    me: WorkerId
    ticket_key: bytes
    ttl_s: float
    peer_at: Callable[[str, int], WorkerId | None]  # by the address of its control socket


def moriio_params(unique: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What MoRI-IO's P and D are told of one transfer. `translated` reads it."""
    both = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": f"tx-{unique}", "remote_dp_size": 1}
    source = {"do_remote_decode": True, "do_remote_prefill": False, **both}
    return source, {"do_remote_decode": False, "do_remote_prefill": True, **both}


def translated(request_id: str, raw: Mapping[str, Any], lookup: ForeignLookup, index: int = 0) -> TransferParams | None:
    """The parameters of both legs sent off at once (MoRI-IO WRITE); None where `raw` is not of that kind.

    `index` says which of the request's prompts and answers is meant, where the id itself does not.
    """
    if "ticket" in raw or lookup.mode is Mode.PULL or not isinstance(raw.get("transfer_id"), str):
        return None
    transfer = request_ids.transfer_hex(raw["transfer_id"])
    if transfer is None:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.transfer_id: not tx- and 32 hexadecimal digits")
    try:
        addresses = request_ids.parse(request_id)
    except ValueError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"request id: {error}"[:SHOWN_CHARS]) from None
    if addresses is None:
        return None
    prefill = _peer(lookup, "prefill", addresses.prefill)
    decode = _peer(lookup, "decode", addresses.decode)
    handoff = handoff_id(TransferId(transfer), _index(addresses, index))
    sealed = seal(Ticket(handoff, prefill, time.time() + lookup.ttl_s, target=decode), lookup.ticket_key)
    if raw.get("do_remote_decode") is True and prefill == lookup.me:
        return TransferParams(do_remote_decode=True, mode=lookup.mode, ticket=sealed)
    if raw.get("do_remote_prefill") is True and decode == lookup.me:
        return TransferParams(do_remote_prefill=True, mode=lookup.mode, ticket=sealed)
    raise ProtocolError(Reason.PEER_UNKNOWN, f"request id: it is for {prefill} and {decode}, this is {lookup.me}")


TICKETS_MAX = 128
"""Looked at in one refused body; beyond it leases run out."""


def together(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What P answers for several prompts or answers of one request: the first's parameters, and every ticket."""
    params = [each for each in told if each is not None]
    if not params or len(params) < len(told):
        return None
    return {**params[0], "tickets": [each.get("ticket") for each in params]}


def one_of(raw: Mapping[str, Any], index: int, count: int) -> Mapping[str, Any]:
    """The parameters of part `index` of `count`, where P's answer was for all of them."""
    tickets = raw.get("tickets")
    if tickets is None:
        return raw
    if not isinstance(tickets, list) or len(tickets) != count:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.tickets: expected a list of {count}, one for each answer")
    return {**raw, "ticket": tickets[index]}


def tickets_in(raw: object) -> list[str]:
    """The tickets by which a D was asked to read, as far as parameters that were refused can be made out."""
    if not isinstance(raw, Mapping) or raw.get("do_remote_prefill") is not True:
        return []
    several = raw.get("tickets")
    found = [raw.get("ticket"), *(several[:TICKETS_MAX] if isinstance(several, list) else ())]
    return list(dict.fromkeys(each for each in found if isinstance(each, str)))


def _index(addresses: request_ids.Addresses, index: int) -> int:
    """Which of a client request's handoffs this is: one for each prompt and each of n answers."""
    prompt = addresses.prompt_index + addresses.input_index + index
    found = addresses.sample_index * _PROMPTS_MAX + prompt
    if prompt >= _PROMPTS_MAX or found >= PROMPTS_PER_TRANSFER_MAX:
        raise ProtocolError(
            Reason.BAD_MESSAGE, f"request id: prompt {prompt}, answer {addresses.sample_index}: too many"
        )
    return found


def _peer(lookup: ForeignLookup, side: str, address: request_ids.PeerAddress) -> WorkerId:
    port = address.handshake if isinstance(address, request_ids.MoriioAddress) else address.port
    found = lookup.peer_at(address.host, port)
    if found is None:
        raise ProtocolError(Reason.PEER_UNKNOWN, f"request id: no known peer is at the {side} address {address}")
    return found
