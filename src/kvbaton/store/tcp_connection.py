"""Lines: TCP connections that carry values between a store's server and its clients.

    server  nonce
    client  magic, version, number of its invitation, nonce, HMAC(secret, "client" + both nonces)
    server  HMAC(secret, "server" + both nonces)

Laws: an invitation (number and secret) travels over the encrypted control plane, is for one line, and its secret never
crosses the line itself. Neither side acts on anything before the other has proven that it holds it. Every wait has a
deadline, and a line on which anything was odd, short or late is closed, never used again. Of the two versions 1 is
plain, and 2 goes on in encrypted and signed records (`kvbaton.sealed`), which is what happens between hosts: the
version is a part of what both prove, and who insists on 2 takes nothing else. Values have sums of their own (`frames`).
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvbaton.protocol.errors import ProtocolError
from kvbaton.security.records import HEAD, OVERHEAD_BYTES, RECORD_BYTES, Seals
from kvbaton.security.sealing import MISSING, can_seal
from kvbaton.store.content_keys import KEY_CHARS_MAX, VALUE_BYTES_MAX, is_key

PLAIN, SEALED = 1, 2
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
KEYS_MAX = 4096
BLOB_BYTES_MAX = 2 << 20
WRONG_CHARS_MAX = 200

_MAGIC = b"KVBL"
_HELLO = struct.Struct(f"<4sB3xQ{NONCE_BYTES}s{PROOF_BYTES}s")
_SAID = struct.Struct("<BQ")
_HEAD = struct.Struct("<B3xI")  # what is asked, and the bytes of its list
SIZE = struct.Struct("<Q")

Item: TypeAlias = tuple[
    Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)], Annotated[int, msgspec.Meta(ge=0, le=VALUE_BYTES_MAX + 64)]
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
    """The line is of no use any more."""


class PlainLine(LineError):
    """A client with an invitation that would not encrypt."""


class Line:
    """One connection, used by one thread at a time. Every call raises `LineError` or `OSError`, by `until`."""

    _seals: Seals | None = None

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.until = 0.0

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def seal(self, seals: Seals) -> None:
        """All that is said from now on, both ways, crosses as records."""
        self._seals = seals
        self._records = memoryview(bytearray(3 * (RECORD_BYTES + OVERHEAD_BYTES)))  # one out, one in, its plaintext
        self._opened = self._records[:0]  # of the last record, not yet asked for

    def send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            if self._seals is None:
                self._send(part)
                continue
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
        """The next record. Nothing of it is seen before it is proven."""
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

    def _send(self, part: bytes | memoryview) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(part)

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
        """The next question, within bounds."""
        op, size = _HEAD.unpack(self.read(_HEAD.size))
        if op not in _OPS or size > BLOB_BYTES_MAX:
            raise LineError("not a question")
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
            raise LineError("an answer out of bounds")
        try:
            texts: tuple[str, ...] = _texts.decode(self.read(size))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(f"not an answer: {error}") from None
        return texts

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also ends a read of another thread
        self._socket.close()

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise LineError("not in time")
        return left


def greet(line: Line, number: int, secret: bytes, sealed: bool = False) -> None:
    """The client's half; LineError when the server cannot prove itself."""
    version = SEALED if sealed else PLAIN
    theirs, ours = line.read(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    said = _said(version, number, theirs, ours)
    line.send(_HELLO.pack(_MAGIC, version, number, ours, _proof(secret, b"client", said)))
    try:
        proof = line.read(PROOF_BYTES)
    except (LineError, OSError) as error:
        raise LineError(f"refused at the greeting ({error}); is encrypt the same there, and the version?") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", said)):
        raise LineError("the server does not hold the secret of our invitation")
    if sealed:
        line.seal(Seals(secret, b"kvbaton-line|" + said, is_server=False))


def admit(
    line: Line,
    secret_of: Callable[[int], bytes | None],
    take: Callable[[int], bytes | None],
    must_seal: bool = False,
) -> None:
    """The server's half; LineError for a stranger, and with `must_seal` for a client that speaks plainly. `take` gives
    an invitation's secret once, to who has proven it."""
    ours = secrets.token_bytes(NONCE_BYTES)
    line.send(ours)
    magic, version, number, theirs, proof = _HELLO.unpack(line.read(_HELLO.size))
    if magic != _MAGIC or version not in {PLAIN, SEALED}:
        raise LineError(f"no greeting of version {PLAIN} or {SEALED}")
    secret = secret_of(number) or secrets.token_bytes(SECRET_BYTES)
    said = _said(version, number, ours, theirs)
    if not hmac.compare_digest(proof, _proof(secret, b"client", said)):
        raise LineError("a stranger")  # who only names a number spends no invitation
    if must_seal and version == PLAIN:
        raise PlainLine("a client would not encrypt, and this store insists; update it, or set encrypt on both alike")
    if version == SEALED and not can_seal():
        raise LineError(f"encrypt: a client encrypts, and {MISSING}")
    if take(number) is None:
        raise LineError("an invitation is for one line")
    line.send(_proof(secret, b"server", said))
    if version == SEALED:
        line.seal(Seals(secret, b"kvbaton-line|" + said, is_server=True))


def _said(version: int, number: int, server: bytes, client: bytes) -> bytes:
    """What both prove. Version 1 has always been the nonces alone."""
    return server + client if version == PLAIN else _SAID.pack(version, number) + server + client


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"kvbaton-line|" + role + b"|" + nonces, "sha256")
