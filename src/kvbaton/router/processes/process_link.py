"""The link between a router's parent and one of its children: typed messages over a UNIX socket pair.

Laws: both ends are this program, started by this operator, so a message is not judged, only bounded in what waits: a
peer that does not read loses what may be lost (`spare`), and what may not is small. The end of the link is the end of
the other process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from kvbaton.observe.flight.flight_records import Flight
from kvbaton.observe.metrics.metric_types import Exemplar
from kvbaton.observe.metrics.process_metrics import ProcessFigures
from kvbaton.processes.process_logs import LogSettings
from kvbaton.protocol.ids import PeerId
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine

WAITING_BYTES_MAX = 8 << 20
"""Of one direction; beyond it records of requests are dropped."""
_HEAD_BYTES = 4

Labels = tuple[str, ...]


class LinkMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# --- from the parent


class ChildSetup(LinkMessage, frozen=True):
    """The first message: all that a child is."""

    index: int
    processes: int
    settings: RouterSettings
    name: str
    ticket_key: bytes | None
    pages: tuple[str, ...]  # further paths that the parent answers
    listeners: tuple[int, ...]  # descriptors
    counts: int  # a descriptor
    quota_key: bytes
    logs: LogSettings
    secrets: FrontSecrets


class WorkersListed(LinkMessage, frozen=True):
    """The workers that there are now, each with its number."""

    workers: tuple[ListedEngine, ...]
    numbers: tuple[int, ...]


class StandingTold(msgspec.Struct, frozen=True, array_like=True):
    """What is held against a worker."""

    peer: PeerId
    failures: int
    suspect_until: float  # by the clock that all processes of a machine share
    is_broken: bool


class StandingsTold(LinkMessage, frozen=True):
    """Of all workers that gave cause; the others are well."""

    standings: tuple[StandingTold, ...]


class NewTicketKey(LinkMessage, frozen=True):
    key: bytes


class DrainChild(LinkMessage, frozen=True):
    """Take nothing new."""


class TellFigures(LinkMessage, frozen=True):
    """Asks for `FiguresTold` with this number."""

    number: int


class PageAnswer(LinkMessage, frozen=True):
    """To `PageAsked` with this number."""

    number: int
    status: int
    headers: dict[str, str]
    content_type: str
    body: bytes


# --- from a child


class ChildReady(LinkMessage, frozen=True):
    """It takes connections."""


class PageAsked(LinkMessage, frozen=True):
    """A client asks for what the parent answers; that it may has been seen to."""

    number: int
    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    peer: str


class CountedTimes(msgspec.Struct, frozen=True, array_like=True):
    """A histogram of one label set."""

    name: str
    labels: Labels
    counts: list[int]
    sum: float
    exemplars: list[Exemplar | None]


class CountedFigures(msgspec.Struct, frozen=True):
    """What one process has counted since it started, and its gauges."""

    in_flight: int = 0
    held_bytes: int = 0
    waiting: int = 0
    numbers: Mapping[str, int] = {}
    counters: Mapping[str, Mapping[str, int]] = {}
    waits: tuple[float, int] = (0.0, 0)
    times: tuple[CountedTimes, ...] = ()
    process: ProcessFigures = ProcessFigures()


class FiguresTold(LinkMessage, frozen=True):
    """A child's figures, and its requests under way; unasked now and then, with number 0."""

    number: int
    counted: CountedFigures
    live: tuple[Flight, ...] = ()


class RecordsTold(LinkMessage, frozen=True):
    """Records of requests."""

    level: int  # of those that ended well one in 2**level is told
    noted: tuple[Flight, ...]
    amended: tuple[Flight, ...]


class WorkerOutcome(LinkMessage, frozen=True):
    """A worker failed a request, or did its part though something was held against it."""

    peer: PeerId
    failed: bool


class TicketUnused(LinkMessage, frozen=True):
    """A ticket that nobody will use."""

    worker: ListedEngine
    ticket: str


FromParent = ChildSetup | WorkersListed | StandingsTold | NewTicketKey | DrainChild | TellFigures | PageAnswer
FromChild = ChildReady | PageAsked | FiguresTold | RecordsTold | WorkerOutcome | TicketUnused

_encode = msgspec.msgpack.Encoder().encode
read_from_parent: Callable[[bytes], FromParent] = msgspec.msgpack.Decoder(FromParent).decode
read_from_child: Callable[[bytes], FromChild] = msgspec.msgpack.Decoder(FromChild).decode


class ProcessLink(asyncio.Protocol):
    """One end. `heard` is called with each message as its bytes, `lost` once, when the other process is gone."""

    def __init__(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self.dropped = 0
        self._heard = heard
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def over(cls, end: socket.socket, heard: Callable[[bytes], None], lost: Callable[[], None]) -> ProcessLink:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(heard, lost), sock=end)
        return link

    def send(self, message: FromParent | FromChild, *, spare: bool = False) -> bool:
        """Never blocks; False where it was not sent. `spare`: it may be dropped if the other end does not read."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if spare and transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            self.dropped += 1
            return False
        data = _encode(message)
        transport.write(len(data).to_bytes(_HEAD_BYTES, "little") + data)
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) >= at + _HEAD_BYTES:
            end = at + _HEAD_BYTES + int.from_bytes(buffer[at : at + _HEAD_BYTES], "little")
            if len(buffer) < end:
                break
            self._heard(bytes(buffer[at + _HEAD_BYTES : end]))
            at = end
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()
