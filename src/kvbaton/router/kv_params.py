"""Request bodies for P and D: the client's fields, changed only where the handoff needs it, in the worker's dialect.

Laws: P computes the prompt and one token, whatever the client wants; D gets the client's body as it came, with one
field added. No address in a request id comes from a client: both are what the workers registered.

    kvbaton    P's parameters ask for a lease (pull), or both sides get one ticket (stream, push)
    moriio     both sides get one transfer id, and a request id that holds both addresses; pull is READ, push is WRITE
    p2p_nccl   both sides get a request id that holds both addresses; what P answers, if anything, goes to D
"""

from __future__ import annotations

import binascii
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api import request_ids, shapes, tokens
from kvbaton.api.bodies import Kind
from kvbaton.api.params import FIELD, LEASE_FOR_PULL, Mode, source_params, target_params
from kvbaton.protocol.ids import HandoffId, TransferId, handoff_id, is_handoff_id
from kvbaton.protocol.numbers import Version
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, Ticket, seal
from kvbaton.router.http.http_client import Header
from kvbaton.router.policy import Pair
from kvbaton.router.workers.directory import Dialect, Worker

_encode = msgspec.json.Encoder().encode
_LEASE = _encode(LEASE_FOR_PULL)
_KEY = b',"kv_transfer_params":'
PARAMS_BYTES_MAX = 1 << 20
"""Of P's parameters for D: NIXL's name each block of the prompt, which for a million tokens is half of this."""
PARAMS_NESTING_MAX = 16
_MAC_BYTES = 16  # of a ticket, before what it says
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class Ask(msgspec.Struct, frozen=True):
    """What the two legs of one try are told besides the client's fields, as JSON."""

    source: bytes
    target: bytes | None  # None in pull: P's answer says
    request_id: str | None = None  # instead of the client's
    needs_answer: bool = True  # D cannot do without what P answers
    handoff: str = ""  # where it is known before P answers


class TicketMinter:
    """Signs the tickets of handoffs that begin on both sides at once."""

    def __init__(
        self,
        key: bytes,
        ttl_s: float,
        *,
        wall: Callable[[], float] = time.time,
        new_id: Callable[[], TransferId] = lambda: TransferId(secrets.token_hex(16)),
    ) -> None:
        self.key = key  # may be replaced while it is in use
        self._ttl_s = ttl_s
        self._wall = wall
        self._new_id = new_id

    def token(self, worker: Worker) -> Header | None:
        """Shows a worker of this cluster that the router asks; nobody else is shown anything."""
        if worker.dialect is not Dialect.OWN or not worker.incarnation:
            return None
        return tokens.HEADER.encode(), tokens.token(self.key, worker.name).encode()

    def mint(self, pair: Pair) -> str:
        """A ticket for one handoff between the two; never given out twice."""
        return self.minted(pair)[1]

    def minted(self, pair: Pair) -> tuple[HandoffId, str]:
        """The handoff that a new ticket names, and the ticket."""
        expires_unix_s = self._wall() + self._ttl_s
        source, target = pair.prefill, pair.decode.name
        handoff = handoff_id(self._new_id())
        ticket = Ticket(handoff, source.name, expires_unix_s, source.incarnation, target=target)
        return handoff, seal(ticket, self.key)


def can_mint(pair: Pair, mode: Mode, minter: TicketMinter | None) -> bool:
    """Whether this router can begin a handoff of the pair in `mode`."""
    return mode is Mode.PULL or minter is not None or pair.prefill.dialect is not Dialect.OWN


def ask(pair: Pair, mode: Mode, minter: TicketMinter | None) -> Ask:
    """Everything that is new for one try: nothing of it was used before."""
    dialect = pair.prefill.dialect
    if dialect is Dialect.OWN:
        if mode is Mode.PULL:
            return Ask(_LEASE, None)
        assert minter is not None
        handoff, ticket = minter.minted(pair)
        source, target = source_params(mode, ticket), target_params(mode, ticket)
        return Ask(_encode(source), _encode(target), handoff=handoff)
    unique = secrets.token_hex(16)
    name = request_ids.build(
        request_ids.parse_address(pair.prefill.address), request_ids.parse_address(pair.decode.address), unique
    )
    if dialect is Dialect.P2P_NCCL:
        return Ask(_LEASE, None, name, needs_answer=False)
    return _moriio(pair, mode, unique, name)


def _moriio(pair: Pair, mode: Mode, unique: str, name: str) -> Ask:
    both = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": f"tx-{unique}", "remote_dp_size": 1}
    source = {"do_remote_decode": True, "do_remote_prefill": False, **both}
    if mode is Mode.PULL:
        return Ask(_encode(source), None, name)
    target = {"do_remote_decode": False, "do_remote_prefill": True, **both}
    return Ask(
        _encode({**source, "remote_tp_size": pair.decode.tp_size}),
        _encode({**target, "remote_tp_size": pair.prefill.tp_size}),
        name,
        handoff=handoff_id(TransferId(unique)),
    )


def prefill_body(kind: Kind, fields: Mapping[str, Any], params: bytes) -> bytes:
    """Asks P for the prompt's KV and one token, which nobody reads."""
    body: dict[str, Any] = {**fields, "stream": False, FIELD: msgspec.Raw(params)}
    for name in ("stream_options", "stop", "stop_token_ids"):
        body.pop(name, None)
    body["ignore_eos"] = True  # MoRI-IO hands over only what ended by its length, and a prompt may be answered with EOS
    if body.get("min_tokens"):
        body["min_tokens"] = 1
    if kind is Kind.RESPONSES:
        return _encode(body | {"max_output_tokens": 1, "store": False})
    body["max_tokens"] = 1
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = 1
    return _encode(body)


def decode_body(data: bytes | None, fields: Mapping[str, Any], params: bytes | None) -> bytes:
    """Asks D for the client's answer. `data` is the client's own JSON object, None where it stood for several."""
    if data is None or FIELD in fields:
        body = {name: value for name, value in fields.items() if name != FIELD}
        return _encode(body if params is None else {**body, FIELD: msgspec.Raw(params)})
    if params is None:
        return data
    return b"".join((data[: data.rindex(b"}")], _KEY, params, b"}"))


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Handover(msgspec.Struct, frozen=True):
    """What P says about the KV that it holds; other systems' fields pass unread."""

    do_remote_prefill: bool = False
    ticket: str | None = None


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
    if isinstance(raw, msgspec.UnsetType) or bytes(raw) == b"null":
        return None
    params = bytes(raw)
    if len(params) > PARAMS_BYTES_MAX:
        raise ParamsError(f"of {len(params)} bytes, at most {PARAMS_BYTES_MAX}")
    costly = shapes.too_costly(params, PARAMS_NESTING_MAX)
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


def traced(params: bytes, traceparent: str, worker: Worker) -> bytes:
    """The parameters with the span that they belong to, for workers of ours; others' get the header alone."""
    if not traceparent or worker.dialect is not Dialect.OWN or not worker.incarnation:
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
