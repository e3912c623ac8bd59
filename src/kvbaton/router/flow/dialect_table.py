"""How workers are told what becomes of a prompt's KV: a table with one entry for each dialect, both legs of it.

Laws: all that is said in one try is new: nothing of it was used before. No address in a request id comes from a client:
both are what the workers registered.

    kvbaton    P's parameters ask for a lease (pull), or both sides get one ticket (stream, push)
    moriio     both sides get one transfer id, and a request id that holds both addresses; pull is READ, push is WRITE
    p2p_nccl   both sides get a request id that holds both addresses; what P answers, if anything, goes to D
    sglang     both sides get P's bootstrap address and a room, as fields of the request itself

Another dialect is a function that makes a `HandoffAsk`, and its entry below; how its workers announce themselves is a
format of `control.plain`. What workers of ours read of other systems' requests is `api.params`'s, which writes it too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvbaton.api import params, request_ids, tokens
from kvbaton.api.http.http_types import Header
from kvbaton.api.params import LEASE_FOR_PULL, Mode, source_params, target_params
from kvbaton.control.addressing import split_endpoint
from kvbaton.control.plain import Fleet
from kvbaton.protocol.ids import HandoffId, PeerId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal, seal_history
from kvbaton.router.policy import Pair
from kvbaton.router.workers.directory import OWN, ListedEngine

SHOWN_MAX = 4096
"""Tokens that are kept, one for each worker: all requests to it show the same."""
_encode = msgspec.json.Encoder().encode
_LEASE = _encode(LEASE_FOR_PULL)


class HandoffAsk(msgspec.Struct, frozen=True):
    """What the two legs of one try are told besides the client's fields, as JSON."""

    source: bytes
    target: bytes | None  # None in pull: P's answer says
    request_id: str | None = None  # instead of the client's
    needs_answer: bool = True  # D cannot do without what P answers
    handoff: str = ""  # where it is known before P answers


_PULL = HandoffAsk(_LEASE, None)


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
        self._shown: dict[str, tuple[bytes, Header]] = {}  # by worker: the key, and the token made from it
        self._ttl_s = ttl_s
        self._wall = wall
        self._new_id = new_id

    def token(self, worker: ListedEngine) -> Header | None:
        """Shows a worker of this cluster that the router asks; no other is shown anything."""
        if not worker.is_own:
            return None
        key, known = self.key, self._shown.get(worker.name)
        if known is None or known[0] is not key:
            if len(self._shown) >= SHOWN_MAX:
                self._shown.clear()
            known = key, (tokens.HEADER.encode(), tokens.token(key, worker.name).encode())
            self._shown[worker.name] = known
        return known[1]

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

    def for_history(self, tokens: Sequence[int], worker: ListedEngine) -> str:
        """The router's word for a worker that an answer begins so."""
        return seal_history(tokens, worker.name, self._wall() + self._ttl_s, self.key)

    def new_handoff(self) -> HandoffId:
        return handoff_id(self._new_id())

    def for_turn(self, handoff: HandoffId, source: PeerId, target: str = "", life_s: float = 0.0) -> str:
        """A ticket for what D keeps of a conversation; the target is "" where it is not known yet."""
        expires_unix_s = self._wall() + (life_s or self._ttl_s)
        ticket = Ticket(handoff, source.worker, expires_unix_s, source.incarnation, target=WorkerId(target))
        return seal(ticket, self.key)


class Dialect(msgspec.Struct, frozen=True):
    """One way of telling workers."""

    ask: Callable[[Pair, Mode, TicketMinter | None], HandoffAsk]
    fleets: Mapping[Fleet, Mode] = {}  # how its workers announce themselves, and the mode that each kind serves
    never_alone: Mapping[Fleet, str] = {}  # roles of such workers that take every prompt for handed over
    is_signed: bool = False  # where both legs begin at once, their ticket needs this router's key


