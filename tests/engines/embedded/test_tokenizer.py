from __future__ import annotations

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.tokenizer import ASSISTANT, BOS, EOS, SPEAKABLE, SYSTEM, USER


def test_a_text_survives_encoding_and_decoding() -> None:
    for text in ("", "plain", "naïve – ünïcödé 😀", "\x00\n\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_answer_can_be_cut_after_any_token() -> None:
    for token in SPEAKABLE:
        text = tokenizer.decode([token])
        assert text.isprintable()
        assert len(text) == (0 if token == EOS else 1)


def test_a_chat_is_told_by_marks_and_ends_with_the_answers() -> None:
    tokens = tokenizer.encode_chat([("system", "a"), ("user", "b"), ("tool", "c"), ("assistant", "d")])
    assert tokens == [BOS, SYSTEM, 97, USER, 98, USER, 99, ASSISTANT, 100, ASSISTANT]
    assert tokenizer.decode(tokens) == "abcd"


def test_a_prompt_cut_within_a_character_still_decodes() -> None:
    assert tokenizer.decode(tokenizer.encode("é")[:-1]) == "\ufffd"
