"""The fuzzer is itself tested: bugs planted behind some conditions are found within the budget of `make test`."""

from __future__ import annotations

from typing import Any

import guided
import pytest
from fuzzing import TIMEOUT_S
from guided import Found, Target, explore, grown_bytes, shrunk
from mutators import Shape
from targets import TARGETS

from kvbaton.api import bodies
from kvbaton.control.plain import announcements as plain
from kvbaton.protocol.wire import codec
from kvbaton.protocol.wire import messages as m

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guided.TRACED", (guided.ROOT, __file__))  # what is planted here counts as the product's


def finds(name: str, cause: type[BaseException]) -> bytes:
    target = TARGETS[name]
    with pytest.raises(Found) as found:
        explore(target, inputs=target.inputs)
    assert type(found.value.cause) is cause
    with pytest.raises(cause):
        target.run(found.value.data)
    return found.value.data


def test_a_key_error_in_one_message_of_a_few_with_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    import targets_protocol

    def decode(frame: bytes) -> tuple[codec.Envelope, m.Message]:
        envelope, message = codec.decode(frame)
        if isinstance(message, m.Renew | m.Ready | m.Stale | m.Granted):
            counts = getattr(message, "have", getattr(message, "good", getattr(message, "blocks", ())))
            if not counts:
                raise KeyError("no count")
        return envelope, message

    monkeypatch.setattr(targets_protocol, "decode", decode)
    finds("codec", KeyError)


def test_a_type_error_deep_in_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = bodies._check_message

    def check(where: str, message: Any) -> None:
        checked(where, message)
        content = message.get("content")
        if isinstance(content, list) and content and isinstance(content[0], dict) and content[0].get("text") is None:
            raise TypeError("no text")

    monkeypatch.setattr(bodies, "_check_message", check)
    finds("body_chat", TypeError)


def test_an_index_error_at_the_edge_of_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    size = plain._size

    def narrow(field: str, value: Any) -> int:
        number = size(field, value)
        if number == plain.RANKS_MAX:
            raise IndexError("one rank too many for the table")
        return number

    monkeypatch.setattr(plain, "_size", narrow)
    finds("plain", IndexError)


@pytest.mark.parametrize("seed", range(3))
def test_a_bug_three_steps_deep_is_found_by_feedback_and_not_without(seed: int) -> None:
    def run(data: bytes) -> None:
        # one condition a line: reaching the next line is what feedback sees
        if len(data) < 8 or data[1] != 0x10:
            return
        if data[4] != 0x02:
            return
        if data[7] == 0x40:
            raise KeyError("all three")

    target = Target("three_steps", run, lambda: [bytes(8)], Shape.BYTES, 10_000)
    with pytest.raises(Found):
        explore(target, inputs=target.inputs, seed=seed)
    assert explore(target, inputs=target.inputs, seed=seed, blind=True).inputs == target.inputs


def test_feedback_sees_more_of_the_codec_than_as_many_blind_inputs() -> None:
    target = TARGETS["codec"]
    blind = explore(target, inputs=2000, blind=True)
    assert explore(target, inputs=2000).features > blind.features
    assert blind.kept == target.seeds()


@pytest.mark.parametrize("name", ["params", "store_wire", "sse", "ledger_liar"])
def test_an_input_that_leaves_something_behind_is_seen(name: str) -> None:
    target, left = TARGETS[name], []

    def run(data: bytes) -> None:
        target.run(data)
        left.append(bytes(64))

    inputs = target.seeds()[:8]
    assert grown_bytes(Target(name, run, target.seeds, target.shape, 1), inputs) > 40
    assert left


def test_what_the_interpreter_remembers_of_a_match_is_not_taken_for_a_leak() -> None:
    kinds = [type(f"Kind{number}", (), {"__match_args__": ("me",), "me": number}) for number in range(40)]

    def run(data: bytes) -> None:
        spread = [bytes(63 - 33) for _ in range(data[0])]  # of the size of the strings that a match makes
        for kind in kinds:
            match kind():
                case kind(me):
                    spread.append(bytes(me))

    target = Target("matching", run, list, Shape.BYTES, 1)
    assert grown_bytes(target, [bytes([number]) for number in range(1, 200, 25)]) < 8


def test_a_finding_is_made_small() -> None:
    def run(data: bytes) -> None:
        if b"!" in data:
            raise ValueError("!")

    assert shrunk(Target("t", run, list, Shape.BYTES, 1), b"a" * 500 + b"!" + b"b" * 300, ValueError) == b"!"
