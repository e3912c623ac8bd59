"""Lines: TCP connections that carry values between a store's server and its clients.

Laws: an invitation (number and secret) travels over the encrypted control plane and is for one line, which starts with
the handshake over it (`kvbaton.security.sealing` has its laws). Every wait has a deadline, and a line on which
anything was malformed, short or late is closed, never used again. Values have their own checksums (`value_header`).
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvbaton.protocol.errors import ProtocolError
from kvbaton.security import sealing
from kvbaton.security.records import HEAD, OVERHEAD_BYTES, RECORD_BYTES, Seals
from kvbaton.security.sealing import (
    NONCE_BYTES,
    PLAIN,
    PROOF_BYTES,
    SEALED,
    VERSIONS,
    Handshake,
    HandshakeError,
    Service,
    nonce,
)
from kvbaton.store.interface import KEY_CHARS_MAX, VALUE_BYTES_MAX, is_key
from kvbaton.store.value_header import FRAME_BYTES

KEYS_MAX = 4096
BLOB_BYTES_MAX = 2 << 20
WRONG_CHARS_MAX = 200
SMALL_BYTES = 4096
LOCAL_BUFFER_BYTES = 256 << 10
"""Between processes of one host: what is under way stays in the processor's cache: a seventh of the time less."""

_MAGIC = b"KVBL"
_HELLO = struct.Struct(f"<4sB3xQ{NONCE_BYTES}s{PROOF_BYTES}s")
_SAID = struct.Struct("<BQ")
_HEAD = struct.Struct("<B3xI")  # the request, and the size of its list
SIZE = struct.Struct("<Q")

Item: TypeAlias = tuple[
    Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)],
    Annotated[int, msgspec.Meta(ge=0, le=VALUE_BYTES_MAX + FRAME_BYTES)],
]
"""A key, and the bytes of its value: that follow, or that there is room for."""
_items = msgspec.msgpack.Decoder(Annotated[tuple[Item, ...], msgspec.Meta(min_length=1, max_length=KEYS_MAX)])
_texts = msgspec.msgpack.Decoder(Annotated[tuple[str, ...], msgspec.Meta(max_length=KEYS_MAX)])
_encode = msgspec.msgpack.Encoder().encode


class Op(enum.IntEnum):
    EXISTS = 1
    PUT = 2
    GET = 3
    DISCARD = 4


_OPS = frozenset(map(int, Op))


class LineError(Exception):
    """The line is unusable."""


