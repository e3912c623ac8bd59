"""Turns of conversations: which D keeps the KV of what a prompt begins with, told to the P of the next turn.

A conversation is known by its prompt alone (`turn_names`). How long prompt and answer were, D's usage says. Laws: an
entry is used once; of two processes that find it at the same moment D serves one. What is told is a guess: P and D
compare digests of the tokens themselves, so a wrong one costs P a question. One that sends the same beginning gets what
it could compute. Nothing of this reaches clients.

Where a router keeps what it knows of turns: by name, bounded, each for as long as D keeps it.

Laws: memory is bounded, the oldest go first. `secret` keys the names of all who share the table. What is found may be
wrong: P and D compare digests of the tokens themselves.

How a conversation is known: by names of the beginnings of its prompt, which the next turn's prompt begins with.

A completion's prompt is a text, named at every `STEP_BYTES` of it. The other APIs send messages, named one by one; what
clients write differently from turn to turn, though the prompt stays the same, is left out of the names:

    responses   the input as one text or as the message that stands for it; ids and states of earlier output
    messages    a text or its only block; marks for the cache, which wander to the newest message
    all three   what type a text part is called by

Laws: pure; names are keyed, so no client can aim at another's turn; a name costs as much as what it is of.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import TEXT_PARTS, BodyKind
from kvbaton.protocol.ids import HandoffId, PeerId
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX
from kvbaton.router.flow.attempt import RoutedCall
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.workers.directory import ListedEngine

TURNS_MAX = 16_384


class KnownTurn(msgspec.Struct, frozen=True):
    """What the router knows of a turn that a D keeps."""

    peer: PeerId  # the D
    handoff: HandoffId
    tokens: int  # of prompt and answer
    until: float
    whole: bytes  # the name of the whole prompt
    length: int  # of its text, where it has one


class TurnTable:
    """Of one process."""

    def __init__(self, secret: bytes = b"", turns_max: int = TURNS_MAX) -> None:
        self.secret = secret or secrets.token_bytes(32)
        self._turns: OrderedDict[bytes, KnownTurn] = OrderedDict()
        self._turns_max = turns_max

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, key: bytes, turn: KnownTurn, now: float) -> int:
        """Note a turn; how many others were forgotten for it, or were too old."""
        self._turns[key] = turn
        self._turns.move_to_end(key)
        before = len(self._turns)
        while len(self._turns) > self._turns_max or next(iter(self._turns.values())).until < now:
            self._turns.popitem(last=False)
        return before - len(self._turns)

    def get(self, key: bytes) -> KnownTurn | None:
        return self._turns.get(key)

    def drop(self, key: bytes) -> None:
        """It was used, or is worth nothing."""
        self._turns.pop(key, None)


TOKENS_MAX = 1 << 31
"""Of prompt and answer: what says more is no usage."""
_encode = msgspec.json.Encoder().encode
_USAGE = b',"stream_options":{"include_usage":true}}'
_UNTYPED = (BodyKind.COMPLETION, BodyKind.CHAT)
"""Their streams tell the usage only if they are asked to, in an event of its own."""
_TELLING = ("response.completed", "response.incomplete", "message_delta")
"""The events of the others that tell it."""


class _TokenUsage(msgspec.Struct, frozen=True):
    """By OpenAI's two sets of names; Anthropic leaves what was cached out of the input."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    input_tokens: int = 0
    output_tokens: int | None = 0
    cache_read_input_tokens: int | None = 0
    cache_creation_input_tokens: int | None = 0

    @property
    def tokens(self) -> int:
        """Of prompt and answer; 0 where one of them is not told."""
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        asked, said = self.prompt_tokens + self.input_tokens + cached, self.completion_tokens or self.output_tokens or 0
        return asked + said if asked > 0 and said > 0 and asked + said < TOKENS_MAX else 0


class _WholeTold(msgspec.Struct, frozen=True):
    """A whole answer of any of the APIs, and the response within an event."""

    usage: _TokenUsage | None = None


class _ChunkTold(msgspec.Struct, frozen=True):
    usage: _TokenUsage | None = None
    choices: list[msgspec.Raw] = []


class _EventTold(msgspec.Struct, frozen=True):
    type: str = ""
    usage: _TokenUsage | None = None
    response: _WholeTold | None = None


