"""One direction of an encrypted connection, as records. Pure: bytes in, bytes out.

    record   bytes of the plaintext (4, little-endian), ciphertext, tag (16)       AES-128-GCM
             empty: the end, nothing of this connection lands any more

    secret   random, for one peer and incarnation (or one store connection), sent over CurveZMQ, never here
    root     HKDF-Extract(SHA-256 of the whole handshake, secret)      both sides' nonces are in it
    way      HKDF-Expand(root, "client" or "server")                               a key of its own for each direction
    key, iv  HKDF-Expand(way, "key"), HKDF-Expand(way, "iv"); nonce = iv XOR number of the record

Laws: a nonce is used once per key: each handshake has fresh nonces and so fresh keys, each direction has its own, and
record numbers only rise. A record opens only as the next one of its direction and connection, complete and unaltered; a
record that does not open yields nothing. After `RECORDS_PER_KEY` both sides derive the next key and forget the last,
far below the limit of AES-GCM (RFC 8446, 5.5).
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import struct
from typing import Any

from kvbaton.protocol.errors import ProtocolError, Reason

RECORD_BYTES = 256 << 10
"""Maximum plaintext. Larger records cost fewer Python iterations, smaller ones stay in a core's cache."""

HEAD = struct.Struct("<I")
TAG_BYTES = 16
OVERHEAD_BYTES = HEAD.size + TAG_BYTES
RECORDS_PER_KEY = 1 << 17  # 32 GiB at most, 2^31 blocks; the limit is 2^34.5
KEY_BYTES = 16
NONCE_BYTES = 12
_SUITE = b"kvbaton sealed 1 aes-128-gcm "


class _Way:
    """The keys of one direction, and the number of the next record."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._number = 0
        self._load()

    def _load(self) -> None:
        self._iv = int.from_bytes(_expand(self._secret, b"iv")[:NONCE_BYTES], "big")
        self._aead = _aead()(_expand(self._secret, b"key")[:KEY_BYTES])

    def _nonce(self) -> bytes:
        """The nonce of the next record. Each is used once."""
        number = self._number
        if number and number % RECORDS_PER_KEY == 0:
            self._secret = _expand(self._secret, b"next")
            self._load()
        self._number = number + 1
        return (self._iv ^ number).to_bytes(NONCE_BYTES, "big")


class Sealer(_Way):
    """The sending direction."""

    def seal(self, plain: memoryview, into: memoryview) -> int:
        """The size of the record that `into` now starts with. `plain` is not empty and within `RECORD_BYTES`."""
        size = len(plain)
        if not 0 < size <= RECORD_BYTES:
            raise ValueError(f"a record of {size} bytes")
        head = HEAD.pack(size)
        into[: HEAD.size] = head
        total = size + OVERHEAD_BYTES
        nonce = self._nonce()  # first: it may switch to the next key
        self._aead.encrypt_into(nonce, plain, head, into[HEAD.size : total])
        return total

    def end(self) -> bytes:
        """The last record: its sender accepts no more data. Unlike a FIN or a reset, it cannot be forged."""
        head, nonce = HEAD.pack(0), self._nonce()  # first: it may switch to the next key
        return head + bytes(self._aead.encrypt(nonce, b"", head))


class Opener(_Way):
    """The receiving direction."""

    def size_of(self, head: bytes | memoryview) -> int:
        """The total size of the record with this header."""
        size = int(HEAD.unpack(head)[0])
        if size > RECORD_BYTES:
            raise ProtocolError(
                Reason.BAD_MESSAGE, f"encrypt: a record of {size} bytes; at most {RECORD_BYTES} are allowed"
            )
        return size + OVERHEAD_BYTES

    def open(self, record: memoryview, into: memoryview) -> int:
        """The size of the plaintext that `into` now starts with; ProtocolError for anything but the next record."""
        size = len(record) - OVERHEAD_BYTES
        nonce = self._nonce()  # first: it may switch to the next key
        try:
            self._aead.decrypt_into(nonce, record[HEAD.size :], bytes(record[: HEAD.size]), into[:size])
        except _invalid_tag():
            raise ProtocolError(
                Reason.BAD_MESSAGE, "encrypt: a record was altered, repeated, dropped or reordered in transit"
            ) from None
        return size


class Seals:
    """Both directions of one connection, as seen by one end. Used by one thread at a time."""

    __slots__ = ("opener", "sealer")

    def __init__(self, secret: bytes, said: bytes, is_server: bool) -> None:
        """`said`: the whole handshake, which both sides have proven; it contains fresh nonces of both."""
        root = hmac.digest(hashlib.sha256(_SUITE + said).digest(), secret, "sha256")
        client, server = (_expand(root, _SUITE + role) for role in (b"client", b"server"))
        self.sealer = Sealer(server if is_server else client)
        self.opener = Opener(client if is_server else server)


def load() -> None:
    """Import the library now, so that no connection waits for it."""
    _aead()


def _expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand (RFC 5869) for one block of SHA-256, which is all that is needed here."""
    return hmac.digest(key, info + b"\x01", "sha256")


def _aead() -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM


def _invalid_tag() -> type[Exception]:
    found: type[Exception] = importlib.import_module("cryptography.exceptions").InvalidTag
    return found
