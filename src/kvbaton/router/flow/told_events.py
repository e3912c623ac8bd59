"""Events of an engine's stream of `/v1/completions` or `/v1/chat/completions`: read, and with their ids taken out.

Three ways to read, each for what the one before leaves: by shape (almost all), several as one piece of JSON, and one
by one, which is the caller's. Events of one stream begin alike, up to their choice: the head. A shape is the rest, with
two holes, in a string and in a list of numbers; streams share shapes.

Law: all ways hear the same of the same events, and show the same. A head and a shape have each been read as JSON, so
that any of the one can stand before any of the other. What fills the holes is valid there, or the event is not of that
shape. So it is JSON that differs in nothing else from what was read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvbaton.api import sse

TextPath: TypeAlias = tuple[str | int, ...]
"""Where a text lies in a choice: `("text",)`, or its path within the delta of a chat."""
TEXT: TextPath = ("text",)
ONCE = frozenset({"role", "id", "type"})
"""Texts within a delta that are told whole, once; another engine draws ids of its own."""
BROKEN_OFF = ("abort", "error")
"""Finish reasons of an engine that gave up on an answer which nobody asked it to end."""
MARK = b'token_ids":'
NO_PROMPT = b',"prompt_token_ids":null'
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids":\s*\[[0-9,\s]*\]')
"""An unescaped quote before a colon ends a name, so no text looks like this."""
_NONE = msgspec.Raw(b"null")
_DONE_BEHIND = b"\n\n" + sse.DONE


class ToldChoice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class ToldFault(msgspec.Struct):
    code: int | str | None = None


class ToldChunk(msgspec.Struct, gc=False):
    choices: list[ToldChoice] = []
    usage: msgspec.Raw = _NONE
    error: ToldFault | None = None


class _Headed(msgspec.Struct):
    error: None = None


read_chunk = msgspec.json.Decoder(ToldChunk).decode
_chunks = msgspec.json.Decoder(list[ToldChunk]).decode
_text = msgspec.json.Decoder(str).decode
read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_headed = msgspec.json.Decoder(_Headed).decode
_numbers = msgspec.json.Decoder(list[int]).decode


class PlainTold(NamedTuple):
    """What events say that bear tokens of one text and nothing else."""

    path: TextPath
    text: str
    ids: list[int]
    finished: bool


def plain(events: bytes) -> PlainTold | None:
    """Whole events, and perhaps the end of the stream behind them; None where one is of another kind."""
    if not events.startswith(b"data: {"):
        return None
    body = events[6:-16] if events.endswith(_DONE_BEHIND) else events[6:-2]
    try:  # no line ends within JSON
        found = _chunks(b"[%b]" % body.replace(b"\n\ndata: ", b","))
    except UNREADABLE:
        return None
    ids: list[int] = []
    texts = []
    path: TextPath = ()
    for each in found:
        if len(each.choices) != 1 or each.error is not None:
            return None
        choice = each.choices[0]
        if choice.token_ids is None or choice.index or choice.finish_reason in BROKEN_OFF:
            return None
        if choice.text is not None:
            here, text = TEXT, choice.text
        elif choice.delta is not None and len(choice.delta) == 1:
            [(name, text)] = choice.delta.items()
            here = (name,)
            if type(text) is not str or name in ONCE:
                return None
        else:
            return None
        if path and path != here:
            return None
        path = here
        ids += choice.token_ids
        texts.append(text)
    return PlainTold(path, "".join(texts), ids, found[-1].choices[0].finish_reason is not None)


def stripped(events: bytes) -> bytes:
    """Events without ids; b"" where they stand in another way than engines write them."""
    first, *rest = events.split(b',"token_ids":[')  # at the speed of C, where `_IDS` tries each comma
    bare = b"".join([first, *[each.partition(b"]")[2] for each in rest]])
    if MARK in bare:
        bare = bare.replace(NO_PROMPT, b"")  # as vLLM has it in all but the first of a completion
    if MARK in bare:
        bare = _IDS.sub(b"", bare)
    return bare if MARK not in bare else b""


def without_ids(payload: bytes) -> bytes:
    """An event, without its end, where they stand in another way."""
    fields = msgspec.json.decode(payload)
    for each in (fields, *(fields.get("choices") or ())):
        for name in ("token_ids", "prompt_token_ids"):
            each.pop(name, None)
    return sse.event(fields)[:-2]


_STRING = re.compile(rb'(?:[^"\\]|\\.)*"', re.DOTALL)
_CHOICE = b'"choices":[{"index":0,'
_BEHIND = b'"text":""}]}'
_OPENING = re.compile(rb'"text":"|"delta":\{"[a-z_]+":"')
_ROW = b'"token_ids":['
_HOLE, _ID = "a text that stands for any other", 1234567890
SHAPES_MAX, LOOKS_MAX = 8, 4
"""Shapes that are kept, and how often one stream looks for another of them."""
SHAPE_BYTES_MAX = 1024
"""Of an event from which one is taken."""


class EventShape(NamedTuple):
    """What stands around the text and the ids of a choice as engines send it, and behind the text as it is shown."""

    path: TextPath
    opening: bytes
    between: bytes
    after: bytes
    shown: bytes

    def read(self, head: bytes, events: bytes) -> tuple[str, list[int], bytes] | None:
        """Text, ids and what is shown of whole events, as `plain`; None where one is of another shape."""
        _, opening, between, after, shown = self
        before = head + opening
        end = sse.DONE if events.endswith(_DONE_BEHIND) else b""
        stop = len(events) - len(end)
        if not (events.startswith(before) and events.endswith(after, 0, stop)):
            return None
        texts, ids = [], []
        for each in events[len(before) : stop - len(after)].split(after + before):
            text, mark, row = each.partition(between)
            if not mark:
                return None
            texts.append(text)
            ids.append(row)
        try:
            told = _joined(texts), _numbers(b"[%b]" % b",".join(ids))
        except UNREADABLE:
            return None
        return *told, b"".join((before, (shown + before).join(texts), shown, end))


def shape_of(head: bytes, event: bytes) -> EventShape | None:
    """The shape of an event without its end; None where it is not plain, or ends the answer. In time of its length."""
    is_usual = len(event) <= SHAPE_BYTES_MAX and event.startswith(head)
    opening = _OPENING.match(event, len(head)) if is_usual else None
    string = _STRING.match(event, opening.end()) if opening else None
    ids = event.find(_ROW, string.end()) if string else -1
    end = event.find(b"]", ids)
    if opening is None or string is None or ids < 0 or end < 0:
        return None
    between, after = event[string.end() - 1 : ids + len(_ROW)], event[end:]
    before = head + opening[0] + _HOLE.encode()
    sample = b"%b%b%d%b" % (before, between, _ID, after)
    told, shown = plain(sample + b"\n\n"), stripped(sample)
    if told is None or told.finished or (told.text, told.ids) != (_HOLE, [_ID]) or not shown.startswith(before):
        return None
    return EventShape(told.path, opening[0], between, after + b"\n\n", shown[len(before) :] + b"\n\n")


def head_of(event: bytes) -> bytes:
    """Of an event without its end; b"" where it has none."""
    at = event.find(_CHOICE)
    head = event[: at + len(_CHOICE)]
    if 0 <= at < SHAPE_BYTES_MAX and MARK not in head and head.startswith(b"data: {"):
        with contextlib.suppress(*UNREADABLE):
            _headed(head[6:] + _BEHIND)  # with these brackets it is JSON only if it ends in a first choice
            read_chunk(head[6:] + _BEHIND)  # also where a name stands twice
            return head
    return b""


def _names(head: bytes) -> set[str]:
    return set(read_fields(head[6:] + _BEHIND))


class ShapedEvents:
    """The events of one stream, by shapes that it shares with others."""

    __slots__ = ("_head", "_looks_left", "_shape", "_shapes", "_theirs")

    def __init__(self, shapes: list[EventShape]) -> None:
        self._shapes = shapes
        self._shape: EventShape | None = None
        self._head = b""
        self._theirs: bytes | None = None  # the head of another engine that goes on; b"": not of the same names
        self._looks_left = LOOKS_MAX

    def begin(self, event: bytes) -> None:
        """By the stream's first event, without its end."""
        self._head = head_of(event)

    def moved(self) -> None:
        """What comes from now on has a head of its own."""
        self._theirs = None

    def under_head(self, events: bytes) -> bytes:
        """Another engine's events as if the first had sent them; b"" where they have not all one head."""
        if self._theirs is None:
            theirs = head_of(events)
            self._theirs = theirs if theirs and self._head and _names(theirs) == _names(self._head) else b""
        theirs = self._theirs
        # No head is in a string, where its quotes would be escaped, and no line ends there
        whole = theirs and events.startswith(theirs) and events.count(theirs) == events.count(b"\n\ndata: {") + 1
        return events.replace(theirs, self._head) if whole else b""

    def read(self, events: bytes) -> tuple[TextPath, str, list[int], bytes] | None:
        """The path, and as `EventShape.read`."""
        shape, head = self._shape, self._head
        told = shape.read(head, events) if shape is not None else None
        if told is None and head and self._looks_left:
            self._looks_left -= 1
            for shape in self._shapes:
                if (told := shape.read(head, events)) is not None:
                    break
            else:
                shape = shape_of(head, events[: events.find(b"\n\n")])
                if shape is not None and shape not in self._shapes:
                    self._shapes.insert(0, shape)
                    del self._shapes[SHAPES_MAX:]
                    told = shape.read(head, events)
            self._shape = shape if told is not None else self._shape
        return None if shape is None or told is None else (shape.path, *told)


def _joined(texts: Sequence[bytes]) -> str:
    """The text of strings as they stand in JSON; raises where one of them is none."""
    told = b'"'.join(texts).decode()
    if "\\" not in told and told.isprintable() and told.count('"') == len(texts) - 1:
        return told.replace('"', "")
    return "".join([_text(b'"%b"' % each) for each in texts])