def _kvbaton(pair: Pair, mode: Mode, minter: TicketMinter | None) -> HandoffAsk:
    if mode is Mode.PULL:
        # P signs the ticket of the lease itself. This one says for whom it computes: P keeps room for whom it knows.
        if minter is None or not pair.prefill.is_own:
            return _PULL
        return HandoffAsk(_encode(source_params(mode, minter.mint(pair))), None)
    assert minter is not None
    handoff, ticket = minter.minted(pair)
    source, target = source_params(mode, ticket), target_params(mode, ticket)
    return HandoffAsk(_encode(source), _encode(target), handoff=handoff)


def _moriio(pair: Pair, mode: Mode, _: TicketMinter | None) -> HandoffAsk:
    unique, name = _named(pair)
    writes = mode is not Mode.PULL
    ranks = [params.RanksOf(each.tp_size, each.dp_size, each.dp_rank) for each in (pair.prefill, pair.decode)]
    source, target = params.moriio_params(unique, writes=writes, source=ranks[0], target=ranks[1])
    if not writes:
        return HandoffAsk(_encode(source), None, name)
    return HandoffAsk(_encode(source), _encode(target), name, handoff=handoff_id(TransferId(unique)))


def _p2p_nccl(pair: Pair, mode: Mode, _: TicketMinter | None) -> HandoffAsk:
    return HandoffAsk(_LEASE, None, _named(pair)[1], needs_answer=False)


def _sglang(pair: Pair, mode: Mode, _: TicketMinter | None) -> HandoffAsk:
    host, port = split_endpoint(pair.prefill.address)
    room = secrets.randbelow((1 << 63) - 1) + 1
    told = _encode(dict(zip(params.BOOTSTRAP, (host, port, room), strict=True)))
    return HandoffAsk(told, told, needs_answer=False, handoff=params.room_handoff(room))


def _named(pair: Pair) -> tuple[str, str]:
    """Something new, and the request id that holds it and both addresses."""
    unique = secrets.token_hex(16)
    prefill, decode = request_ids.parse_address(pair.prefill.address), request_ids.parse_address(pair.decode.address)
    return unique, request_ids.build(prefill, decode, unique)


DIALECTS: Mapping[str, Dialect] = {
    OWN: Dialect(_kvbaton, is_signed=True),
    # A D of these tells vLLM that all of a prompt but its last token comes from P, also where no P was asked: it
    # decodes on blocks that nobody wrote. P2pNccl's need P's address in the request id besides, and raise without it.
    "moriio": Dialect(_moriio, {Fleet.MORIIO_READ: Mode.PULL, Fleet.MORIIO_WRITE: Mode.PUSH}, {Fleet.MORIIO_READ: "D"}),
    params.SGLANG: Dialect(_sglang),
    "p2p_nccl": Dialect(_p2p_nccl, {Fleet.P2P_NCCL: Mode.PULL}, {Fleet.P2P_NCCL: "PD"}),
}
"""By the name that a `ListedEngine` has."""


def ask(pair: Pair, mode: Mode, minter: TicketMinter | None) -> HandoffAsk:
    return DIALECTS[pair.prefill.dialect].ask(pair, mode, minter)


def can_ask(pair: Pair, mode: Mode, can_sign: bool) -> bool:
    """Whether this router can begin a handoff of the pair in `mode`."""
    return mode is Mode.PULL or can_sign or not DIALECTS[pair.prefill.dialect].is_signed


def computes_alone(fleet: Fleet, role: str) -> bool:
    """Whether a worker that announced itself so may be asked for a prompt that no other computes."""
    return role not in DIALECTS[spoken_by(fleet)[0]].never_alone.get(fleet, "")


def spoken_by(fleet: Fleet) -> tuple[str, Mode]:
    """The dialect and the mode of workers that announced themselves as of this kind."""
    return next((name, found.fleets[fleet]) for name, found in DIALECTS.items() if fleet in found.fleets)
