"""https at the router's door: clients of all kinds, those that never finish a handshake, and new certificates."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvbaton.api.http import http_server, tls_server
from kvbaton.api.http.http_types import Answer, Request
from kvbaton.api.http.tls_server import TlsError, TlsFiles
from tests.api.http.test_http_server import GET, Stage, post, same_id, streaming, whole  # noqa: F401 - a fixture
from tests.async_tests import Run, run_on
from tests.certificates import write_certificate
from tests.router.fake_workers import until

BIG = 3 << 20


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    write_certificate(tmp_path, "first")
    return TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


class Gate:
    """The door's address, and clients of it."""

    def __init__(self, url: str, folder: Path) -> None:
        assert url.startswith("https://127.0.0.1:")
        self.port = int(url.rpartition(":")[2])
        self._folder = folder
        self._writers: list[asyncio.StreamWriter] = []

    async def secure(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._opened(ssl=trusting(self._folder), limit=2 * BIG)

    async def plain(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._opened()

    async def _opened(self, **how: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **how)
        self._writers.append(writer)
        return reader, writer

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def gate(stage: Stage, files: TlsFiles, folder: Path) -> AsyncIterator[Gate]:
    async with http_server.serving(stage, "127.0.0.1", 0, files) as url:
        found = Gate(url, folder)
        try:
            yield found
        finally:
            found.close()


async def expect(reader: asyncio.StreamReader, data: bytes) -> None:
    async with asyncio.timeout(20):
        assert await reader.readexactly(len(data)) == data


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def test_requests_streams_and_large_bodies_pass_through_tls(run: Run, files: TlsFiles, tmp_path: Path) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(40):
            yield b"x" * (64 << 10)

    stage = Stage(stream=streaming(events))
    stage.body_bytes_max = BIG
    async with gate(stage, files, tmp_path) as town:
        reader, writer = await town.secure()
        writer.write(GET + post(b"one"))  # the second is sent ahead
        await expect(reader, whole(b"GET") + whole(b"one"))
        big = bytes(range(256)) * (BIG // 256)
        writer.write(post(big))
        await expect(reader, whole(big))
        writer.write(post(b"", path=b"/stream"))
        await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and (await reader.readuntil(b"\r\n0\r\n\r\n")).count(b"x") == 40 * (64 << 10)
        writer.write(post(b"x" * 10, b"Connection: close"))
        await expect(reader, whole(b"x" * 10, b"Connection: close\r\n"))
        assert await rest(reader) == b"", "closed by TLS, not cut off"
        reader, writer = await town.secure()
        writer.write(post(b"y" * 10) + b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (BIG + 1))
        told = await rest(reader)
        assert told.startswith(whole(b"y" * 10)) and b"413" in told and b"body_too_large" in told


async def test_plain_http_at_a_tls_port_is_told_so_and_noise_is_not_answered(
    run: Run, files: TlsFiles, tmp_path: Path
) -> None:
    async with gate(Stage(), files, tmp_path) as town:
        reader, writer = await town.plain()
        writer.write(GET)
        told = await rest(reader)
        assert told.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"use https://" in told
        for noise in (
            b"\x16\x03\x01\x00\x05hello",
            b"\x16" + bytes(range(255)),
            b"\x16\x03\x03\x40\x01" + b"x" * 20000,
        ):
            reader, writer = await town.plain()
            writer.write(noise)
            with contextlib.suppress(ConnectionError):
                writer.write_eof()
            assert len(await rest(reader)) < 20, "an alert at most"
        reader, writer = await town.secure()
        writer.write(GET)
        await expect(reader, whole(b"GET"))


async def test_who_never_finishes_a_handshake_costs_a_place_for_a_while_and_nobody_else(
    run: Run, files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "connections_max", 4)
    monkeypatch.setattr(http_server, "SWEEP_S", 0.02)

    stage = Stage()
    async with gate(stage, files, tmp_path) as town:
        slow = [await town.plain() for _ in range(12)]
        for _, writer in slow:
            with contextlib.suppress(ConnectionError):
                writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello
        reader, writer = await town.secure()
        writer.write(GET)
        await expect(reader, whole(b"GET"))
        assert stage.room.turned_away["idle"] >= 8, "the oldest silent ones made room"
        monkeypatch.setattr(tls_server, "HANDSHAKE_S", 0.05)
        for reader, _ in slow:
            assert await rest(reader) == b"", "cut off in time"


async def test_a_client_that_goes_away_cancels_its_handler(run: Run, files: TlsFiles, tmp_path: Path) -> None:
    ended: list[str] = []

    async def slow(_: Request) -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("gone")
        raise AssertionError

    async with gate(Stage(slow=slow), files, tmp_path) as town:
        for leave in ("close", "abort"):
            _, writer = await town.secure()
            writer.write(post(b"", path=b"/slow"))
            await writer.drain()
            await asyncio.sleep(0.05)
            getattr(writer.transport, leave)()
        await until(lambda: ended == ["gone", "gone"])


def test_a_new_certificate_is_taken_for_new_connections_and_a_broken_one_is_not(
    files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def served(town: Gate) -> str:
        _, writer = await town.secure()
        names = writer.get_extra_info("ssl_object").getpeercert()["subject"]
        return str(names[0][0][1])

    async def story() -> None:
        async with gate(Stage(), files, tmp_path) as town:
            reader, writer = await town.secure()
            assert await served(town) == "first"
            write_certificate(tmp_path, "second")
            files.refresh()
            assert await served(town) == "second"
            writer.write(GET)
            await expect(reader, whole(b"GET"))  # who came before goes on
            kept = (tmp_path / "cert.pem").read_bytes()
            (tmp_path / "key.pem").write_text("no key")
            files.refresh()
            files.refresh()
            (tmp_path / "cert.pem").write_bytes(kept)
            assert await served(town) == "second"

    with caplog.at_level(logging.WARNING):
        run_on("uvloop", story())
    assert len([record for record in caplog.records if "[front-files]" in record.getMessage()]) == 1


def test_what_is_offered_and_what_cannot_be_read(files: TlsFiles, tmp_path: Path) -> None:
    assert files.context.minimum_version is ssl.TLSVersion.TLSv1_2
    key = ec.generate_private_key(ec.SECP256R1())
    locked = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    (tmp_path / "locked.pem").write_bytes(pem)
    for name in ("locked.pem", "cert.pem", "none.pem"):
        with pytest.raises(TlsError, match=name):
            TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / name))


class Raw:
    """The socket's side of a layer."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_over = False

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.is_over

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.is_over = True


def client_keys(secret: bytes, client: bytes, server: bytes) -> tuple[bytes, bytes]:
    """The key and the salt of a client's records: TLS 1.2, AES-128-GCM with SHA-256."""
    seed = b"key expansion" + server + client
    made, link = b"", seed
    while len(made) < 40:
        link = hmac.digest(secret, link, "sha256")
        made += hmac.digest(secret, link + seed, "sha256")
    return made[:16], made[32:36]


def test_a_client_that_has_the_layer_itself_talk_and_does_not_listen_is_cut_off(
    files: TlsFiles, tmp_path: Path
) -> None:
    context = trusting(tmp_path)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    context.keylog_filename = str(tmp_path / "secrets")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    raw, inner, said = Raw(), mock.MagicMock(), list[bytes]()
    layer = tls_server.TlsLayer(files, mock.MagicMock(), lambda: inner, str, 0.0)
    layer.connection_made(cast(asyncio.Transport, raw))
    for _ in range(2):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        said += [outgoing.read(), b""]
        raw.sent.clear()
        layer.data_received(said[-2])
        said[-1] = bytes(raw.sent)
        incoming.write(said[-1])
    client.do_handshake()
    assert inner.connection_made.called
    # OpenSSL answers each wish to begin anew with a warning; what is behind the layer hears of neither
    hello, secret = said[0][5:], bytes.fromhex((tmp_path / "secrets").read_text().split()[-1])
    key, salt = client_keys(secret, said[0][11:43], said[1][11:43])
    sealing = AESGCM(key)
    raw.sent.clear()
    for number in range(1, 4000):
        nonce = number.to_bytes(8, "big")
        about = nonce + b"\x16\x03\x03" + len(hello).to_bytes(2, "big")
        sealed = nonce + sealing.encrypt(salt + nonce, hello, about)
        layer.data_received(b"\x16\x03\x03" + len(sealed).to_bytes(2, "big") + sealed)
        assert raw.sent, "the first one is answered"
    assert raw.is_over and len(raw.sent) <= 2 * tls_server.SAID_BYTES_MAX
