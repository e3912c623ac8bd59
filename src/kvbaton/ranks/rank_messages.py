"""Messages between the engine's process and the process of one of its ranks, as typed and bounded msgpack.

The ledger lives with the scheduler; memory and transports live in the rank (rule 20). Commands go down, news comes up.

Laws: each command names its transport, or is for the rank's store (`rank_store_messages`). A device event cannot cross:
it belongs to the process that made it, so a copy that must wait for one is started where the event is. A copy's table
(spans, and a weave's column and shifts) crosses in parts, so no frame is larger than `FRAME_BYTES_MAX`; an incomplete
table is refused. The invitation is a secret: its holder can act as the engine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvbaton.control.addressing import check_endpoint
from kvbaton.control.keyring import is_public_key
from kvbaton.protocol.effects import Capabilities, Copy, Direction, Loan
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, CopyRested
from kvbaton.protocol.geometry.layout import PageTable
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.geometry.spans import SPANS_MAX, Area, Weave
from kvbaton.protocol.ids import JobId, LeaseId, PeerId, WorkerId
from kvbaton.protocol.numbers import GROUPS_MAX, RANKS_MAX
from kvbaton.ranks.rank_store_messages import RankStoreCommand, RankStoreNews

SPAN_BYTES = 24
SHIFT_BYTES = 16
PAIR_BYTES = 16
TABLE_BYTES_MAX = SPANS_MAX * SPAN_BYTES
PART_BYTES_MAX = (4 << 20) // SPAN_BYTES * SPAN_BYTES
FRAME_BYTES_MAX = PART_BYTES_MAX + (1 << 20)
ENDPOINT_BYTES_MAX = 1024  # as in `protocol.messages.Endpoints`
DETAIL_CHARS_MAX = 512
CAUSES_MAX = 32
TRANSPORTS_MAX = 16
NEWS_BATCH_MAX = 256  # whose details, at four bytes a character, fill half a frame

TABLES_MAX = 4096
LENT_BYTES_MAX = PART_BYTES_MAX
"""Of one group's block ids: a million, which is more than one prompt has."""

ENGINE = WorkerId("engine")

Name = Annotated[str, Meta(min_length=1, max_length=64)]
Key = Annotated[str, Meta(min_length=40, max_length=40)]
Detail = Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]
Endpoint = Annotated[bytes, Meta(max_length=ENDPOINT_BYTES_MAX)]
Part = Annotated[bytes, Meta(max_length=PART_BYTES_MAX)]
Number = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=0, le=TABLE_BYTES_MAX)]


# --- commands


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transport: Name


class Open(_Command, frozen=True):
    """Tell a transport whose it is; the first command of an engine to transports made without a name."""

    me: PeerId


class Mint(_Command, frozen=True):
    """Make an endpoint for `peer`; answered by `Minted` or `MintFailed` under the same number."""

    ask: Number
    peer: PeerId


class RankConnect(_Command, frozen=True):
    peer: PeerId
    endpoint: Endpoint


class RankDisconnect(_Command, frozen=True):
    peer: PeerId


class TablePart(_Command, frozen=True):
    """The beginning, or more, of the table of a copy whose `Submit` follows."""

    job: JobId
    table: Part


class Submit(_Command, frozen=True):
    """Start a copy. Its table is its spans, then the column and the shifts of its weave, if it has one; `table` is the
    last part, and the sizes say how much there must be, so that an incomplete table is never used."""

    job: JobId
    peer: PeerId
    direction: Direction
    local_region: int
    remote_region: int
    spans_bytes: Size
    column_bytes: Size
    shifts_bytes: Size
    table: Part


class Cancel(_Command, frozen=True):
    job: JobId


class LayOut(_Command, frozen=True):
    """The memory layout of blocks; before anything is lent."""

    tables: Annotated[tuple[PageTable, ...], Meta(max_length=TABLES_MAX)]


class RankLend(_Command, frozen=True):
    """Give a peer access to some blocks; `Cancel` revokes it, and `RankEnded` says that nothing moves by it any
    more. What the peer must write crosses as a copy's table does: (region, bytes of rows, bytes of shifts) of each
    area, and all these rows and shifts one after another, of which `table` is the last part."""

    job: JobId
    peer: PeerId
    direction: Direction
    blocks: Annotated[tuple[Annotated[bytes, Meta(max_length=LENT_BYTES_MAX)], ...], Meta(max_length=GROUPS_MAX)]
    due: Annotated[tuple[tuple[Number, Size, Size], ...], Meta(max_length=TABLES_MAX)] = ()
    table: Part = b""


class Fence(_Command, frozen=True):
    peer: PeerId


class Close(_Command, frozen=True):
    pass


PlaneCommand = (
    Open | Mint | RankConnect | RankDisconnect | TablePart | Submit | Cancel | LayOut | RankLend | Fence | Close
)
Command = PlaneCommand | RankStoreCommand


# --- news


