"""tcp as its owner sees it: configuration, endpoints, dialling, device events, and peers that lie."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core import jobs
from kvbaton.transports.core.loans import EVERYTHING, lend_everything
from kvbaton.transports.core.transport import Copy, CopyEnded, DeviceEvent, Direction
from kvbaton.transports.net.connection_handshake import SecretRing, admit
from kvbaton.transports.net.stream_socket import FRAME_BYTES, Frame, FrameKind, FrameStatus
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpEndpoint, TcpTransport
from tests.transports.device.test_device_event_wait import Event
from tests.transports.tcp.blocking import D, P, exactly, play

SIZE = 1 << 20


@pytest.fixture
def make() -> Iterator[Callable[..., TcpTransport]]:
    made: list[TcpTransport] = []

    def create(me: PeerId = D, **options: object) -> TcpTransport:
        made.append(TcpTransport(me, TcpConfig(**options)))  # type: ignore[arg-type]
        made[-1].register(0, memoryview(bytearray(SIZE)))
        lend_everything(made[-1], D, P)
        return made[-1]

    yield create
    for transport in made:
        transport.close()


def read(job: int = 1, size: int = 64, peer: PeerId = P, after: DeviceEvent | None = None) -> Copy:
    return Copy(JobId(job), peer, Direction.READ, 0, 0, array("q", [0, 0, size]), after)


def ends(transport: TcpTransport, count: int = 1) -> list[CopyEnded]:
    seen: list[CopyEnded] = []

    def enough() -> bool:
        seen.extend(event for event in transport.drain() if isinstance(event, CopyEnded))
        return len(seen) >= count

    assert poll(enough, 20), f"only {seen}"
    return seen


# --- configuration and endpoints


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "localhost"},
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "0.0.0.0", "advertise": "example.org"},
        {"host": "0.0.0.0", "advertise": "0.0.0.0"},
        {"streams": 0},
        {"streams": 17},
        {"threads": 0},
        {"window_bytes": 0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        TcpConfig(**wrong)  # type: ignore[arg-type]


def test_a_wildcard_listener_is_dialled_at_its_advertised_address(make: Callable[..., TcpTransport]) -> None:
    p, d = make(P, host="0.0.0.0", advertise="127.0.0.1"), make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(read())
    assert ends(d)[0].reason is None


def test_an_endpoint_is_small_even_with_all_regions(make: Callable[..., TcpTransport]) -> None:
    p = make(P)
    for region in range(1, 256):
        p.register(region, memoryview(bytearray(8)))
    assert len(p.endpoint(D)) < 4096


@pytest.mark.parametrize(
    "change",
    [
        {"owner": D},
        {"owner": PeerId(P.worker, Incarnation(9))},
        {"host": "localhost"},
        {"port": 0},
        {"port": 65536},
        {"secret": b"short"},
    ],
)
def test_an_endpoint_that_cannot_be_right_is_refused(
    make: Callable[..., TcpTransport], change: dict[str, object]
) -> None:
    there = msgspec.msgpack.decode(make(P).endpoint(D), type=TcpEndpoint)
    with pytest.raises(ValueError):
        make(D).connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, **change)))


def test_a_new_endpoint_replaces_the_old_and_the_same_changes_nothing(make: Callable[..., TcpTransport]) -> None:
    p, d = make(P), make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(1)) and ends(d)[0].reason is None
    d.connect(P, p.endpoint(D))
    assert d.submit(read(2)) and ends(d)[0].reason is None
    p.disconnect(D)
    assert poll(lambda: d.submit(read(3)) and ends(d)[0].reason is Reason.TRANSFER_FAILED, 20)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(4)) and ends(d)[0].reason is None


# --- dialling


def endpoint_of(port: int, secret: bytes = bytes(32)) -> bytes:
    return msgspec.msgpack.encode(TcpEndpoint(P, "127.0.0.1", port, secret, {0: SIZE}))


def test_a_peer_that_is_not_there_fails_all_that_waits(make: Callable[..., TcpTransport]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    d = make(D)
    d.connect(P, endpoint_of(port))
    for job in range(5):
        assert d.submit(read(job, SIZE))
    assert {(end.reason, end.at_rest) for end in ends(d, 5)} == {(Reason.TRANSFER_FAILED, True)}


def test_a_peer_that_accepts_and_says_nothing_is_given_up_at_the_deadline(make: Callable[..., TcpTransport]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        d = make(D, dial_deadline_s=0.1)
        d.connect(P, endpoint_of(mute.getsockname()[1]))
        assert d.submit(read())
        end = ends(d)[0]
        assert end.reason is Reason.TRANSFER_FAILED and "within 0.1 s" in end.detail


def test_a_copy_that_waits_for_a_dial_is_cancelled_at_once(make: Callable[..., TcpTransport]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        d = make(D, dial_deadline_s=1000.0)
        d.connect(P, endpoint_of(mute.getsockname()[1]))
        for direction in Direction:
            assert d.submit(msgspec.structs.replace(read(), direction=direction))
            d.cancel(JobId(1))
            assert d.drain() == [CopyEnded(JobId(1), Reason.CANCELLED)]


def test_when_only_some_streams_can_be_dialled_the_others_carry_all(
    make: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make(P), make(D, streams=3)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(0)) and ends(d)[0].reason is None  # one stream is up

    def out_of_descriptors(self: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("kvbaton.transports.tcp.tcp_client.TcpRoute.dial", out_of_descriptors)
    for job in range(1, 20):
        assert d.submit(read(job, SIZE))
    assert {end.reason for end in ends(d, 19)} == {None}


def test_a_peer_that_cannot_even_be_dialled_fails_the_copy(
    make: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make(P), make(D)
    d.connect(P, p.endpoint(D))
    monkeypatch.setattr("kvbaton.transports.tcp.tcp_client.socket.socket.connect_ex", lambda *_: 101, raising=False)
    assert d.submit(read())
    end = ends(d)[0]
    assert end.reason is Reason.UNREACHABLE and "unreachable" in end.detail


def test_a_copy_of_nothing_tells_whether_the_peer_can_be_reached(make: Callable[..., TcpTransport]) -> None:
    p, d = make(P), make(D)
    d.connect(P, p.endpoint(D))
    nothing = Copy(JobId(1), P, Direction.READ, 0, 0, array("q"))
    assert d.submit(nothing) and ends(d)[0].reason is None
    late = PeerId(D.worker, Incarnation(D.incarnation + 1))
    there = p.endpoint(late)
    p.close()
    reader = make(late)
    reader.connect(P, there)
    assert reader.submit(nothing) and ends(reader)[0].reason is not None


def test_a_stream_that_broke_is_dialled_again_for_the_next_copy(make: Callable[..., TcpTransport]) -> None:
    p, d = make(P), make(D)
    for job in range(3):
        d.connect(P, p.endpoint(D))
        assert d.submit(read(job)) and ends(d)[0].reason is None
        p.disconnect(D)


# --- peers that lie


class Liar:
    """A server that proves itself and then answers whatever the test wants."""

    def __init__(self, say: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._keyring = SecretRing()
        self._say = say
        self.endpoint = endpoint_of(self._listener.getsockname()[1], self._keyring.mint(D))
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(sock)
            sock.settimeout(20)
            try:
                play(sock, lambda wire: admit(wire, self._keyring, P))
                self._say(sock)
            except OSError:
                continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)
        for sock in self._held:
            sock.close()


LIES: dict[str, Callable[[Frame], bytes]] = {
    "another tag": lambda asked: Frame(FrameKind.DATA, asked.tag + 1, 64).pack() + bytes(64),
    "too few bytes": lambda asked: Frame(FrameKind.DATA, asked.tag, 63).pack() + bytes(63),
    "too many bytes": lambda asked: Frame(FrameKind.DATA, asked.tag, 65).pack() + bytes(65),
    "the wrong kind": lambda asked: Frame(FrameKind.DONE, asked.tag).pack(),
    "bytes with a refusal": lambda asked: Frame(FrameKind.DATA, asked.tag, 64, FrameStatus.BAD_SPAN).pack() + bytes(64),
    "a request": lambda asked: Frame(FrameKind.READ, asked.tag).pack(),
    "noise": lambda asked: b"\xff" * 200,
    "an end": lambda asked: b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_fails_the_copy_and_touches_nothing_else(
    make: Callable[..., TcpTransport], lie: str
) -> None:
    def say(sock: socket.socket) -> None:
        asked = Frame(FrameKind.READ, int.from_bytes(exactly(sock, FRAME_BYTES)[12:20], "little"))
        sock.sendall(LIES[lie](asked))
        sock.shutdown(socket.SHUT_WR)

    liar, d = Liar(say), make(D)
    memory = memoryview(bytearray(b"\7" * SIZE))
    d.register(1, memory)
    d.connect(P, liar.endpoint)
    assert d.submit(msgspec.structs.replace(read(), local_region=1))
    end = ends(d)[0]
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True), end
    assert bytes(memory[64:]) == b"\7" * (SIZE - 64)
    liar.close()


def test_a_refusal_by_the_server_fails_that_copy_as_a_bad_span(make: Callable[..., TcpTransport]) -> None:
    def say(sock: socket.socket) -> None:
        for status in (FrameStatus.BAD_SPAN, FrameStatus.OK):
            tag = int.from_bytes(exactly(sock, FRAME_BYTES + 16)[12:20], "little")
            data = b"" if status else b"y" * 64
            sock.sendall(Frame(FrameKind.DATA, tag, len(data), status).pack() + data)

    liar, d = Liar(say), make(D, streams=1)
    d.connect(P, liar.endpoint)
    assert d.submit(read(1)) and d.submit(read(2))
    assert [(end.job, end.reason) for end in ends(d, 2)] == [(1, Reason.BAD_SPAN), (2, None)]
    liar.close()


def test_a_write_whose_connection_vanishes_without_a_word_is_not_called_at_rest(
    make: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = threading.Event()
    liar, d = Liar(lambda sock: silent.wait(20) and None), make(D, streams=1)
    d.connect(P, liar.endpoint)
    assert d.submit(msgspec.structs.replace(read(), direction=Direction.WRITE))
    stream = d._links[P]._streams
    assert poll(lambda: stream[0] is not None and stream[0].ready, 20)
    wire = stream[0].wire  # type: ignore[union-attr]
    d._loops[0].call(lambda: wire._broke(OSError(110, "Connection timed out")))
    end = ends(d)[0]
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, False)
    silent.set()
    liar.close()


# --- device events


def connected(make: Callable[..., TcpTransport]) -> tuple[TcpTransport, TcpTransport]:
    p, d = make(P), make(D)
    d.connect(P, p.endpoint(D))
    return p, d


def test_a_copy_waits_for_its_device_event_and_others_do_not_wait_for_it(make: Callable[..., TcpTransport]) -> None:
    _, d = connected(make)
    event = Event()
    assert d.submit(read(1, after=event)) and d.submit(read(2))
    assert [end.job for end in ends(d)] == [2]
    assert not d.drain()
    event.done.set()
    assert [(end.job, end.reason) for end in ends(d)] == [(1, None)]


def test_a_device_that_fails_fails_the_copy(make: Callable[..., TcpTransport]) -> None:
    _, d = connected(make)
    event = Event(RuntimeError("device lost"))
    event.done.set()
    assert d.submit(read(1, after=event))
    end = ends(d)[0]
    assert end.reason is Reason.TRANSFER_FAILED and "device lost" in end.detail


def test_a_copy_that_waits_for_a_device_is_cancelled_at_once(make: Callable[..., TcpTransport]) -> None:
    _, d = connected(make)
    event = Event()
    assert d.submit(read(1, after=event))
    d.cancel(JobId(1))
    assert d.drain() == [CopyEnded(JobId(1), Reason.CANCELLED)]
    event.done.set()
    assert d.submit(read(2)) and [end.job for end in ends(d)] == [2]


# --- the whole


def test_threads_are_bounded_whatever_the_number_of_peers(make: Callable[..., TcpTransport]) -> None:
    before = set(threading.enumerate())  # of earlier tests, some may be about to end
    d = make(D, threads=2)
    for number in range(8):
        peer = PeerId(P.worker, Incarnation(100 + number))
        p = make(peer, threads=1)
        d.connect(peer, p.endpoint(D))
        assert d.submit(read(number, SIZE, peer))
    ends(d, 8)
    begun = set(threading.enumerate()) - before
    assert len([thread for thread in begun if thread.name.endswith(str(D))]) <= 2 and len(begun) <= 2 + 8


def test_closing_under_load_ends_every_copy_and_leaves_no_thread(make: Callable[..., TcpTransport]) -> None:
    _, d = connected(make)
    for job in range(50):
        assert d.submit(read(job, SIZE))
    d.close()
    d.close()
    assert sorted(end.job for end in ends(d, 54) if end.job < EVERYTHING) == list(range(50))
    assert not d.submit(read(99))
    assert poll(lambda: not [thread for thread in threading.enumerate() if thread.name.endswith(str(D))], 20)


def test_what_tcp_promises() -> None:
    able = tcp_transport.CAPABILITIES
    assert (able.can_write, able.can_fence, able.cancels, able.same_host, able.one_sided) == (
        True,
        True,
        True,
        False,
        False,
    )


def test_what_is_not_lent_is_asked_for_again_ever_less_often(
    make: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a copy that is larger than what is asked for at once."""
    monkeypatch.setattr(jobs, "LENT_WAIT_S", 0.3)
    p, d = make(P), make(D, window_bytes=64 << 10, streams=1)
    p.cancel(JobId(EVERYTHING))
    d.connect(P, p.endpoint(D))
    spans = array("q", [number for at in range(0, SIZE, 4096) for number in (at, at, 4096)])
    assert d.submit(Copy(JobId(1), P, Direction.READ, 0, 0, spans))
    (end,) = [each for each in ends(d) if each.job == 1]
    assert end.reason is Reason.LEASE_EXPIRED and p.refusals["not_lent"] < 200
