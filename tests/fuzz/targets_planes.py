"""What reaches the data planes, the shared store and the ranks: endpoints, frames, greetings, lines, commands."""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import msgspec
from guided import Target
from mutators import Shape

from kvbaton.control.plain.announcer import registration  # noqa: F401 - loads the control layer before the planes
from kvbaton.protocol.effects import Capabilities, Copy, Direction
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.geometry.spans import SPANS_MAX, Weave
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, WorkerId
from kvbaton.ranks import rank_messages as rm
from kvbaton.ranks import rank_store_messages as sm
from kvbaton.ranks.rank_stream import WINDOW_FRAMES_MAX, Stream, StreamEnvelope
from kvbaton.security.sealing import SECRET_BYTES
from kvbaton.store import tcp_backend, tcp_connection, value_header
from kvbaton.store.interface import HASH_BYTES
from kvbaton.store.value_header import ALONE
from kvbaton.transports.checksum import checksum_transport
from kvbaton.transports.core.shared_memory import host_identity
from kvbaton.transports.cuda import cuda_listener
from kvbaton.transports.local.region_listener import ShmEndpoint, local_endpoint
from kvbaton.transports.mooncake import mooncake_engine
from kvbaton.transports.net import connection_handshake, stream_socket
from kvbaton.transports.nixl import nixl_agent
from kvbaton.transports.nixl.nixl_agent import NixlPlace
from kvbaton.transports.staged import staged_listener
from kvbaton.transports.tcp import tcp_transport

PEER, ME = PeerId(WorkerId("p#0"), Incarnation(0xA1)), PeerId(WorkerId("d#0"), Incarnation(0xD1))
SECRET = bytes(range(SECRET_BYTES))
PACK = msgspec.msgpack.encode
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
REFUSED = ValueError


# --- endpoints


def _nixl(data: bytes) -> PeerId:
    return nixl_agent.parse(PEER, nixl_agent.VERSION + zlib.compress(data, 1)).owner


def _summed(data: bytes) -> PeerId:
    assert len(checksum_transport.parse(PEER, checksum_transport.VERSION + data).secret) == SECRET_BYTES
    return PEER


ENDPOINTS: dict[str, Callable[[bytes], PeerId]] = {
    "tcp": lambda data: tcp_transport._parse(PEER, data).owner,
    "shm": lambda data: local_endpoint(ShmEndpoint, "shm", PEER, data).owner,
    "cuda": lambda data: cuda_listener.parse_endpoint(PEER, data).owner,
    "staged-tcp": lambda data: staged_listener.parse_endpoint(PEER, "tcp", data).owner,
    "staged-shm": lambda data: staged_listener.parse_endpoint(PEER, "shm", data).owner,
    "mooncake": lambda data: mooncake_engine.parse(PEER, data).owner,
    "nixl": _nixl,
    "sums": _summed,
}


def endpoints(data: bytes) -> None:
    """Every data plane: `ValueError`, or an endpoint of the peer that it came from."""
    for name, parse in ENDPOINTS.items():
        with contextlib.suppress(REFUSED):
            assert parse(data) == PEER, name
    with contextlib.suppress(REFUSED):
        nixl_agent.parse(PEER, data)  # packed


def endpoint_seeds() -> list[bytes]:
    agent = f"{PEER.incarnation}.{'ab' * nixl_agent.NONCE_BYTES}.{PEER.worker}"
    head = nixl_agent.METADATA_HEAD + len(agent).to_bytes(8, "little") + agent.encode() + b"|rest"
    places = {0: NixlPlace(4096, 4096)}
    region = mooncake_engine.MooncakePlace(4096, 4096)
    host = host_identity()
    life = nixl_agent.Life(host, 1, 1)
    plain = [
        tcp_transport.TcpEndpoint(PEER, "10.0.0.1", 5000, SECRET, {0: 4096}),
        ShmEndpoint(PEER, host, "name", SECRET),
        cuda_listener.CudaEndpoint(PEER, host, "name", SECRET),
        staged_listener.StagedEndpoint(PEER, "tcp", host, "10.0.0.1", 5000, SECRET),
        staged_listener.StagedEndpoint(PEER, "shm", host, "name", 0, SECRET),
        mooncake_engine.MooncakeEndpoint(PEER, "10.0.0.1", 5000, 4096, b"m" * 16, {0: region}),
        nixl_agent.NixlEndpoint(PEER, agent, life, places, head),
        checksum_transport.SumEndpoint("10.0.0.1", 5000, SECRET, b"inner"),
    ]
    return [*map(PACK, plain)]


