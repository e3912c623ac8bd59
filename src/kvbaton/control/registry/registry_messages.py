"""Messages of workers, operators and watching routers to the registry, and of the registry to them.

Maps, not arrays: errors name the field, and unknown fields pass.

Law: `decode` raises `RegistryFault` and nothing else, whatever the bytes; past it every field is within its bounds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvbaton.control.addressing import check_authority, check_endpoint
from kvbaton.control.joining.join_messages import ClusterCard, SignedCard
from kvbaton.control.joining.join_token import Certificate
from kvbaton.control.keyring import is_public_key
from kvbaton.control.signing import Signed
from kvbaton.protocol import ids
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, PeerId, WorkerId, is_worker_id
from kvbaton.protocol.numbers import ID, UnixSeconds, Version
from kvbaton.protocol.numbers import Number as Count
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX

VERSION = 1
WORKERS_MAX = 1024
FIELD_CHARS_MAX = 256
DETAIL_CHARS_MAX = 512
OPERATOR = "operator"
NOTHING = "nothing"
"""How a worker says that it holds nothing, and has held nothing for a while."""
TICKETS_MAX = 64
"""In one message: 64 KiB of the longest."""
REPORT_BYTES_MAX = 512 << 10
DP_SIZE_MAX = 1024
SHOWN_MAX = 64
"""Ids that one message asks for."""

Role = Literal["prefill", "decode", "both"]
Name = Annotated[str, Meta(max_length=64)]
Names = Annotated[tuple[Name, ...], Meta(max_length=16)]
Text = Annotated[str, Meta(max_length=FIELD_CHARS_MAX)]
Incarnation = Annotated[ids.Incarnation, ID]
Worker = Annotated[WorkerId, Meta(max_length=WORKER_ID_CHARS_MAX)]
Ids = Annotated[tuple[Annotated[str, Meta(max_length=FIELD_CHARS_MAX)], ...], Meta(max_length=SHOWN_MAX)]
Tickets = Annotated[tuple[Annotated[str, Meta(max_length=TICKET_CHARS_MAX)], ...], Meta(max_length=TICKETS_MAX)]
Lives = Annotated[tuple[PeerId, ...], Meta(max_length=WORKERS_MAX)]
Ended = Annotated[tuple[Signed, ...], Meta(max_length=WORKERS_MAX)]
"""Statements of workers that their lives are over."""


class RegistryFault(Exception):
    """A message that breaks the rules; the text names the field."""


class Registration(msgspec.Struct, frozen=True):
    """How a worker presents itself when it can serve."""

    worker: Worker
    incarnation: Incarnation
    role: Role
    http_address: Text  # host:port, without a scheme; "": another server has this worker inside, no router asks it
    control_endpoint: Text  # tcp://, numeric
    modes: Names = ()
    transports: Names = ()
    compat_digest: Name = ""
    tp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    model: Text = ""
    host: Text = ""  # workers that name the same can share memory
    draining: bool = False  # finishes what it has and then goes: ask others
    stays: bool = False  # its process does not end by itself when it has drained
    dp_rank: Annotated[int, Meta(ge=0, lt=DP_SIZE_MAX)] = 0  # which of the ranks behind its HTTP address it is
    dp_size: Annotated[int, Meta(ge=1, le=DP_SIZE_MAX)] = 1  # how many those are; above 1 a request must name the rank
    born: UnixSeconds = 0.0  # Unix time of the start of this life, by its own clock; 0: not told
    continues: Name = ""  # how it goes on with an answer that another began (`params.HistoryWay`); "": it cannot
    context_tokens: Count = 0  # what it serves of prompt and answer together, where its own first token may be told

    @property
    def peer(self) -> PeerId:
        return PeerId(self.worker, self.incarnation)


class DirectoryEntry(msgspec.Struct, frozen=True):
    """A worker as the others need to know it."""

    worker: Worker
    incarnation: Incarnation
    role: Role
    control_endpoint: Text
    public_key: Name
    certificate: Certificate = b""  # of a cluster whose members may join: proves name, key and role
    born: UnixSeconds = 0.0
    signed: Signed | None = None  # the worker's own statement; what is said beside it counts for nothing

    @property
    def peer(self) -> PeerId:
        return PeerId(self.worker, self.incarnation)

    @property
    def order(self) -> Signed | None:
        """Its peers need not know whether it drains."""
        return None

    @property
    def told(self) -> Registration | None:
        """Nor where routers ask it."""
        return None

    def stated(self, told: Registration, key: str, signed: Signed, draining: bool) -> DirectoryEntry:
        """This entry with the worker's own words."""
        at = told.worker, told.incarnation, told.role, told.control_endpoint
        return DirectoryEntry(*at, key, self.certificate, told.born, signed)


class WorkerState(enum.StrEnum):
    READY = "ready"
    SUSPECT = "suspect"


