"""A member for the tests of networks: does on its host what it is told, by JSON lines on its standard input.

Every connection here opens with nothing; what comes in on one is counted and answered by echo.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
import time
from typing import Any


class Agent:
    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0))
        self._links: list[socket.socket] = []
        self._got: dict[int, int] = {}
        self._served: list[socket.socket] = []
        self._served_got = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def dial(self, host: str, port: int, timeout_s: float) -> int:
        """A connection that stays open; its number."""
        self._links.append(socket.create_connection((host, port), timeout_s))
        number = len(self._links) - 1
        threading.Thread(target=self._read, args=(number,), daemon=True).start()
        return number

    def send(self, number: int, count: int) -> None:
        self._links[number].sendall(bytes(count))

    def got(self, number: int) -> int:
        return self._got.get(number, 0)

    def served(self) -> int:
        """Bytes that came in on the connections of others."""
        return self._served_got

    def reply(self, count: int) -> None:
        """Send on the newest connection that another opened."""
        self._served[-1].sendall(bytes(count))

    def exchange(self, host: str, port: int, count: int, timeout_s: float) -> float:
        """Send `count` bytes, compare what comes back; the seconds it took."""
        payload = hashlib.shake_128(b"%d" % count).digest(count)
        begun = time.monotonic()
        with socket.create_connection((host, port), timeout_s) as sock:
            sock.sendall(b"E")
            sender = threading.Thread(target=sock.sendall, args=(payload,), daemon=True)
            sender.start()
            back = bytearray()
            while len(back) < count:
                chunk = sock.recv(1 << 20)
                if not chunk:
                    raise ConnectionError(f"ended after {len(back)} bytes")
                back += chunk
            sender.join()
        if back != payload:
            raise ValueError("other bytes came back")
        return time.monotonic() - begun

    def _accept(self) -> None:
        while True:
            sock, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        self._served.append(sock)
        echo = False
        while data := sock.recv(1 << 20):
            if not echo and data[:1] == b"E":
                echo, data = True, data[1:]
            if echo:
                sock.sendall(data)
            else:
                self._served_got += len(data)

    def _read(self, number: int) -> None:
        sock = self._links[number]
        sock.settimeout(None)
        while data := sock.recv(1 << 20):
            self._got[number] = self._got.get(number, 0) + len(data)


def main() -> None:
    agent = Agent(sys.argv[1])
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"ok": getattr(agent, what)(*arguments)}
        except (OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
