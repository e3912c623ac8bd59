"""A streamed answer: its times by a clock that is an argument, and whatever can be wrong with it."""

from __future__ import annotations

import json

import pytest

from kvbaton_proof.bench.load.open_loop import LONG, MALFORMED, NO_END, SHORT, Answer, TokenStream, refusal

DONE = b"data: [DONE]\n\n"
LAST = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'


def token(text: str = "a", reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


def fed(*pieces: tuple[float, bytes]) -> TokenStream:
    stream = TokenStream(10.0)
    for at, data in pieces:
        stream.feed(data, at)
    return stream


def test_times_are_those_at_which_tokens_came() -> None:
    stream = fed((10.5, token()), (10.7, token("b")), (11.2, token("c")), (11.3, LAST + usage(3) + DONE))
    answer = stream.answer(3)
    assert isinstance(answer, Answer)
    assert answer.ttft_s == pytest.approx(0.5) and answer.e2e_s == pytest.approx(1.2)
    assert answer.gaps_s == pytest.approx((0.2, 0.5)) and answer.tokens == 3
    assert answer.tpot_s == pytest.approx(0.35)


@pytest.mark.parametrize("step", [1, 3, 50])
def test_an_event_counts_when_its_last_byte_is_there(step: int) -> None:
    whole = token() + token("b", "length") + DONE
    stream = TokenStream(0.0)
    ends = [len(token()), len(token() + token("b", "length"))]
    for end in range(step, len(whole) + step, step):
        stream.feed(whole[end - step : end], float(end))
    answer = stream.answer(2)
    assert isinstance(answer, Answer)
    first, second = (-(-end // step) * step for end in ends)
    assert answer.ttft_s == first and answer.gaps_s == (second - first,)


def test_tokens_of_one_read_came_at_one_time() -> None:
    answer = fed((10.5, token() + token() + DONE)).answer(2)
    assert isinstance(answer, Answer) and answer.gaps_s == (0.0,)


def test_a_single_token_has_no_time_for_further_ones() -> None:
    answer = fed((10.5, token() + DONE)).answer(1)
    assert isinstance(answer, Answer) and answer.tpot_s is None and answer.gaps_s == ()


def test_usage_counts_where_it_is_told_and_events_where_it_is_not() -> None:
    assert isinstance(fed((11.0, token("ab") + usage(2) + DONE)).answer(2), Answer), "two tokens in one event"
    assert fed((11.0, token() + token() + usage(1) + DONE)).answer(2) == SHORT
    assert isinstance(fed((11.0, token() + token() + DONE)).answer(2), Answer)


def test_a_last_event_without_text_is_no_token_and_one_within_is() -> None:
    assert isinstance(fed((11.0, token() + token("") + LAST + DONE)).answer(2), Answer)


def test_a_single_token_without_text_comes_with_the_last_event_and_only_usage_tells() -> None:
    answer = fed((10.5, LAST), (10.7, usage(1) + DONE)).answer(1)
    assert isinstance(answer, Answer) and answer.ttft_s == answer.e2e_s == 0.5 and answer.gaps_s == ()
    assert fed((10.5, LAST + DONE)).answer(1) == fed((10.5, LAST + usage(0) + DONE)).answer(1) == SHORT


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (token() + DONE, SHORT),
        (DONE, SHORT),
        (token() * 3 + DONE, LONG),
        (token() * 2, NO_END),
        (b"", NO_END),
        (b"data: {oh\n\n" + DONE, MALFORMED),
        (b'data: {"choices": 3}\n\n' + DONE, MALFORMED),
        (token() + b'data: {"error": {"code": "worker_died", "message": "x"}}\n\n', "error event: worker_died"),
        (b'data: {"error": {"type": "internal_error"}}\n\n' + DONE, "error event: internal_error"),
        (b'data: {"error": "broken"}\n\n' + DONE, "error event: broken"),
    ],
)
def test_what_is_wrong_has_a_name(data: bytes, said: str) -> None:
    assert fed((11.0, data)).answer(2) == said


def test_text_and_token_ids_are_kept_where_the_server_tells_them() -> None:
    stream = fed((11.0, b'data: {"choices": [{"text": "ab", "token_ids": [7, 8]}]}\n\n' + token("c") + DONE))
    assert "".join(stream.text) == "abc" and stream.ids == [7, 8]


def test_equal_texts_have_equal_digests() -> None:
    def digest(*texts: str) -> bytes:
        answer = fed((11.0, b"".join(map(token, texts)) + usage(2) + DONE)).answer(2)
        assert isinstance(answer, Answer)
        return answer.digest

    assert digest("ab", "c") == digest("a", "bc") != digest("a", "bd")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"error": {"code": "no_pair"}}', "status 503: no_pair"),
        (b'{"error": {"type": "overloaded_error", "code": null}}', "status 503: overloaded_error"),
        (b'{"error": {}}', "status 503: without a code"),
        (b"<html>", "status 503"),
        (b"[]", "status 503"),
    ],
)
def test_a_refusal_is_its_status_and_code(data: bytes, said: str) -> None:
    assert refusal(503, data) == said
