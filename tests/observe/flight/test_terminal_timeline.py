"""A journey drawn for a terminal: it fits, its bars lie where their times are, and a failure says what to do next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight.flight_records import Moment
from kvbaton.observe.flight.journey import GONE, join
from kvbaton.observe.flight.terminal_timeline import (
    BRIEF_HEADER,
    WIDTH_MAX,
    WIDTH_MIN,
    Ink,
    StyleName,
    amount,
    brief,
    draw,
    duration,
    journey_reason,
)
from tests.observe.flight.handoffs import decode, moments, prefill, router

WHOLE = join([router(), prefill(), decode()])


def bars(lines: list[str], bar: str = "█") -> dict[str, tuple[int, int]]:
    """Where each bar begins and ends, by its label."""
    found = {}
    for line in lines:
        at = [index for index, char in enumerate(line) if char in (bar, "▏", "|")]
        if at and line.startswith("  "):
            found[line[2:28].strip()] = (at[0], at[-1] + 1)
    return found


def test_every_stage_of_a_whole_handoff_is_on_the_picture() -> None:
    text = "\n".join(draw(WHOLE))
    for word in ("request mine", "\nrouter\n", "P p0@00000000", "D d0@00000000", "compute the prompt", "claim"):
        assert word in text
    assert "p0 → d0" in text
    assert "over shm" in text
    assert "1.9 MiB in 3 blocks at 95.4 MiB/s" in text
    assert "first byte after 100.0 ms, of which the transfer took 37.0 ms (37%)" in text
    assert "explain" not in text
    assert "clock" not in text


def test_bars_lie_in_the_order_of_their_times() -> None:
    found = bars(draw(WHOLE, 140))
    order = ["wait for P", "wait for D", "stream the answer"]
    assert [found[name][0] for name in order] == sorted(found[name][0] for name in order)
    assert found["compute the prompt"][1] <= found["copy"][0]
    assert found["wait for D"][0] <= found["claim"][0]
    assert found["deliver"][1] <= found["wait for D"][1] + 1


@settings(deadline=None)
@given(st.integers(0, 400), st.floats(-1000, 1000), st.text(max_size=300))
def test_no_bar_is_wider_than_the_terminal(width: int, skew: float, detail: str) -> None:
    lines = draw(join([router(detail=detail), prefill(skew), decode()]), width)
    axis = max(len(line) for line in lines if "█" in line or "─" in line)
    assert axis <= max(WIDTH_MIN, min(width, WIDTH_MAX))


def test_a_try_that_goes_on_with_an_answer_names_the_worker_that_began_it() -> None:
    first, *rest = router().moments
    went_on = router(retries=1, moments=(first, Moment("moved", first.at, "died d0"), *rest))
    assert "it went on with an answer that d0 had begun (died): --last 2 shows both" in draw(join([went_on]))
    assert not any("went on" in line for line in draw(WHOLE))


def test_a_failure_names_its_reason_and_the_next_step() -> None:
    failed = decode(end="lease_expired", detail="P let go", moments=decode().moments[:3])
    journey = join([router(end="worker_died", detail="d0 says no"), prefill(end="aborted"), failed])
    lines = draw(journey)
    assert lines[-1] == "next: kvbaton explain lease_expired"
    assert "D d0: lease_expired: P let go" in lines
    assert "router: worker_died: d0 says no" in lines
    assert journey_reason(join([router(end="no_pair")])) == "no_pair"


def test_a_failed_handoff_has_nothing_to_deliver_and_says_how_often_it_asked() -> None:
    ended = moments((("asked", 0.010), ("ended", 8.0)))
    text = "\n".join(draw(join([router(), decode(end="peer_gone", detail="", retries=14, moments=ended)])))
    assert "claim, unfinished" in text
    assert "deliver" not in text
    assert "D d0: peer_gone (14 messages repeated)" in text


def test_one_of_something_is_one() -> None:
    text = "\n".join(draw(join([router(tokens=1), decode(tokens=1, blocks=1, retries=1)])))
    assert ", 1 token," in text
    assert "in 1 block " in text
    assert "(1 message repeated)" in text


def test_who_is_missing_and_who_is_gone_is_said() -> None:
    journey = join([router(), prefill(end="")], why=lambda *_: GONE, gone=lambda flight: flight.worker == "p0")
    text = "\n".join(draw(journey))
    assert "D d0: no record: gone" in text
    assert "P p0: gone; this is its last report" in text


def test_a_skewed_clock_is_said() -> None:
    text = "\n".join(draw(join([router(), prefill(), decode(-30.0)])))
    assert "the clock of d0 is 30.00 s behind the first lane's" in text
    jumped = decode(moments=moments((("asked", -9.0), ("granted", -8.0), ("ended", 9.0))))
    assert "contradict" in "\n".join(draw(join([router(), jumped])))


def test_what_is_under_way_shows_how_far_it_is() -> None:
    text = "\n".join(draw(join([router(end="", moments=router().moments[:3])])))
    assert "wait for P, unfinished" in text
    assert "wait for D" not in text
    assert "router: under way" in text


def test_without_its_characters_a_terminal_gets_plain_ones() -> None:
    lines = draw(WHOLE, 80, Ink(fancy=False))
    assert all(line.isascii() for line in lines)
    assert any("###" in line for line in lines)


def test_a_colour_changes_nothing_but_the_colour() -> None:
    def style(text: str, name: StyleName) -> str:
        return f"<{name}>{text}</>"

    styled = draw(WHOLE, 90, Ink(style))
    plain = [line.split(">", 1)[-1].replace("</>", "") if line.startswith("<") else line for line in styled]
    stripped = [line.replace("<good>", "").replace("</>", "") for line in plain]
    assert stripped == draw(WHOLE, 90)


def test_an_answer_that_came_although_its_handoff_failed_is_said_to_be_one() -> None:
    journey = join([router(), prefill(), decode(end="peer_gone")])
    assert journey.failed
    assert brief(journey)[-1] == "ok, but peer_gone"
    assert "D computed the prompt itself" in draw(journey)[-2]


def test_tries_are_numbered() -> None:
    assert draw(join([router(retries=1)], tries=3))[0] == "request mine, try 2 of 3"


def test_a_row_of_a_list() -> None:
    assert len(BRIEF_HEADER) == len(brief(WHOLE))
    assert brief(WHOLE) == ["mine", "abababababab", "pull", "p0 → d0", "100.0 ms", "37%", "ok"]
    assert brief(join([prefill(end="")]))[0] == "?"
    assert brief(join([router(end="", handoff="", mode="alone", peers=("-", "d0"))]))[-1] == "under way"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"), (1e-6, "1 µs"), (0.000999, "999 µs"), (0.0012, "1.20 ms"), (0.0123, "12.3 ms"), (1.5, "1.50 s"),
        (250.0, "250 s"),
    ],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")])
def test_amounts_are_short(count: int, text: str) -> None:
    assert amount(count) == text
