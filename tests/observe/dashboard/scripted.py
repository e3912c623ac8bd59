"""The page's files behind a server whose state a test writes: for what a live cluster cannot be made to show."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvbaton.observe.dashboard.state import HEADERS, STATE, Page, fixed_pages, json_page


@dataclass
class Script:
    """What is answered, and what was asked for."""

    state: Callable[[], bytes]
    flights: Callable[[dict[str, str]], list[Any]] = lambda _: []
    asked: list[str] = field(default_factory=list)
    state_bytes: list[int] = field(default_factory=list)
    refuse: bool = False
    url: str = ""


@contextlib.contextmanager
def serving(script: Script) -> Iterator[Script]:
    """Serve on a free port of loopback until the context ends."""
    fixed = fixed_pages()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            target = urlsplit(self.path)
            script.asked.append(target.path)
            page = None if script.refuse else self.found(target.path, target.query)
            page = page or Page(b"{}", "application/json", HEADERS)
            missing = script.refuse or (target.path not in fixed and target.path not in (STATE, "/flights"))
            self.send_response(503 if script.refuse else 404 if missing else 200)
            for name, value in {**page.headers, "Content-Type": page.content_type}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

        def found(self, path: str, query: str) -> Page | None:
            if path == STATE:
                data = script.state()
                script.state_bytes.append(len(data))
                return json_page(data)
            if path == "/flights":
                asked = {name: values[0] for name, values in parse_qs(query).items()}
                return json_page(msgspec.json.encode({"journeys": script.flights(asked)}))
            return fixed.get(path)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
