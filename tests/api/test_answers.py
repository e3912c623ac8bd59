"""The shapes of answers and chunks."""

from __future__ import annotations

from kvbaton.api.answers import AnswerShape, Token
from kvbaton.api.bodies import BodyKind


def test_log_probabilities_are_written_without_exponents() -> None:
    shape = AnswerShape(BodyKind.COMPLETION, model="m", request_id="r", created_unix_s=0, token_text=str, top=2)
    token = Token("a", ((7, -1.2e-7), (7, -1.2e-7), (8, -12.34567), (9, -20.0)))
    logprobs = shape.token(token)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [0.0]
    assert logprobs["top_logprobs"] == [{"7": 0.0, "8": -12.3457}]
    assert "e" not in repr(logprobs["token_logprobs"])
