"""The union of several registries' lists, case by case: each row is a law of `registry_union`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from kvbaton.control.registry.registry_union import Hearing, RegistryUnion, RegistryView
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId


@dataclass(frozen=True)
class Seen:
    name: str
    life: int
    born: float = 0.0
    endpoint: str = ""

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.name)

    @property
    def peer(self) -> PeerId:
        return PeerId(self.worker, Incarnation(self.life))


def lives(text: str) -> tuple[Seen, ...]:
    """`p1.5 d1`: name, life, and if told when it was born."""
    found = []
    for word in text.split():
        life, _, born = word[1:].partition(".")
        found.append(Seen(word[0], int(life), float(born or 0)))
    return tuple(found)


def view(text: str) -> RegistryView[Seen]:
    """`p1 d1 | left p3 | gone d4 | young | silent`."""
    parts = [part.strip() for part in text.split("|")]
    more = {word: frozenset(e.peer for e in lives(rest)) for word, _, rest in (p.partition(" ") for p in parts[1:])}
    nothing: frozenset[PeerId] = frozenset()
    return RegistryView(
        lives(parts[0]), "young" not in more, more.get("gone", nothing), more.get("left", nothing), "silent" not in more
    )


# Of two registries one may lie, so that its word alone takes no one away.
CASES: dict[str, tuple[list[tuple[int, str]], str, str]] = {
    "each lists another": ([(0, "p1"), (1, "d1")], "d1 p1", ""),
    "listed by one of two": ([(0, "p1 d1"), (1, "d1")], "d1 p1", ""),
    "one lost it, the other hears it": ([(0, "p1"), (1, "p1"), (0, "")], "p1", ""),
    "both lack it": ([(0, "p1"), (1, "p1"), (0, ""), (1, "")], "", "p1"),
    "one silent, the other lacks it": ([(0, "p1 d1"), (1, "d1"), (0, "p1 d1 | silent")], "d1 p1", ""),
    "one silent, the other empty": ([(0, "p1 d1"), (1, "p1 d1"), (0, "p1 d1 | silent"), (1, "")], "d1 p1", ""),
    "one silent, and back without it": ([(0, "p1"), (1, "p1"), (0, "p1 | silent"), (1, ""), (0, "")], "", "p1"),
    "one young, the other empty": ([(0, "p1"), (1, "p1"), (0, "| young"), (1, "")], "p1", ""),
    "one silent, the other lists it": ([(0, "p1"), (1, "p1"), (0, "p1 | silent")], "p1", ""),
    "all silent": ([(0, "p1 d1"), (1, "d1"), (1, "d1 | silent"), (0, "p1 d1 | silent")], "d1 p1", ""),
    "back empty": ([(0, "p1"), (0, "p1 | silent"), (0, "| young")], "p1", ""),
    "both back empty": ([(0, "p1"), (1, "p1"), (0, "| young"), (1, "| young")], "p1", ""),
    "back empty, and old by now": ([(0, "p1"), (0, "| young"), (0, "")], "p1", ""),
    "both back empty, and old by now": (
        [(0, "p1"), (1, "p1"), (0, "| young"), (1, "| young"), (0, ""), (1, "")],
        "",
        "p1",
    ),
    "back empty beside one that lists it": ([(0, "p1"), (1, "p1"), (0, "| young"), (0, "")], "p1", ""),
    "young one lists it, complete one lacks it": ([(0, "p1"), (1, "p1 | young"), (0, "")], "p1", ""),
    "new at a young one beside one that lacks it": ([(0, "d1"), (1, "p1 | young")], "d1 p1", ""),
    "a young one names it as gone": ([(0, "p1 | young"), (0, "| young | gone p1")], "p1", ""),
    "a young one names it as gone, and the other lacks it": (
        [(0, "p1 | young"), (1, ""), (0, "| young | gone p1")],
        "",
        "p1",
    ),
    "one names it as gone, the other hears it": ([(0, "p1"), (1, "p1"), (0, "| young | gone p1")], "p1", ""),
    "left by its own word": ([(0, "p1"), (1, "p1"), (0, "| left p1")], "", "p1"),
    "left here, the other is silent": ([(0, "p1"), (1, "p1"), (1, "p1 | silent"), (0, "| left p1")], "", "p1"),
    "left, another life came": ([(0, "p1"), (1, "p1"), (0, "p2 | left p1")], "p2", "p1"),
    "left in that life only": ([(0, "p2"), (1, "p2 | left p1")], "p2", ""),
    "newest life by birth, either order": ([(0, "p2.9"), (1, "p1.5")], "p2", ""),
    "newest life by birth, the other order": ([(0, "p1.5"), (1, "p2.9")], "p2", "p1"),
    "newest life by appearance": ([(0, "p1"), (1, "p2")], "p2", "p1"),
    "the older one said again": ([(0, "p1"), (1, "p2"), (0, "p1 d1")], "d1 p2", "p1"),
    "the newer one gone, the older one listed": ([(0, "p1"), (1, "p2"), (1, "")], "p1", "p1 p2"),
}


# A registry that is alone is believed.
ALONE: dict[str, tuple[list[tuple[int, str]], str, str]] = {
    "no longer listed": ([(0, "p1 d1"), (0, "d1")], "d1", "p1"),
    "in another life": ([(0, "p1"), (0, "p2")], "p2", "p1"),
    "a young one adds and replaces, and removes nobody": (
        [(0, "p1 d1"), (0, "| young"), (0, "d2 e1 | young")],
        "d2 e1 p1",
        "d1",
    ),
    "it is old by now": ([(0, "p1 d1"), (0, "| young"), (0, "d2 | young"), (0, "d2")], "d2", "d1 p1"),
    "a young one names who is gone": ([(0, "p1 d1 | young"), (0, "d1 | young | gone p1 d7")], "d1", "p1"),
}


class Credulous:
    """Believes registries."""

    def views(self, views: Sequence[RegistryView[Seen]]) -> Sequence[RegistryView[Seen]]:
        return views

    def keeps(self, entry: Seen) -> bool:
        return True


def union_of(
    registries: int, merge: Callable[[Sequence[Seen]], Seen] = lambda entries: entries[0]
) -> RegistryUnion[Seen]:
    return RegistryUnion(registries, merge, lambda entry: entry, Credulous())


@pytest.mark.parametrize("case", [*CASES, *ALONE])
def test_one_list_is_made_of_several(case: str) -> None:
    said, expected, departed = (CASES | ALONE)[case]
    union = union_of(1 if case in ALONE else 2)
    gone: list[str] = []
    for registry, text in said:
        news = union.take(registry, view(text))
        if news is not None:
            assert news.entries == union.known
            gone += [f"{peer.worker}{peer.incarnation}" for peer in news.departed]
    assert " ".join(f"{each.name}{each.life}" for each in union.known) == expected
    assert " ".join(gone) == departed


def test_the_same_again_is_no_news_and_a_moved_one_has_not_departed() -> None:
    union = union_of(1)
    first = RegistryView((Seen("p", 1, endpoint="a"),), True)
    assert union.take(0, first) is not None
    assert union.take(0, replace(first, complete=False)) is None
    news = union.take(0, RegistryView((Seen("p", 1, endpoint="b"),), True))
    assert news is not None and news.entries[0].endpoint == "b" and news.departed == ()


def test_entries_of_one_life_are_merged_and_told_by_whom_it_is_listed() -> None:
    union = union_of(2, lambda entries: entries[-1])
    union.take(0, RegistryView((Seen("p", 1, endpoint="a"),), True))
    union.take(1, RegistryView((Seen("p", 1, endpoint="b"),), True))
    assert union.known[0].endpoint == "b"
    union.take(1, RegistryView((Seen("p", 1, endpoint="b"),), True, answers=False))
    assert [union.lists(number, union.known[0].peer) for number in (0, 1)] == [True, False]


def test_a_listener_that_slept_hears_no_silence_in_it() -> None:
    hearing: Hearing[Seen] = Hearing(silent_s=8.0, turn_s=1.0)
    assert not hearing.answers(0.0)
    hearing.heard(0.5)
    assert hearing.answers(1.0)
    assert hearing.answers(60.0)  # stopped for a minute, and just back
    assert [hearing.answers(60.0 + t) for t in range(1, 10)][-2:] == [False, False]
    hearing.heard(70.0)
    assert hearing.answers(70.0)
