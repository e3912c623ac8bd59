"""A back end that asks a `StoreServer`: what one kvbaton process keeps, many use.

Laws: a call comes back within `timeout_s`, with an answer or `ServerSilent`; lost frames are nothing else. Only the
calling thread writes into its buffers, and none after it came back. One thread touches the port. At most
`values_at_once` values of a call are on their way, so queues stay short and nothing is lost to their bounds.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from kvbaton.protocol.ids import WorkerId
from kvbaton.store.store_messages import (
    Ask,
    Dial,
    Discard,
    Fetch,
    FramePort,
    Invited,
    Keep,
    Kept,
    Piece,
    Reply,
    Request,
    Told,
    encode,
    pieces,
    reply,
)

log = logging.getLogger(__name__)


class ServerSilent(Exception):
    """The server did not answer in time; the message names the next step."""


class ServedBackend:
    """Implements `Backend`; owns the port."""

    lands_late = False

    def __init__(self, port: FramePort, server: WorkerId, *, timeout_s: float = 4.0, values_at_once: int = 8) -> None:
        self.counters: Counter[str] = Counter()
        self._port = port
        self._server = server
        self._timeout_s = timeout_s
        self._values_at_once = values_at_once
        self._ids = itertools.count(1)
        self._talks: dict[int, SimpleQueue[Reply]] = {}  # who waits for what
        self._out: deque[Request] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-store-client", daemon=True)
        self._thread.start()

    def register(self, memory: memoryview) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        there: list[bool] = []

        def heard(index: int, said: Reply) -> bool:
            if isinstance(said, Told):
                there.extend(map(bool, said.there))
            return True

        self._converse([[Ask(next(self._ids), tuple(keys))]], heard)
        return there

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[str]:
        wrong = ["no answer"] * len(keys)

        def heard(index: int, said: Reply) -> bool:
            if isinstance(said, Kept):
                wrong[index] = said.wrong
            return True

        self._converse((self._keep(key, value) for key, value in zip(keys, values, strict=True)), heard)
        return wrong

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        sizes = [0] * len(keys)

        def heard(index: int, said: Reply) -> bool:
            if not isinstance(said, Piece) or said.total > into[index].nbytes or said.at != sizes[index]:
                sizes[index] = 0
                return True
            into[index][said.at : said.at + len(said.data)] = said.data
            sizes[index] += len(said.data)
            return sizes[index] == said.total

        self._converse(([Fetch(next(self._ids), key, to.nbytes)] for key, to in zip(keys, into, strict=True)), heard)
        return sizes

    def discard(self, keys: Sequence[str]) -> None:
        self._say([Discard(next(self._ids), tuple(keys))])

    def invitation(self, timeout_s: float) -> tuple[int, int, bytes]:
        """Port, number and secret of a line to the server."""
        found = 0, 0, b""

        def heard(index: int, said: Reply) -> bool:
            nonlocal found
            if isinstance(said, Invited):
                found = said.port, said.number, said.secret
            return True

        self._converse([[Dial(next(self._ids))]], heard, timeout_s)
        return found

    def close(self) -> None:
        self._stopping.set()
        self._port.wake()
        self._thread.join(self._timeout_s)

    def _keep(self, key: str, value: memoryview) -> list[Request]:
        number, total = next(self._ids), value.nbytes
        return [Keep(number, key, at, total, bytes(value[at:to])) for at, to in pieces(total)]

    def _converse(
        self,
        questions: Iterable[Sequence[Request]],
        heard: Callable[[int, Reply], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Ask all questions, some at a time; `heard(index, reply)` says whether one is answered in full."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        came: SimpleQueue[Reply] = SimpleQueue()
        asked: dict[int, int] = {}
        coming = iter(enumerate(questions))
        try:
            while True:
                for index, said in itertools.islice(coming, self._values_at_once - len(asked)):
                    asked[said[0].id] = index
                    self._talks[said[0].id] = came
                    self._say(said)
                if not asked:
                    return
                answer = came.get(timeout=max(0.0, until - time.monotonic()))
                if answer.id in asked and heard(asked[answer.id], answer):
                    del asked[answer.id], self._talks[answer.id]
        except Empty:
            self.counters["silent"] += 1
            raise ServerSilent(f"store {self._server} did not answer in {timeout_s:.1f} s; is it running?") from None
        finally:
            for number in asked:
                self._talks.pop(number, None)

    def _say(self, said: Sequence[Request]) -> None:
        self._out.extend(said)
        self._port.wake()

    # --- the port's thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:
                log.exception("[store-fault] the store's client failed at one thing; going on")
                self._stopping.wait(0.05)
        self._port.close()

    def _turn(self) -> None:
        while self._out:
            if not self._port.send(self._server, encode(self._out.popleft())):
                self.counters["unknown_server"] += 1
        for worker, frame in self._port.receive():
            said = reply(frame) if worker == self._server else None
            if said is None:
                self.counters["malformed"] += 1
            elif (waiting := self._talks.get(said.id)) is not None:
                waiting.put(said)
        self._port.wait(None)