class _News(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transport: Name


class Minted(_News, frozen=True):
    ask: Number
    endpoint: Endpoint


class MintFailed(_News, frozen=True):
    ask: Number
    detail: Detail


class ConnectFailed(_News, frozen=True):
    """The rank refused an endpoint; copies with that peer end as `PEER_UNKNOWN`."""

    peer: PeerId
    detail: Detail


class RankEnded(_News, frozen=True):
    """`events.CopyEnded` of one data plane."""

    job: JobId
    reason: Reason | None
    at_rest: bool
    detail: Detail
    unwritten: Number | None = None

    @classmethod
    def of(cls, transport: str, event: CopyEnded) -> RankEnded:
        detail = event.detail[:DETAIL_CHARS_MAX]
        return cls(transport, event.job, event.reason, event.at_rest, detail, event.unwritten)

    @property
    def event(self) -> CopyEnded:
        return CopyEnded(self.job, self.reason, self.at_rest, self.detail, self.unwritten)


class Rested(_News, frozen=True):
    """`events.CopyRested` of one data plane."""

    job: JobId

    @classmethod
    def of(cls, transport: str, event: CopyRested) -> Rested:
        return cls(transport, event.job)


class Fenced(_News, frozen=True):
    peer: PeerId


class RankRefusals(_News, frozen=True):
    """Refusals at the rank's data port so far, by cause; sent only on change."""

    counts: Annotated[dict[Name, Number], Meta(max_length=CAUSES_MAX)]


class MappedBytes(_News, frozen=True):
    """Device memory of other processes that the rank has mapped; sent only on change."""

    nbytes: Number


class Progressed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank's device has finished writing this much of a lease."""

    lease: LeaseId
    progress: Progress


PlaneNews = Minted | MintFailed | ConnectFailed | RankEnded | Rested | Fenced | RankRefusals | MappedBytes
News = PlaneNews | Progressed | RankStoreNews

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_news: msgspec.msgpack.Decoder[list[News]] = msgspec.msgpack.Decoder(
    Annotated[list[News], Meta(max_length=NEWS_BATCH_MAX)]
)


def encode_command(command: Command) -> bytes:
    return _encoder.encode(command)


def decode_command(body: bytes) -> Command:
    """`msgspec.MsgspecError` for anything else."""
    return _commands.decode(body)


def encode_news(batch: list[News]) -> bytes:
    return _encoder.encode(batch)


def decode_news(body: bytes) -> list[News]:
    """`msgspec.MsgspecError` for anything else."""
    return _news.decode(body)


_NOTHING = array("q")


def table_bytes(copy: Copy) -> int:
    """The size of a copy's table."""
    return sum(len(each) * each.itemsize for each in _table(copy))


def submit_commands(transport: str, copy: Copy, part_bytes: int = PART_BYTES_MAX) -> list[Command]:
    """A copy as the commands that carry it, in order; ValueError for one that cannot cross."""
    if copy.after is not None:
        raise ValueError("copy.after: a device event belongs to the rank's process and cannot cross to it")
    spans, column, shifts = (_little_endian(each).tobytes() for each in _table(copy))
    sizes = len(spans), len(column), len(shifts)
    _check_sizes(*sizes)
    parts, last = _in_parts(transport, copy.job, (spans, column, shifts), part_bytes)
    place = copy.direction, copy.local_region, copy.remote_region
    return [*parts, Submit(transport, copy.job, copy.peer, *place, *sizes, last)]


def lend_commands(transport: str, loan: Loan, part_bytes: int = PART_BYTES_MAX) -> list[Command]:
    """A loan as the commands that carry it, in order; ValueError for one that cannot cross."""
    due = tuple((area.region, PAIR_BYTES * (len(area.rows) // 2), 8 * len(area.shifts)) for area in loan.due)
    _check_due(due)
    tables = [_little_endian(each).tobytes() for area in loan.due for each in (area.rows, area.shifts)]
    parts, last = _in_parts(transport, loan.job, tables, part_bytes)
    packed = tuple(array("i", ids).tobytes() for ids in loan.blocks)
    return [*parts, RankLend(transport, loan.job, loan.peer, loan.direction, packed, due, last)]


def loan_of(command: RankLend, before: bytes | bytearray = b"") -> Loan:
    """The loan that a `RankLend` makes; `before` are the earlier parts. ValueError when something is incomplete."""
    _check_due(command.due)
    numbers = _numbers(sum(rows + shifts for _, rows, shifts in command.due), before, command.table)
    areas: list[Area] = []
    at = 0
    for region, rows_bytes, shifts_bytes in command.due:
        middle, end = at + rows_bytes // 8, at + (rows_bytes + shifts_bytes) // 8
        areas.append(Area(region, numbers[at:middle], numbers[middle:end]))
        at = end
    blocks = tuple(tuple(_int32(ids)) for ids in command.blocks)
    return Loan(command.job, command.peer, command.direction, blocks, tuple(areas))


def _in_parts(transport: str, job: JobId, tables: Sequence[bytes], part_bytes: int) -> tuple[list[TablePart], bytes]:
    """All parts but the last, and the last."""
    table = memoryview(b"".join(tables))
    starts = range(0, table.nbytes, part_bytes) or range(1)
    parts = [bytes(table[start : start + part_bytes]) for start in starts]
    return [TablePart(transport, job, part) for part in parts[:-1]], parts[-1]


def _numbers(size_bytes: int, before: bytes | bytearray, last: bytes) -> array[int]:
    if len(before) + len(last) != size_bytes:
        raise ValueError(f"table: received {len(before) + len(last)} of its {size_bytes} bytes")
    numbers = array("q")
    numbers.frombytes(before)
    numbers.frombytes(last)
    return _little_endian(numbers)


def copy_of(submit: Submit, before: bytes | bytearray = b"") -> Copy:
    """The copy that a `Submit` starts; `before` are the earlier parts. ValueError when the table is incomplete."""
    sizes = submit.spans_bytes, submit.column_bytes, submit.shifts_bytes
    _check_sizes(*sizes)
    numbers = _numbers(sum(sizes), before, submit.table)
    spans_end = submit.spans_bytes // numbers.itemsize
    column_end = spans_end + submit.column_bytes // numbers.itemsize
    weave = Weave(numbers[spans_end:column_end], numbers[column_end:]) if submit.column_bytes else None
    place = submit.direction, submit.local_region, submit.remote_region
    return Copy(submit.job, submit.peer, *place, numbers[:spans_end], weave=weave)


def _table(copy: Copy) -> tuple[array[int], array[int], array[int]]:
    weave = copy.weave
    return (copy.spans, _NOTHING, _NOTHING) if weave is None else (copy.spans, weave.column, weave.shifts)


def _check_sizes(spans: int, column: int, shifts: int) -> None:
    """Size of a table in bytes. A weave must not stand for more rows than a table can have either."""
    rows = (column // SPAN_BYTES) * (shifts // SHIFT_BYTES)
    if spans % SPAN_BYTES or column % SPAN_BYTES or shifts % SHIFT_BYTES or bool(column) != bool(shifts):
        told = f"{spans} bytes of spans, {column} of a weave's column, {shifts} of its shifts"
        raise ValueError(f"copy: {told}; whole rows of {SPAN_BYTES}, {SPAN_BYTES} and {SHIFT_BYTES} are needed")
    if spans + column + shifts > TABLE_BYTES_MAX or rows > SPANS_MAX:
        told = f"a table of {spans + column + shifts} bytes with a weave of {rows} rows"
        raise ValueError(f"copy: {told}; at most {TABLE_BYTES_MAX} bytes and {SPANS_MAX} rows can cross")


def _check_due(due: Sequence[tuple[int, int, int]]) -> None:
    """Whole rows and shifts, and no more rows in all than a table can have."""
    for _, rows, shifts in due:
        if rows % PAIR_BYTES or shifts % 8 or rows // PAIR_BYTES * (shifts // 8) > SPANS_MAX:
            raise ValueError(f"due: an area of {rows} bytes of rows and {shifts} of shifts")
    total = sum(rows + shifts for _, rows, shifts in due)
    if total > TABLE_BYTES_MAX or len(due) > TABLES_MAX:
        raise ValueError(f"due: {len(due)} areas of {total} bytes; at most {TABLES_MAX} of {TABLE_BYTES_MAX} can cross")


def _int32(data: bytes) -> array[int]:
    """Both ends are processes of one engine, on machines of the same kind."""
    found = array("i")
    found.frombytes(data)
    return found


def _little_endian(spans: array[int]) -> array[int]:
    if sys.byteorder == "big":  # pragma: no cover
        spans = spans[:]
        spans.byteswap()
    return spans


# --- rendezvous


class RankInvitation(msgspec.Struct, frozen=True):
    """Everything that the engine needs to reach one rank, and to be the only one who can. Hand it over in private."""

    rank: Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
    endpoint: Annotated[str, Meta(max_length=300)]
    rank_public: Key
    engine_public: Key
    engine_secret: Key
    capabilities: Annotated[dict[Name, Capabilities], Meta(min_length=1, max_length=TRANSPORTS_MAX)]
    has_store: bool = False  # this rank reaches a shared store

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RankInvitation:
        """ValueError names what is wrong; it never shows the secret."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not an invitation of a rank: {error}") from None
        check_endpoint(found.endpoint)
        if not all(is_public_key(key) for key in (found.rank_public, found.engine_public, found.engine_secret)):
            raise ValueError("a rank's invitation has a key that is not 40 characters of Z85")
        return found

    def __repr__(self) -> str:
        return f"RankInvitation(rank={self.rank}, endpoint={self.endpoint!r}, transports={sorted(self.capabilities)})"

    __str__ = __repr__

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("rank", self.rank), ("endpoint", self.endpoint), ("transports", sorted(self.capabilities))]


def rank_name(rank: int) -> WorkerId:
    return WorkerId(f"rank-{rank}")
