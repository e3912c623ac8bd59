"""TLS before a server's HTTP: certificate files that may change, and a connection's layer of records.

Laws: a client that is slow with its handshake, or sends something else, costs one place among the connections and no
memory beyond one record; it makes room for others like any silent one, and is cut off after `HANDSHAKE_S`. Plain HTTP
is told so, in plain HTTP. What is behind the layer sees a transport like any other. TLS 1.2 or newer.

`asyncio`'s own layer accepts first and counts never: handshakes would not be bounded by number, and plain HTTP would
only see a closed connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import address_of, last_words

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
HANDSHAKE_BYTES_MAX = 64 << 10
"""Of a client, before its handshake is over: certificates of clients are not asked for."""
SAID_BYTES_MAX = 16 << 10
"""Of what TLS itself says after the handshake, such as warnings against renegotiation: nobody else counts it."""
READ_BYTES = 256 << 10
_RECORD = 0x16  # how a TLS handshake begins; no HTTP does
PLAIN_HTTP = "this port speaks TLS: use https://"


class TlsError(ValueError):
    """The operator must give other files."""


def stamp(path: str) -> object:
    """Changes with the file; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class TlsFiles:
    """A certificate and its key; `context` is made of what they hold now."""

    def __init__(self, certificate: str, key: str) -> None:
        """`TlsError` says what is wrong with which file."""
        self._files = (certificate, key)
        self._stamp = self._stamped()
        self.context = self._made()

    def _stamped(self) -> tuple[object, ...]:
        return tuple(stamp(path) for path in self._files)

    def refresh(self) -> None:
        """Take new files for connections to come; what cannot be used is told once, and the old stay good."""
        found = self._stamped()
        if found == self._stamp:
            return
        self._stamp = found
        try:
            self.context = self._made()
        except TlsError as error:
            log.warning("[front-files] %s; the certificate of before is used on", error)
        else:
            log.info("the certificate was read again")

    def _made(self) -> ssl.SSLContext:
        certificate, key = self._files
        for path in self._files:
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise TlsError(f"{path}: cannot be read: {error.strerror or error}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A key with a passphrase would have OpenSSL ask for it on the terminal, and wait
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            said = (
                f"{certificate} and {key}: no certificate (PEM, with its chain) and its key without passphrase ({why})"
            )
            raise TlsError(said) from None
        return context


class TlsInner(Protocol):
    """What a layer carries: an `asyncio.Protocol`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class TlsDoor(Protocol):
    """Where connections are counted whose handshake is not over."""

    def admit(self, connection: TlsLayer, who: str) -> bool: ...
    def forget(self, connection: TlsLayer) -> None: ...


class TlsLayer(asyncio.Transport, asyncio.Protocol):
    """One connection: a protocol to the socket, and a transport to `inner`, which begins when the handshake is over."""

    def __init__(
        self, files: TlsFiles, door: TlsDoor, inner: Callable[[], TlsInner], who: Callable[[str], str], now: float
    ) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = files.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._door = door
        self._make = inner
        self._who = who
        self._inner: TlsInner | None = None  # from the handshake's end on
        self._raw: asyncio.Transport = cast(asyncio.Transport, None)  # from connection_made on
        self._begun = now
        self._heard = 0  # bytes of the handshake
        self._said = 0  # bytes that TLS itself has answered since
        self._paused = False
        self._ended = False  # we have said that no more comes, so nothing is read either

    # --- as one that waits in the crowd

    is_busy = False

    def overdue(self, now: float) -> bool:
        return now - self._begun > HANDSHAKE_S

    def give_up(self) -> None:
        self._raw.abort()

    def make_room(self) -> None:
        self._raw.abort()

    def close_when_idle(self) -> None:
        self._raw.abort()

    # --- as a protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        who = self._who(address_of(transport.get_extra_info("peername")))
        if not self._door.admit(self, who):
            self._raw.abort()

    def data_received(self, data: bytes) -> None:
        if self._ended or self._raw.is_closing():
            return
        if self._inner is None:
            self._greet(data)
            return
        self._incoming.write(data)
        self._decrypt()

    def _greet(self, data: bytes) -> None:
        if not self._heard and data[0] != _RECORD:
            self._raw.write(last_words(ApiError(400, PLAIN_HTTP, code="bad_request")))
            self._raw.close()
            return
        self._heard += len(data)
        self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            if self._heard > HANDSHAKE_BYTES_MAX:
                self._raw.abort()
            return
        except ssl.SSLError:
            self._flush()  # the alert that says why
            self._raw.close()
            return
        self._flush()
        self._door.forget(self)
        self._inner = self._make()
        self._inner.connection_made(self)
        self._decrypt()

    def _decrypt(self) -> None:
        """Give on what has come, as long as it is wanted."""
        inner = self._inner
        assert inner is not None
        while not (self._paused or self._ended or self._raw.is_closing()):
            try:
                data = self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                data = b""
            except ssl.SSLError:
                self._flush()
                self._raw.abort()
                break
            if not data:
                inner.eof_received()
                self.close()
                break
            inner.data_received(data)
        self._said += self._outgoing.pending  # what `inner` writes goes out at once
        self._flush()
        if self._said > SAID_BYTES_MAX:
            self._raw.abort()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())

    def eof_received(self) -> None:
        if self._inner is not None:
            self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        inner, self._inner = self._inner, None
        self._ended = True
        if inner is None:
            self._door.forget(self)
        else:
            inner.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    # --- as a transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self._raw.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._ended or self._raw.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        try:
            if data:
                self._tls.write(data)
        except ssl.SSLError:
            self.abort()
        self._flush()

    def write_eof(self) -> None:
        self._say_goodbye()
        if not self._raw.is_closing():
            self._raw.write_eof()

    def close(self) -> None:
        self._say_goodbye()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def _say_goodbye(self) -> None:
        """Close this side's direction of TLS, so that the client knows that it has read all."""
        if self._ended or self._raw.is_closing():
            return
        with contextlib.suppress(ssl.SSLError):  # it wants the other side's, which nobody waits for
            self._tls.unwrap()
        self._flush()
        self._ended = True

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True
        if not self._raw.is_closing():
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        if not self._paused:
            return
        self._paused = False
        if self._raw.is_closing():
            return
        self._raw.resume_reading()
        if self._inner is not None and not self._ended:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """With what was decrypted of, or came, before reading was paused."""
        if self._inner is not None:
            self._decrypt()
