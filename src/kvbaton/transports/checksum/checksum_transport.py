"""Any transport with end-to-end comparison of the bytes of each copy: `checksum: sample` or `full`.

When the inner transport reports that a copy has succeeded, the side that drove it asks the other side for digests of
the memory there, digests its own, and compares: what was sent with what landed, whichever way it moved. The other side
answers from a small checksum service next to its transport, which only authenticated peers can reach. Host memory is
digested by host threads, device memory by the device (`checksum_memory`, `checksum_device`).

Law: no copy succeeds unless every digest requested for it agreed. A copy whose bytes differ ends as CHECKSUM_MISMATCH;
one whose digests could not be obtained as TRANSFER_FAILED, or as UNREACHABLE if the service cannot be reached.
Comparing only reads, so whatever ends a copy meanwhile (cancel, disconnect, fence, close) ends it at once, and at rest.
The side that drives a copy decides how much of it is compared; with `off` it compares nothing and still answers. A peer
without a checksum service is refused by `connect`.

A reader also sees a mismatch if its source reused the blocks before they were compared (an expired lease); such a copy
would have been refused as stale a moment later.
"""

from __future__ import annotations

import ipaddress
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.protocol.numbers import Number, Port
from kvbaton.security import sealing
from kvbaton.security.records import load
from kvbaton.security.sealing import SECRET_BYTES, Encrypt
from kvbaton.transports.catalogue_entry import summed
from kvbaton.transports.checksum.checksum_client import Question, SumLink, SumService
from kvbaton.transports.checksum.checksum_memory import Checksum, HostSums, Sums, described, difference, portions
from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.loans import GRACE_S, Loans
from kvbaton.transports.core.shared_memory import mapped_bytes_of
from kvbaton.transports.core.shell import CLOSED, NEW_ENDPOINT, PlaneShell
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    DeviceTransport,
    HostTransport,
    LendingTransport,
    Loan,
    PageTable,
    Spans,
    refusals_of,
)
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.tcp.tcp_client import TcpRoute

CLOSE_S = 2.0


class SumConfig(msgspec.Struct, frozen=True):
    """Addresses are numeric, so that nothing ever waits for a resolver."""

    mode: Checksum = Checksum.FULL
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""  # what peers connect to, when `host` is a wildcard
    threads: int = 1  # that digest; one does 6 GB/s of 16 KiB segments, and two hardly more
    copies_max: int = 1024
    answer_s: float = 10.0  # a service that answers nothing for this long has failed
    dial_deadline_s: float = 5.0
    strangers_max: int = 64
    pure_python: bool = False
    encrypt: Encrypt = "auto"  # unless both ends are loopback addresses: digests tell whether a guess is right

    def __post_init__(self) -> None:
        host = ipaddress.ip_address(self.host)
        if (ipaddress.ip_address(self.advertise) if self.advertise else host).is_unspecified:
            raise ValueError(f"peers cannot connect to {self.advertise or host}: set advertise to this host's address")
        if min(self.threads, self.copies_max, self.strangers_max) < 1 or min(self.answer_s, self.dial_deadline_s) <= 0:
            raise ValueError(
                f"threads, copies_max, strangers_max, answer_s and dial_deadline_s must be positive: {self}"
            )
        sealing.check(self.encrypt, self.advertise or self.host)

    @property
    def must_seal(self) -> bool:
        """Whether this side requires encryption, with any peer."""
        return sealing.is_required(self.encrypt, self.advertise or self.host)


