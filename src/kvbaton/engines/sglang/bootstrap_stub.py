"""What stands at a prefill engine's bootstrap port: routers of SGLang's ask there whether it lives.

Law: nothing is learnt here, and nothing registered: no peer is found by it, and no key goes over it.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_ROUTE = json.dumps(
    {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "follow_bootstrap_room": True}
).encode()
_ANSWERS = {"/health": (b"OK", "text/plain"), "/route": (_ROUTE, "application/json")}


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0

    def do_GET(self) -> None:
        body, kind = _ANSWERS.get(self.path.partition("?")[0], (b"", ""))
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not news."""


class BootstrapStub:
    """SGLang's `BaseKVBootstrapServer`."""

    def __init__(self, host: str, port: int) -> None:
        self._server = ThreadingHTTPServer((host, port), _Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="kvbaton-bootstrap", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
