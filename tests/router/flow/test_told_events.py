"""Events are heard and shown the same whether they are read by their shape or as JSON."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.api import sse
from kvbaton.router.flow.delivered import Delivered
from kvbaton.router.flow.said_text import HistoryRoom
from kvbaton.router.flow.told_events import SHAPES_MAX, EventShape, ShapedEvents

HEAD = b'{"id":"cmpl-1","object":"text_completion","created":7,"model":"m",'
_ENDS = b'"logprobs":null,"finish_reason":null,'
KINDS = {
    "vllm": b'"text":"%b",' + _ENDS + b'"stop_reason":null,"prompt_token_ids":null,"token_ids":[%b]',
    "embedded": b'"text":"%b",' + _ENDS + b'"token_ids":[%b]',
    "chat": b'"delta":{"content":"%b"},' + _ENDS + b'"token_ids":[%b]',
    "reasoning": b'"delta":{"reasoning":"%b"},' + _ENDS + b'"token_ids":[%b]',
}
"""How a choice goes on behind its index."""
FIRST = dict.fromkeys(("vllm", "embedded"), b'"text":"%b","prompt_token_ids":[5,6,7],"token_ids":[%b]')
ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'


def event(choice: bytes, text: bytes = b" a", ids: bytes = b"1", head: bytes = HEAD) -> bytes:
    filled = choice.replace(b"%b", text, 1).replace(b"%b", ids, 1)
    return b'data: %b"choices":[{"index":0,%b}]}\n\n' % (head, filled)


def stream(kind: str, told: list[tuple[bytes, bytes]], head: bytes = HEAD) -> list[bytes]:
    (text, ids), *others = told
    return [event(FIRST.get(kind, ROLE), text, ids, head), *[event(KINDS[kind], *each, head) for each in others]]


USUAL = (b" a", b"1")
TEXTS = [
    b" a", b"", "é日本".encode(), "\u3000".encode(), b"\\n", b'say \\"', b"\\u00e9", b'\\",\\"token_ids\\":[7]',
    b"\x7f", b'"', b"\\", b"\n", b"\x01", b"\xff", b"\xe6\x97", b"\\ud83d", b"\\x", b'a","token_ids":[9', b'"],"x":["',
]  # fmt: skip
IDS = [
    b"1", b"1,2", b"2147483647", b"", b"2147483648", b"-1", b" 1", b"01", b"1_0", b"1.0", b"1e2", b"+1", b"[1]", b"1,",
    b'1],"x":[2', b'"1"', b'1],"finish_reason":"abort","x":[1', b'1],"index":1,"x":[1', b'1]}],"error":{"code":1',
    b"null",
]  # fmt: skip
_PLAIN = KINDS["embedded"]
ODD = [
    event(b'"text":"","finish_reason":"stop","token_ids":[]'), event(b'"text":"a"'),
    event(b'"text":"","finish_reason":"abort","token_ids":[]'),
    event(b'"text":"a","logprobs":{},"token_ids":[4]'), event(b'"text":"a","token_ids":[4],"text":"b"'),
    event(b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]},"token_ids":[4]'),
    event(b'"text":"a","token_ids":[4]}],"choices":[{"text":"b","token_ids":[5]'), b": still here\n\n", sse.DONE,
    event(b'"delta":{"role":"b"},"token_ids":[4]'), event(b'"text":"a","token_ids":[4],"x":{"token_ids":null}'),
    b'data: {"error":{"code":500}}\n\n', b"data: {\r\n\r\n", event(_PLAIN, head=HEAD.replace(b"l-1", b"l-2")),
    event(_PLAIN).replace(b"]}]}", b"]}]x"), event(b'"text":"abc')[:-5] + b"]}]}\n\n",
]  # fmt: skip
HEADS = [
    HEAD, b"{", HEAD + b'"error":7,', HEAD + b'"error":{"code":400},', b'{"m":{"choices":[{"index":0,"text":"x"}]},',
    b'{"m":{', b'{"token_ids":null,', HEAD + b'"choices":[],', b'{"id":"\xff",', HEAD + b'"m":"%b",' % (b"m" * 2000),
]  # fmt: skip


class Blind(ShapedEvents):
    """Knows no shape."""

    def read(self, events: bytes) -> None:
        return None


def learnt() -> list[EventShape]:
    room = HistoryRoom(99, 99)
    for kind in KINDS:
        delivered = Delivered(room)
        for each in stream(kind, [USUAL] * 2):
            delivered.told(each)
    return room.shapes


def heard(delivered: Delivered, reads: list[bytes]) -> Any:
    shown = [delivered.told(each) for each in reads]
    texts = {path: (text.chars, text._digest.digest()) for path, text in delivered._channels.items()}
    return (
        shown,
        delivered.history,
        texts,
        delivered.stuck,
        delivered.broken_off,
        delivered.rest(),
        delivered._room.held,
    )


def check(reads: list[bytes], *, ids_wanted: bool, shapes: list[EventShape]) -> None:
    rooms = HistoryRoom(20, 1 << 20), HistoryRoom(20, 1 << 20)
    rooms[0].shapes[:] = shapes
    by_shape, by_json = [Delivered(room, ids_wanted=ids_wanted, usage_due=True) for room in rooms]
    by_json._shaped = Blind([])
    assert heard(by_shape, reads) == heard(by_json, reads)
    assert len(rooms[0].shapes) <= SHAPES_MAX


def test_what_only_looks_alike_is_read_as_json() -> None:
    shapes = learnt()
    for kind, ids_wanted in itertools.product(KINDS, (False, True)):
        usual = stream(kind, [USUAL] * 3)
        streams = [[*usual, odd, usual[-1]] for odd in ODD] + [stream(kind, [USUAL] * 4, head) for head in HEADS]
        streams += [stream(kind, [USUAL, USUAL, (text, b"1"), USUAL]) for text in TEXTS]
        streams += [stream(kind, [USUAL, USUAL, (b"a", ids), USUAL]) for ids in IDS]
        for events in streams:
            for reads in (events, [events[0], b"".join(events[1:])], [events[0] + events[1], b"".join(events[2:])]):
                check(reads, ids_wanted=ids_wanted, shapes=shapes)


TOLD = st.one_of(st.just(USUAL), st.tuples(st.sampled_from(TEXTS), st.sampled_from(IDS)))


@given(
    st.sampled_from(sorted(KINDS)), st.lists(TOLD, min_size=2, max_size=9), st.sampled_from(HEADS),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ODD)), max_size=2), st.lists(st.integers(1, 4), min_size=1),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_both_ways_say_the_same(
    kind: str, told: list[tuple[bytes, bytes]], head: bytes, odd: list[tuple[int, bytes]], sizes: list[int],
    ids_wanted: bool, is_known: bool,
) -> None:  # fmt: skip
    events = stream(kind, told, head)
    for place, each in odd:
        events.insert(place, each)
    events += [b'data: %b"choices":[],"usage":{"prompt_tokens":3}}\n\n' % head, sse.DONE]
    reads = []
    while events:
        size = sizes[len(reads) % len(sizes)]
        reads.append(b"".join(events[:size]))
        del events[:size]
    check(reads, ids_wanted=ids_wanted, shapes=learnt() if is_known else [])


@pytest.mark.parametrize("kind", KINDS)
def test_almost_all_events_have_a_shape(kind: str) -> None:
    """Of a second stream all but the first."""
    room = HistoryRoom(1 << 20, 1 << 20)
    for name in (b"cmpl-a", b"cmpl-b"):
        delivered = Delivered(room)
        events = stream(kind, [(b'a\\"\xc3\xa9', b"%d,3" % number) for number in range(8)])
        first, *others = [each.replace(b"cmpl-1", name) for each in events]
        delivered.told(first)
        read = [delivered._shaped.read(each + sse.DONE) for each in others]
    assert [each and each[1:3] for each in read] == [('a"é', [number, 3]) for number in range(1, 8)]
    assert 1 <= len(room.shapes) <= 2