class SummedTransport(PlaneShell[SumLink]):
    """See `base.Transport`. Threads besides the inner transport's: one that asks and answers, and those of `sums`."""

    def __init__(
        self,
        inner: HostTransport | DeviceTransport,
        me: PeerId,
        config: SumConfig | None = None,
        sums: Sums | None = None,
    ) -> None:
        """`sums` digests the kind of memory that `inner` moves; without it, host memory."""
        self._config = config = config or SumConfig()
        self.capabilities = summed(inner.capabilities)
        super().__init__(me, config.copies_max, config.pure_python)
        self._inner = inner
        self._sums: Sums = sums or HostSums(f"kvbaton-digest-{me}", config.threads)
        self._comparisons: dict[JobId, Comparison] = {}
        self._loop = SocketLoop(f"kvbaton-sums-{me}")
        limits = config.strangers_max, config.dial_deadline_s
        self._loans = Loans(self._mover, self._loan_ended, partial(self._loop.call_later, GRACE_S))
        self._lent: dict[JobId, int] = {}  # how many of the two, inner transport and service, still hold it
        self._unwritten: dict[JobId, int] = {}  # of loans that the inner transport has released, as it said
        asked = self._loans if inner.capabilities.enforces else None
        self._service = SumService(me, self._loop, self._sums, self._mover, asked, *limits, config.encrypt)
        if config.must_seal:
            load()
        inner.set_waker(self._has_news)

    @property
    def refusals(self) -> Mapping[str, int]:
        """Of the checksum service and, if it counts them, of the inner transport's own port."""
        return refusals_of(self._service, self._inner)

    @property
    def mapped_bytes(self) -> int:
        return mapped_bytes_of(self._inner)

    def register(self, region: int, memory: Any) -> None:
        """Of the kind that the inner transport moves."""
        self._inner.register(region, memory)
        self._sums.add(region, memory)
        self._loans.add_region(region, memory.nbytes)

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        self._loans.lay_out(tables)
        cast(LendingTransport, self._inner).lay_out(tables)

    def lend(self, loan: Loan) -> None:
        with self._jobs:
            self._lent[loan.job] = 2
        self._loans.lend(msgspec.structs.replace(loan, due=()))  # digests are read, whatever they are of
        cast(LendingTransport, self._inner).lend(loan)

    def endpoint(self, peer: PeerId) -> bytes:
        """The inner transport's, and the checksum service's. Listens from the first call on."""
        inner, config = self._inner.endpoint(peer), self._config
        port = self._service.listen(config.host, config.port)
        secret = self._service.keyring.mint(peer)
        seals = INSISTS if config.must_seal else CAN if sealing.can_seal() else CANNOT
        there = SumEndpoint(config.advertise or config.host, port, secret, inner, seals)
        return pack(there, self._sums.kind)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """ValueError, naming `checksum`, for a peer without a checksum service; and as of any encrypted connection."""
        there = parse(peer, endpoint, self._sums.kind)
        insists, able = there.seals == INSISTS, there.seals != CANNOT
        sealed = sealing.agree(str(peer), self._config.encrypt, there.host, insists, able)
        if sealed:
            load()
        self._inner.connect(peer, there.inner)
        address, limit_s = (there.host, there.port), self._config.dial_deadline_s
        route = TcpRoute(self._me, peer, address, there.secret, {}, 0, limit_s, sealed)
        with self._jobs:
            old = self._links.get(peer)
            if old is not None and old.there == route:
                return
            self._links[peer] = SumLink(route, self._loop, self._config.answer_s)
            if old is not None:
                self._end_comparisons(peer, *NEW_ENDPOINT)
                self._loop.call(partial(old.shut, "the peer has a new endpoint"))

    def disconnect(self, peer: PeerId) -> None:
        self._service.shut_out(peer)
        self._loans.forget(peer)
        super().disconnect(peer)
        self._inner.disconnect(peer)

    def submit(self, copy: Copy) -> bool:
        with self._jobs:
            if self._jobs.find(copy.job) is not None:
                raise ValueError(f"job {copy.job} is already in flight")
            if not self._jobs.has_room or not self._inner.submit(copy):
                return False
            self._jobs.accept(copy)
        return True

    def cancel(self, job: JobId) -> None:
        super().cancel(job)
        self._loans.take_back(job)
        self._inner.cancel(job)

    def fence(self, peer: PeerId) -> None:
        """As the inner transport's; and `peer` gets no more digests until it has a new endpoint."""
        self._inner.fence(peer)
        self._service.shut_out(peer)
        with self._jobs:
            self._end_comparisons(peer, Reason.TRANSFER_FAILED, "the peer was fenced")

    def _retire(self, link: SumLink, detail: str) -> None:
        self._loop.call(partial(link.shut, detail))

    def _wind_up(self) -> None:
        for job in self._jobs.of_peer():
            self._stop(job, self._links.get(job.copy.peer), *CLOSED)

    def _halt(self) -> bool:
        self._inner.close()
        self._loop.stop(CLOSE_S)
        self._sums.close(CLOSE_S)
        self._loans.close()
        self._collect()
        for job in self._jobs.of_peer():
            job.lost = True  # the inner transport did not report how it ended
        return False  # memory is the inner transport's

    def _has_news(self) -> None:
        """Called by the inner transport, on any of its threads."""
        self._loop.call(self._collect)

    def _collect(self) -> None:
        """Process the ends of the inner transport's copies. On the loop, and once more when it has ended."""
        with self._jobs:
            for event in self._inner.drain():
                job = self._jobs.find(event.job) if isinstance(event, CopyEnded) else None
                if not isinstance(event, CopyEnded):
                    self._jobs.post(event)
                elif job is not None:
                    self._landed(job, event)
                elif event.job in self._lent:
                    self._loan_ended(event)

    def _loan_ended(self, event: CopyEnded) -> None:
        """The inner transport, or the service, has released a loan."""
        with self._jobs:
            self._lent[event.job] -= 1
            if event.unwritten is not None:
                self._unwritten[event.job] = event.unwritten
            if not self._lent[event.job]:
                del self._lent[event.job]
                unwritten = self._unwritten.pop(event.job, None)
                self._jobs.loan_ended(msgspec.structs.replace(event, unwritten=unwritten))

    def _landed(self, job: CopyJob, event: CopyEnded) -> None:
        """The inner transport is done with `job`. If it succeeded and was not cancelled, its bytes are compared."""
        # The inner transport's result comes first: bytes that did not land need no comparison. A reason noted by
        # `_stop` while they moved counts only now, because until now the copy was not at rest.
        if event.reason is not None:
            job.reason, job.detail = event.reason, event.detail
        job.lost = not event.at_rest
        if job.reason is not None or self._config.mode is Checksum.OFF:
            self._jobs.settle(job)
            return
        try:
            self._compare(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the copy has an end
            self._comparisons.pop(job.copy.job, None)
            self._jobs.fail(job, Reason.TRANSFER_FAILED, f"cannot be compared: {error!r}")

    def _compare(self, job: CopyJob) -> None:
        copy, bounds = job.copy, self._sums.portioning
        link = self._links.get(copy.peer)
        if link is None or self._sums.size_of(copy.local_region) is None:
            self._jobs.fail(job, Reason.PEER_GONE, "disconnected before its bytes could be compared")
            return
        # An empty copy also sends a query, for nothing: it shows a pair that the transport can be opened, checksums
        # included.
        found = portions(copy, self._config.mode, bounds.piece_bytes, bounds.part_bytes) or [array("q")]
        comparison = self._comparisons[copy.job] = Comparison(job, found)
        fail = partial(self._failed, comparison)
        link.ask(
            Question(job, spans, partial(self._heard, comparison, index), fail) for index, spans in enumerate(found)
        )
        for index, spans in enumerate(found):
            self._sums.digest(copy.local_region, spans, 3, job.halt, partial(self._digested, comparison, index))

    def _digested(self, comparison: Comparison, index: int, found: bytes, problem: str) -> None:
        """On the digesting thread."""
        if problem:
            self._failed(comparison, Reason.TRANSFER_FAILED, f"cannot be digested here: {problem}")
        else:
            self._heard(comparison, index, found)

    def _heard(self, comparison: Comparison, index: int, found: bytes) -> None:
        with self._jobs:
            if comparison.job.ended:
                return
            difference = comparison.hear(index, found)
            if difference:
                self._failed(comparison, Reason.CHECKSUM_MISMATCH, difference)
            elif comparison.agrees:
                del self._comparisons[comparison.job.copy.job]
                self._jobs.settle(comparison.job)

    def _failed(self, comparison: Comparison, reason: Reason, detail: str) -> None:
        with self._jobs:
            if not comparison.job.ended:
                self._stop(comparison.job, self._links.get(comparison.job.copy.peer), reason, detail)

    def _stop(self, job: CopyJob, link: SumLink | None, reason: Reason, detail: str) -> None:
        """End a copy that is being compared; one that is being moved ends with this reason, if it succeeds, when it
        has."""
        if self._comparisons.pop(job.copy.job, None) is None:
            job.reason, job.detail = job.reason or reason, job.detail or detail
            return
        self._jobs.fail(job, reason, detail)
        if link is not None:
            self._loop.call(link.sweep)

    def _end_comparisons(self, peer: PeerId, reason: Reason, detail: str) -> None:
        for comparison in [each for each in self._comparisons.values() if each.job.copy.peer == peer]:
            self._stop(comparison.job, self._links.get(peer), reason, detail)


class Comparison:
    """One landed copy while its bytes are compared: each portion's digests, from both sides, in any order; pure.

    Law: it agrees only when both sides have given the digests of every portion and all of them were equal. The caller
    holds the lock of the jobs.
    """

    def __init__(self, job: CopyJob, portions: list[Spans]) -> None:
        self.job = job
        self.portions = portions
        self._left = len(portions)
        self._halves: dict[int, bytes] = {}  # by portion, of the side that came first

    @property
    def agrees(self) -> bool:
        return not self._left

    def hear(self, index: int, digests: bytes) -> str:
        """The difference, if it is known now; otherwise nothing."""
        first = self._halves.pop(index, None)
        if first is None:
            self._halves[index] = digests
            return ""
        row = difference(first, digests)
        if row is not None:
            return described(self.job.copy, self.portions[index], row)
        self._left -= 1
        return ""


VERSION = b"sum1"
VERSIONS = {"host": VERSION, "device": b"sum2"}
"""By the kind of digest: xxh3, or what a device computes (`checksum_device`)."""

BYTES_MAX = 1024  # as in `protocol.messages.Endpoints`


CANNOT, CAN, INSISTS = range(3)


class SumEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The address of the checksum service, and the endpoint of the transport itself.

    Law: an endpoint without a checksum service is refused by name, never treated as one that needs no checking; and so
    is one whose digests are of another kind than ours (`checksum_memory`), which would always differ.
    """

    host: str
    port: Port
    secret: bytes
    inner: bytes
    seals: Number = CANNOT  # versions that could not encrypt omit it


def is_summed(endpoint: bytes) -> bool:
    """Whether the sender of `endpoint` has a checksum service."""
    return endpoint.startswith(tuple(VERSIONS.values()))


def pack(endpoint: SumEndpoint, kind: str = "host") -> bytes:
    packed = VERSIONS[kind] + msgspec.msgpack.encode(endpoint)
    if len(packed) > BYTES_MAX:
        raise ValueError(
            f"checksum: the endpoint is {len(packed)} bytes with its checksum service, at most {BYTES_MAX} are allowed"
        )
    return packed


def parse(peer: PeerId, data: bytes, kind: str = "host") -> SumEndpoint:
    """ValueError for anything but an endpoint with a checksum service of that kind."""
    if not is_summed(data):
        raise ValueError(
            f"checksum: {peer} offers no checksums, so its bytes cannot be compared with ours; "
            "set checksum on both sides, or to off on both"
        )
    if not data.startswith(VERSIONS[kind]):
        raise ValueError(
            f"checksum: {peer} has its digests of another kind of memory than ours, {kind} memory, and they cannot be "
            "compared; keep the caches of both sides in the same kind of memory, or set checksum to off on both"
        )
    try:
        there = msgspec.msgpack.decode(data[len(VERSION) :], type=SumEndpoint)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint with a checksum service: {error}") from None
    ipaddress.ip_address(there.host)
    if not 0 < there.port < 1 << 16 or len(there.secret) != SECRET_BYTES:
        raise ValueError("the endpoint's checksum service has no usable port or secret")
    return there
