"""Stop texts."""

from __future__ import annotations

from kvbaton.engines.embedded.http_worker import StopFilter


def test_an_answer_ends_before_its_stop_text_wherever_that_is_cut() -> None:
    for size in range(1, 6):
        stops, text, met = StopFilter(["END", "E!"]), "", False
        source = "the ENclosure EN ENDs here"
        for at in range(0, len(source), size):
            told, met = stops.feed(source[at : at + size])
            text += told
            if met:
                break
        assert (text, met) == ("the ENclosure EN ", True)


def test_what_was_held_back_is_told_when_no_stop_text_came() -> None:
    stops = StopFilter(["END"])
    assert stops.feed("the EN") == ("the ", False)
    assert stops.rest() == "EN"
    assert StopFilter([]).feed("x") == ("x", False)
