"""A load on a router that is measured: connections that ask again as soon as they are answered.

Laws: requests and CPU time are counted over the same window, after a warm-up under the same load. A window is whole
laps, in each of which as many requests end as there are clients: a router that serves them in bursts would else be
charged for answers that were not counted, or not for some that were. Every request that was sent is accounted for: it
was answered as expected, or it is an error with a name. Every wait has a deadline, and too many errors end a load.

One HTTP answer as its bytes come, read no further than a measurement needs.

Laws: pure. It knows where an answer ends and whether it is the one that was asked for; it parses no JSON. It relies on
what the backends of this benchmark send: no body contains CR LF, so a chunked one ends where the last chunk does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from kvbaton_proof.bench.kit import cpu_meter
from kvbaton_proof.bench.kit.cpu_meter import Cpu
from kvbaton_proof.bench.router.router_backends import EVENTS, HOST, TEXT

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_UNKNOWN, _CHUNKED = -1, -2


class Answer:
    """Feed it until it says that it is complete; then `wrong` is empty or says what is."""

    __slots__ = ("_end", "_start", "data")

    def __init__(self) -> None:
        self.data = b""
        self._start = 0  # of the body
        self._end = _UNKNOWN  # in bytes from the beginning, or one of the two above

    def feed(self, data: bytes) -> bool:
        """Whether it is complete now. One without a length is complete at once, and wrong."""
        self.data = data = self.data + data if self.data else data
        if self._end == _UNKNOWN:
            head_end = data.find(b"\r\n\r\n")
            if head_end < 0:
                return False
            self._start = head_end + 4
            self._end = _end_of(data[: self._start].lower(), self._start)
        if self._end == _CHUNKED:
            return data.endswith(_LAST_CHUNK)
        return len(data) >= self._end

    @property
    def has_event(self) -> bool:
        return self._start > 0 and self.data.find(b"data: ", self._start) >= 0

    @property
    def keeps_alive(self) -> bool:
        return b"\r\nconnection: close" not in self.data[: self._start].lower()

    def wrong(self, stream: bool) -> str:
        """Why this is not the answer to a request of this benchmark; empty if it is."""
        status = self.data[9:12].decode("ascii", "replace")
        if status != "200":
            return f"status {status}"
        if self._end == self._start:
            return "no length, or no body"
        if not stream:
            return "" if self.data.find(TEXT, self._start) >= 0 else "another answer"
        body = self.data[self._start :]
        if body.count(b"data: ") != EVENTS + 1:
            body = dechunked(body)  # an event may be cut in two by a chunk's head
        events = body.count(b"data: ")
        if events != EVENTS + 1 or b"data: [DONE]" not in body:
            return f"a stream of {events} events, expected {EVENTS} and [DONE]"
        return ""


def _end_of(head: bytes, start: int) -> int:
    at = head.find(b"\r\ncontent-length:")
    if at >= 0:
        digits = head[at + 17 : head.find(b"\r\n", at + 17)].strip()
        return start + int(digits) if digits.isdigit() else start
    return _CHUNKED if b"\r\ntransfer-encoding: chunked" in head else start


def dechunked(body: bytes) -> bytes:
    """What the chunks of a complete body carry; as far as they make sense."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.find(b"\r\n", at)
        try:
            size = int(body[at:line_end].split(b";", 1)[0], 16) if line_end >= 0 else 0
        except ValueError:
            size = 0
        if size <= 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2


