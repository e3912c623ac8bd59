from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvbaton.engines.embedded.engine_request import Sampling
from kvbaton.engines.embedded.model.decoder import choose
from kvbaton.engines.embedded.tokenizer import EOS, SPEAKABLE, VOCAB


def logits_with(**tokens: float) -> np.ndarray:
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    for token, value in tokens.items():
        logits[int(token[1:])] = value
    return logits


def test_the_likeliest_speakable_token_is_chosen() -> None:
    assert choose(logits_with(_3=99.0, _200=98.0, _65=97.0), Sampling(), 5, 0).token == 65


@pytest.mark.parametrize(
    "sampling", [Sampling(ignore_eos=True), Sampling(min_tokens=2), Sampling(ignore_eos=True, temperature=1.0)]
)
def test_an_answer_is_not_ended_before_it_may(sampling: Sampling) -> None:
    assert choose(logits_with(_257=99.0), sampling, 5, 1).token != EOS


def test_an_answer_ends_once_it_may() -> None:
    assert choose(logits_with(_257=99.0), Sampling(min_tokens=2), 5, 2).token == EOS


def test_a_draw_depends_on_seed_and_position_only() -> None:
    sampling = Sampling(temperature=1.0, seed=-3)
    draws = [choose(logits_with(), sampling, position, 0).token for position in range(40)]
    assert draws == [choose(logits_with(), sampling, position, 7).token for position in range(40)]
    assert len(set(draws)) > 10
    other = Sampling(temperature=1.0, seed=4)
    assert draws != [choose(logits_with(), other, position, 0).token for position in range(40)]


def test_draws_follow_the_logits() -> None:
    logits = np.full(VOCAB, -50.0, dtype=np.float32)
    logits[[65, 66]] = np.log([3.0, 1.0])
    counts = Counter(choose(logits, Sampling(temperature=1.0), position, 0).token for position in range(1000))
    assert set(counts) == {65, 66}
    assert 700 < counts[65] < 800


def test_a_low_temperature_is_nearly_greedy() -> None:
    logits = logits_with(_65=9.0)
    assert {choose(logits, Sampling(temperature=0.1), position, 0).token for position in range(50)} == {65}


def test_logprobs_name_the_chosen_token_and_then_the_likeliest() -> None:
    logits = logits_with(_65=9.0, _66=8.0)
    choice = choose(logits, Sampling(logprobs=3), 0, 0)
    assert [token for token, _ in choice.logprobs[:3]] == [65, 65, 66]
    assert len(choice.logprobs) == 4
    assert choose(logits, Sampling(logprobs=0), 0, 0).logprobs == choice.logprobs[:1]
    assert choose(logits, Sampling(), 0, 0).logprobs == ()
    everything = choose(logits, Sampling(logprobs=len(SPEAKABLE)), 0, 0).logprobs[1:]
    assert np.exp([value for _, value in everything]).sum() == pytest.approx(1.0)


def test_logits_that_are_not_numbers_still_choose_a_speakable_token() -> None:
    assert choose(np.full(VOCAB, np.nan, dtype=np.float32), Sampling(), 0, 0).token in SPEAKABLE
