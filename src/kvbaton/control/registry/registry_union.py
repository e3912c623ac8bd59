"""The words of several registries as one list, as pure code: views and silences go in; news comes out.

Laws. The list is the union of what the registries that answer list, and of it only what the workers themselves have
signed (`statement_reader`). Of one name there is one life, the newest: by the time of its birth as it tells it, and of
equals the one that appeared later. A known life has departed when

- it has said so itself, or a later one is listed;
- no registry that answers lists it, and two of those that answer (of one registry: that one) are complete, or name it
  as gone. Of several registries one may lie: its word alone takes no one away. A life that only one registry lacks,
  while no other answers, is `withheld`.

So a registry takes no one away by its silence, nor by coming back empty (it is not complete until all have had the time
to register), nor by having lost a worker that another one hears. With no registry left the last list stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from kvbaton.control.signing import Signed
from kvbaton.protocol.ids import PeerId, WorkerId

MISSED_MAX = 2048
"""Lives that no registry lists and that are not known to have ended; beyond it they are forgotten."""


class UnionEntry(Protocol):
    """A worker as one registry lists it."""

    @property
    def worker(self) -> WorkerId: ...
    @property
    def peer(self) -> PeerId: ...
    @property
    def born(self) -> float: ...


E = TypeVar("E", bound=UnionEntry)


@dataclass(frozen=True, slots=True)
class RegistryView(Generic[E]):
    """The last words of one registry."""

    entries: tuple[E, ...] = ()
    complete: bool = False  # whoever is not listed is not here
    gone: frozenset[PeerId] = frozenset()
    left: frozenset[PeerId] = frozenset()
    answers: bool = True
    ended: tuple[Signed, ...] = ()  # the workers' own words that their lives are over


@dataclass(frozen=True, slots=True)
class News(Generic[E]):
    """The list changed."""

    entries: tuple[E, ...]
    departed: tuple[PeerId, ...]


class Judge(Protocol[E]):
    """What of several registries' words counts."""

    def views(self, views: Sequence[RegistryView[E]]) -> Sequence[RegistryView[E]]: ...

    def keeps(self, entry: E) -> bool:
        """Whether a life that no registry lists may still be known."""


@dataclass(slots=True)
class RegistryUnion(Generic[E]):
    """One reader's list. `merge` makes one entry of those that several registries have of one life; `withheld` is the
    entry of a life that the only registry that answers, of several, does not list."""

    registries: int
    merge: Callable[[Sequence[E]], E]
    withheld: Callable[[E], E]
    judge: Judge[E]
    _views: list[RegistryView[E]] = field(init=False)
    _known: dict[WorkerId, E] = field(default_factory=dict)
    _appeared: dict[PeerId, int] = field(default_factory=dict)  # in which order, of those that may be listed now
    _turn: int = 0

    def __post_init__(self) -> None:
        self._views = [RegistryView(answers=False) for _ in range(self.registries)]

    @property
    def known(self) -> tuple[E, ...]:
        return tuple(self._known[worker] for worker in sorted(self._known))

    @property
    def all_answer(self) -> bool:
        return all(view.answers for view in self._views)

    def lists(self, registry: int, peer: PeerId) -> bool:
        """Whether a registry that answers lists this life."""
        view = self._views[registry]
        return view.answers and any(entry.peer == peer for entry in view.entries)

    def take(self, registry: int, view: RegistryView[E]) -> News[E] | None:
        """A registry's list changed, or it began or ceased to answer; returns what changed for the reader."""
        self._views[registry] = view
        return self.refresh()

    def refresh(self) -> News[E] | None:
        """The same words may count for more, or less, than before."""
        before, self._known = self._known, self._union()
        if before == self._known:
            return None
        here = {entry.peer for entry in self._known.values()}
        departed = tuple(entry.peer for entry in before.values() if entry.peer not in here)
        return News(self.known, departed)

    def _union(self) -> dict[WorkerId, E]:
        views = self.judge.views(self._views)
        answering = [view for view in views if view.answers]
        left = frozenset[PeerId]().union(*(view.left for view in views))
        listed: dict[PeerId, list[E]] = {}
        for view in answering:
            for entry in view.entries:
                if entry.peer not in left:
                    listed.setdefault(entry.peer, []).append(entry)
        missed = [entry for entry in self._known.values() if entry.peer not in listed and entry.peer not in left]
        for entry in missed[:MISSED_MAX]:
            against = sum(view.complete or entry.peer in view.gone for view in answering)
            if against < min(2, self.registries) and self.judge.keeps(entry):
                listed[entry.peer] = [self.withheld(entry) if against else entry]
        self._turn += 1
        self._appeared = {peer: self._appeared.get(peer, self._turn) for peer in listed}
        found: dict[WorkerId, E] = {}
        for entry in map(self.merge, listed.values()):
            other = found.get(entry.worker)
            if other is None or self._age(other) < self._age(entry):
                found[entry.worker] = entry
        return found

    def _age(self, entry: E) -> tuple[float, int, int]:
        return entry.born, self._appeared[entry.peer], entry.peer.incarnation


class Hearing(Generic[E]):
    """Whether a registry answers, and with what. What the listener slept through is not the registry's silence."""

    def __init__(self, silent_s: float, turn_s: float) -> None:
        self.view: RegistryView[E] | None = None  # as it was last news
        self._silent_s = silent_s
        self._turn_s = turn_s  # turns are at most this far apart, unless the listener slept
        self._heard_at: float | None = None
        self._looked_at: float | None = None

    def heard(self, now: float) -> None:
        self._heard_at = now

    @property
    def is_answered(self) -> bool:
        """Whether it was when last looked at, with a list."""
        return self.view is not None and self.view.answers

    def news(self, view: RegistryView[E] | None, now: float) -> RegistryView[E] | None:
        """The registry's list as it is now, if it changed or the registry began or ceased to answer. In every turn."""
        answers = self.answers(now)
        view = None if view is None else replace(view, answers=answers)
        if view == self.view:
            return None
        self.view = view
        return view

    def answers(self, now: float) -> bool:
        looked_at, self._looked_at = self._looked_at, now
        if self._heard_at is None:
            return False
        slept_s = 0.0 if looked_at is None else now - looked_at - self._turn_s
        if slept_s > 0:
            self._heard_at = min(now, self._heard_at + slept_s)
        return now - self._heard_at < self._silent_s