ERRORS_MAX = 200  # then a load is given up
CONNECTING_MAX, CONNECT_S = 64, 20.0  # at once, and for one of them
WINDOW_S_MAX = 30.0  # with its warm-up, however slow a router is
BODY = b'{"model":"m","prompt":"%s","max_tokens":16,"temperature":0%s}'
PROMPT = b"x y z " * 340
"""With the rest of the body 2.1 kB, the size that the other routers were measured with before."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A load, or (`hold_port`) as many streams as `concurrency` says, all of them open at the same moment."""

    port: int
    concurrency: int
    stream: bool = False
    window_s: float = 2.0
    warmup_s: float = 0.4
    laps_min: int = 2
    drain_s: float = 30.0  # for what is under way when the window ends
    hold_port: int | None = None
    watched: dict[str, tuple[int, ...]] = {}  # whose CPU time is told apart


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an order. `answered`, `p50_ms` and so on are of the window; `errors` and `asked` of all of it."""

    asked: int
    answered: int
    errors: dict[str, int]
    p50_ms: float | None = None
    p99_ms: float | None = None
    first_byte_p50_ms: float | None = None
    used: Cpu | None = None
    open_at_once: int | None = None


def request(stream: bool) -> bytes:
    body = BODY % (PROMPT, b',"stream":true' if stream else b"")
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


class Window:
    """The laps that count."""

    def __init__(self, order: Order) -> None:
        self.used: Cpu | None = None  # once it is over
        self.due = float("inf")  # when it may begin, then when it may end
        self.latencies_s: list[float] = []
        self.first_bytes_s: list[float] = []
        self._order = order
        self._before: Cpu | None = None  # when it began
        self._laps = 0

    def count(self, latency_s: float, first_byte_s: float) -> None:
        if self._before is not None and self.used is None:
            self.latencies_s.append(latency_s)
            self.first_bytes_s.append(first_byte_s)

    def lap(self, now: float) -> bool:
        """As many requests ended as there are clients; whether the window is over with them."""
        self._laps += 1
        if now < self.due or self.used is not None:
            return False
        if self._before is None:
            self._before, self._laps = cpu_meter.read(self._order.watched), 0
            self.due = now + self._order.window_s
        elif self._laps >= self._order.laps_min:
            self.close()
        return self.used is not None

    def close(self) -> None:
        if self._before is not None and self.used is None:
            self.used = self._before.until(cpu_meter.read(self._order.watched))


class Load:
    """Connections that ask again as soon as they are answered, until they are told to stop."""

    def __init__(self, order: Order) -> None:
        self.request = request(order.stream)
        self.is_asking = True
        self.is_connected = False  # until then nobody asks
        self.window = Window(order)
        self.errors: Counter[str] = Counter()
        self.asked = self.answered = self.under_way = self.started = 0
        self.changed = asyncio.Event()
        self._order = order
        self._connections: set[Connection] = set()
        self._dialling: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """All connections, some at a time; then all ask. A router that is busy is slow to accept, and a backlog that
        overflows costs seconds.
        """
        missing = self._order.concurrency
        while missing > 0 and self.is_asking:
            await asyncio.gather(*(self._dial() for _ in range(min(missing, CONNECTING_MAX))))
            missing -= CONNECTING_MAX
        self.is_connected = True
        for connection in list(self._connections):
            connection.ask()

    async def _dial(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(lambda: Connection(self), HOST, self._order.port)
        except OSError as error:
            self.fail(f"cannot connect: {error.strerror or type(error).__name__}")
        else:
            self._connections.add(connection)

    def redial(self, lost: Connection) -> None:
        self._connections.discard(lost)
        if self.is_asking:
            task = asyncio.create_task(self._dial())
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)

    def end(self, answer: Answer, asked_at: float, first_at: float) -> None:
        now = time.perf_counter()
        wrong = answer.wrong(self._order.stream)
        if wrong:
            self.fail(wrong)
            return
        self.answered += 1
        self.window.count(now - asked_at, first_at - asked_at)
        if self.answered % self._order.concurrency == 0 and self.window.lap(now):
            self.changed.set()

    @property
    def _is_cut_off(self) -> bool:
        return not self._connections and not self._dialling

    async def measure(self) -> None:
        """A warm-up, and then a window."""
        window = self.window
        window.due = time.perf_counter() + self._order.warmup_s
        await self.until(lambda: window.used is not None or not self.is_asking or self._is_cut_off, WINDOW_S_MAX)
        window.close()

    def fail(self, why: str) -> None:
        self.errors[why] += 1
        if self.errors.total() >= ERRORS_MAX:
            self.is_asking = False
        self.changed.set()

    async def stop(self, within_s: float) -> None:
        """Ask no more, wait for what is under way, and close."""
        self.is_asking = False
        if not await self.until(lambda: not self.under_way and not self._dialling, within_s):
            self.errors["no answer in time"] += self.under_way
        for connection in list(self._connections):
            connection.close()

    async def until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Whether it came true; it is looked at whenever something changed, and a few times a second."""
        deadline = time.perf_counter() + within_s
        while not condition():
            if time.perf_counter() > deadline:
                return False
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), 0.05)
            except TimeoutError:
                continue
        return True


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._answer: Answer | None = None
        self._asked_at = self._first_at = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if self._load.is_connected:
            self.ask()

    def ask(self) -> None:
        load = self._load
        if not load.is_asking:
            self._transport.close()
            return
        load.asked += 1
        load.under_way += 1
        self._answer = Answer()
        self._first_at = 0.0
        self._asked_at = time.perf_counter()
        self._transport.write(load.request)

    def data_received(self, data: bytes) -> None:
        answer, load = self._answer, self._load
        if answer is None:
            load.fail("bytes that were not asked for")
            return
        is_complete = answer.feed(data)
        if not self._first_at and answer.has_event:
            self._first_at = time.perf_counter()
            load.started += 1
            load.changed.set()
        if not is_complete:
            return
        self._answer = None
        load.under_way -= 1
        load.end(answer, self._asked_at, self._first_at or self._asked_at)
        if load.under_way == 0:
            load.changed.set()
        if answer.keeps_alive:
            self.ask()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer = None
            self._load.under_way -= 1
            self._load.fail("connection lost")
        self._load.redial(self)

    def close(self) -> None:
        self._answer = None
        self._transport.abort()
