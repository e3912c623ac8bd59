"""The access log: one line for each request that has been answered, under the logger `kvbaton.access`.

Laws: a line has the method, the path, the status, how long the answer took, the caller's address, the request's id, and
at a router who served it, TTFT and tokens; neither the query, nor headers, nor anything of a body. What is asked again
and again and is well (`/health`, `/ping`, `/metrics`, what an open dashboard asks for) is logged at DEBUG.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from kvbaton.processes import process_logs

log = logging.getLogger(process_logs.ACCESS_LOGGER)

PATH_CHARS_MAX = 200
CLIENT_GONE = 499
"""The status of a request whose client went before its answer ended, as nginx has it."""
_PROBES = frozenset({"/health", "/ping", "/metrics", "/dashboard/state"})


class ServedFacts(msgspec.Struct):
    """What a router knows of an answer, since its request was read; of several choices together."""

    begun: float = msgspec.field(default_factory=time.monotonic)  # uvloop's clock stands still for milliseconds
    pair: str = ""  # `P/D`, as the header `x-kvbaton-pair` has it
    mode: str = ""
    ttft_s: float | None = None  # of a stream
    prompt_tokens: int = 0  # estimated where the prompt is text
    output_tokens: int = 0

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.begun

    def by(self, pair: str, mode: str, prompt_tokens: int) -> None:
        """One choice has an answer."""
        self.pair = f"{self.pair},{pair}" if self.pair else pair
        self.mode = mode
        self.prompt_tokens += prompt_tokens

    def facts(self) -> dict[str, Any]:
        if not self.pair:
            return {}
        ttft = {} if self.ttft_s is None else {"ttft_ms": round(self.ttft_s * 1000, 1)}
        tokens = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        return {"pair": self.pair, "mode": self.mode, **ttft, **tokens}


def answered(
    method: str,
    path: str,
    status: int,
    seconds: float,
    *,
    request: str = "",
    client: str = "",
    error: str = "",
    served: ServedFacts | None = None,
) -> None:
    """A request has ended. `error`: the code that was told within a stream which had begun well."""
    if status < 400 and not error and process_logs.current().access == "errors":
        return
    level = logging.DEBUG if path in _PROBES and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    path, ms = path[:PATH_CHARS_MAX], round(seconds * 1000, 1)
    more = {} if served is None else served.facts()
    if error:
        more["error"] = error
    facts = {"method": method, "path": path, "status": status, "ms": ms, "client": client, **more}
    told = "".join([f" {name}={value}" for name, value in more.items()])
    said = f"{client or '-'} {method} {path} {status} {ms:.1f} ms{told}"
    if not process_logs.say_quickly(logging.getLevelName(level), log.name, said, request, facts):
        say = log.debug if level == logging.DEBUG else log.info
        say("%s", said, extra={"request": request, "fields": facts})
