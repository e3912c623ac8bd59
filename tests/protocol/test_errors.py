"""Every failure has one reason from a closed list, and every reason says who must act (one failure contract)."""

from __future__ import annotations

import pytest

from kvbaton.protocol.errors import MEANING, Blame, ProtocolError, Reason, reason_of


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANING) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_a_meaning_is_one_sentence_with_somebody_to_act(reason: Reason) -> None:
    blame, text = MEANING[reason]
    assert isinstance(blame, Blame)
    assert text.endswith(".") and text[0].isupper() and "\n" not in text and len(text) < 120


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_travels_as_its_own_name_in_lower_case(reason: Reason) -> None:
    assert reason.value == reason.name.lower() == str(reason)


def test_a_reason_of_a_newer_peer_is_another_one() -> None:
    assert reason_of("stale") is Reason.STALE
    assert reason_of("bored") is Reason.OTHER


def test_an_error_tells_its_reason_and_the_field_at_fault() -> None:
    error = ProtocolError(Reason.BAD_SPAN, "blocks: 9 is outside 0..7")
    assert (error.reason, error.detail) == (Reason.BAD_SPAN, "blocks: 9 is outside 0..7")
    assert str(error) == "bad_span: blocks: 9 is outside 0..7"


def test_an_error_without_detail_is_its_reason() -> None:
    assert str(ProtocolError(Reason.BUSY)) == "busy"
