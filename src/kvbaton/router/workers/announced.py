"""Workers that announced themselves in a plain format, and several directories as one, in the router's form.

Law: who comes from an earlier directory is never displaced by one of a later: a worker of a later one whose name or URL
is taken is left out. So the directory that is trusted most stands first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvbaton.api.params import Mode
from kvbaton.api.request_ids import parse_address
from kvbaton.control.plain import AnnouncedWorker, Announcement
from kvbaton.control.rank_names import data_parallel_name
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, WorkerId
from kvbaton.router.flow.dialect_table import computes_alone, spoken_by
from kvbaton.router.workers.directory import ListedEngine, WorkerDirectory, WorkerListState

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
