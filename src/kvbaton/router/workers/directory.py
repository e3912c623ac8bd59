"""The directory of workers, from a registry or from a static list.

Law: an address comes from here and from nowhere else; no request and no answer can add one.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvbaton.api.params import HistoryWay, Mode
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

OWN = "kvbaton"
"""Dialect of tickets in `kv_transfer_params`; what P answers goes to D as it came, as with vLLM's NIXL connector."""
ALL_MODES: tuple[Mode, ...] = tuple(Mode)


class WorkerListState(enum.StrEnum):
    """What is known of a worker's health."""

    SERVING = "serving"
    SUSPECT = "suspect"  # missed pings or failed a request: asked only when nobody else is there
    BROKEN = "broken"  # failed several in a row: never asked, but probed
    DRAINING = "draining"  # never asked; it leaves when it has nothing left to do
    NO_HTTP = "no_http"  # never asked: it is inside another server, and only its peers speak with it


class ListedEngine(msgspec.Struct, frozen=True, dict=True):
    """One worker in one of its lives. Its name as a peer is made once: every request asks for it a dozen times."""

    name: WorkerId
    role: Literal["prefill", "decode", "both"]
    url: str  # http://host:port; "" where it is never asked
    incarnation: Incarnation = Incarnation(0)
    modes: tuple[Mode, ...] = ALL_MODES
    transports: tuple[str, ...] = ()  # none named: unknown, so not compared
    compat: str = ""  # digest of what shapes the KV; "" is unknown
    state: WorkerListState = WorkerListState.SERVING
    host: str = ""  # workers that name the same can share memory; "" is unknown
    dialect: str = OWN  # its name in `dialect_table.DIALECTS`
    address: str = ""  # as it stands in request ids of the other dialects
    tp_size: int = 1
    dp_rank: int = 0  # which of the engines behind its URL it is
    dp_size: int = 1  # how many those are, at least: with several a request names the one that it is for
    full: bool = False  # it says that it has no room: asked after those that have
    computes_alone: bool = True  # a prompt that comes without a handoff; else what it answers to one is wrong
    continues: HistoryWay = HistoryWay.NONE  # how it goes on with an answer that another began
    context_tokens: int = 0  # of prompt and answer, where a first token of P may be told and D goes on; 0: not

    @functools.cached_property
    def peer(self) -> PeerId:
        return PeerId(self.name, self.incarnation)

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether it has registered as one of this cluster: it may be shown tokens, and told of spans."""
        return self.dialect == OWN and bool(self.incarnation)

    @property
    def prefills(self) -> bool:
        return self.role != "decode"

    @property
    def decodes(self) -> bool:
        return self.role != "prefill"


class WorkerDirectory(Protocol):
    """Where the router learns of workers. Never blocks."""

    def snapshot(self) -> Sequence[ListedEngine]:
        """All that are known now, in a stable order."""


class StaticDirectory:
    """A list that was given at the start."""

    def __init__(self, workers: Sequence[ListedEngine]) -> None:
        self._workers = tuple(workers)

    def snapshot(self) -> Sequence[ListedEngine]:
        return self._workers