class RosterEntry(msgspec.Struct, frozen=True):
    """A listed worker, as routers need to know it."""

    registration: Registration
    public_key: Name
    state: WorkerState
    draining: bool = False  # by its own word or an operator's
    certificate: Certificate = b""
    signed: Signed | None = None  # the worker's own statement
    order: Signed | None = None  # an operator's, that it drain

    @property
    def role(self) -> Role:
        return self.registration.role

    @property
    def told(self) -> Registration | None:
        return self.registration

    def stated(self, told: Registration, key: str, signed: Signed, draining: bool) -> RosterEntry:
        """This entry with the worker's own words, and an operator's."""
        return RosterEntry(told, key, self.state, draining, self.certificate, signed, self.order if draining else None)

    @property
    def worker(self) -> WorkerId:
        return self.registration.worker

    @property
    def peer(self) -> PeerId:
        return self.registration.peer

    @property
    def born(self) -> float:
        return self.registration.born


class SeenWorkers(msgspec.Struct, frozen=True):
    """Which directory a worker has: of which life of the registry, and how new."""

    registry: Count = 0
    version: Count = 0


# --- worker to registry


class Register(msgspec.Struct, frozen=True, tag="register"):
    registration: Registration
    signed: Signed | None = None  # the same, as a `statements.Statement`; repeated from time to time


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    incarnation: Incarnation
    seen: SeenWorkers
    held: Text = ""  # in words: what a draining worker still waits for


class Deregister(msgspec.Struct, frozen=True, tag="deregister"):
    incarnation: Incarnation
    signed: Signed | None = None  # that this life is over


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """What a worker tells of itself, for those who look on. Only to a registry that takes reports."""

    incarnation: Incarnation
    data: Annotated[bytes, Meta(max_length=REPORT_BYTES_MAX)]  # opaque here; see kvbaton.observe.flight


# --- router to registry


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Tell me of everybody; repeated, it says what has arrived, and that more may be sent."""

    seen: SeenWorkers
    reports: Count = 0  # that have arrived from this life of the registry


class DiscardFor(msgspec.Struct, frozen=True, tag="discard_for"):
    """Have a worker told that nobody will use these tickets."""

    worker: Worker
    incarnation: Incarnation
    tickets: Tickets


class ShowFor(msgspec.Struct, frozen=True, tag="show_for"):
    """Have a worker report at once, of these ids too."""

    worker: Worker
    incarnation: Incarnation
    ids: Ids


# --- operator to registry, and on from there to the worker


class DrainWorker(msgspec.Struct, frozen=True, tag="drain"):
    """Finish and go. From an operator 0 asks which life is listed; that life's number comes with a signed order."""

    worker: Worker
    incarnation: Count = 0
    order: Signed | None = None  # a `statements.DrainOrder`
    look: bool = False  # only say how it stands


# --- registry to operator


class DrainState(msgspec.Struct, frozen=True, tag="drain_state"):
    """How far a worker is; idle: it has drained, holds nothing and waits for its process to be ended. `workers`: all
    that are listed, where it is unknown; to a look, those that are ready in its role beside it."""

    worker: Worker
    state: Literal["ready", "unknown", "draining", "idle", "gone"]
    incarnation: Count = 0
    held: Text = ""
    workers: Annotated[tuple[Name, ...], Meta(max_length=WORKERS_MAX)] = ()
    role: Name = ""  # to a look


# --- registry to worker


class RegisteredReply(msgspec.Struct, frozen=True, tag="registered"):
    """You are listed, in this life; also the answer to a ping that needs nothing more."""

    incarnation: Incarnation
    draining: bool = False  # and nobody new is sent to you
    reports: bool = False  # the registry takes reports; older ones do not know what that is
    certificate: Certificate = b""  # to one that joined: its certificate as of now, and
    cluster: ClusterCard | None = None  # what a member without a key directory needs of one; to earlier releases
    card: SignedCard = b""  # the same, signed; to any worker: who was removed


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """You are not listed; register again."""

    incarnation: Incarnation


class Outdated(msgspec.Struct, frozen=True, tag="outdated"):
    """Your statement is older than this one of yours: your clock was set back. Number yourself above it."""

    incarnation: Incarnation
    signed: Signed


class Superseded(msgspec.Struct, frozen=True, tag="superseded"):
    """Another process registered later under your name, and is alive."""

    incarnation: Incarnation


class RegistryRefused(msgspec.Struct, frozen=True, tag="refused"):
    detail: Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]


class Deregistered(msgspec.Struct, frozen=True, tag="deregistered"):
    incarnation: Incarnation


class Directory(msgspec.Struct, frozen=True, tag="directory"):
    """Everybody who is listed. Until it is `complete` absence means nothing: the registry is young; see `gone`."""

    seen: SeenWorkers
    complete: bool
    entries: Annotated[tuple[DirectoryEntry, ...], Meta(max_length=WORKERS_MAX)]
    gone: Lives = ()
    left: Lives = ()  # lives that ended by their own word: they deregistered, or a later one registered
    ended: Ended = ()


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """A `Directory` for a router: all that is known of those who are listed."""

    seen: SeenWorkers
    complete: bool
    entries: Annotated[tuple[RosterEntry, ...], Meta(max_length=WORKERS_MAX)]
    gone: Lives = ()
    left: Lives = ()
    ended: Ended = ()