class StoreConnection:
    """One connection, used by one thread at a time. Every call raises `LineError` or `OSError`, by `until`."""

    _seals: Seals | None = None

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # it may be gone already, which its first use tells
            if sealing.is_local(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        self._socket = connection
        self.until = 0.0

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def seal(self, seals: Seals) -> None:
        """Everything from now on, in both directions, crosses as records."""
        self._seals = seals
        self._records = memoryview(bytearray(3 * (RECORD_BYTES + OVERHEAD_BYTES)))  # one out, one in, its plaintext
        self._opened = self._records[:0]  # of the last record, not yet consumed

    def send(self, *parts: bytes | memoryview) -> None:
        if self._seals is None:
            self._send(*parts)
            return
        for part in parts:
            whole = memoryview(part).cast("B")
            for at in range(0, len(whole), RECORD_BYTES):
                self._send(self._records[: self._seals.sealer.seal(whole[at : at + RECORD_BYTES], self._records)])

    def read_into(self, buffer: memoryview) -> None:
        if self._seals is None:
            self._read_into(buffer)
            return
        at, whole = 0, buffer.cast("B")
        while at < len(whole):
            if not self._opened:
                self._open(self._seals)
            step = min(len(whole) - at, len(self._opened))
            whole[at : at + step] = self._opened[:step]
            self._opened = self._opened[step:]
            at += step

    def _open(self, seals: Seals) -> None:
        """The next record. Nothing of it is used before it is authenticated."""
        record_bytes = RECORD_BYTES + OVERHEAD_BYTES
        room = self._records[record_bytes : 2 * record_bytes]
        try:
            self._read_into(room[: HEAD.size])
            size = seals.opener.size_of(room[: HEAD.size])
            self._read_into(room[HEAD.size : size])
            plain = self._records[2 * record_bytes :]
            self._opened = plain[: seals.opener.open(room[:size], plain)]
        except ProtocolError as error:
            raise LineError(error.detail) from None

    def _send(self, *parts: bytes | memoryview) -> None:
        """What is small goes with what follows it: alone it would wake the reader for itself."""
        small: list[bytes | memoryview] = []
        for part in parts:
            if len(part) < SMALL_BYTES:
                small.append(part)
                continue
            self._socket.settimeout(self._left())
            if small:
                first, small = b"".join(small), []
                sent = self._socket.sendmsg((first, part))
                self._socket.sendall(first[sent:])
                part = memoryview(part)[max(sent - len(first), 0) :]
            self._socket.sendall(part)
        if small:
            self._socket.settimeout(self._left())
            self._socket.sendall(b"".join(small))

    def _read_into(self, buffer: memoryview) -> None:
        at = 0
        while at < buffer.nbytes:
            self._socket.settimeout(self._left())
            came = self._socket.recv_into(buffer[at:])
            if not came:
                raise LineError("the other side has closed the line")
            at += came

    def read(self, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def ask(self, op: Op, items: Sequence[Item]) -> None:
        blob = _encode(items)
        self.send(_HEAD.pack(op, len(blob)) + blob)

    def asked(self) -> tuple[Op, tuple[Item, ...]]:
        """The next request, within bounds."""
        op, size = _HEAD.unpack(self.read(_HEAD.size))
        if op not in _OPS or size > BLOB_BYTES_MAX:
            raise LineError("not a request")
        try:
            items: tuple[Item, ...] = _items.decode(self.read(size))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(f"not a list of keys: {error}") from None
        if not all(is_key(key) for key, _ in items):
            raise LineError("not a key")
        return Op(op), items

    def tell(self, texts: Sequence[str]) -> None:
        blob = _encode([text[:WRONG_CHARS_MAX] for text in texts])
        self.send(SIZE.pack(len(blob)) + blob)

    def told(self) -> tuple[str, ...]:
        [size] = SIZE.unpack(self.read(SIZE.size))
        if size > BLOB_BYTES_MAX:
            raise LineError("a response out of bounds")
        try:
            texts: tuple[str, ...] = _texts.decode(self.read(size))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(f"not a response: {error}") from None
        return texts

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also ends another thread's read
        self._socket.close()

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise LineError("timed out")
        return left


def greet(line: StoreConnection, number: int, secret: bytes, sealed: bool = False) -> None:
    """The client's half; LineError when the server cannot prove itself."""
    version = SEALED if sealed else PLAIN
    theirs, challenge = line.read(NONCE_BYTES), nonce()
    ours = Handshake(Service.STORE, version, secret, _said(version, number, theirs, challenge), is_server=False)
    line.send(_HELLO.pack(_MAGIC, version, number, challenge, ours.proof()))
    try:
        proof = line.read(PROOF_BYTES)
    except (LineError, OSError) as error:
        raise LineError(f"refused in the handshake ({error}); are encrypt and version the same there?") from None
    if not ours.is_proof(proof):
        raise LineError("the server does not hold the secret of our invitation")
    _go_on(line, ours.seals("the store"))


def admit(
    line: StoreConnection,
    secret_of: Callable[[int], bytes | None],
    take: Callable[[int], bytes | None],
    must_seal: bool = False,
) -> None:
    """The server's half; LineError for an unauthenticated peer, and with `must_seal` for a client that does not
    encrypt. `take` returns an invitation's secret once, to a client that has proven it."""
    challenge = nonce()
    line.send(challenge)
    magic, version, number, theirs, proof = _HELLO.unpack(line.read(_HELLO.size))
    if magic != _MAGIC or version not in VERSIONS:
        raise LineError(f"no handshake of version {PLAIN} or {SEALED}")
    said = _said(version, number, challenge, theirs)
    ours = Handshake(Service.STORE, version, secret_of(number), said, is_server=True)
    if not ours.is_proof(proof):
        raise LineError("a stranger")  # naming a number alone spends no invitation
    try:
        seals = ours.seals("a client of the store", must_seal)
    except HandshakeError as error:
        raise LineError(str(error)) from None
    if take(number) is None:
        raise LineError("an invitation is valid for one line")
    line.send(ours.proof())
    _go_on(line, seals)


def _go_on(line: StoreConnection, seals: Seals | None) -> None:
    if seals is not None:
        line.seal(seals)


def _said(version: int, number: int, server: bytes, client: bytes) -> bytes:
    """The text that both prove. Version 1 has always been the nonces alone."""
    return server + client if version == PLAIN else _SAID.pack(version, number) + server + client
