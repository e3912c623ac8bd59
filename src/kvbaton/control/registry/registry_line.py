"""One registry as a worker or a router hears it: what came, whether it answers, and its last list. Of one thread.

Laws: a message that breaks the rules is counted and skipped; a callback that raises is logged and costs only itself. A
registry that says nothing for `SILENCE_S` is named once, until it has answered.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from kvbaton.control.addressing import ControlLimits, RegistryPlace
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_union import Hearing, RegistryView, UnionEntry
from kvbaton.control.zmq import ZmqControl
from kvbaton.observe.codes.entry import worth_saying

log = logging.getLogger(__name__)

SILENCE_S = 10.0
E = TypeVar("E", bound=UnionEntry)
M = TypeVar("M")


class RegistryLine(Generic[E, M]):
    """The connection to one registry, whose messages `decode` reads."""

    def __init__(
        self,
        keyring: Keyring,
        place: RegistryPlace,
        limits: ControlLimits,
        decode: Callable[[bytes], M],
        on_view: Callable[[RegistryView[E]], None],
        settings: RegistrySettings,
        clock: Callable[[], float],
        reader: str = "",
    ) -> None:
        """`on_view` is called when the registry's list changes, and when the registry begins or ceases to answer;
        `reader` is who listens, for the log."""
        self.counters: Counter[str] = Counter()
        self.place = place
        self.control = ZmqControl(keyring, None, limits, clock)
        self.control.set_directory({place[0]: (place[1], "")})  # under whichever key it has by then
        self._decode = decode
        self._on_view = on_view
        self._reader = reader
        self._hearing: Hearing[E] = Hearing(settings.evict_s, settings.ping_s)
        self._silent_since: float | None = clock()  # None: it is said that the registry is silent

    @property
    def answers(self) -> bool:
        """Whether the registry does: it has, and not long ago."""
        return self._hearing.is_answered

    def messages(self) -> list[M]:
        found: list[M] = []
        for _, frame in self.control.receive():
            try:
                found.append(self._decode(frame))
            except m.RegistryFault as fault:
                self.counters["bad_messages"] += 1
                if worth_saying(self.counters["bad_messages"]):
                    log.warning("[registry-message] a message from the registry was ignored: %s", fault)
        return found

    def heard(self, now: float, *, is_answer: bool = True) -> None:
        """Something came; a refusal to let this process read is no answer."""
        self._silent_since = now
        if is_answer:
            self._hearing.heard(now)

    def look(self, view: RegistryView[E] | None, now: float) -> None:
        """In every turn: say what is new of the registry, whose last list is `view`."""
        news = self._hearing.news(view, now)
        if news is not None:
            self.guard(partial(self._on_view, news))
        if self._silent_since is not None and now - self._silent_since >= SILENCE_S:
            self._silent_since = None
            who = f"{self._reader}: " if self._reader else ""
            said = "[registry-silent] %sregistry %s at %s has not answered for %g s; still trying"
            log.warning(said, who, *self.place, SILENCE_S)

    def guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.counters["callback_faults"] += 1
            if worth_saying(self.counters["callback_faults"]):
                log.exception("[callback-failed] a discovery callback failed; continuing")

    def say(self, message: m.ToRegistry) -> None:
        self.control.send(self.place[0], m.encode(message))