_whole = msgspec.json.Decoder(_WholeTold)
_chunk = msgspec.json.Decoder(_ChunkTold)
_event = msgspec.json.Decoder(_EventTold)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class TurnBook:
    """All turns that this router knows of."""

    def __init__(
        self,
        minter: TicketMinter | None,
        turn_s: float,
        lists: Callable[[PeerId, float], bool],
        now: Callable[[], float],
        counts: Counter[str],
        table: TurnTable | None = None,
    ) -> None:
        self._minter = minter if turn_s else None
        self._turn_s = turn_s
        self._lists = lists
        self._now = now
        self._counts = counts
        self._table = TurnTable() if table is None else table

    def offered(self, call: RoutedCall, prefill: ListedEngine, params: bytes) -> bytes:
        """P's parameters, with what some D has of this prompt."""
        if self._minter is None or not prefill.is_own:
            return params
        turn = self._find(call)
        if turn is None:
            return params
        self._counts["offered"] += 1
        ticket = self._minter.for_turn(turn.handoff, turn.peer, prefill.name)
        return _with(params, b'"turn":' + _encode({"ticket": ticket, "tokens": turn.tokens}))

    def keeps(self, call: RoutedCall, decode: ListedEngine) -> TurnWatch | None:
        """How D is to keep this request, and the router to hear of it; None where a next turn could not be known."""
        if self._minter is None or not decode.is_own or call.data is None or call.alone:
            return None
        asks_usage = call.stream and call.kind in _UNTYPED
        options = call.fields.get("stream_options")
        if asks_usage and options is not None:
            if not (isinstance(options, dict) and options.get("include_usage") is True):
                return None
            asks_usage = False
        name = name_of(call, self._table.secret)
        if name is None:
            return None
        handoff = self._minter.new_handoff()
        # D opens it when the request ends
        ticket = self._minter.for_turn(handoff, decode.peer, life_s=TICKET_LIFE_S_MAX)
        return TurnWatch(self, call.kind, decode.peer, handoff, ticket, name, asks_usage)

    def note(self, peer: PeerId, handoff: HandoffId, name: TurnName, tokens: int) -> None:
        self._counts["noted"] += 1
        now = self._now()
        turn = KnownTurn(peer, handoff, tokens, now + self._turn_s, name.whole, name.length)
        forgotten = self._table.put(name.key, turn, now)
        if forgotten:
            self._counts["forgotten"] += forgotten

    def _find(self, call: RoutedCall) -> KnownTurn | None:
        """The longest beginning of this prompt that a D keeps; from here on it is nobody else's."""
        for key, turn in reversed(self._known(call)):
            self._table.drop(key)
            now = self._now()
            if turn.until >= now and self._lists(turn.peer, now):
                return turn
            self._counts["forgotten"] += 1
        return None

    def _known(self, call: RoutedCall) -> list[tuple[bytes, KnownTurn]]:
        """All beginnings of this prompt that are known, shortest first."""
        text, secret = text_of(call), self._table.secret
        if not text:
            said = list(message_names(call, secret))[:-1]
            return [(key, turn) for key in said if (turn := self._table.get(key)) is not None]
        found = []
        for state, at in steps(call, text, secret):
            key = state.digest()
            turn = self._table.get(key)
            # Only what is behind the step is hashed here: a client could plant turns at each of a long text's steps.
            if turn and turn.length < len(text) and whole(state, text[at : turn.length]) == turn.whole:
                found.append((key, turn))
        return found


class TurnWatch:
    """One answer on its way to the client: D's usage is read, and left out where the client did not ask for it."""

    __slots__ = ("_asks_usage", "_book", "_handoff", "_is_typed", "_name", "_peer", "_ticket")

    def __init__(
        self,
        book: TurnBook,
        kind: BodyKind,
        peer: PeerId,
        handoff: HandoffId,
        ticket: str,
        name: TurnName,
        asks_usage: bool,
    ) -> None:
        self._book = book
        self._is_typed = kind not in _UNTYPED
        self._peer = peer
        self._handoff = handoff
        self._ticket = ticket
        self._name = name
        self._asks_usage = asks_usage

    def added(self, params: bytes | None) -> bytes:
        return _with(params or b"{}", b'"keep":' + _encode(self._ticket))

    def asked(self, body: bytes) -> bytes:
        """D's body; a stream is to tell its usage."""
        return body[: body.rindex(b"}")] + _USAGE if self._asks_usage else body

    def whole(self, answer: bytes) -> None:
        """An answer that is not streamed."""
        try:
            self._note(_whole.decode(answer).usage)
        except _UNREADABLE:
            return  # somebody else's to judge

    def stream(self, events: bytes) -> bytes:
        """Whole events as they came, as the client may see them."""
        if b'"usage"' not in events:
            return events
        if self._is_typed:
            for payload in sse.payloads(events):
                self._read_event(payload)
            return events
        kept = []
        for event in events.split(b"\n\n"):
            payload = event.removeprefix(b"data:").strip()
            if b'"usage"' in event and self._read_chunk(payload) and self._asks_usage:
                continue
            kept.append(event)
        return b"\n\n".join(kept)

    def _read_chunk(self, data: bytes) -> bool:
        """Whether this is the usage of the whole answer."""
        try:
            told = _chunk.decode(data)
        except _UNREADABLE:
            return False
        if told.usage is None or told.choices:
            return False
        self._note(told.usage)
        return True

    def _read_event(self, data: bytes) -> None:
        if b'"usage"' not in data:
            return
        try:
            told = _event.decode(data)
        except _UNREADABLE:
            return
        if told.type in _TELLING:
            self._note(told.usage if told.response is None else told.response.usage)

    def _note(self, usage: _TokenUsage | None) -> None:
        if usage is not None and usage.tokens:
            self._book.note(self._peer, self._handoff, self._name, usage.tokens)


