"""Who announced itself, as pure code: announcements and time go in; what is listed comes out.

Laws: a worker's latest word replaces the one before at once, and other words at the same address are another life.
Those who are listed are one fleet: whoever differs is refused, alone, until nobody of the other kind is left; so no
mode outlives its workers. Silence makes a worker suspect and then gone, but only silence that we were awake to hear.
Nothing is kept of a worker that is gone, of a connection, or of a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from kvbaton.control.plain.announcements import Announcement, Fleet, PlainFault, Role
from kvbaton.protocol.ids import Incarnation

INTERVAL_S = 3.0  # between announcements, with vLLM's workers and with ours
WORKERS_MAX = 256
TICK_S_MAX = 1.0


class PlainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long silence is forgiven, and who may come."""

    suspect_s: float = 7.0  # two announcements missed; a suspect gets no new requests if there is anyone else
    evict_s: float = 15.0
    workers_max: int = WORKERS_MAX  # who is listed stays, newcomers are refused
    fleet: Fleet | None = None  # None: that of whoever came first

    def __post_init__(self) -> None:
        if not (0 < self.suspect_s < self.evict_s and math.isfinite(self.evict_s)):
            raise ValueError(f"expected 0 < suspect_s < evict_s, got {self.suspect_s} and {self.evict_s}")
        if not 0 < self.workers_max <= WORKERS_MAX:
            raise ValueError(f"workers_max: got {self.workers_max}, expected 1..{WORKERS_MAX}")

    @property
    def tick_s(self) -> float:
        """How long we may look away; beyond it we slept."""
        return min(TICK_S_MAX, self.suspect_s / 4)


class AnnouncedWorker(msgspec.Struct, frozen=True):
    """A worker in one of its lives. The number of a life is ours: announcements have none."""

    announcement: Announcement
    incarnation: Incarnation
    suspect: bool = False


@dataclass(slots=True)
class _Heard:
    listed: AnnouncedWorker
    at: float


class PlainRoster:
    """Who is here. `revision` rises with every change."""

    def __init__(self, settings: PlainSettings, draw: Callable[[], Incarnation], now: float) -> None:
        """`draw` gives the number of a new life."""
        self.settings = settings
        self.revision = 0
        self._draw = draw
        self._looked_at = now
        self._heard: dict[tuple[Role, str], _Heard] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def announce(self, announcement: Announcement, now: float) -> bool:
        """A worker is there; whether that is news. `PlainFault` names the field for which it is not listed.

        A listed worker that now says what cannot be listed is no longer what its entry says: the entry goes.
        """
        current = self._heard.get(announcement.key)
        if current is not None and current.listed.announcement == announcement:
            current.at = now
            if current.listed.suspect:
                self._change(current, suspect=False)
            return False
        if current is not None:
            self._remove(announcement.key)
        self._admit(announcement)
        self._heard[announcement.key] = _Heard(AnnouncedWorker(announcement, self._draw()), now)
        self.revision += 1
        return True

    def on_time(self, now: float) -> tuple[AnnouncedWorker, ...]:
        """Let silence have its consequences: who is gone. What we slept through ourselves is nobody's silence."""
        slept_s = max(0.0, now - self._looked_at - self.settings.tick_s)
        self._looked_at = now
        gone = []
        for key, heard in list(self._heard.items()):
            heard.at = min(now, heard.at + slept_s)
            silent_s = now - heard.at
            if silent_s >= self.settings.evict_s:
                gone.append(heard.listed)
                self._remove(key)
            elif silent_s >= self.settings.suspect_s and not heard.listed.suspect:
                self._change(heard, suspect=True)
        return tuple(gone)

    def next_deadline(self) -> float | None:
        """At the latest in half a tick, or sleeping could not be told from waiting; None while nobody is listed."""
        return self._looked_at + self.settings.tick_s / 2 if self._heard else None

    def entries(self) -> tuple[AnnouncedWorker, ...]:
        """Everybody, ordered by role and address."""
        return tuple(heard.listed for _, heard in sorted(self._heard.items()))

    def _admit(self, newcomer: Announcement) -> None:
        expected = self.settings.fleet or _fleet(heard.listed for heard in self._heard.values())
        if expected is not None and newcomer.fleet is not expected:
            why = "this router was started for" if self.settings.fleet else "the listed workers announce"
            raise PlainFault("transfer_mode", f"got {newcomer.fleet.transfer_mode}, {why} {expected.transfer_mode}")
        if len(self._heard) >= self.settings.workers_max:
            raise PlainFault("workers", f"{len(self._heard)} are listed, the maximum")

    def _change(self, heard: _Heard, *, suspect: bool) -> None:
        heard.listed = msgspec.structs.replace(heard.listed, suspect=suspect)
        self.revision += 1

    def _remove(self, key: tuple[Role, str]) -> None:
        del self._heard[key]
        self.revision += 1


def _fleet(listed: Iterable[AnnouncedWorker]) -> Fleet | None:
    """That of any of them: all have the same."""
    return next((entry.announcement.fleet for entry in listed), None)
