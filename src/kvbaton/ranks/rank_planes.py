"""One transport of a rank as its host drives it: commands in, news out.

Laws: every `Submit` gets one end, also one that the transport had no room for or raised at. Copies that wait for room
are started in order, and end with their peer: a disconnect, a fence, a cancel or a close does not wait for them. No
exception of the transport leaves this module. A stop, a fence or a goodbye at which the transport raised is retried,
and so is polling, as the node does with a transport of its own process: the engine waits for them, and cannot know that
they failed. Those of a peer come before its next endpoint, or there is none.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import cast

from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.ranks.rank_messages import (
    DETAIL_CHARS_MAX,
    ENDPOINT_BYTES_MAX,
    TABLE_BYTES_MAX,
    Cancel,
    Close,
    Command,
    ConnectFailed,
    Fence,
    Fenced,
    LayOut,
    MappedBytes,
    Mint,
    Minted,
    MintFailed,
    News,
    Open,
    RankConnect,
    RankDisconnect,
    RankEnded,
    RankLend,
    RankRefusals,
    Rested,
    Submit,
    TablePart,
    copy_of,
    loan_of,
)
from kvbaton.transports.core.shared_memory import mapped_bytes_of
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    CopyRested,
    FenceEnded,
    LendingTransport,
    Transport,
    refusals_of,
)
from kvbaton.transports.core.wrapped import UnnamedTransport

log = logging.getLogger(__name__)

WAITING_MAX = 4096
"""Copies that wait for room, and copies whose tables have not all come. The engine's own bound is lower."""
AGAIN_S = 0.1
"""After this a transport that threw is asked again."""
AGAIN_MAX = 4096
"""Commands that are; the oldest is forgotten first."""