# --- what crosses a data plane's sockets


def tcp_frame(data: bytes) -> None:
    """Within all bounds, or `ProtocolError`; and packed again it is the same head."""
    head = data[: stream_socket.FRAME_BYTES].ljust(stream_socket.FRAME_BYTES, b"\0")
    for kinds in ((stream_socket.FrameKind.READ, stream_socket.FrameKind.WRITE), tuple(stream_socket.FrameKind)):
        try:
            found = stream_socket.parse(head, *kinds)
        except ProtocolError as error:
            assert error.detail
        else:
            assert found.kind in kinds and found.payload_bytes <= stream_socket.PAYLOAD_BYTES_MAX
            assert found.pack() == head


def tcp_seeds() -> list[bytes]:
    return [stream_socket.Frame(kind, 7, 64, table_bytes=32).pack() for kind in stream_socket.FrameKind]


def scripted(script: Generator[Any, None, Any], data: bytes) -> tuple[Any, int]:
    """Give a script the bytes that it takes; its result, and how many it took. `EOFError` where there are no more."""
    at = 0
    try:
        sink = next(script)
        while True:
            assert sink.left <= 1 << 16, "room is made for more than a greeting"
            if at + sink.left > len(data):
                script.close()
                raise EOFError
            sink.data[:] = data[at : at + sink.left]
            at += sink.left
            sink.left = 0
            sink = next(script)
    except StopIteration as done:
        return done.value, at


def greeting(data: bytes) -> None:
    """No bytes of a stranger's let it in, at a server or at a client; it gets one answer of one size at most."""
    known = connection_handshake.SecretRing()
    known.mint(PEER)
    for script in (
        lambda line: connection_handshake.admit(line, known, ME),
        lambda line: connection_handshake.admit(line, known, ME, True),
        lambda line: connection_handshake.greet(line, SECRET, ME, PEER, 0),
        lambda line: connection_handshake.greet(line, SECRET, ME, PEER, 0, True),
    ):
        line = SimpleNamespace(out=[])
        with contextlib.suppress(ProtocolError, EOFError):
            found, _ = scripted(script(line), data)
            raise AssertionError(f"a stranger was let in as {found}")
        assert len(line.out) <= 1


def greeting_seeds() -> list[bytes]:
    name = PEER.worker.encode()
    said = (
        connection_handshake._HELLO.pack(connection_handshake._MAGIC, 1, 1, len(name), PEER.incarnation, bytes(32))
        + name
    )
    return [said + bytes(32), said, bytes(64)]


# --- the store


def store_frame(data: bytes) -> None:
    """None, or a request or a reply within bounds."""
    asked = tcp_backend.request(data)
    if asked is not None:
        assert tcp_backend.request(tcp_backend.encode(asked)) == asked
    answered = tcp_backend.reply(data)
    if answered is not None:
        assert tcp_backend.reply(tcp_backend.encode(answered)) == answered


def store_seeds() -> list[bytes]:
    return [tcp_backend.encode(each) for each in (tcp_backend.Dial(5), tcp_backend.Invited(5, 99, 7, SECRET))]


def kept_value(data: bytes) -> None:
    """A value that is held for a key is the one that was sealed for it: nothing else, altered anywhere, is."""
    frame = memoryview(data)
    assert (value_header.held(frame, "kv1-a", ALONE) is not None) == (data == _sealed())
    assert value_header.held(frame, "kv1-b", ALONE) is None
    assert len(value_header.writers_of(frame)) <= 1 + value_header.ORIGINS_MAX


