"""Unauthenticated peers at every port: the fault of that name, and the measurements of `tests/security`.

Laws: bounded in sockets and in time: when a call returns, every connection that it made is closed. A visit holds one
connection and says nothing that only a member of the cluster can say: it holds no secret, though it may know public
keys. An unauthenticated peer is never admitted; "let in" counts those that got what only members get.

Listening ports of processes, from the kernel: TCP of both families and UNIX sockets, named and abstract.

Law: nothing is asked of the processes themselves, so no port can be forgotten; what ends meanwhile is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import itertools
import os
import random
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvbaton.control.registry import registry_messages
from kvbaton.protocol.ids import Incarnation, WorkerId

Place = tuple[str, int]
"""Host and port. Of a UNIX socket its path, or a zero byte and its abstract name; and 0."""

_LISTEN = "0A"
_ACCEPTS = 0x10000  # __SO_ACCEPTCON of /proc/net/unix


def listening(pids: Iterable[int]) -> list[Place]:
    """Every place where one of these processes accepts connections, sorted."""
    found: set[Place] = set()
    for pid in pids:
        inodes = set(_sockets(pid))
        found |= {place for inode, place in _places(pid) if inode in inodes}
    return sorted(found)


def family(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    found = [pid]
    for each in found:
        try:
            tasks = list(Path(f"/proc/{each}/task").iterdir())
            found += [int(word) for task in tasks for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def is_local(place: Place) -> bool:
    """Whether only this machine can reach it."""
    host = place[0]
    return host[:1] in ("\0", "/") or ipaddress.ip_address(host).is_loopback


def _sockets(pid: int) -> Iterator[str]:
    try:
        entries = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return
    for entry in entries:
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _places(pid: int) -> Iterator[tuple[str, Place]]:
    for table in ("tcp", "tcp6"):
        for words in _rows(pid, table):
            if words[3] == _LISTEN:
                yield words[9], _address(words[1])
    for words in _rows(pid, "unix"):
        if int(words[3], 16) & _ACCEPTS and len(words) > 7:
            yield words[6], (words[7].replace("@", "\0", 1) if words[7].startswith("@") else words[7], 0)


def _rows(pid: int, table: str) -> list[list[str]]:
    try:
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return []
    return [line.split() for line in lines]


def _address(text: str) -> Place:
    """The kernel writes each word of an address in the byte order of the machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(packed)), int(port, 16)


ANSWER_BYTES_MAX = 64 << 10
CONNECT_S = 2.0
LET_IN, TURNED_AWAY, HELD, UNREACHED = "let in", "turned away", "held", "unreached"
AT_ONCE_MAX = 64
VISIT_S = 2.0
"""The longest that one visit takes; those that only hold a connection take all of it."""
DIALS_AT_ONCE_MAX = 64
CONNECT_S = 5.0

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_NULL = _GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_HTTP = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_HELLO = struct.Struct("<4sBBHQ32s")  # of kvbaton's own data plane
_LINE = struct.Struct("<4sB3xQ32s32s")  # of a store's lines
ADMIN = (
    b"PUT /route", b"POST /run_script", b"POST /admin/drain", b"POST /drain", b"PUT /workers", b"DELETE /workers/p0",
    b"POST /register", b"POST /reset_prefix_cache", b"POST /pause", b"POST /sleep", b"POST /collective_rpc",
    b"PUT /metadata", b"POST /v1/load_lora_adapter", b"POST /debug/pprof", b"POST /shutdown", b"TRACE /",
    b"CONNECT x:1",
)  # fmt: skip
"""What administrators' paths are called elsewhere; here there are none."""


class Guest(msgspec.Struct, frozen=True):
    """One visit: where, by when, with which chance, and what a stranger can know."""

    place: Place
    until: float  # of the loop's clock
    rng: random.Random
    context: zmq.asyncio.Context
    public_keys: Sequence[str] = ()


Visit = Callable[[Guest], Awaitable[str]]


class Kind(msgspec.Struct, frozen=True):
    """`visit` tells what came of it: one of the outcomes above."""

    name: str
    what: str
    visit: Visit


async def dial(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CONNECT_S):
        if place[0][:1] in ("\0", "/"):
            return await asyncio.open_unix_connection(place[0])
        return await asyncio.open_connection(*place)