class HostedPlane:
    """A transport, its waiting copies, and its news."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.transport = transport
        self.faults = 0
        self.waiting_max = WAITING_MAX
        self._waiting: deque[Copy] = deque()
        self._parts: dict[JobId, bytearray] = {}
        self._news: list[News] = []
        self._refusals: dict[str, int] = {}  # as last told
        self._mapped_bytes = 0  # as last told
        self._closed = False
        self._again: deque[Cancel | RankDisconnect | Fence] = deque(maxlen=AGAIN_MAX)
        self._again_at: float | None = None
        self._threw = False  # since the last turn

    def carry_out(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, TablePart):
            self._gather(command)
        elif isinstance(command, Mint):
            self._do_owed(command.peer)
            self._mint(command)
        elif isinstance(command, RankConnect):
            self._welcome(command.peer)
            self._connect(command)
        elif isinstance(command, Cancel | RankDisconnect | Fence):
            self._end_waiting_for(command)
            self._stop(command)
        elif isinstance(command, LayOut):
            tables = command.tables
            self._guarded(lambda: cast(LendingTransport, self.transport).lay_out(tables))
        elif isinstance(command, RankLend):
            self._lend(command)
        elif isinstance(command, Open):
            self._open(command)
        elif isinstance(command, Close):
            self.close()

    def turn(self, now: float) -> float | None:
        """Collect events, and start copies for which there is room now; returns when to retry, if something raised."""
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            for _ in range(len(self._again)):
                self._stop(self._again.popleft())
        self._drain()
        while self._waiting and self._started(self._waiting[0]):
            self._waiting.popleft()
        if self._threw and self._again_at is None:
            self._again_at = now + AGAIN_S
        self._threw = False
        return self._again_at

    def take_news(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def note_refusals(self) -> None:
        """Report refusals since the last call, and memory mapped now."""
        self._guarded(self._count_refusals)
        self._guarded(self._count_mapped)

    def close(self) -> None:
        """Ends everything; the ends are in the news afterwards. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._parts.clear()
        self._again.clear()
        self._end_waiting(lambda copy: True, Reason.CANCELLED, "the transport was closed")
        self.shut()
        self._drain()

    def shut(self) -> None:
        """Close the transport and nothing else."""
        self._guarded(self.transport.close)

    # --- commands

    def _submit(self, command: Submit) -> None:
        try:
            copy = copy_of(command, self._parts.pop(command.job, b""))
        except ValueError as error:
            self._end(command.job, Reason.BAD_SPAN, str(error))
            return
        if self._closed:
            self._end(command.job, Reason.CANCELLED, "the transport was closed")
        elif len(self._waiting) >= self.waiting_max:
            self._end(command.job, Reason.BUSY, f"{self.waiting_max} copies wait for room in {self.name}")
        elif self._waiting or not self._started(copy):
            self._waiting.append(copy)

    def _stop(self, command: Cancel | RankDisconnect | Fence) -> bool:
        """Whether the transport accepted it; a call that raised is retried."""
        try:
            if isinstance(command, Cancel):
                self.transport.cancel(command.job)
            elif isinstance(command, RankDisconnect):
                self.transport.disconnect(command.peer)
            else:
                self.transport.fence(command.peer)
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._threw = True
            self._fault(_told(error))
            self._again.append(command)
            return False
        return True

    def _welcome(self, peer: PeerId) -> None:
        """A peer that connects again is no longer being disconnected: the new connection replaces the old one."""
        with contextlib.suppress(ValueError):
            self._again.remove(RankDisconnect(self.name, peer))

    def _owed_to(self, peer: PeerId) -> RankDisconnect | Fence | None:
        """Calls that raised, and would invalidate the endpoint that is created now if they were retried later."""
        owed = RankDisconnect(self.name, peer), Fence(self.name, peer)
        return next((command for command in owed if command in self._again), None)

    def _do_owed(self, peer: PeerId) -> None:
        while (owed := self._owed_to(peer)) is not None:
            self._again.remove(owed)
            if not self._stop(owed):
                return

    def _lend(self, command: RankLend) -> None:
        try:
            loan = loan_of(command, self._parts.pop(command.job, b""))
        except ValueError as error:
            self._end(command.job, Reason.BAD_SPAN, str(error))
            return
        try:
            cast(LendingTransport, self.transport).lend(loan)
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._end(command.job, Reason.TRANSFER_FAILED, _told(error))

    def _open(self, command: Open) -> None:
        transport = self.transport
        if isinstance(transport, UnnamedTransport):
            self._guarded(lambda: transport.open(command.me))
        else:
            self._fault(f"named {command.me}, but it was constructed with a name")

    def _gather(self, command: TablePart) -> None:
        """At a bound the table stays incomplete, and its `Submit` or `RankLend` is refused."""
        found = self._parts.get(command.job, b"")
        if self._closed or len(self._parts) >= self.waiting_max or len(found) + len(command.table) > TABLE_BYTES_MAX:
            self._fault(f"the table of job {command.job} beyond the bounds")
            return
        self._parts.setdefault(command.job, bytearray()).extend(command.table)

    def _started(self, copy: Copy) -> bool:
        """Whether the transport has accepted the copy, or it has ended here."""
        try:
            return self.transport.submit(copy)
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._end(copy.job, Reason.TRANSFER_FAILED, _told(error))
            return True

    def _mint(self, command: Mint) -> None:
        try:
            if self._owed_to(command.peer) is not None:
                raise TimeoutError(f"{command.peer} is not disconnected or fenced yet")
            endpoint = self.transport.endpoint(command.peer)
            if len(endpoint) > ENDPOINT_BYTES_MAX:
                raise ValueError(f"an endpoint of {len(endpoint)} bytes; at most {ENDPOINT_BYTES_MAX} are allowed")
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._news.append(MintFailed(self.name, command.ask, _told(error)))
        else:
            self._news.append(Minted(self.name, command.ask, endpoint))

    def _connect(self, command: RankConnect) -> None:
        try:
            self.transport.connect(command.peer, command.endpoint)
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._news.append(ConnectFailed(self.name, command.peer, _told(error)))

    # --- news

    def _drain(self) -> None:
        try:
            self._collect()
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._threw = True
            self._fault(_told(error))

    def _collect(self) -> None:
        for event in self.transport.drain():
            if isinstance(event, CopyEnded):
                self._news.append(RankEnded.of(self.name, event))
            elif isinstance(event, CopyRested):
                self._news.append(Rested.of(self.name, event))
            elif isinstance(event, FenceEnded):
                self._news.append(Fenced(self.name, event.peer))
            else:
                self._news.append(ConnectFailed(self.name, event.peer, event.detail[:DETAIL_CHARS_MAX]))

    def _count_refusals(self) -> None:
        found = refusals_of(self.transport)
        if found != self._refusals:
            self._refusals = found
            self._news.append(RankRefusals(self.name, found))

    def _count_mapped(self) -> None:
        found = mapped_bytes_of(self.transport)
        if found != self._mapped_bytes:
            self._mapped_bytes = found
            self._news.append(MappedBytes(self.name, found))

    def _end(self, job: JobId, reason: Reason, detail: str) -> None:
        self._news.append(RankEnded(self.name, job, reason, True, detail[:DETAIL_CHARS_MAX]))

    def _end_waiting_for(self, command: Cancel | RankDisconnect | Fence) -> None:
        if isinstance(command, Cancel):
            self._end_waiting(lambda copy: copy.job == command.job, Reason.CANCELLED, "")
        elif isinstance(command, RankDisconnect):
            self._end_waiting(lambda copy: copy.peer == command.peer, Reason.PEER_GONE, "disconnected")
        else:
            self._end_waiting(lambda copy: copy.peer == command.peer, Reason.TRANSFER_FAILED, "the peer was fenced")

    def _end_waiting(self, concerned: Callable[[Copy], bool], reason: Reason, detail: str) -> None:
        ended = [copy for copy in self._waiting if concerned(copy)]
        if ended:
            self._waiting = deque(copy for copy in self._waiting if not concerned(copy))
        for copy in ended:
            self._end(copy.job, reason, detail)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._fault(_told(error))

    def _fault(self, detail: str) -> None:
        self.faults += 1
        if worth_saying(self.faults):
            log.error("[plane-fault] %s: %s (fault %d)", self.name, detail, self.faults)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
