"""A transport in another process of this engine: the `Transport` that the node sees for it.

Laws, beyond those of `Transport`: memory is registered in the rank's process, and a copy that waits for a device event
is refused, since neither can cross. `submit` returns False at `COPIES_MAX` copies (or `TABLES_QUEUED_BYTES_MAX` of
their tables) whose end was not drained; other commands are bounded by what they undo or by `COMMANDS_MAX`. Only
`endpoint` waits for the rank (`Endpoints`). While the link is lost, new copies fail at once and those in flight
have ended with `at_rest=False`: their state is unknown. If the link comes back, `CopyRested` and `FenceEnded` follow
when the rank says so, and never otherwise.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.ranks.rank_messages import (
    ENDPOINT_BYTES_MAX,
    PART_BYTES_MAX,
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
    RankConnect,
    RankDisconnect,
    RankEnded,
    RankRefusals,
    Rested,
    lend_commands,
    submit_commands,
    table_bytes,
)
from kvbaton.ranks.rank_stream import Arrival
from kvbaton.transports.catalogue import endpoint_type
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.transport import (
    Capabilities,
    Copy,
    FenceEnded,
    Loan,
    OpenFailed,
    PageTable,
    TransportEvent,
)

log = logging.getLogger(__name__)

COPIES_MAX = 1024
TABLES_QUEUED_BYTES_MAX = 64 << 20
"""Of copies that have not ended; one that is larger goes alone."""

COMMANDS_MAX = 4096
"""Commands that the rank has not answered for; beyond it `connect` and `endpoint` raise."""

RESTLESS_MAX = 4096
"""Copies that ended and are not at rest. The oldest is forgotten first: what it touches then stays quarantined."""


class Uplink(Protocol):
    """The connection to one rank, as its transports use it."""

    rank: int

    @property
    def lost(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Commands that the rank is not known to have."""

    def post(self, commands: Sequence[Command]) -> None:
        """Send, in this order, after everything posted before. Never waits."""


class RemoteTransport:
    """See `base.Transport`. Called by the node's thread; the link's thread delivers the news."""

    def __init__(self, name: str, capabilities: Capabilities, link: Uplink, came: Arrival) -> None:
        """`came`: how the node's thread waits for an endpoint."""
        self.capabilities = capabilities
        self.counters: Counter[str] = Counter()  # connects_refused
        self.refusals: Mapping[str, int] = {}  # as last reported by the rank
        self.mapped_bytes = 0  # as last reported by the rank
        self.part_bytes, self.tables_bytes_max = PART_BYTES_MAX, TABLES_QUEUED_BYTES_MAX
        self.commands_max = COMMANDS_MAX
        self._name = name
        self._link = link
        self._jobs = Jobs(COPIES_MAX)
        self._tables_bytes = 0
        self._restless: Remembered[JobId, CopyJob] = Remembered(RESTLESS_MAX)
        self._endpoints = Endpoints(f"rank {link.rank} ({name})", self._mint, came)
        self._loans: set[JobId] = set()  # that the rank has not reported as ended
        self._known: set[PeerId] = set()  # peers for which the rank may hold an endpoint or a connection

    def register(self, region: int, memory: memoryview) -> None:
        raise NotImplementedError("memory is registered in the rank's process, before its RankHost starts")

    def endpoint(self, peer: PeerId) -> bytes:
        """The rank's answer, kept until `peer` is disconnected or fenced. TimeoutError: try again later."""
        return self._endpoints.get(peer)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """Problems that only the rank can detect come later: `OpenFailed` follows, and copies with `peer` end."""
        _check_endpoint(self.capabilities.name, peer, endpoint)
        self._check_room()
        self._known.add(peer)
        self._link.post([RankConnect(self._name, peer, endpoint)])

    def disconnect(self, peer: PeerId) -> None:
        self._endpoints.forget(peer)
        if peer in self._known:
            self._known.discard(peer)
            self._link.post([RankDisconnect(self._name, peer)])

    def fence(self, peer: PeerId) -> None:
        """While the link is lost this does not end: the state of the rank's memory is unknown.

        Each ends by itself, in the order in which they were started: the ledger counts on it.
        """
        if not self.capabilities.can_fence:
            raise NotImplementedError(f"{self._name} cannot fence: see capabilities.can_fence")
        self._endpoints.forget(peer)
        self._link.post([Fence(self._name, peer)])

    def submit(self, copy: Copy) -> bool:
        commands = submit_commands(self._name, copy, self.part_bytes)
        size = table_bytes(copy)
        with self._jobs:
            if self._tables_bytes and self._tables_bytes + size > self.tables_bytes_max:
                return False
            job = self._jobs.accept(copy)
            if job is None:
                return False
            if self._link.lost:
                self._jobs.fail(job, Reason.TRANSFER_FAILED, f"rank {self._link.rank} is lost; nothing was started")
                return True
            job.live = 1
            self._tables_bytes += size
            self._link.post(commands)
        return True

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        self._link.post([LayOut(self._name, tuple(tables))])

    def lend(self, loan: Loan) -> None:
        """While the link is lost the rank's state is unknown: its loans end when it says so, or never."""
        commands = lend_commands(self._name, loan, self.part_bytes)
        with self._jobs:
            self._loans.add(loan.job)
        self._link.post(commands)

    def cancel(self, job: JobId) -> None:
        with self._jobs:
            if job in self._loans:
                self._link.post([Cancel(self._name, job)])
                return
            found = self._jobs.find(job)
            if found is not None and not found.halt[0]:
                found.halt[0] = 1  # sent once
                self._link.post([Cancel(self._name, job)])

    def drain(self) -> Sequence[TransportEvent]:
        return self._jobs.drain()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._jobs.set_waker(waker)

    def close(self) -> None:
        """Returns at once; accepted copies end when the rank has closed, or is lost."""
        if self._jobs.close():
            self._link.post([Close(self._name)])

    # --- the link's thread

    def take(self, news: News) -> None:
        if isinstance(news, RankEnded):
            self._take_end(news)
        elif isinstance(news, Rested):
            job = self._restless.get(news.job)
            if job is not None and job.live:
                self._jobs.part_ended(job)
        elif isinstance(news, Fenced):
            self._jobs.post(FenceEnded(news.peer))
        elif isinstance(news, Minted | MintFailed):
            self._endpoints.take(news)
        elif isinstance(news, RankRefusals):
            self.refusals = news.counts
        elif isinstance(news, MappedBytes):
            self.mapped_bytes = news.nbytes
        elif isinstance(news, ConnectFailed):
            self.counters["connects_refused"] += 1
            self._jobs.post(OpenFailed(news.peer, news.detail))
            if worth_saying(self.counters["connects_refused"]):
                log.warning("[rank-refused] rank %d refused to reach %s: %s", self._link.rank, news.peer, news.detail)

    def on_lost(self, detail: str) -> None:
        """The state of copies in flight is unknown: they end, not at rest, and are to stop if they can be told."""
        with self._jobs:
            for job in self._jobs.of_peer():
                self.cancel(job.copy.job)
                self._abandon(job, Reason.TRANSFER_FAILED, detail)

    def _take_end(self, news: RankEnded) -> None:
        with self._jobs:
            if news.job in self._loans:
                self._loans.discard(news.job)
                self._jobs.loan_ended(news.event)
                return
            job = self._jobs.find(news.job)
            if job is None:
                job = self._restless.get(news.job)
                if job is not None and job.live and news.at_rest:
                    self._jobs.part_ended(job)
            elif news.at_rest:
                self._tables_bytes -= table_bytes(job.copy)
                self._jobs.part_ended(job, news.reason, news.detail)
            else:
                self._abandon(job, news.reason or Reason.TRANSFER_FAILED, news.detail)

    def _abandon(self, job: CopyJob, reason: Reason, detail: str) -> None:
        self._tables_bytes -= table_bytes(job.copy)
        self._jobs.abandon(job, reason, detail)
        job.copy = msgspec.structs.replace(job.copy, spans=job.copy.spans[:0], weave=None)
        self._restless.put(job.copy.job, job)

    def _mint(self, number: int, peer: PeerId) -> None:
        self._check_room()
        self._known.add(peer)
        self._link.post([Mint(self._name, number, peer)])

    def _check_room(self) -> None:
        """New obligations are refused while the rank lags behind; what ends them never is."""
        if self._link.lost:
            raise ConnectionError(f"rank {self._link.rank} is lost")
        if self._link.backlog >= self.commands_max:
            raise TimeoutError(f"rank {self._link.rank} has not acknowledged {self.commands_max} commands")


