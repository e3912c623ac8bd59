"""Old against new, from frames that a release recorded which spoke version 1 alone (rule 24).

`tools/record_frames.py` made the recordings with that release's own code. They show that new code reads what old code
says, says in version 1 what old code said, byte for byte, and holds every recorded conversation from either side.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import frozen_v1
import pytest
from conversations import CONVERSATIONS, REFUSALS, D, P, record
from pair import Frame, Pair
from party import Party

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import decode, encode
from kvbaton.protocol.wire.messages import SPOKEN, Versions

FRAMES = Path(__file__).parent / "frames"
OLD = Versions(1, 1)


class MixedPair(Pair):
    """P and D of different releases, over all their lives."""

    def __init__(self, p: Versions, d: Versions) -> None:
        self.speaks = {P: p, D: d}
        super().__init__(P, D)

    def add(self, name: str, **options: Any) -> Party:
        speaks = self.speaks[name]
        features = {"optional": int(frozen_v1.ALL_FEATURES)} if speaks == OLD else {}
        return super().add(name, **(options | features | {"versions": speaks}))


def recorded(name: str) -> list[dict[str, Any]]:
    head, *lines = map(json.loads, (FRAMES / f"{name}.jsonl").read_text().splitlines())
    assert head["conversation"] == name
    return lines


def every_frame() -> list[bytes]:
    return [bytes.fromhex(line["frame"]) for name in CONVERSATIONS for line in recorded(name)]


def plain(line: dict[str, Any]) -> tuple[Any, ...]:
    """A frame as the old release hears it, without what new nodes add to their cards."""
    kind, fields = frozen_v1.heard(bytes.fromhex(line["frame"]))
    if kind in ("Hello", "Welcome"):
        fields[5] = [fields[5][0], fields[5][1] & int(frozen_v1.ALL_FEATURES), *fields[5][2:]]
    return line["at"], line["from"], line["to"], kind, fields


def test_every_conversation_is_recorded_and_every_message_of_version_1_is_in_one() -> None:
    assert {path.stem for path in FRAMES.glob("*.jsonl")} == set(CONVERSATIONS) | set(REFUSALS)
    said = {frozen_v1.heard(frame)[0] for frame in every_frame()}
    assert said == {kind.__name__ for kind in typing.get_args(frozen_v1.Message)}


def test_no_message_of_version_1_has_another_number_or_other_fields_today() -> None:
    today = {kind.__name__: kind for kind in typing.get_args(m.Message)}
    for kind in typing.get_args(frozen_v1.Message):
        now = today[kind.__name__]
        assert now.__struct_config__.tag == kind.__struct_config__.tag
        assert now.__struct_fields__[: len(kind.__struct_fields__)] == kind.__struct_fields__


def test_new_code_reads_every_recorded_frame_and_says_it_again_byte_for_byte() -> None:
    frames = every_frame()
    for frame in frames:
        envelope, message = decode(frame)
        assert envelope.version == 1
        assert encode(envelope.sender, envelope.to, envelope.session, message, 1) == frame
    assert len(frames) > 100


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_two_nodes_that_speak_version_1_say_what_the_old_release_said(name: str) -> None:
    pair = MixedPair(OLD, OLD)
    assert record(pair, CONVERSATIONS[name]) == recorded(name)
    pair.finish()


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("old", [P, D])
def test_an_old_node_and_a_new_one_hold_the_conversation_of_two_old_ones(name: str, old: str) -> None:
    """The old side says the very bytes that were recorded; the new side says what the old release hears as the same."""
    pair = MixedPair(OLD if old == P else SPOKEN, OLD if old == D else SPOKEN)
    said, before = record(pair, CONVERSATIONS[name]), recorded(name)
    assert [line for line in said if line["from"] == old] == [line for line in before if line["from"] == old]
    assert [plain(line) for line in said] == [plain(line) for line in before]
    counts = pair.p.counts + pair.d.counts
    assert not {name for name in counts if name.startswith("frames_refused")}
    pair.finish()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_two_new_nodes_hold_it_in_version_2(name: str) -> None:
    """The same turns of the same conversation; only greetings are in version 1."""
    pair = MixedPair(SPOKEN, SPOKEN)
    record(pair, CONVERSATIONS[name])
    turns = [
        (str(e.source), type(e.message).__name__, decode(e.raw)[0].version) for e in pair.log if isinstance(e, Frame)
    ]
    assert [turn[:2] for turn in turns] == [
        (line["from"], frozen_v1.heard(bytes.fromhex(line["frame"]))[0]) for line in recorded(name)
    ]
    assert {turn for turn in turns if turn[1] in ("Hello", "HelloRefused")} == {
        (sender, kind, 1) for sender, kind, _ in turns if kind in ("Hello", "HelloRefused")
    }
    assert {version for _, kind, version in turns if kind not in ("Hello", "HelloRefused")} <= {2}
    pair.finish()


class TestRefusals:
    """Releases that have no version in common: refused by name, at once, whichever of the two is the old one."""

    def test_an_old_p_refuses_a_d_that_is_too_new(self) -> None:
        """An old P's own answer to a Hello of version 3, as recorded."""
        pair = MixedPair(OLD, Versions(3, 3))
        load = pair.d.want("r", pair.p.grant())
        greeting = next(entry for entry in pair.log if isinstance(entry, Frame))
        with pytest.raises(ValueError, match="version: got 3, this node speaks 1"):
            frozen_v1.heard(greeting.raw)
        pair.wire.clear()
        (refusal,) = recorded("too_new")
        pair.d.receive(pair.p.name, bytes.fromhex(refusal["frame"]))
        pair.d.carry_out()
        assert load.failed is not None
        told = (load.failed.reason, load.failed.detail)
        assert told == (Reason.WRONG_VERSION, "version: got 3, this node speaks 1")
        pair.finish()

    def test_an_old_d_is_refused_by_a_p_that_is_too_new_in_words_that_it_reads(self) -> None:
        """An old D's own Hello, as recorded."""
        pair = MixedPair(Versions(2, 3), OLD)
        hello = next(line for line in recorded("pull") if line["from"] == D)
        pair.p.receive(pair.d.name, bytes.fromhex(hello["frame"]))
        answer = next(entry for entry in pair.log if isinstance(entry, Frame))
        kind, fields = frozen_v1.heard(answer.raw)
        assert (kind, fields[5]) == ("HelloRefused", "wrong_version")
        assert "the source speaks 2 to 3, the target 1;" in fields[6]
        pair.wire.clear()
        pair.finish()
