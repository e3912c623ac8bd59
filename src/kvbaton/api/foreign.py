"""Handoff parameters of other systems: requests of their routers, turned into what kvbaton's router would have sent.

vllm-router and vLLM's proxies know nothing of tickets. Where P answers before D is asked (NIXL, MoRI-IO READ, P2pNccl)
they carry P's answer to D, ticket and all. Where both are asked at once (MoRI-IO WRITE) each side makes the same
handoff out of the transfer id and of the two addresses in the request id. A server that embeds the engine and sets the
parameters itself (Ray Serve) knows the two by their names, and no ticket key: it sends the names instead.

Laws: nothing here raises but `ProtocolError`, whatever a client sent. No address and no block id is read from the
parameters; the addresses in a request id only select workers that are known already. Names in place of a ticket are
read only by an engine that was started for it (`named_pairs`): whoever can set them can make D wait for P.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import request_ids
from kvbaton.api.params import FIELD, Mode, TransferParams
from kvbaton.control.addressing import data_parallel_name, engine_and_rank
from kvbaton.control.registry.registry_messages import DP_SIZE_MAX
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import (
    PROMPTS_PER_TRANSFER_MAX,
    HandoffId,
    TransferId,
    WorkerId,
    handoff_id,
    is_worker_id,
)
from kvbaton.protocol.wire.ticket import Ticket, seal

SHOWN_CHARS = 200
PAIR = "pair"
_PROMPTS_MAX = 256


class ForeignLookup(msgspec.Struct):
    """What is needed to understand parameters that hold no ticket. Only the key may change, when it is rotated."""

    mode: Mode  # of requests that name none
    modes: tuple[Mode, ...]
    me: WorkerId
    ticket_key: bytes
    ttl_s: float
    peer_at: Callable[[str, int], WorkerId | None]  # by the address of its control socket
    named_pairs: bool = False  # P and D by name, in place of a ticket


class RanksOf(msgspec.Struct, frozen=True):
    """The ranks of one side of a handoff, as the other side is told of them."""

    tp_size: int = 1
    dp_size: int = 1
    dp_rank: int = 0  # the one that does it


def moriio_params(unique: str, *, writes: bool, source: RanksOf, target: RanksOf) -> tuple[dict[str, Any], ...]:
    """What MoRI-IO's P and D are told of one transfer. `translated` reads it.

    Where P writes, each is told of the other's ranks; where D reads, P's answer tells D.
    """
    both = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": f"tx-{unique}"}
    p = {"do_remote_decode": True, "do_remote_prefill": False, **both, **_told_of(target, writes)}
    return p, {"do_remote_decode": False, "do_remote_prefill": True, **both, **_told_of(source, writes)}


def _told_of(other: RanksOf, writes: bool) -> dict[str, int]:
    told = {"remote_dp_size": other.dp_size}
    if writes:
        told["remote_tp_size"] = other.tp_size
    if other.dp_size > 1:
        told["remote_dp_size_local"] = other.dp_size
        if writes:
            told["remote_dp_rank"] = other.dp_rank
    return told


def pair_params(mode: Mode, unique: str, prefill: str, decode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What P and D are told of one transfer by who knows their names; `unique` is 32 hexadecimal digits."""
    both = {"mode": str(mode), "transfer_id": f"tx-{unique}", PAIR: [prefill, decode]}
    source = {"do_remote_decode": True, "do_remote_prefill": False, **both}
    return source, {"do_remote_decode": False, "do_remote_prefill": True, **both}