def _sealed() -> bytes:
    room = bytearray(value_header.FRAME_BYTES + 16)
    room[value_header.FRAME_BYTES :] = bytes(range(16))
    value_header.seal_all([memoryview(room)], ["kv1-a"], (), ALONE)
    return bytes(room)


class Canned:
    """A socket whose other end has said `data` and then closed."""

    family = socket.AF_UNIX

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.sent = 0

    def setsockopt(self, *what: int) -> None: ...
    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes) -> None:
        self.sent += len(data)

    def recv_into(self, room: memoryview) -> int:
        come = self._data[self._at : self._at + len(room)]
        room[: len(come)] = come
        self._at += len(come)
        return len(come)


def line(data: bytes) -> None:
    """`LineError`, or a question within bounds; nobody is let in, and no more is said than a greeting."""

    def fresh() -> tcp_connection.StoreConnection:
        made = tcp_connection.StoreConnection(Canned(data))  # type: ignore[arg-type]
        made.until = float("inf")
        return made

    with contextlib.suppress(tcp_connection.LineError):
        _, items = fresh().asked()
        assert 0 < len(items) <= tcp_connection.KEYS_MAX
    with contextlib.suppress(tcp_connection.LineError):
        assert len(fresh().told()) <= tcp_connection.KEYS_MAX
    for script in (
        lambda: tcp_connection.admit(fresh(), {7: SECRET}.get, {7: SECRET}.get),
        lambda: tcp_connection.greet(fresh(), 7, SECRET),
    ):
        with contextlib.suppress(tcp_connection.LineError):
            script()
            raise AssertionError("a stranger was let in")


class _Ears(Canned):
    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.heard = b""

    def sendall(self, data: bytes) -> None:
        self.heard += bytes(data)


def line_seeds() -> list[bytes]:
    found = []
    for op in tcp_connection.Op:
        ears = _Ears()
        said = tcp_connection.StoreConnection(ears)  # type: ignore[arg-type]
        said.until = float("inf")
        said.ask(op, [("kv1-a", 64), ("kv1-b", 0)])
        found.append(ears.heard)
    ears = _Ears()
    said = tcp_connection.StoreConnection(ears)  # type: ignore[arg-type]
    said.until = float("inf")
    said.tell(["", "full"])
    hello = tcp_connection._HELLO.pack(tcp_connection._MAGIC, 1, 7, bytes(32), bytes(32))
    return [*found, ears.heard, hello, bytes(96)]


# --- ranks


def rank_frame(data: bytes) -> None:
    """The decoders' own error, or what says the same again; what does not fit together is a ValueError."""
    with contextlib.suppress(*UNREADABLE):
        command = rm.decode_command(data)
        assert PACK(rm.decode_command(rm.encode_command(command))) == PACK(command)
        with contextlib.suppress(ValueError):
            _used(command)
    with contextlib.suppress(*UNREADABLE):
        news = rm.decode_news(data)
        assert PACK(rm.decode_news(rm.encode_news(news))) == PACK(news)
        for each in news:
            with contextlib.suppress(ValueError):
                _used(each)
    with contextlib.suppress(REFUSED):
        assert str(rm.RankInvitation.decode(data))


def _used(said: Any) -> None:
    match said:
        case rm.Submit():
            copy = rm.copy_of(said)
            assert len(copy.spans) % 3 == 0
            assert copy.weave is None or (0 < copy.weave.rows <= SPANS_MAX and len(copy.weave.column) % 3 == 0)
        case sm.RankStoreGet() | sm.RankStorePut():
            sm.hashes_of(said.hashes)
            sm.ids_of(said.blocks)
        case sm.RankStoreHas():
            sm.ids_of(said.orders)
        case sm.RankStoreEnded():
            assert said.end.count <= sm.KEYS_MAX


