"""Somebody between two ends of TCP connections: hears every byte, and changes what crosses, record by record."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from kvbaton.security.records import HEAD, OVERHEAD_BYTES
from kvbaton.security.sealing import NONCE_BYTES, PROOF_BYTES
from kvbaton.transports.net.connection_handshake import _HELLO

Edit = Callable[[str, int, bytes], list[bytes] | None]
"""(to "server" or "client", number of the record, the record): what is passed on instead; None hangs up."""


def as_it_is(_to: str, _number: int, record: bytes) -> list[bytes]:
    return [record]


class Relay:
    """Listens before a server. `greeting` changes the client's first words, `edit` each record that follows."""

    def __init__(
        self,
        port: int,
        name_bytes: int,
        edit: Edit = as_it_is,
        greeting: Callable[[bytes], bytes] = lambda hello: hello,
        sealed: bool = True,
    ) -> None:
        self._target = port
        self._edit = edit
        self._greeting = greeting
        self._hello_bytes = _HELLO.size + name_bytes
        self._sealed = sealed
        self.heard: dict[str, bytearray] = {"server": bytearray(), "client": bytearray()}
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._hang_up()
        for thread in self._threads:
            thread.join(20)
        for sock in self._socks:
            sock.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._target), 20)
                self._socks += [client, server]
                self._start(self._pass, "server", client, server)
                self._start(self._pass, "client", server, client)

    def _pass(self, to: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            if to == "server":
                target.sendall(self._greeting(self._exactly(to, source, self._hello_bytes)))
                target.sendall(self._exactly(to, source, PROOF_BYTES))
            else:
                target.sendall(self._exactly(to, source, NONCE_BYTES + PROOF_BYTES))
            number = 0
            while not self._sealed:
                target.sendall(self._exactly(to, source, 1 << 16, whole=False))
            while True:
                head = self._exactly(to, source, HEAD.size)
                record = head + self._exactly(to, source, HEAD.unpack(head)[0] + OVERHEAD_BYTES - HEAD.size)
                instead = self._edit(to, number, record)
                if instead is None:
                    break
                for each in instead:
                    target.sendall(each)
                number += 1
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _exactly(self, to: str, source: socket.socket, size: int, whole: bool = True) -> bytes:
        data = b""
        while len(data) < size:
            more = source.recv(size - len(data))
            if not more:
                raise EOFError
            self.heard[to] += more
            data += more
            if not whole:
                break
        return data

    def _hang_up(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