def _with(params: bytes, field: bytes) -> bytes:
    end = params.rindex(b"}")
    comma = b"" if params[:end].strip() == b"{" else b","
    return b"%b%b%b}" % (params[:end], comma, field)


STEP_BYTES = 256
"""A text is looked up by its beginnings of so many bytes and multiples of it; a shorter one is not worth it."""
STEPS_MAX = 4096
_MARKS = frozenset({"cache_control"})
_OF_OUTPUT = frozenset({"role", "content", "type", "id", "status"})
_BILLING = "x-anthropic-billing-header"
"""Begins a part of some clients' system prompt that is new in each request; vLLM leaves it out of the prompt."""
_MESSAGES_IN = {BodyKind.CHAT: "messages", BodyKind.RESPONSES: "input", BodyKind.MESSAGES: "messages"}


class TurnName(msgspec.Struct, frozen=True):
    """Of one beginning of a prompt."""

    key: bytes  # by which it is looked up
    whole: bytes  # of the whole prompt, where it is a text; else the same
    length: int = 0  # of that text


def text_of(call: RoutedCall) -> bytes:
    """The prompt of a completion as bytes of which a longer prompt's begin; b"" of anything else."""
    if call.kind is not BodyKind.COMPLETION:
        return b""
    prompt = call.fields.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return _encode(prompt)[:-1] + b","
    return b""


def name_of(call: RoutedCall, secret: bytes) -> TurnName | None:
    """Of a whole prompt; None if it is too short, or none that is known by its beginnings."""
    text = text_of(call)
    if not text:
        last = deque(message_names(call, secret), maxlen=1)
        return TurnName(last[0], last[0]) if last else None
    stepped = deque(steps(call, text, secret), maxlen=1)
    if not stepped:
        return None
    [(state, at)] = stepped
    return TurnName(state.digest(), whole(state, text[at:]), len(text))


def message_names(call: RoutedCall, secret: bytes) -> Iterator[bytes]:
    """Names of the beginnings of what is not a text, message by message."""
    if call.kind is BodyKind.COMPLETION:
        return
    name = _hash(_shape(call), secret)
    for message in _messages(call):
        name = _hash(name + _encode(_said(message)), secret)
        yield name


def steps(call: RoutedCall, text: bytes, secret: bytes) -> Iterator[tuple[Any, int]]:
    """A text's beginnings, each a step longer: the hash of it so far, which goes on with the next, and its length."""
    state = blake2b(_shape(call), key=secret, digest_size=16)
    for at in range(STEP_BYTES, min(len(text), STEPS_MAX * STEP_BYTES) + 1, STEP_BYTES):
        state.update(text[at - STEP_BYTES : at])
        yield state, at


def whole(state: Any, rest: bytes) -> bytes:
    """The name of a text of which `state` has all but the rest."""
    state = state.copy()
    state.update(rest)
    return bytes(state.digest())


def _messages(call: RoutedCall) -> list[Any]:
    found = call.fields.get(_MESSAGES_IN[call.kind])
    if isinstance(found, str) and call.kind is BodyKind.RESPONSES:
        return [{"role": "user", "content": found}]
    return found if isinstance(found, list) else []


def _shape(call: RoutedCall) -> bytes:
    """What shapes the KV besides the messages or the text, and comes before them."""
    fields = call.fields
    shape = [call.kind.value, fields.get("model"), fields.get("cache_salt"), _unmarked(fields.get("tools"))]
    if call.kind is BodyKind.RESPONSES:
        shape.append(fields.get("instructions"))
    if call.kind is BodyKind.MESSAGES:
        shape.append([part for part in _parts(fields.get("system")) if not str(part[-1]).startswith(_BILLING)])
    return _encode(shape)


def _said(message: Any) -> Any:
    """A message as it is named: who says what, and all else that belongs to it."""
    if not isinstance(message, Mapping) or "role" not in message:  # an item of a response: a call of a tool, say
        return message
    more = {name: value for name, value in message.items() if name not in _OF_OUTPUT}
    return [message["role"], _parts(message.get("content")), more]


def _parts(content: Any) -> list[Any]:
    """What is said, part by part; a text is its only one."""
    if content is None:
        return []
    found = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS else part
        found.append(["text", text] if isinstance(text, str) else [_unmarked_part(part)])
    return found


def _unmarked(tools: Any) -> Any:
    return [_unmarked_part(each) for each in tools] if isinstance(tools, list) else tools


def _unmarked_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or _MARKS.isdisjoint(part):
        return part
    return {name: value for name, value in part.items() if name not in _MARKS}


def _hash(data: bytes, secret: bytes) -> bytes:
    return blake2b(data, key=secret, digest_size=16).digest()
