"""Observability of one engine: records of its handoffs, metrics derived from them, files, spans and reports.

Law: observation delays no handoff: records are made on the node's thread and handed on; files and spans have their own
threads; a report is made when the registry's client asks.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvbaton import __version__
from kvbaton.node.node import Node
from kvbaton.observe.flight.dumps import Dumps, default_directory
from kvbaton.observe.flight.flight_records import DELIVERED, QUIET, Flight
from kvbaton.observe.flight.recorder import KEPT_MAX, Recorder
from kvbaton.observe.metrics import handoff_metrics as figures
from kvbaton.observe.metrics.handoff_metrics import HandoffMetrics
from kvbaton.observe.tracing.export import SpanExport
from kvbaton.protocol.ids import PeerId

More = Callable[[], Mapping[str, float]]
_COUNTED = (
    "bytes_total", "copies_total", "leases_total", "leases_expired_total", "commits_stale_total",
    "cache_resets_total", "cache_reset_blocks_total",
)  # fmt: skip


def dump_on_signal(dumps: Dumps) -> bool:
    """SIGUSR2 dumps all records, if the signal is unused and this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGUSR2, lambda *_: dumps.ask())
    return True


class NodeObservation:
    """Made before the node, which gets its recorder; `begin` when the node exists."""

    def __init__(
        self,
        me: PeerId,
        *,
        directory: str = "",
        spans: SpanExport | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.recorder = Recorder(me)
        self.handoffs = HandoffMetrics()
        self.dumps = Dumps(Path(directory) if directory else default_directory(), me.worker, self.flights)
        self._keeps_failures = bool(directory)  # without a directory only requested dumps are written
        self._spans = spans
        self._clock = clock
        self._wall = wall
        self._node: Node | None = None
        self._more: More = dict

    def begin(self, node: Node, more: More = dict) -> None:
        """`more`: gauges of the engine itself, by name. Called on the thread that asks for a report."""
        self._node, self._more = node, more
        self.recorder.on_flight.append(self.handoffs.observe)
        if self._keeps_failures:
            self.recorder.on_flight.append(self.dumps.on_flight)
        if self._spans is not None:
            self.recorder.on_flight.append(self._spans.take)

    def flights(self) -> Iterator[Flight]:
        """All records, oldest first."""
        over = {id(each): each for each in (*self.recorder.last(KEPT_MAX, failed=True), *self.recorder.last(KEPT_MAX))}
        yield from sorted((*over.values(), *self.recorder.under_way()), key=lambda each: each.began)

    def report(self) -> bytes | None:
        """For the router: the current state, and the handoffs since the last report."""
        if self._node is None:
            return None
        ledger = self._node.ledger
        told = {name: float(value) for name, value in figures.gauges(ledger, self._clock()).items()}
        counted = figures.counters(ledger, {})
        told |= {name: float(value) for name in _COUNTED if isinstance(value := counted[name], int)}
        ends = counted["ends_total"]
        assert isinstance(ends, dict)
        told["handoffs_total"] = float(sum(ends.values()))
        told["delivered_total"] = float(ends.get(DELIVERED, 0))
        told["failed_total"] = float(sum(count for end, count in ends.items() if end not in (DELIVERED, *QUIET)))
        told["pins"] = float(self._node.doorway.pinned_blocks)
        links = {
            str(link.worker): link.transport.name
            for link in list(ledger.consumer.links.by_worker.values())
            if link.transport is not None
        }
        return self.recorder.report(self._wall(), {**told, **self._more()}, links, __version__, socket.gethostname())

    def close(self) -> None:
        self.dumps.close()
        if self._spans is not None:
            self._spans.close()
