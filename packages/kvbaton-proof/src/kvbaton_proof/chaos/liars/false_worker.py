"""A worker of the product that works as it should, but for one lie: what it writes, what it computes, what it answers.

`python -m kvbaton_proof.chaos.liars.false_worker LIE OPTIONS` is a worker with these options (JSON), and with that lie.

Laws: everything but the lie is the product's own code, so that whatever members prove to each other, the liar proves
too. False KV is of requests whose salt begins with `BAIT` and of no others, so that a wrong answer to another request
is never the liar's own word.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvbaton.engines.embedded import embedded_engine, embedded_worker
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.processes import process_logs
from kvbaton.protocol.ids import JobId
from kvbaton.transports import catalogue
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction, HostTransport, TransportEvent
from kvbaton.transports.core.wrapped import WrappedTransport
from kvbaton_proof.lies import lie_copies

BAIT = "bait"
LATE_S = 0.5
"""After Written was said: D decodes by then."""
KEPT = 8
_FIRST_LATE = 1 << 40
"""Job numbers of writes that are made late: the ledger's are smaller."""


class FalseWrites(WrappedTransport):
    """Another transport, on which writes are said to have ended well. `aim`: what is written of each, if anything."""

    def __init__(
        self, inner: HostTransport, aim: Callable[[Copy, Sequence[Copy]], Copy | None], after_s: float
    ) -> None:
        super().__init__(inner)
        self._aim = aim
        self._after_s = after_s
        self._ends: deque[CopyEnded] = deque()
        self._due: deque[tuple[float, Copy]] = deque()
        self._before: deque[Copy] = deque(maxlen=KEPT)
        self._jobs = _FIRST_LATE
        self._wake: Callable[[], None] = lambda: None

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._wake = waker
        super().set_waker(waker)

    def submit(self, copy: Copy) -> bool:
        if copy.direction is not Direction.WRITE:
            return self.inner.submit(copy)
        made = self._aim(copy, tuple(self._before))
        self._before.append(copy)
        if made is not None:
            self._jobs += 1
            self._due.append((time.monotonic() + self._after_s, msgspec.structs.replace(made, job=JobId(self._jobs))))
            if self._after_s:
                threading.Timer(self._after_s, self._wake).start()
        self._make_due()
        self._ends.append(CopyEnded(copy.job, None))
        self._wake()
        return True

    def drain(self) -> Sequence[TransportEvent]:
        self._make_due()
        ends, self._ends = list(self._ends), deque()
        return [*ends, *(each for each in self.inner.drain() if getattr(each, "job", 0) < _FIRST_LATE)]

    def _make_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            self.inner.submit(self._due.popleft()[1])


def _elsewhere(copy: Copy, before: Sequence[Copy]) -> Copy | None:
    """Into the blocks of an earlier handoff of the same D, which may be lent still.

    But for a byte: blocks that are written whole, with the KV of another handoff, are false KV, which is P's word.
    """
    for other in reversed(before):
        is_alike = other.spans[2::3] == copy.spans[2::3]
        if other.peer == copy.peer and is_alike and other.spans[1::3] != copy.spans[1::3]:
            spans = copy.spans[:]
            spans[1::3] = other.spans[1::3]
            spans[2] -= 1
            return msgspec.structs.replace(copy, spans=spans)
    return None


_WRITES: Mapping[str, tuple[Callable[[Copy, Sequence[Copy]], Copy | None], float]] = {
    "writes-nothing": (lambda copy, before: None, 0.0),
    "writes-half": (lambda copy, before: lie_copies.half(copy), 0.0),
    "writes-all-but-a-byte": (lambda copy, before: lie_copies.all_but_a_byte(copy), 0.0),
    "writes-one-place": (lambda copy, before: lie_copies.in_one_place(copy), 0.0),
    "writes-elsewhere": (_elsewhere, 0.0),
    "writes-late": (lambda copy, before: copy, LATE_S),
}


def _lie_of_writes(name: str) -> None:
    aim, after_s = _WRITES[name]

    def false(make: Callable[..., HostTransport], *told: Any) -> HostTransport:
        return FalseWrites(make(*told), aim, after_s)

    for plane_name, plane in catalogue.PLANES.items():
        if plane.make is not None:
            catalogue.PLANES[plane_name] = msgspec.structs.replace(plane, make=partial(false, plane.make))


def _lie_of_kv(_: str) -> None:
    """Of bait another prompt's KV is computed, and given for that of the prompt: to D, to the store, to the next P."""
    honest = embedded_engine._piece  # the one place where tokens become KV

    def piece(sequence: Any, tokens: int) -> Any:
        made = honest(sequence, tokens)
        if not sequence.request.cache_salt.startswith(BAIT):
            return made
        return msgspec.structs.replace(made, tokens=[token ^ 1 for token in made.tokens])

    setattr(embedded_engine, "_piece", piece)  # noqa: B010 - in this process only


def _lie_of_place(lie: str) -> None:
    """`names=HOST:PORT`: where the router is to send its prompts, which is not here."""
    honest = embedded_worker._registered

    def registered(worker: Any, _: str, stop: Any) -> Any:
        return honest(worker, f"http://{lie.partition('=')[2]}", stop)

    setattr(embedded_worker, "_registered", registered)  # noqa: B010 - in this process only


LIES: Mapping[str, Callable[[str], None]] = {
    **dict.fromkeys(_WRITES, _lie_of_writes),
    "false-kv": _lie_of_kv,
    "names": _lie_of_place,
}
WRITES = tuple(_WRITES)


def main(lie: str, options: str) -> int:
    LIES[lie.partition("=")[0]](lie)
    process_logs.configure(process_logs.LogSettings())
    return embedded_worker.main(msgspec.json.decode(options, type=WorkerOptions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
