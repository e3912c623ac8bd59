"""The access log: one line for each request that has been answered, under the logger `kvbaton.access`.

Laws: a line has the method, the path, the status, how long the answer took, the caller's address and the request's id;
neither the query, nor headers, nor anything of a body. Probes that are well (`/health`, `/ping`, `/metrics`) are logged
at DEBUG.
"""

from __future__ import annotations

import logging

from kvbaton.processes import process_logs

log = logging.getLogger(process_logs.ACCESS_LOGGER)

PATH_CHARS_MAX = 200
CLIENT_GONE = 499
"""The status of a request whose client went before its answer ended, as nginx has it."""
_PROBES = frozenset({"/health", "/ping", "/metrics"})


def answered(
    method: str, path: str, status: int, seconds: float, *, request: str = "", client: str = "", error: str = ""
) -> None:
    """A request has ended. `error`: the code that was told within a stream which had begun well."""
    if status < 400 and not error and process_logs.current().access == "errors":
        return
    level = logging.DEBUG if path in _PROBES and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    path, ms = path[:PATH_CHARS_MAX], round(seconds * 1000, 1)
    facts = {"method": method, "path": path, "status": status, "ms": ms, "client": client}
    if error:
        facts["error"] = error
    said = f"{client or '-'} {method} {path} {status} {ms:.1f} ms{f' error={error}' if error else ''}"
    if not process_logs.say_quickly(logging.getLevelName(level), log.name, said, request, facts):
        say = log.debug if level == logging.DEBUG else log.info
        say("%s", said, extra={"request": request, "fields": facts})