def translated(request_id: str, raw: Mapping[str, Any], lookup: ForeignLookup, index: int = 0) -> TransferParams | None:
    """The parameters of both legs sent off at once (MoRI-IO WRITE, named pairs); None where `raw` is of neither kind.

    `index` says which of the request's prompts and answers is meant, where the id itself does not.
    """
    if lookup.named_pairs and PAIR in raw and "ticket" not in raw:
        return _named(raw, lookup)
    if "ticket" in raw or lookup.mode is Mode.PULL or not isinstance(raw.get("transfer_id"), str):
        return None
    transfer = request_ids.transfer_hex(raw["transfer_id"])
    if transfer is None:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.transfer_id: not tx- and 32 hexadecimal digits or a UUID")
    try:
        addresses = request_ids.parse(request_id)
    except ValueError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"request id: {error}"[:SHOWN_CHARS]) from None
    if addresses is None:
        return None
    rank = _remote_rank(raw)
    prefill = _rank_of(_peer(lookup, "prefill", addresses.prefill), lookup.me, rank)
    decode = _rank_of(_peer(lookup, "decode", addresses.decode), lookup.me, rank)
    pair = prefill, decode
    handoff = handoff_id(TransferId(transfer), _index(addresses, index))
    return _sealed("request id", raw, lookup, handoff, pair, lookup.mode)


def _named(raw: Mapping[str, Any], lookup: ForeignLookup) -> TransferParams:
    unique = raw.get("transfer_id")
    transfer = request_ids.transfer_hex(unique) if isinstance(unique, str) else None
    if transfer is None:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.transfer_id: not tx- and 32 hexadecimal digits")
    names = raw[PAIR]
    if not (isinstance(names, list) and len(names) == 2 and all(isinstance(n, str) and is_worker_id(n) for n in names)):
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.{PAIR}: not the names of a prefill and of a decode worker")
    if raw.get("mode") not in (Mode.STREAM, Mode.PUSH):
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.mode: a named pair is for stream or push")
    pair = WorkerId(names[0]), WorkerId(names[1])
    return _sealed(f"{FIELD}.{PAIR}", raw, lookup, handoff_id(TransferId(transfer)), pair, Mode(raw["mode"]))


def _sealed(
    field: str,
    raw: Mapping[str, Any],
    lookup: ForeignLookup,
    handoff: HandoffId,
    pair: tuple[WorkerId, WorkerId],
    mode: Mode,
) -> TransferParams:
    """This engine's side of the handoff, with the ticket that the other side makes as well."""
    prefill, decode = pair
    sealed = seal(Ticket(handoff, prefill, time.time() + lookup.ttl_s, target=decode), lookup.ticket_key)
    if raw.get("do_remote_decode") is True and prefill == lookup.me:
        return TransferParams(do_remote_decode=True, mode=mode, ticket=sealed)
    if raw.get("do_remote_prefill") is True and decode == lookup.me:
        return TransferParams(do_remote_prefill=True, mode=mode, ticket=sealed)
    raise ProtocolError(Reason.PEER_UNKNOWN, f"{field}: it is for {prefill} and {decode}, this is {lookup.me}")


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


def _remote_rank(raw: Mapping[str, Any]) -> int:
    """Which data-parallel rank of the other side was chosen; MoRI-IO takes the first where none is named."""
    rank = raw.get("remote_dp_rank", 0)
    if type(rank) is not int or not 0 <= rank < DP_SIZE_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.remote_dp_rank: expected 0 to {DP_SIZE_MAX - 1}")
    return rank


def _rank_of(found: WorkerId, me: WorkerId, rank: int) -> WorkerId:
    """Whom an address stands for: all data-parallel ranks of an engine share one, that of their first.

    Of this engine it is the rank that was asked, of the other the one that the parameters name.
    """
    ours, theirs = engine_and_rank(me), engine_and_rank(found)
    if theirs is None:
        return found
    return me if ours is not None and ours[0] == theirs[0] else data_parallel_name(theirs[0], rank)


def _peer(lookup: ForeignLookup, side: str, address: request_ids.PeerAddress) -> WorkerId:
    port = address.handshake if isinstance(address, request_ids.MoriioAddress) else address.port
    found = lookup.peer_at(address.host, port)
    if found is None:
        raise ProtocolError(Reason.PEER_UNKNOWN, f"request id: no known peer is at the {side} address {address}")
    return found
