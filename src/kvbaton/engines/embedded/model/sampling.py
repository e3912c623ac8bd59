"""The next token: a pure function of logits, the request's sampling and the position.

Randomness is drawn from (seed, position), not from a running generator: a token is the same whether it was sampled by P
or D, before or after a preemption, alone or in a batch.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvbaton.engines.embedded.engine_request import Sampling
from kvbaton.engines.embedded.memory.kv_memory import Floats
from kvbaton.engines.embedded.tokenizer import EOS, SPEAKABLE

_SPEAKABLE = np.array(SPEAKABLE)


TEMPERATURE_MIN = 1e-6
"""Below this the likeliest token is all there is, and dividing by it only overflows."""


class Choice(msgspec.Struct, frozen=True):
    token: int
    logprobs: tuple[tuple[int, float], ...] = ()  # the chosen token first, then the likeliest


def choose(logits: Floats, sampling: Sampling, position: int, answer_tokens: int) -> Choice:
    """Pick the token at `position`, the answer's token number `answer_tokens`."""
    allowed = _SPEAKABLE
    if sampling.ignore_eos or answer_tokens < sampling.min_tokens:
        allowed = allowed[allowed != EOS]
    scores = logits[allowed]
    index = int(scores.argmax())
    if sampling.temperature > TEMPERATURE_MIN:
        index = _draw(scores / sampling.temperature, sampling.seed, position)
    token = int(allowed[index])
    if sampling.logprobs is None:
        return Choice(token)
    logprobs = scores.astype(np.float64) - _log_total(scores)
    likeliest = np.argsort(-logprobs, kind="stable")[: sampling.logprobs]
    pairs = [(int(allowed[each]), float(logprobs[each])) for each in (index, *likeliest)]
    return Choice(token, tuple(pairs))


def _draw(scores: Floats, seed: int, position: int) -> int:
    weights = np.exp(scores.astype(np.float64) - _log_total(scores))
    dice = np.random.default_rng((seed % 2**64, position)).random()
    return min(int(np.searchsorted(np.cumsum(weights), dice, side="right")), len(scores) - 1)


def _log_total(scores: Floats) -> float:
    top = float(scores.max())
    return top + float(np.log(np.exp(scores.astype(np.float64) - top).sum()))