async def _told(guest: Guest, *said: bytes, pause_s: float = 0.0, hangs_up: bool = False) -> tuple[bytes, str]:
    """Say all of it, then listen until the other side has had enough, or the time is over."""
    heard = b""
    try:
        reader, writer = await dial(guest.place)
    except (OSError, TimeoutError):
        return b"", UNREACHED
    try:
        async with asyncio.timeout_at(guest.until):
            for piece in said:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if hangs_up:
                return heard, TURNED_AWAY
            while len(heard) < ANSWER_BYTES_MAX:
                came = await reader.read(4096)
                if not came:
                    return heard, TURNED_AWAY
                heard += came
        return heard, HELD
    except TimeoutError:
        return heard, HELD
    except OSError:
        return heard, TURNED_AWAY
    finally:
        if hangs_up:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def _openings(rng: random.Random) -> Sequence[bytes]:
    """How each protocol that is spoken here begins, well formed."""
    return (
        _NULL + _READY,
        _CURVE + b"\x06\xc8\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(120),
        _HTTP + b"Content-Length: 64\r\n\r\n" + b'{"prompt":"' + b"a" * 51 + b'"}',
        hello(rng),
        _LINE.pack(b"KVBL", 1, rng.getrandbits(32), rng.randbytes(32), rng.randbytes(32)),
        client_hello(),
    )


def hello(rng: random.Random, name: bytes = b"d0/0", name_bytes: int | None = None) -> bytes:
    """The greeting of a data plane's client."""
    count = len(name) if name_bytes is None else name_bytes
    return _HELLO.pack(b"KVBT", 1, 0, count, rng.getrandbits(63), rng.randbytes(32)) + name


