"""Directories of workers: announced in a plain format, listed by registries, several as one, and the full marked.

Workers that announced themselves, and several directories as one, in the router's form.

Law: who comes from an earlier directory is never displaced by one of a later: a worker of a later one whose name or URL
is taken is left out. So the directory that is trusted most stands first.

Workers as registries list them, in the form that the router chooses from.

Law: one that has no HTTP address is listed and never asked.

Workers that say they are full: a directory that marks them, by their own reports.

Laws: a worker speaks for itself alone, in the life that is listed, and its word is forgotten after `FULL_S`: one that
went silent is the registry's to judge. "Full" is advice: whoever is full is asked after the others, never not at all,
so that no report takes a cluster out of service.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from kvbaton.api.params import CONTROL_AFTER_BOOTSTRAP, SGLANG, HistoryWay, Mode
from kvbaton.api.request_ids import parse_address
from kvbaton.control.addressing import split_endpoint
from kvbaton.control.keyring import data_parallel_name
from kvbaton.control.plain import AnnouncedWorker, Announcement
from kvbaton.control.registry import RosterEntry, WorkerState
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, Incarnation, PeerId, WorkerId
from kvbaton.router.flow.dialect_table import computes_alone, spoken_by
from kvbaton.router.workers.directory import ALL_MODES, ListedEngine, WorkerDirectory, WorkerListState

RANKS_LISTED_MAX = 256
"""Of all workers together: anybody may announce, and pairs are as many as the ranks of P times those of D."""
_ROLES: dict[str, Literal["prefill", "decode"]] = {"P": "prefill", "D": "decode"}


class _Listener(Protocol):
    def workers(self) -> tuple[AnnouncedWorker, ...]: ...


class AnnouncedDirectory:
    """A directory over `PlainListener`, whose list is a new tuple whenever it changes."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener
        self._listed: tuple[AnnouncedWorker, ...] = ()
        self._workers: tuple[ListedEngine, ...] = ()

    def snapshot(self) -> Sequence[ListedEngine]:
        listed = self._listener.workers()
        if listed is not self._listed:
            ranks_max = max(1, RANKS_LISTED_MAX // max(1, len(listed)))
            self._listed, self._workers = listed, tuple(rank for each in listed for rank in _ranks(each, ranks_max))
        return self._workers


class Directories:
    """Several directories as one: each in its order, one after the other."""

    def __init__(self, *parts: WorkerDirectory) -> None:
        self._parts = parts
        self._found: tuple[tuple[ListedEngine, ...], ...] = ()
        self._workers: tuple[ListedEngine, ...] = ()

    def snapshot(self) -> Sequence[ListedEngine]:
        """The same tuple while no part has changed."""
        found = tuple(tuple(part.snapshot()) for part in self._parts)
        if found != self._found:  # the same tuples are not looked into
            self._found, self._workers = found, _merged(found)
        return self._workers


def worker_name(announcement: Announcement) -> WorkerId:
    """A legal name, different for different keys: `P-10.0.0.1-8100`, and for IPv6 `P-_fe80__1_-8100`.

    No host name begins with `_`, so neither that form nor the digest of a long host name can be mistaken for one.
    """
    host, _, port = announcement.http_address.rpartition(":")
    name = f"{announcement.role}-{host.translate(_LEGAL)}-{port}"
    if len(name) > WORKER_ID_CHARS_MAX:
        digest = hashlib.sha256(host.encode()).hexdigest()
        name = f"{announcement.role}-_{host[:16]}_{digest[:32]}-{port}"
    return WorkerId(name)


_LEGAL = str.maketrans("[:]", "___")


def _worker(listed: AnnouncedWorker) -> ListedEngine:
    told = listed.announcement
    dialect, mode = spoken_by(told.fleet)
    return ListedEngine(
        worker_name(told),
        _ROLES[told.role],
        f"http://{told.http_address}",
        listed.incarnation,
        (mode,),
        state=WorkerListState.SUSPECT if listed.suspect else WorkerListState.SERVING,
        dialect=dialect,
        address=str(parse_address(told.zmq_address)),
        tp_size=told.tp_size,
        computes_alone=computes_alone(told.fleet, told.role),
    )


def _ranks(listed: AnnouncedWorker, ranks_max: int) -> list[ListedEngine]:
    """A worker, or each of its data-parallel ranks where both legs of a request must name one.

    That is where P writes. Where D reads, P's answer says which rank has the KV, and any rank of D may come for it.
    """
    worker, size = _worker(listed), listed.announcement.dp_size
    if size == 1 or Mode.PULL in worker.modes:
        return [worker]
    return [
        msgspec.structs.replace(worker, name=data_parallel_name(worker.name, rank), dp_rank=rank, dp_size=size)
        for rank in range(min(size, ranks_max))
    ]


def _merged(parts: Sequence[Sequence[ListedEngine]]) -> tuple[ListedEngine, ...]:
    merged: list[ListedEngine] = []
    for part in parts:
        urls = {worker.url for worker in merged}
        names = {worker.name for worker in merged}
        merged += [worker for worker in part if worker.name not in names and (not worker.url or worker.url not in urls)]
    return tuple(merged)


class _Registry(Protocol):
    def workers(self) -> tuple[RosterEntry, ...]: ...
    def discard(self, worker: WorkerId, incarnation: Incarnation, tickets: Sequence[str]) -> int: ...
    def show(self, worker: WorkerId, incarnation: Incarnation, ids: Sequence[str]) -> bool: ...


class RegistryDirectory:
    """A directory over `RegistryServer` or `RegistryReaders`: a new tuple whenever it changes. Never blocks."""

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self._entries: tuple[RosterEntry, ...] = ()
        self._workers: tuple[ListedEngine, ...] = ()

    def snapshot(self) -> Sequence[ListedEngine]:
        entries = self._registry.workers()
        if entries is not self._entries:
            self._entries, self._workers = entries, tuple(map(_registered, entries))
        return self._workers

    def discard(self, worker: ListedEngine, ticket: str) -> None:
        """Have P told that nobody will use this ticket. What cannot be told is released when its lease runs out."""
        self._registry.discard(worker.name, worker.incarnation, (ticket,))

    def show(self, worker: str, incarnation: int, ids: Sequence[str]) -> bool:
        """Have a worker tell of these ids at once; False if it cannot be asked."""
        return self._registry.show(WorkerId(worker), Incarnation(incarnation), ids)


def _registered(entry: RosterEntry) -> ListedEngine:
    told = entry.registration
    modes = tuple(mode for mode in Mode if mode in told.modes)
    found = ListedEngine(
        told.worker,
        told.role,
        f"http://{told.http_address}" if told.http_address else "",
        told.incarnation,
        modes if told.modes else ALL_MODES,
        told.transports,
        told.compat_digest,
        _state(entry),
        told.host,
        tp_size=told.tp_size,
        dp_rank=told.dp_rank,
        dp_size=told.dp_size,
        continues=_continues(told.continues),
        context_tokens=told.context_tokens,
    )
    return found if SGLANG not in told.modes else _of_sglang(found, told.control_endpoint)


def _of_sglang(found: ListedEngine, control_endpoint: str) -> ListedEngine:
    """Its server is SGLang's: D reads behind P, by SGLang's own words, and neither answers a prompt alone."""
    host, port = split_endpoint(control_endpoint)
    bootstrap = port - CONTROL_AFTER_BOOTSTRAP
    address = f"[{host}]:{bootstrap}" if ":" in host else f"{host}:{bootstrap}"
    return msgspec.structs.replace(
        found, modes=(Mode.STREAM,), dialect=SGLANG, address=address, computes_alone=False, continues=HistoryWay.NONE
    )


def _continues(told: str) -> HistoryWay:
    """A way that a later release may have, and this router does not know, is none."""
    return HistoryWay(told) if told in list(HistoryWay) else HistoryWay.NONE


def _state(entry: RosterEntry) -> WorkerListState:
    if entry.draining:
        return WorkerListState.DRAINING  # also if it is silent: it will not come back
    if not entry.registration.http_address:
        return WorkerListState.NO_HTTP
    return WorkerListState.SERVING if entry.state is WorkerState.READY else WorkerListState.SUSPECT


FULL_S = 5.0
"""Reports come twice a second."""
GAUGE = "full"
NOTED_MAX = 4096
LOOK_S = 0.25
"""How often it is looked whether a word is to be forgotten, while there is any."""


class FullWorkers:
    """`heard` is called on the registry's thread, `snapshot` on the router's."""

    def __init__(self, inner: WorkerDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._until: dict[PeerId, float] = {}
        self._listed: object = None
        self._full: frozenset[PeerId] = frozenset()
        self._changes_at = 0.0  # when the next word is forgotten, or at once
        self._workers: tuple[ListedEngine, ...] = ()

    def heard(self, worker: WorkerId, incarnation: Incarnation, gauges: Mapping[str, float]) -> None:
        peer = PeerId(worker, incarnation)
        if gauges.get(GAUGE, 0.0) > 0.0:  # false where it is no number
            if peer not in self._until and len(self._until) >= NOTED_MAX:
                return
            is_news = peer not in self._full
            self._until[peer] = self._clock() + FULL_S
        else:
            is_news = self._until.pop(peer, None) is not None
        if is_news:
            self._changes_at = 0.0

    def snapshot(self) -> Sequence[ListedEngine]:
        """The same tuple while nothing has changed."""
        listed, now = self._inner.snapshot(), self._clock()
        if listed is self._listed and now < self._changes_at:
            return self._workers
        self._changes_at = math.inf  # before the look: what is heard meanwhile is looked at again
        for peer, until in list(self._until.items()):
            if until <= now:
                self._until.pop(peer, None)
        full = frozenset(self._until)
        if full and self._changes_at:  # nothing was heard meanwhile
            self._changes_at = now + LOOK_S
        if listed is not self._listed or full != self._full:
            self._listed, self._full = listed, full
            self._workers = tuple(_marked(worker, worker.peer in full) for worker in listed)
        return self._workers


def _marked(worker: ListedEngine, full: bool) -> ListedEngine:
    return worker if worker.full is full else msgspec.structs.replace(worker, full=full)
