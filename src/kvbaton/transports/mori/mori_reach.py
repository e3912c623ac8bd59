"""The peers that mori can reach: sessions between two regions each, opened at first use.

Laws:
 - Opening talks to the peer with the GIL held, so it is done rarely: an unreachable peer is not tried again for
   `redial_s`, and a session is kept for as long as its peer is connected.
 - A peer with which a read has failed is given up for good: its queue pair is in the error state, and mori makes no
   new one for the same two engines (August 2026). After a restart it is another engine.
Touched only by the mover's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from kvbaton.transports.mori.mori_engine import MoriEngine, MoriError, Plot
from kvbaton.transports.mori.mori_links import MoriLink

log = logging.getLogger(__name__)

BROKEN_MAX = 4096


class Reach:
    """The peers that one engine knows."""

    def __init__(self, engine: MoriEngine, plots: dict[int, Plot], redial_s: float) -> None:
        self._engine = engine
        self._plots = plots
        self._redial_s = redial_s
        self._met: Counter[str] = Counter()  # links by engine
        self._broken: dict[str, str] = {}  # engines with which a read has failed, and how

    def session(self, link: MoriLink, here: int, there: int) -> Any:
        """The session of two regions; MoriError where the peer cannot be reached."""
        if link.far.key in self._broken:
            raise MoriError("session", f"broken for good until one of the two restarts: {self._broken[link.far.key]}")
        if time.monotonic() < link.shut_until:
            raise MoriError("session", f"the peer is not tried again for {self._redial_s} s: {link.problem}")
        try:
            return self._open(link, here, there)
        except MoriError as error:
            link.shut_until, link.problem = time.monotonic() + self._redial_s, str(error)
            raise

    def give_up(self, link: MoriLink, problem: str) -> None:
        """A read has failed."""
        while len(self._broken) >= BROKEN_MAX:
            self._broken.pop(next(iter(self._broken)))
        self._broken.setdefault(link.far.key, problem)

    def leave(self, link: MoriLink) -> None:
        """The peer is disconnected; mori forgets it when no other link needs it."""
        link.sessions.clear()
        if not link.met:
            return
        link.met = False
        self._met[link.far.key] -= 1
        if not self._met[link.far.key]:
            del self._met[link.far.key]
            try:
                self._engine.part(link.far)
            except MoriError as error:
                log.debug("%s", error)

    def _open(self, link: MoriLink, here: int, there: int) -> Any:
        session = link.sessions.get((here, there))
        if session is None or not self._engine.is_alive(session):
            if not link.met:
                self._engine.meet(link.far)
                link.met = True
                self._met[link.far.key] += 1
            session = self._engine.open(self._plots[here].desc, link.far.regions[there].desc)
        link.keep((here, there), session)
        return session
