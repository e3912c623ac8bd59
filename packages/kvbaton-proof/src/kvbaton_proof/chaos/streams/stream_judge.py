"""The verdict on one stream: against what one engine answers that hands nothing over and never dies.

Laws: each token once, in order, from one history. A stream that may be cut and goes on must be the whole answer; one
that cannot go on must end in the documented event, and be a beginning of that answer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton_proof.chaos.streams.stream_reader import Choice, StreamReader

COUNTED = ("completion_tokens", "output_tokens")
SHOWN = 40


class Fate(enum.StrEnum):
    """What became of a stream."""

    RIGHT = "right"
    ENDED = "ended"  # cut, of a kind that is not continued, and told so
    REFUSED = "refused"  # told so, before any text
    LOST = "lost"  # it did not come to its end, and nobody could say why it may
    TWICE = "twice"  # some of it was told again
    MISSING = "missing"  # some of it was never told
    WRONG = "wrong"  # anything else: another text, another end, another head, another usage
    LATE = "late"
    GONE = "gone"  # its client hung up; what it leaves behind is seen at rest


BAD = frozenset({Fate.TWICE, Fate.MISSING, Fate.WRONG})


class Right(msgspec.Struct, frozen=True):
    """What is right of one stream.

    `sure_chars`: of each choice, how much of the text can be compared; after a near tie another text is right too, of
    as many tokens. None: all of it. `is_one_text`: another run would give the same; else only its length is known.
    """

    choices: Sequence[Choice]
    usage: Mapping[str, Any]
    sure_chars: int | None = None
    is_one_text: bool = True


def compared(got: str, right: str) -> Fate:
    """How a text that differs does: part of it again, part of it left out, or something else."""
    if got == right:
        return Fate.RIGHT
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    longer, shorter = (got, right) if len(got) > len(right) else (right, got)
    more = len(longer) - len(shorter)
    if more and longer[at + more :] == shorter[at:]:
        return Fate.TWICE if longer is got else Fate.MISSING
    return Fate.WRONG


def judge(
    reader: StreamReader, right: Right, *, was_cut: bool, goes_on: bool, is_refused: bool = False
) -> tuple[Fate, str]:
    """The verdict, and what was seen where it is a bad one."""
    if reader.problems:
        return Fate.WRONG, "; ".join(reader.problems)
    if not reader.is_done:
        fate, said = _beginning(reader, right)
        if fate is not Fate.RIGHT:
            return fate, said
        how = f"event {reader.error}" if reader.error else "closed without its end"
        if was_cut and not goes_on and reader.error:
            return Fate.ENDED, how
        if not reader.told_text and (reader.error or is_refused):
            return Fate.REFUSED, how
        return Fate.LOST, how
    for number, expected in enumerate(right.choices):
        got = reader.choices.get(number, Choice())
        fate, said = _choice(got, expected, right)
        if fate is not Fate.RIGHT:
            return fate, f"choice {number}: {said}"
    if len(reader.choices) != len(right.choices):
        return Fate.WRONG, f"{len(reader.choices)} choices where {len(right.choices)} were asked for"
    return _rest(reader, right)


def _beginning(reader: StreamReader, right: Right) -> tuple[Fate, str]:
    """Of a stream that broke off: all that was told must be a beginning of the right answer."""
    for number, got in reader.choices.items():
        expected = right.choices[number].text if right.is_one_text else got.text
        sure = expected if right.sure_chars is None else expected[: right.sure_chars]
        told = got.text[: len(sure)] if right.sure_chars is not None else got.text
        if not sure.startswith(told):
            return Fate.WRONG, f"choice {number}: {_shown(told, sure)}"
    return Fate.RIGHT, ""


def _choice(got: Choice, expected: Choice, right: Right) -> tuple[Fate, str]:
    if not right.is_one_text:  # sampled without a seed: as long as it was asked to be, a character a token
        if len(got.text) != len(expected.text):
            fate = Fate.TWICE if len(got.text) > len(expected.text) else Fate.MISSING
            return fate, f"{len(got.text)} characters where {len(expected.text)} were due"
    elif right.sure_chars is not None:
        sure = expected.text[: right.sure_chars]
        if got.text[: len(sure)] != sure:
            fate = compared(got.text, expected.text)
            return (Fate.WRONG if fate is Fate.RIGHT else fate), _shown(got.text, expected.text)
    else:
        fate = compared(got.text, expected.text)
        if fate is not Fate.RIGHT:
            return fate, _shown(got.text, expected.text)
        fate = _listed(got.ids, expected.ids)
        if fate is not Fate.RIGHT:
            return fate, f"token ids {got.ids} where {expected.ids} were due"
        fate = _listed(got.logprobs, expected.logprobs)
        if fate is not Fate.RIGHT:
            at = next((n for n, (a, b) in enumerate(zip(got.logprobs, expected.logprobs, strict=False)) if a != b), -1)
            pair = (got.logprobs[at], expected.logprobs[at]) if at >= 0 else ("", "")
            counts = f"{len(got.logprobs)} and {len(expected.logprobs)}"
            return fate, f"log probabilities differ, {counts}, at {at}: {pair[0]} where {pair[1]} was due"
    if got.finish != expected.finish and (right.sure_chars is None or not got.finish):
        return Fate.WRONG, f"finished by {got.finish or 'nothing'!r}, not by {expected.finish!r}"
    return Fate.RIGHT, ""


def _listed(got: Sequence[Any], expected: Sequence[Any]) -> Fate:
    if list(got) == list(expected):
        return Fate.RIGHT
    if len(got) == len(expected):
        return Fate.WRONG
    return Fate.TWICE if len(got) > len(expected) else Fate.MISSING


def _rest(reader: StreamReader, right: Right) -> tuple[Fate, str]:
    for name in COUNTED:
        told, due = (reader.usage or {}).get(name), right.usage.get(name)
        if told is not None and told != due:
            return Fate.WRONG, f"usage.{name} {told}, not {due}"
    if reader.built is not None:
        part = reader.built["output"][0]["content"][0]
        choice = reader.choices[0]
        if part["text"] != choice.text or part.get("logprobs", []) != choice.logprobs:
            return Fate.WRONG, "the last event is not what the others have built"
    return Fate.RIGHT, ""


def _shown(got: str, right: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    low = max(0, at - SHOWN)
    return f"differs at {at}: …{got[low : at + SHOWN]!r} where …{right[low : at + SHOWN]!r} was due"