def _check_endpoint(kind: str, peer: PeerId, endpoint: bytes) -> None:
    """What can be checked without the rank; ValueError if invalid."""
    if not 0 < len(endpoint) <= ENDPOINT_BYTES_MAX:
        raise ValueError(f"an endpoint of {len(endpoint)} bytes; 1..{ENDPOINT_BYTES_MAX} expected")
    known = endpoint_type(kind)
    if known is None:
        return
    try:
        there = msgspec.msgpack.decode(endpoint, type=known)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an endpoint of {kind}: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")


ENDPOINT_WAIT_S = 0.5


class Endpoints:
    """One transport's endpoints, for a node that needs them at once. `get`, `forget` by the node, `take` by the link.

    Laws: the caller waits at most `ENDPOINT_WAIT_S`, and not at all while an earlier request is overdue, so a rank that
    stalls costs the node's thread one such wait, not one per peer. An endpoint that arrives late is kept for the next
    call; a failure is not: the next call asks again. A response to a request from before a disconnect or fence is
    dropped: the secret in it is no longer valid.
    """

    def __init__(self, whose: str, ask: Callable[[int, PeerId], None], came: Arrival) -> None:
        self._whose = whose
        self._ask = ask
        self._came = came
        self._numbers = itertools.count(1)
        self._asked: dict[PeerId, int] = {}
        self._answers: dict[PeerId, Minted | MintFailed] = {}
        self._awaited: PeerId | None = None

    def get(self, peer: PeerId) -> bytes:
        """TimeoutError: not yet; RuntimeError: the rank could not."""
        with self._came:
            patient = not self._asked
            if peer not in self._answers and peer not in self._asked:
                number = next(self._numbers)
                self._ask(number, peer)
                self._asked[peer] = number
            self._awaited = peer
            self._came.wait_for(lambda: peer in self._answers, ENDPOINT_WAIT_S if patient else 0)
            self._awaited = None
            answer = self._answers.get(peer)
            if isinstance(answer, Minted):
                return answer.endpoint
            if answer is None:
                raise TimeoutError(f"{self._whose} has not created an endpoint for {peer} yet; try again")
            del self._answers[peer]
        raise RuntimeError(f"{self._whose} could not create an endpoint for {peer}: {answer.detail}")

    def forget(self, peer: PeerId) -> None:
        with self._came:
            self._asked.pop(peer, None)
            self._answers.pop(peer, None)

    def take(self, answer: Minted | MintFailed) -> None:
        with self._came:
            for peer, number in self._asked.items():
                if number == answer.ask:
                    del self._asked[peer]
                    if isinstance(answer, Minted) or peer == self._awaited:
                        self._answers[peer] = answer
                        self._came.notify_all()
                    return
