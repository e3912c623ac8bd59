"""What a client has of one streamed answer, so that another engine can go on with it (decision 0025).

An engine's events go through here on their way to the client. Noted of them are the ids of their tokens and, of each
text that they build (an answer, reasoning, each tool call's arguments), its length and a digest. After a move the next
engine tells the answer from its first token. What the client has is left out, and compared; the rest gets the head of
the first engine's events.

Laws: what the client has is not said again, and what it has not is not left out. Nothing of another engine's answer is
shown before all that the client has was told again and was the same. A history holds the ids of all tokens of which
something was shown. Memory is four bytes a token, and bounded. Neither HTTP nor asyncio is known here.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import sse
from kvbaton.router.flow.said_text import HistoryRoom, SaidText, SeamError
from kvbaton.router.flow.told_events import (
    BROKEN_OFF,
    MARK,
    NO_PROMPT,
    ONCE,
    TEXT,
    UNREADABLE,
    ShapedEvents,
    TextPath,
    ToldChunk,
    plain,
    read_chunk,
    read_fields,
    stripped,
    without_ids,
)

_HEAD = ("id", "object", "created", "model", "system_fingerprint")
CHANNELS_MAX, DEPTH_MAX = 512, 8
"""Texts of one answer, and how deep they lie in a delta: far more than the tool calls of any model."""
OPENING_BYTES_KEPT = 1024
"""Of an event; of a longer one only what is needed."""
_NONE = msgspec.Raw(b"null")
_PROMPT_IDS = b',"prompt_token_ids":['
_choices = msgspec.json.Decoder(list[dict[str, Any]]).decode


class Delivered:
    """Of one choice of a stream of `/v1/completions` or `/v1/chat/completions`."""

    __slots__ = (
        "_at", "_begun", "_channels", "_finished", "_ids", "_ids_wanted", "_once", "_opening", "_room", "_shaped",
        "_usage_due", "broken_off", "prompt_tokens", "stuck",
    )  # fmt: skip

    def __init__(self, room: HistoryRoom, *, ids_wanted: bool = False, usage_due: bool = False) -> None:
        """`ids_wanted`, `usage_due`: the client asked for token ids, or for the usage at the end."""
        self.stuck = ""  # why nobody can go on with it
        self.broken_off = b""  # the event by which an engine said that it goes no further; not shown
        self._room = room
        self._ids_wanted = ids_wanted
        self._usage_due = usage_due
        self._ids = array("i")
        self._at = -1  # after a move: how many of the ids were repeated; before: -1
        self._begun = 0  # how many ids the client had at the last move
        self._channels: dict[TextPath, SaidText] = {}
        self._once: set[TextPath] = set()
        self._opening = b""  # the first event, without its end and the ids of the prompt
        self.prompt_tokens = 0  # for the usage at the end; 0: not told
        self._finished = False
        self._shaped = ShapedEvents(room.shapes)

    @property
    def history(self) -> tuple[int, ...]:
        """The tokens that the next engine is to go on behind."""
        return tuple(self._ids)

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def catches_up(self) -> bool:
        """Whether another engine has yet to tell what the client has."""
        return 0 <= self._at < self._begun or self._owes_text

    @property
    def _owes_text(self) -> bool:
        return any(each.owed for each in self._channels.values())

    def moved(self) -> None:
        """What comes from now on is another engine's, from the answer's first token on."""
        self._at, self._begun, self.broken_off = 0, len(self._ids), b""
        self._shaped.moved()
        for channel in self._channels.values():
            channel.begin_again()

    def rest(self) -> bytes:
        """What is left to be said where the engine broke off behind its last word; b"" where there is more to it."""
        if not self._finished or (self._usage_due and (self.stuck or not self.prompt_tokens)):
            return b""
        usage = b""
        if self._usage_due:
            prompt, said = self.prompt_tokens, len(self._ids)
            told = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
            usage = sse.event({**_named(self._opening), "choices": [], "usage": told})
        return usage + sse.DONE

    def close(self) -> None:
        """Forget the ids; nobody can go on then."""
        self._room.held -= len(self._ids)
        self._ids = array("i")

    def told(self, events: bytes) -> bytes:
        """Whole events of the engine, as the client shall see them. `SeamError`: nothing more of this engine."""
        if not events.endswith(b"\n\n"):  # no engine of ours writes so, and others are not asked to go on
            if self._at >= 0:
                raise SeamError("it sent an event that cannot be read")
            self._get_stuck("unreadable")
            return events
        if self._at < 0 and not self.broken_off:
            if not self._opening:
                return self._begin(events)
            if shown := self._by_shape(events) or self._at_once(events):
                return shown
        elif shown := self._as_if_first(events):
            return shown
        return self._one_by_one(events)

    def _as_if_first(self, events: bytes) -> bytes:
        """Of another engine's that has told all that the client has; b"" where they are to be read one by one."""
        if not 0 < self._begun <= self._at or self.broken_off or self._owes_text:
            return b""
        ours = self._shaped.under_head(events)
        return self._by_shape(ours) or self._at_once(ours) if ours else b""

    def _one_by_one(self, events: bytes) -> bytes:
        shown = []
        for event in events[:-2].split(b"\n\n"):
            if event.startswith(b"data: {") and not self.broken_off:
                event = self._first(event) if self._at < 0 else self._again(event)
                if not event:
                    continue
            elif self.broken_off:  # whatever it says after giving up
                continue
            elif self._at >= 0 and event.startswith(b"data: [DONE]") and self.catches_up:
                raise SeamError("its answer ends before what the client has")
            shown.append(event + b"\n\n")
        return b"".join(shown)

    # --- of the first engine

    def _begin(self, events: bytes) -> bytes:
        """The first event says whose answer it is, and bears the ids of a prompt that may be long."""
        end = events.find(b"\n")  # of one byte: that of two takes ten times as long
        if not events.startswith(b"\n\n", end):
            end = events.find(b"\n\n")
        first, rest = events[:end], events[end:]
        if not first.startswith(b"data: {"):
            return first + b"\n\n" + (self.told(rest[2:]) if len(rest) > 2 else b"")
        before, mark, behind = first.partition(_PROMPT_IDS)
        ids, _, after = behind.partition(b"]")
        bare = before + (NO_PROMPT if NO_PROMPT in rest else b"") + after  # as those that follow
        self._shaped.begin(bare)
        self._opening = bare[6:] if len(bare) <= OPENING_BYTES_KEPT else msgspec.json.encode(_named(bare[6:]))
        if self._usage_due:
            self.prompt_tokens = ids.count(b",") + 1 if mark and ids.strip() else 0
        if not (mark and self._ids_wanted):
            return self.told(bare + rest)
        shown = self._first(bare)
        return (first + b"\n\n" if shown else b"") + (self.told(rest[2:]) if len(rest) > 2 else b"")

    def _by_shape(self, events: bytes) -> bytes:
        """Of events that are all like an earlier one; b"" where one of them is not."""
        told = self._shaped.read(events)
        if told is None:
            return b""
        path, text, ids, shown = told
        self._hear(path, text, ids)
        return events if self._ids_wanted else shown

    def _at_once(self, events: bytes) -> bytes:
        """Of events that only bear tokens of one text; b"" where one is of another kind."""
        told = plain(events)
        if told is None:
            return b""
        shown = events if self._ids_wanted else stripped(events)
        if shown:
            self._finished = self._finished or told.finished
            self._hear(told.path, told.text, told.ids)
        return shown

    def _hear(self, path: TextPath, text: str, ids: list[int]) -> None:
        if self.stuck:
            return
        self._keep(ids)
        try:
            self._channel(path).say(text)
        except SeamError:
            self._get_stuck("unreadable")

    def _first(self, event: bytes) -> bytes:
        payload = event[6:]
        try:
            chunk = read_chunk(payload)
        except UNREADABLE:
            self._get_stuck("unreadable")
            return event
        if self._gives_up(chunk):
            self.broken_off = event + b"\n\n"
            return b""
        self._note(chunk)
        if self._ids_wanted or MARK not in event:
            return event
        return stripped(event) or without_ids(payload)

    def _gives_up(self, chunk: ToldChunk) -> bool:
        if chunk.error is not None:
            code = str(chunk.error.code)
            return not (len(code) == 3 and code[0] == "4" and code.isdigit())  # the client's own fault stays its own
        return any(choice.finish_reason in BROKEN_OFF for choice in chunk.choices)

    def _note(self, chunk: ToldChunk) -> None:
        if not chunk.choices:
            self._usage_due = self._usage_due and not _is_told(chunk.usage)
            return
        if len(chunk.choices) > 1 or chunk.choices[0].index:
            self._get_stuck("choices")
            return
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._finished = True
        if self.stuck:  # nobody goes on with it, and nothing is compared
            return
        text, ids = choice.text, choice.token_ids
        if ids:
            self._keep(ids)
        elif text and ids is None:
            self._get_stuck("no_ids")
        try:
            if text is not None:
                self._channel(TEXT).say(text)
            elif choice.delta:
                for name, value in choice.delta.items():
                    self._note_part(value, (name,), ids)
        except SeamError:
            self._get_stuck("unreadable")

    def _note_part(self, value: Any, path: TextPath, ids: list[int] | None) -> None:
        if type(value) is str:
            if path[-1] in ONCE:
                self._once.add(_bounded(path, self._once))
                return
            self._channel(path).say(value)
            if value and ids is None:
                self._get_stuck("no_ids")
        elif type(value) is dict:
            for name, each in value.items():
                self._note_part(each, (*_bounded(path), name), ids)
        elif type(value) is list:
            for number, each in enumerate(value):
                self._note_part(each, (*_bounded(path), _number(each, number)), ids)

    def _keep(self, ids: list[int]) -> None:
        if self.stuck:
            return
        room = self._room
        try:
            self._ids.fromlist(ids)
        except OverflowError:
            self._get_stuck("unreadable")
            return
        room.held += len(ids)
        if len(self._ids) > room.of_one:
            self._get_stuck("history_max")
        elif room.held > room.of_all:
            self._get_stuck("histories_max")

    def _get_stuck(self, why: str) -> None:
        self.stuck = self.stuck or why
        self.close()

    def _channel(self, path: TextPath) -> SaidText:
        found = self._channels.get(path)
        if found is None:
            found = self._channels[_bounded(path, self._channels)] = SaidText()
        return found

    # --- of those that follow

    def _again(self, event: bytes) -> bytes:
        try:
            payload = event[6:]
            chunk, fields = read_chunk(payload), read_fields(payload)
            choices = _choices(fields["choices"]) if "choices" in fields else []
        except UNREADABLE:
            raise SeamError("it sent an event that cannot be read") from None
        if self._gives_up(chunk):
            self.broken_off = event + b"\n\n"
            return b""
        if chunk.error is not None:
            return event
        if len(choices) > 1 or (choices and choices[0].get("index")):
            raise SeamError("it answers with several choices")
        if not choices:
            if self.catches_up:
                return b""
            self._usage_due = self._usage_due and not _is_told(chunk.usage)
            return self._headed(fields)
        left = self._left_of(choices[0])
        if left is None:
            return b""
        fields["choices"] = msgspec.Raw(msgspec.json.encode([left]))
        return self._headed(fields)

    def _headed(self, fields: dict[str, msgspec.Raw]) -> bytes:
        fields.pop("prompt_token_ids", None)  # the client has them, if it wanted them
        return sse.event({**fields, **_named(self._opening)})[:-2]

    def _left_of(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """What of a choice the client does not have; None where that is nothing."""
        ended = choice.get("finish_reason") is not None
        ids = choice.pop("token_ids", None) or []
        choice.pop("prompt_token_ids", None)
        known = self._repeated(ids)
        new, had = False, self._chars
        if choice.get("text") is not None:
            choice["text"] = self._channel(TEXT).left(choice["text"])
            new = bool(choice["text"])
        elif choice.get("delta"):
            left = self._left(choice["delta"], ())
            new = left is not None
            choice["delta"] = left or {}
        if (ended and self.catches_up) or (self._chars > had and self._owes_text):
            raise SeamError("it goes on before it has told what the client has")
        if choice.get("logprobs") is not None:
            choice["logprobs"] = _logprobs_behind(choice["logprobs"], known, len(ids))
        if self._ids_wanted:
            choice["token_ids"] = ids[known:]
        self._finished = self._finished or ended
        return choice if new or ended or len(ids) > known else None

    @property
    def _chars(self) -> int:
        return sum(each.chars for each in self._channels.values())

    def _repeated(self, ids: Sequence[int]) -> int:
        """How many of these ids the client has; those that follow are noted."""
        known = min(max(self._begun - self._at, 0), len(ids))
        if not self.stuck and list(ids[:known]) != list(self._ids[self._at : self._at + known]):
            raise SeamError("its tokens differ from those that the client has")
        self._at += len(ids)
        self._keep(list(ids[known:]))
        return known

    def _left(self, value: Any, path: TextPath) -> Any:
        if type(value) is str:
            if path[-1] in ONCE:
                if path in self._once:
                    return None
                self._once.add(_bounded(path, self._once))
                return value
            is_first = path not in self._channels
            left = self._channel(path).left(value)
            return left if left or is_first else None
        if type(value) is dict:
            found = {name: self._left(each, (*_bounded(path), name)) for name, each in value.items()}
            new = {name: each for name, each in found.items() if each is not None}
            plain = {name: each for name, each in value.items() if not isinstance(each, str | dict | list)}
            return {**plain, **new} if new else None
        if type(value) is list:
            parts = [self._left(each, (*_bounded(path), _number(each, number))) for number, each in enumerate(value)]
            return [each for each in parts if each is not None] or None
        return None


def _named(event: bytes) -> dict[str, msgspec.Raw]:
    """What all events of its stream say of it."""
    try:
        fields = read_fields(event)
    except UNREADABLE:
        fields = {}
    return {name: fields[name] for name in _HEAD if name in fields} or {"id": _NONE}


def _is_told(value: msgspec.Raw) -> bool:
    return bytes(value) != b"null"


def _bounded(path: TextPath, known: Collection[TextPath] = ()) -> TextPath:
    """A path that may be entered beside those that are known."""
    if len(path) > DEPTH_MAX or len(known) >= CHANNELS_MAX:
        raise SeamError("it tells more texts, or deeper ones, than any answer has")
    return path


def _number(part: Any, place: int) -> int:
    """Which of several tool calls a part of a delta is of."""
    index = part.get("index") if isinstance(part, Mapping) else None
    return index if type(index) is int else place


def _logprobs_behind(told: Any, known: int, count: int) -> Any:
    """Log probabilities without those of tokens that the client has: another engine has only their places."""
    if not known:
        return told
    if known == count:
        return None
    if not isinstance(told, Mapping):
        raise SeamError("its log probabilities cannot be read")
    lists = {name: each for name, each in told.items() if isinstance(each, list)}
    if any(len(each) != count for each in lists.values()):
        raise SeamError(f"it tells log probabilities of another number of tokens than the {count} beside them")
    return {**told, **{name: each[known:] for name, each in lists.items()}}