class Watching(msgspec.Struct, frozen=True, tag="watching"):
    """To a router that has seen the newest roster."""

    seen: SeenWorkers


class RelayedReport(msgspec.Struct, frozen=True, tag="relayed"):
    """A worker's report, to a router."""

    worker: Worker
    incarnation: Incarnation
    data: Annotated[bytes, Meta(max_length=REPORT_BYTES_MAX)]


class DiscardTickets(msgspec.Struct, frozen=True, tag="discard"):
    """Nobody will use these tickets of yours, unless somebody has begun to."""

    incarnation: Incarnation
    tickets: Tickets


class Show(msgspec.Struct, frozen=True, tag="show"):
    """Report at once, and what you know of these too. Only to workers that report."""

    incarnation: Incarnation
    ids: Ids


AboutStanding = Register | Ping | Deregister
FromWorker = AboutStanding | WorkerReport
FromOperator = DrainWorker
FromRouter = Watch | DiscardFor | ShowFor
ToRegistry = FromWorker | FromOperator | FromRouter
FromRegistry = (
    RegisteredReply | Unknown | Outdated | Superseded | RegistryRefused | Deregistered | Directory | DrainWorker
    | DiscardTickets | Show
)  # fmt: skip
ToOperator = DrainState | RegistryRefused
ToRouter = Roster | Watching | RelayedReport | RegistryRefused

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(tuple[Version, msgspec.Raw])
_to_registry = msgspec.msgpack.Decoder(ToRegistry)
_from_registry = msgspec.msgpack.Decoder(FromRegistry)
_to_operator = msgspec.msgpack.Decoder(ToOperator)
_to_router = msgspec.msgpack.Decoder(ToRouter)
T = TypeVar("T")


def encode(message: ToRegistry | FromRegistry | ToOperator | ToRouter) -> bytes:
    return _encoder.encode((VERSION, message))


def decode_to_registry(frame: bytes) -> ToRegistry:
    message: ToRegistry = _decode(frame, _to_registry)
    if isinstance(message, Register):
        validate(message.registration)
    elif isinstance(message, DrainWorker):
        _check_worker(message.worker)
    elif isinstance(message, DiscardFor | ShowFor):
        _check_worker(message.worker)
        _check_incarnation(message.incarnation)
    elif not isinstance(message, Watch):
        _check_incarnation(message.incarnation)
        if isinstance(message, Ping) and not message.held.isprintable():  # it ends on an operator's screen
            raise RegistryFault("held: expected printable text")
    return message


def decode_to_operator(frame: bytes) -> ToOperator:
    message: ToOperator = _decode(frame, _to_operator)
    return message


def decode_to_router(frame: bytes) -> ToRouter:
    message: ToRouter = _decode(frame, _to_router)
    for entry in message.entries if isinstance(message, Roster) else ():
        validate(entry.registration)
        if not is_public_key(entry.public_key):
            raise RegistryFault(f"public_key: not a key, for {entry.worker}")
    return message


def decode_from_registry(frame: bytes) -> FromRegistry:
    message: FromRegistry = _decode(frame, _from_registry)
    for entry in message.entries if isinstance(message, Directory) else ():
        _check_worker(entry.worker)
        _check_incarnation(entry.incarnation)
        _check("control_endpoint", entry.control_endpoint)
        if not is_public_key(entry.public_key):
            raise RegistryFault(f"public_key: not a key, for {entry.worker}")
    return message


def addresses(entries: Iterable[DirectoryEntry]) -> dict[WorkerId, tuple[str, str]]:
    """A directory in the form that `ZmqControl.set_directory` takes."""
    return {entry.worker: (entry.control_endpoint, entry.public_key) for entry in entries}


def validate(registration: Registration) -> Registration:
    """The registration itself, or `RegistryFault` naming the field that is wrong."""
    _check_worker(registration.worker)
    _check_incarnation(registration.incarnation)
    if registration.http_address:
        _check("http_address", registration.http_address)
    _check("control_endpoint", registration.control_endpoint)
    if registration.dp_rank >= registration.dp_size:
        raise RegistryFault(f"dp_rank: got {registration.dp_rank}, expected less than dp_size, {registration.dp_size}")
    return registration


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        version, body = _frames.decode(frame)
        if version != VERSION:
            raise RegistryFault(f"version: got {version}, expected {VERSION}; run one release on both sides")
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RegistryFault(f"message: {error}") from None


def _check(field: str, value: str) -> None:
    try:
        check_authority(value) if field == "http_address" else check_endpoint(value)
    except ValueError as error:
        raise RegistryFault(f"{field}: {error}") from None


def _check_worker(worker: str) -> None:
    if not is_worker_id(worker):
        raise RegistryFault("worker: letters, digits, '.', '_' and '-' only, at most 64")


def _check_incarnation(incarnation: int) -> None:
    if not 0 < incarnation < 1 << 63:
        raise RegistryFault(f"incarnation: got {incarnation}, expected 1..2**63-1")
