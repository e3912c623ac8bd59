"""Somebody who answers over HTTP in his own way: piece by piece, slowly, or with something else than HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

PAUSE_S = 0.02
"""Between two pieces."""
DRIPS = 150
"""After so many a dripping answer is whole: who does not hang up before is a failed test, not a hanging one."""


def whole(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> list[bytes]:
    return [b"HTTP/1.1 " + status + b"\r\n" + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def dripping(body: bytes, status: bytes = b"200 OK") -> Iterator[bytes]:
    """A byte now and then, each long before a socket's time-out; blanks before the body."""
    yield b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % (DRIPS + len(body))
    for _ in range(DRIPS):
        yield b" "
    yield body


@contextmanager
def talker(answer: Callable[[str], Iterable[bytes]]) -> Iterator[str]:
    """Answers each path with pieces; its URL."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def serve(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.settimeout(10)
            heard = b""
            while b"\r\n\r\n" not in heard and (more := line.recv(4096)):
                heard += more
            for number, piece in enumerate(answer(heard.split(b" ")[1].decode()) if b" " in heard else ()):
                if number and over.wait(PAUSE_S):
                    return
                line.sendall(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                line, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(line,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join(15)
