"""Whoever is turned away at a data port is counted, once and by its cause; whoever is let in, is not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest

from kvbaton.protocol.errors import ProtocolError
from kvbaton.ranks import rank_host
from kvbaton.ranks.rank_messages import RankRefusals as RefusalNews
from kvbaton.ranks.rank_planes import HostedPlane
from kvbaton.security import sealing
from kvbaton.security.sealing import Encrypt
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.checksum import checksum_transport
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.shared_memory import DeviceMemory, allocate
from kvbaton.transports.core.transport import Cause, Refusals, Transport, refusals_of
from kvbaton.transports.core.wrapped import DelayedTransport, UnnamedTransport
from kvbaton.transports.cuda.cuda_listener import CudaEndpoint
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from kvbaton.transports.local import region_listener
from kvbaton.transports.local.region_listener import LENGTH, ShmEndpoint
from kvbaton.transports.net import connection_handshake as auth
from kvbaton.transports.net.stream_socket import FRAME_BYTES, Bytes, Frame, FrameKind, FrameStatus, Sink, Wire, take
from kvbaton.transports.shm.shm_transport import ShmConfig, ShmTransport
from kvbaton.transports.staged import staged_server
from kvbaton.transports.staged.staged_listener import SealedStagedEndpoint, StagedEndpoint
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_server import STREAMS_PER_PEER_MAX
from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpConfig, TcpEndpoint, TcpTransport
from tests.transports.device.fake_gpu import FakeGpu
from tests.transports.tcp.blocking import DEADLINE_S, D, P, exactly, is_closed, play, request

from ..ranks.rank_rig import Rig, until

SIZE = 1 << 16
CROWD = 2
LONG_S = 300.0
UNIX = ("shm", "staged-shm", "cuda")
PORTS = ("tcp", "staged-tcp", "tcp+sums")
"""Of each the port that is knocked at; `tcp+sums`: that of the service beside the plane."""
SERVING = ("tcp", "staged-shm", "staged-tcp", "tcp+sums")
"""Those that hear more than a greeting."""


@dataclass
class Door:
    """A data plane that listens, and where."""

    transport: Transport
    address: str | tuple[str, int]
    secret: bytes

    def knock(self) -> socket.socket:
        if isinstance(self.address, tuple):
            return socket.create_connection(self.address, DEADLINE_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        sock.connect(self.address)
        return sock

    def enter(self, stream: int = 0, sealed: bool = False) -> socket.socket:
        sock = self.knock()
        play(sock, lambda wire: auth.greet(wire, self.secret, D, P, stream, sealed))
        return sock

    def counted(self, **expected: int) -> bool:
        """Whether it has counted this and nothing else, soon."""
        return poll(lambda: self.counts() == expected, DEADLINE_S)

    def counts(self) -> dict[str, int]:
        return {cause: count for cause, count in refusals_of(self.transport).items() if count}


Make = Callable[..., Door]


@pytest.fixture(name="make")
def make_doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    for module in (region_listener, staged_server):
        monkeypatch.setattr(module, "STRANGERS_MAX", CROWD)
    with contextlib.ExitStack() as stack:

        def make(plane: str, handshake_s: float = LONG_S, encrypt: Encrypt = "auto") -> Door:
            gpu = FakeGpu()
            made = transport_of(plane, gpu, handshake_s, encrypt)
            stack.callback(made.close)
            if isinstance(made, CudaTransport | StagedTransport):
                made.register(0, DeviceMemory(gpu.allocate(SIZE), SIZE))
            else:
                region = allocate(SIZE)
                stack.callback(region.close)
                made.register(0, region.view)
            return Door(made, *place_of(plane, made.endpoint(D)))

        yield make


def transport_of(plane: str, gpu: FakeGpu, handshake_s: float, encrypt: Encrypt):
    if plane == "tcp":
        return TcpTransport(P, TcpConfig(dial_deadline_s=handshake_s, strangers_max=CROWD, encrypt=encrypt))
    if plane == "tcp+sums":
        sums = SumConfig(dial_deadline_s=handshake_s, strangers_max=CROWD, encrypt=encrypt)
        return SummedTransport(TcpTransport(P), P, sums)
    if plane == "shm":
        return ShmTransport(P, ShmConfig(dial_deadline_s=handshake_s))
    if plane == "cuda":
        return CudaTransport(P, CudaConfig(dial_deadline_s=handshake_s), gpu)
    carrier = plane.removeprefix("staged-")
    config = StagedConfig(carrier=carrier, slot_bytes=1 << 20, slots=2, dial_deadline_s=handshake_s, encrypt=encrypt)  # type: ignore[arg-type]
    return StagedTransport(P, config, gpu)


def place_of(plane: str, endpoint: bytes) -> tuple[str | tuple[str, int], bytes]:
    if plane == "tcp+sums":
        there = checksum_transport.parse(P, endpoint)
        return (there.host, there.port), there.secret
    kinds = TcpEndpoint | SealedTcpEndpoint | ShmEndpoint | CudaEndpoint | StagedEndpoint | SealedStagedEndpoint
    found = msgspec.msgpack.decode(endpoint, type=kinds)
    if isinstance(found, TcpEndpoint):
        return (found.host, found.port), found.secret
    if isinstance(found, StagedEndpoint):
        return ((found.place, found.port) if found.port else f"\0{found.place}"), found.secret
    return f"\0{found.name}", found.secret


# --- strangers


@pytest.mark.parametrize("plane", [*UNIX, *PORTS])
class TestStrangers:
    def test_who_goes_without_a_word_has_only_left(self, make: Make, plane: str) -> None:
        door = make(plane)
        door.knock().close()
        assert door.counted(left=1)

    def test_who_says_nothing_has_shown_no_proof(self, make: Make, plane: str) -> None:
        door = make(plane, handshake_s=0.05)
        with door.knock() as sock:
            assert is_closed(sock)
        assert door.counted(no_proof=1)

    def test_who_goes_in_the_middle_of_its_greeting_has_shown_no_proof(self, make: Make, plane: str) -> None:
        door = make(plane)
        with door.knock() as sock:
            sock.sendall(b"KVBT")
        assert door.counted(no_proof=1)

    def test_a_peer_with_an_old_secret_has_shown_no_proof(self, make: Make, plane: str) -> None:
        door = make(plane)
        with door.knock() as sock, pytest.raises(ProtocolError, match="pair with it again"):
            play(sock, lambda wire: auth.greet(wire, bytes(32), D, P, 0))
        assert door.counted(no_proof=1)

    def test_who_speaks_of_something_else_gave_no_greeting(self, make: Make, plane: str) -> None:
        door = make(plane)
        with door.knock() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: somebody.somewhere.example\r\n\r\n")
            assert is_closed(sock)
        assert door.counted(bad_greeting=1)

    def test_a_wrong_answer_to_the_challenge_is_a_bad_proof(self, make: Make, plane: str) -> None:
        door = make(plane)
        with door.knock() as sock:
            play(sock, forged)
            assert is_closed(sock)
        assert door.counted(bad_proof=1)

    def test_of_a_crowd_the_oldest_are_crowded_out(self, make: Make, plane: str) -> None:
        door = make(plane)
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(door.knock()) for _ in range(CROWD + 3)]
            assert all(is_closed(sock) for sock in socks[:3])
            assert door.counted(crowded_out=3)

    def test_who_is_let_in_and_goes_is_not_counted(self, make: Make, plane: str) -> None:
        door = make(plane)
        door.enter().close()
        door.knock().close()  # who comes later is heard later
        assert door.counted(left=1)

    def test_who_is_there_when_it_ends_was_not_refused(self, make: Make, plane: str) -> None:
        door = make(plane)
        with door.knock() as sock, door.enter():
            door.transport.close()
            assert is_closed(sock)
        assert door.counts() == {}


def forged(wire: Wire) -> Generator[Sink, None, None]:
    """A client that holds no secret, and tries."""
    name = D.worker.encode()
    hello = auth._HELLO.pack(auth._MAGIC, sealing.PLAIN, 0, len(name), D.incarnation, bytes(sealing.NONCE_BYTES))
    wire.out.append(Bytes(hello + name))
    yield from take(sealing.NONCE_BYTES + sealing.PROOF_BYTES)
    wire.out.append(Bytes(bytes(sealing.PROOF_BYTES)))


@pytest.mark.parametrize("plane", UNIX)
def test_another_user_is_told_apart(make: Make, plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    door = make(plane)
    monkeypatch.setattr(region_listener.os, "geteuid", lambda: 12345)
    with door.knock() as sock:
        assert is_closed(sock)
    assert door.counted(other_user=1)


# --- peers


@pytest.mark.parametrize("plane", PORTS)
def test_a_peer_that_will_not_encrypt_is_plain(make: Make, plane: str) -> None:
    door = make(plane, encrypt="on")
    with door.enter() as sock:
        assert is_closed(sock)
    assert door.counted(plain=1)


@pytest.mark.parametrize("plane", PORTS)
def test_a_record_that_was_altered_is_a_bad_message(make: Make, plane: str) -> None:
    door = make(plane, encrypt="on")
    with door.enter(sealed=True) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"\x10\0\0\0" * 4096)
        assert is_closed(sock)
    assert door.counted(bad_message=1)


@pytest.mark.parametrize("plane", SERVING)
@pytest.mark.parametrize("outside", [[SIZE - 4, 8], [0, 8, -8, 8]], ids=str)
def test_memory_outside_is_a_bad_span_each_time(make: Make, plane: str, outside: list[int]) -> None:
    door = make(plane)
    with door.enter() as sock:
        hear_hello(plane, sock)
        for region, spans in ((0, outside), (5, [0, 8])):
            kind = FrameKind.SUM if plane == "tcp+sums" else FrameKind.READ
            sock.sendall(request(kind, spans, region=region))
            status = Frame(FrameKind.SUMS if kind is FrameKind.SUM else FrameKind.DATA, 7, status=FrameStatus.BAD_SPAN)
            assert exactly(sock, FRAME_BYTES) == status.pack()
        assert door.counts() == {"bad_span": 2}, "counted before it is answered"
    assert door.counts() == {"bad_span": 2}


def test_a_write_outside_is_a_bad_span_too(make: Make) -> None:
    door = make("tcp")
    with door.enter() as sock:
        sock.sendall(request(FrameKind.WRITE, [SIZE, 8], b"x" * 8))
        assert exactly(sock, FRAME_BYTES) == Frame(FrameKind.DONE, 7, status=FrameStatus.BAD_SPAN).pack()
    assert door.counts() == {"bad_span": 1}


@pytest.mark.parametrize("plane", SERVING)
def test_what_cannot_be_read_is_a_bad_message(make: Make, plane: str) -> None:
    door = make(plane)
    with door.enter() as sock:
        hear_hello(plane, sock)
        sock.sendall(bytes(FRAME_BYTES))
        assert is_closed(sock)
    assert door.counted(bad_message=1)


def test_a_stream_beyond_the_bound_is_a_bad_message(make: Make) -> None:
    door = make("tcp")
    with door.enter(stream=STREAMS_PER_PEER_MAX) as sock:
        assert is_closed(sock)
    assert door.counted(bad_message=1)


@pytest.mark.parametrize("plane", ["staged-shm", "staged-tcp"])
def test_a_peer_beyond_what_can_be_staged_for_finds_it_full(
    make: Make, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = make(plane)
    monkeypatch.setattr(staged_server, "SESSIONS_MAX", 0)
    with door.enter() as sock:
        assert is_closed(sock)
    assert door.counted(full=1)


def hear_hello(plane: str, sock: socket.socket) -> None:
    """Of staging planes the server speaks first."""
    if plane.startswith("staged"):
        (size,) = LENGTH.unpack(exactly(sock, LENGTH.size))
        exactly(sock, size)


# --- the counts themselves


def test_the_inner_plane_and_its_sums_are_counted_together(make: Make) -> None:
    door = make("tcp+sums")
    inner = msgspec.msgpack.decode(checksum_transport.parse(P, door.transport.endpoint(D)).inner, type=TcpEndpoint)
    socket.create_connection((inner.host, inner.port), DEADLINE_S).close()
    door.knock().close()
    assert door.counted(left=2)


def test_every_cause_is_there_from_the_start_and_threads_lose_no_count() -> None:
    refusals = Refusals()
    assert dict(refusals) == {cause.value: 0 for cause in Cause if cause is not Cause.OTHER}
    threads = [threading.Thread(target=lambda: [refusals.add(Cause.LEFT) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert refusals["left"] == 20_000 and sum(refusals.values()) == 20_000


def test_a_plane_that_counts_nothing_or_something_of_its_own_is_heard() -> None:
    def plane(refusals: object) -> SimpleNamespace:
        return SimpleNamespace(refusals=refusals)

    assert refusals_of(object()) == refusals_of(plane(None)) == refusals_of(plane(3)) == {}
    mine: Mapping[str, int] = {"left": 2, "no_ticket": 3, "no_badge": 4, "bad_span": -1}
    assert refusals_of(plane(mine), plane({"left": 1})) == {"left": 3, "other": 7, "bad_span": 0}


def test_planes_around_a_plane_tell_of_it(make: Make) -> None:
    door = make("tcp")
    late = UnnamedTransport(tcp_transport.CAPABILITIES, lambda _me: DelayedTransport(door.transport, 0.0))
    assert late.refusals == {}
    late.open(P)
    door.knock().close()
    assert door.counted(left=1) and late.refusals["left"] == 1
    assert late.mapped_bytes == 0
    late.close()


def test_ranks_tell_their_engine_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_host, "REFUSALS_S", 0.05)
    rig = Rig()
    try:
        ranks = [rig.direct("tcp", P, rig.memory(SIZE).view) for _ in range(2)]
        hosts = [rig.host(("tcp", plane), rank=rank) for rank, plane in enumerate(ranks)]
        links = rig.link(*(host.invitation for host in hosts), ping_s=0.05, lost_s=60.0)
        assert links.data_refused() in ({}, {f"tcp:{cause}": 0 for cause in Refusals()}), "some may have told already"
        until(lambda: all(links.transports(rank)["tcp"].refusals for rank in range(2)))
        assert links.data_refused() == {f"tcp:{cause}": 0 for cause in Refusals()}
        for count, plane in enumerate(ranks, 1):
            address, _ = place_of("tcp", plane.endpoint(D))
            socket.create_connection(address, DEADLINE_S).close()  # type: ignore[arg-type]
            until(lambda count=count: links.data_refused()["tcp:left"] == count)  # type: ignore[misc]
        assert links.data_refused() is links.data_refused(), "an engine asks at every step"
        for nbytes in (1 << 40, 0):
            ranks[1].mapped_bytes = nbytes  # type: ignore[attr-defined]
            until(lambda nbytes=nbytes: links.mapped_bytes() == nbytes)  # type: ignore[misc]
    finally:
        rig.close()


def test_a_rank_makes_news_of_changes_alone_and_survives_a_plane_that_counts_wrongly() -> None:
    transport = SimpleNamespace(refusals={"left": 0})
    plane = HostedPlane("tcp", transport)  # type: ignore[arg-type]
    for count, expected in ((0, [{"left": 0}]), (0, []), (4, [{"left": 4}]), (4, [])):
        transport.refusals = {"left": count}
        plane.note_refusals()
        assert plane.take_news() == [RefusalNews("tcp", counts) for counts in expected]
    transport.refusals = {"left": "many"}  # type: ignore[dict-item]
    plane.note_refusals()
    assert plane.take_news() == [] and plane.faults == 1
