"""Counts and rate-limits aiohttp's complaints about malformed requests.

Law: nothing that a client sent is in the log, and no trace of it: whoever reaches the port could fill a disk with them,
or have a proxy's credentials written down there.
"""

from __future__ import annotations

import logging
import traceback

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvbaton.observe.codes.saying import worth_saying

log = logging.getLogger(__name__)

CLIENTS_FAULT = (HttpProcessingError, web.RequestPayloadError)
"""What aiohttp raises for bytes that are no HTTP/1.1."""


class Misheard(logging.Logger):
    """In place of aiohttp's own logger. `count` is of requests that could not be read."""

    def __init__(self) -> None:
        super().__init__(f"{__name__}.aiohttp")
        self.count = 0
        self._crashes = 0

    def isEnabledFor(self, level: int) -> bool:
        return False  # of what is not told below: its words are the client's

    def exception(self, msg: object, *args: object, exc_info: object = None, **_: object) -> None:
        if exc_info is None or isinstance(exc_info, CLIENTS_FAULT):
            self.note(exc_info)
            return
        self._crashes += 1
        if worth_saying(self._crashes):
            where = traceback.extract_tb(getattr(exc_info, "__traceback__", None))
            last = f"{where[-1].filename}:{where[-1].lineno}" if where else "nowhere"
            name = type(exc_info).__name__
            log.error("[request-crashed] a connection ended by %s at %s (%d so far)", name, last, self._crashes)

    def note(self, error: object) -> None:
        """One more request that could not be read."""
        self.count += 1
        if worth_saying(self.count):
            name = type(error).__name__
            log.warning(
                "[http-malformed] a request was not HTTP/1.1 or exceeded a limit: %s (%d so far)", name, self.count
            )