def rank_seeds() -> list[bytes]:
    from array import array

    copy = Copy(JobId(1), PEER, Direction.READ, 0, 0, array("q", [0, 64, 32]))
    woven = msgspec.structs.replace(copy, weave=Weave(array("q", [0, 64, 32, 64, 0, 32]), array("q", [0, 0, 128, 128])))
    hashes, order = sm.pack_hashes([b"h" * HASH_BYTES]), 1
    commands: list[rm.Command] = [
        rm.Open("tcp", ME), rm.Mint("tcp", 1, PEER), rm.RankConnect("tcp", PEER, b"endpoint"),
        rm.RankDisconnect("tcp", PEER),
        rm.TablePart("tcp", JobId(1), bytes(24)), *rm.submit_commands("tcp", copy), rm.Cancel("tcp", JobId(1)),
        *rm.submit_commands("tcp", woven),
        rm.Fence("tcp", PEER), rm.Close("tcp"), sm.RankStoreOpen("a" * 32), sm.RankStoreLookup(order, hashes, 1.0),
        sm.RankStoreGet(order, hashes, sm.pack_ids([3]), 1.0), sm.RankStorePut(order, hashes, sm.pack_ids([3]), 1.0),
        sm.RankStoreCancel(order), sm.RankStoreAsk(1),
    ]  # fmt: skip
    news: list[rm.News] = [
        rm.Minted("tcp", 1, b"endpoint"), rm.MintFailed("tcp", 1, "why"), rm.ConnectFailed("tcp", PEER, "why"),
        rm.RankEnded("tcp", JobId(1), Reason.CANCELLED, True, ""), rm.Rested("tcp", JobId(1)), rm.Fenced("tcp", PEER),
        rm.Progressed(LeaseId(1), whole([2])), sm.RankStoreEnded(1, 1, None, ""), sm.RankStoreHas(1, sm.pack_ids([1])),
        sm.RankStoreCounts({"hits": 1}),
    ]  # fmt: skip
    able = Capabilities("tcp", one_sided=False, can_write=True, can_fence=True, cancels=True, same_host=False)
    invitation = rm.RankInvitation(0, "tcp://127.0.0.1:5000", "a" * 40, "b" * 40, "c" * 40, {"tcp": able})
    return [*map(rm.encode_command, commands), rm.encode_news(news), invitation.encode()]


def rank_stream(data: bytes) -> None:
    """Frames in any order, at one end: bodies come once and in order, and no more is kept than the window."""
    try:
        script = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except UNREADABLE:
        return
    end, now, taken = Stream(1), 0.0, 0
    for raw in script[:64]:
        now += 0.6
        end.add(b"body")
        with contextlib.suppress(*UNREADABLE):
            taken += end.take(bytes(raw), now) is not None
        assert len(end.due(now)) <= WINDOW_FRAMES_MAX
    assert end._received == taken and end.backlog <= 64


def stream_seeds() -> list[bytes]:
    script = [
        StreamEnvelope(1, 1, 0, False, b"a"),
        StreamEnvelope(1, 2, 1, True, b"b"),
        StreamEnvelope(1, 0, 2),
        StreamEnvelope(2, 3, 0),
    ]
    return [PACK(script), PACK([StreamEnvelope(1, 1, 0), StreamEnvelope(1, 1, 9)] * 4)]


TARGETS = (
    Target("endpoints", endpoints, endpoint_seeds, Shape.MSGPACK, 2500),
    Target("tcp_frames", tcp_frame, tcp_seeds, Shape.BYTES, 2000),
    Target("greeting", greeting, greeting_seeds, Shape.BYTES, 1500),
    Target("store_wire", store_frame, store_seeds, Shape.MSGPACK, 3000),
    Target("store_frames", kept_value, lambda: [_sealed(), bytes(80)], Shape.BYTES, 1500),
    Target("store_lines", line, line_seeds, Shape.BYTES, 2000),
    Target("rank_messages", rank_frame, rank_seeds, Shape.MSGPACK, 3500),
    Target("rank_stream", rank_stream, stream_seeds, Shape.MSGPACK, 1500),
)
