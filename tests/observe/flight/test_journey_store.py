"""The shelf's bills are always those of the stories on it, and the largest pays."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight.collector import JourneyStore, Story

TELLERS = ("", "p0", "d0")
steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "grow", "hand_over", "take", "drop", "drop_bytes"]),
        st.integers(0, 7),
        st.sampled_from(TELLERS),
        st.integers(0, 50),
    ),
    max_size=60,
)


def most(shelf: JourneyStore, *, in_bytes: bool) -> set[str]:
    held = {teller: [story for story in shelf if story.teller == teller] for teller in TELLERS}
    sizes = {who: sum(each.bytes for each in kept) if in_bytes else len(kept) for who, kept in held.items() if kept}
    return {who for who, size in sizes.items() if size == max(sizes.values())}


@settings(deadline=None)
@given(steps)
def test_the_largest_pays_with_its_oldest(steps: list[tuple[str, int, str, int]]) -> None:
    shelf, ages = JourneyStore(), dict[str, int]()
    for age, (step, number, teller, size) in enumerate(steps):
        key = str(number)
        story = shelf.get(key)
        assert (story is not None) is (key in shelf) is (key in ages)
        if step == "add" and story is None:
            shelf.add(Story(key, teller, bytes=size))
            ages[key] = age
        elif step == "grow" and story is not None:
            shelf.grow(story, size)
        elif step == "hand_over" and story is not None:
            shelf.hand_over(story, teller)
            ages[key] = age
        elif step == "take" and story is not None:
            assert shelf.take(key) is story
            del ages[key]
        elif step.startswith("drop") and len(shelf):
            owners = most(shelf, in_bytes=step == "drop_bytes")
            gone = shelf.drop(for_bytes=step == "drop_bytes")
            assert gone.teller in owners
            others = [ages[each.key] for each in shelf if each.teller == gone.teller]
            assert ages.pop(gone.key) < min(others, default=len(steps))
        assert {each.key for each in shelf} == set(ages)
        assert [each.key for each in reversed(shelf)] == [each.key for each in shelf][::-1]