@functools.cache
def client_hello() -> bytes:
    """What a browser says first to a port of TLS."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(into, out, server_hostname="kvbaton.invalid")
    with contextlib.suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    return out.read()


def registration() -> bytes:
    """A well-formed message by which a worker would register."""
    said = registry_messages.Registration(
        worker=WorkerId("p0"),
        incarnation=Incarnation(1),
        role="prefill",
        http_address="127.0.0.1:9",
        control_endpoint="tcp://127.0.0.1:9",
        modes=("pull",),
        transports=("tcp",),
        compat_digest="0" * 64,
        tp_size=1,
        model="m",
        host="h",
    )
    return registry_messages.encode(registry_messages.Register(said))


async def _noise(guest: Guest) -> str:
    return (await _told(guest, guest.rng.randbytes(guest.rng.randint(1, 64 << 10))))[1]


async def _huge(guest: Guest) -> str:
    rng = guest.rng
    size = rng.choice((100 << 20, 1 << 32, (1 << 63) - 1))
    frames = (
        _NULL + _READY + b"\x02" + struct.pack(">Q", size),
        _CURVE + b"\x06" + struct.pack(">Q", size),
        _HTTP + b"Content-Length: %d\r\n\r\n" % size,
        _HTTP + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size,
        _HTTP + b"X: " + bytes(rng.choices(b"abc", k=100_000)),
        hello(rng, b"d0/0", 65535),
        _LINE.pack(b"KVBL", 1, (1 << 64) - 1, rng.randbytes(32), rng.randbytes(32)),
        struct.pack("<Q", size),
        struct.pack(">Q", size),
    )
    return (await _told(guest, rng.choice(frames), rng.randbytes(64 << 10)))[1]


async def _half(guest: Guest) -> str:
    opening = guest.rng.choice(_openings(guest.rng))
    return (await _told(guest, opening[: guest.rng.randint(1, len(opening) - 1)]))[1]


async def _idle(guest: Guest) -> str:
    return (await _told(guest))[1]


async def _slow(guest: Guest) -> str:
    opening = guest.rng.choice(_openings(guest.rng))
    pieces = [opening[at : at + 1] for at in range(len(opening))]
    return (await _told(guest, *pieces, pause_s=0.05))[1]


async def _reset(guest: Guest) -> str:
    return (await _told(guest, guest.rng.choice(_openings(guest.rng)), hangs_up=True))[1]


async def _tls(guest: Guest) -> str:
    return (await _told(guest, client_hello()))[1]


async def _http(guest: Guest) -> str:
    path = guest.rng.choice(ADMIN)
    head = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    heard, outcome = await _told(guest, path + head + b"{}")
    return LET_IN if re.match(rb"HTTP/1\.. 2", heard) else outcome


async def _plain_zmq(guest: Guest) -> str:
    """All of a handshake without keys, and a registration after it."""
    frame = registration()
    heard, outcome = await _told(guest, _NULL, _READY, b"\x02" + struct.pack(">Q", len(frame)) + frame)
    return LET_IN if heard.startswith(b"\xff") and b"READY" in heard[64:] else outcome


async def _curve(guest: Guest) -> str:
    """libzmq itself, with a key pair that nobody knows, and a registration."""
    if not guest.place[1]:
        return await _noise(guest)
    mine = zmq.curve_keypair()
    known = [key.encode() for key in guest.public_keys] or [zmq.curve_keypair()[0]]
    dealer = guest.context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IPV6, int(":" in guest.place[0]))
        dealer.curve_publickey, dealer.curve_secretkey = mine
        dealer.curve_serverkey = guest.rng.choice(known)
        host = f"[{guest.place[0]}]" if ":" in guest.place[0] else guest.place[0]
        dealer.connect(f"tcp://{host}:{guest.place[1]}")
        async with asyncio.timeout_at(guest.until):
            await dealer.send(registration())
            await dealer.recv()
        return LET_IN
    except TimeoutError:
        return TURNED_AWAY
    finally:
        dealer.close()


async def _greeting(guest: Guest) -> str:
    """A data plane's greeting and then a store's, each well formed and with a proof that is none; then a read."""
    rng = guest.rng
    if rng.random() < 0.5:
        read = struct.pack("<BBHIIQQ", 1, 1, 0, 0, 16, 1, 64) + struct.pack("<QQ", 0, 64)
        heard, outcome = await _told(guest, hello(rng), rng.randbytes(32), read)
        return LET_IN if len(heard) > 64 and not heard.startswith(b"HTTP") and heard[:1] != b"\xff" else outcome
    said = _LINE.pack(b"KVBL", 1, rng.randint(1, 64), rng.randbytes(32), rng.randbytes(32))
    heard, outcome = await _told(guest, said, struct.pack("<B3xI", 3, 1) + b"\x90")
    return LET_IN if 32 < len(heard) < 64 and not heard.startswith(b"HTTP") else outcome


KINDS: tuple[Kind, ...] = (
    Kind("noise", "random bytes", _noise),
    Kind("huge", "frames and bodies that say they are huge", _huge),
    Kind("half", "the first bytes of a greeting, then silence", _half),
    Kind("idle", "a connection on which nothing is said", _idle),
    Kind("slow", "a greeting a byte at a time", _slow),
    Kind("reset", "a greeting, then a reset", _reset),
    Kind("tls", "a TLS hello", _tls),
    Kind("http", "paths of administrators", _http),
    Kind("plain-zmq", "ZMTP without keys, and a registration", _plain_zmq),
    Kind("curve", "CurveZMQ with a key that nobody knows, and a registration", _curve),
    Kind("greeting", "the greeting of a data plane or a store, with a proof that is none", _greeting),
)


async def visit(
    ports: Sequence[Place],
    seconds: float,
    rng: random.Random,
    *,
    public_keys: Sequence[str] = (),
    kinds: Sequence[Kind] = KINDS,
    at_once: int = AT_ONCE_MAX,
) -> Counter[str]:
    """Visit every port in turn, in every way, for so long. Counts "visits", each kind, and each outcome.

    `public_keys` are those of the servers: public, so that a stranger may know them.
    """
    counts: Counter[str] = Counter()
    until = asyncio.get_running_loop().time() + seconds
    places = itertools.cycle([place for place in ports for _ in kinds])
    ways = itertools.cycle(kinds)

    async def come() -> None:
        while (now := asyncio.get_running_loop().time()) < until:
            kind = next(ways)
            ends = min(until, now + rng.uniform(0.1, 1.0) * VISIT_S)
            outcome = await kind.visit(Guest(next(places), ends, rng, context, public_keys))
            counts.update(("visits", kind.name, outcome))
            if outcome == LET_IN:
                counts[f"{LET_IN}: {kind.name}"] += 1
            if outcome == UNREACHED:
                await asyncio.sleep(0.05)  # a port that is closed for the moment is not worth a busy loop

    if not ports:
        return counts
    with zmq.asyncio.Context() as context:
        await asyncio.gather(*(come() for _ in range(at_once)))
    return counts


@contextlib.asynccontextmanager
async def crowd(ports: Sequence[Place], each: int, said: Iterable[bytes] = (b"",)) -> AsyncIterator[int]:
    """`each` connections to every port, held while the context lasts; gives how many there are.

    Of what is `said`, each connection says one, in turn, and then nothing. Who is turned away does not come again.
    """
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(DIALS_AT_ONCE_MAX)
    words = itertools.cycle(said)
    held: list[socket.socket] = []

    async def come(place: Place) -> None:
        if place[0][:1] in ("\0", "/"):
            sock, address = socket.socket(socket.AF_UNIX), place[0]
        else:
            sock, address = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET), place  # type: ignore[assignment]
        held.append(sock)
        sock.setblocking(False)
        async with room:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await loop.sock_connect(sock, address)
                    await loop.sock_sendall(sock, next(words))

    try:
        await asyncio.gather(*(come(place) for place in ports for _ in range(each)))
        yield len(held)
    finally:
        for sock in held:
            sock.close()
