"""Turns of conversations: which D keeps the KV of what a prompt begins with, told to the P of the next turn.

A conversation is known by its prompt alone: the next turn's begins with it. How long prompt and answer were, D's usage
says. Laws: memory is bounded, and an entry is used once. What is told is a guess: P and D compare digests of the tokens
themselves, so a wrong one costs P a question. Names are keyed per process, so no client can aim at another's turn; one
that sends the same beginning gets what it could compute. Nothing of this reaches clients.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton.protocol.ids import HandoffId, PeerId
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX
from kvbaton.router.attempt import RoutedCall
from kvbaton.router.dialect_table import TicketMinter
from kvbaton.router.workers.directory import ListedEngine

TURNS_MAX = 16_384
STEP_BYTES = 256
"""A text is looked up by its beginnings of so many bytes and multiples of it; a shorter one is not worth it."""
STEPS_MAX = 4096
TOKENS_MAX = 1 << 31
"""Of a prompt and its answer; a D that tells of more lies, and P could not read the number."""
_encode = msgspec.json.Encoder().encode
_KEY = secrets.token_bytes(32)
_USAGE = b',"stream_options":{"include_usage":true}}'


class _TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _UsageTold(msgspec.Struct, frozen=True):
    usage: _TokenUsage | None = None
    choices: list[msgspec.Raw] = []


_told = msgspec.json.Decoder(_UsageTold)


class KnownTurn(msgspec.Struct, frozen=True):
    """What the router knows of a turn that a D keeps."""

    worker: ListedEngine
    handoff: HandoffId
    tokens: int  # of prompt and answer
    until: float
    name: bytes  # of the whole prompt
    length: int  # of its text, where it has one


class TurnBook:
    """All turns that this router knows of."""

    def __init__(
        self,
        minter: TicketMinter | None,
        turn_s: float,
        lists: Callable[[PeerId, float], bool],
        now: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._minter = minter if turn_s else None
        self._turn_s = turn_s
        self._lists = lists
        self._now = now
        self._counts = counts
        self._turns: OrderedDict[bytes, KnownTurn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def offered(self, call: RoutedCall, prefill: ListedEngine, params: bytes) -> bytes:
        """P's parameters, with what some D has of this prompt."""
        if self._minter is None or not prefill.is_own:
            return params
        turn = self._find(call)
        if turn is None:
            return params
        self._counts["offered"] += 1
        ticket = self._minter.for_turn(turn.handoff, turn.worker, prefill.name)
        return _with(params, b'"turn":' + _encode({"ticket": ticket, "tokens": turn.tokens}))

    def keeps(self, call: RoutedCall, decode: ListedEngine) -> TurnWatch | None:
        """How D is to keep this request, and the router to hear of it; None where a next turn could not be known."""
        if self._minter is None or not decode.is_own or call.data is None or call.alone:
            return None
        asks_usage = call.stream
        options = call.fields.get("stream_options")
        if call.stream and options is not None:
            if not (isinstance(options, dict) and options.get("include_usage") is True):
                return None
            asks_usage = False
        name = _name(call)
        if name is None:
            return None
        handoff = self._minter.new_handoff()
        ticket = self._minter.for_turn(handoff, decode, life_s=TICKET_LIFE_S_MAX)  # D opens it when the request ends
        return TurnWatch(self, decode, handoff, ticket, name, asks_usage)

    def note(self, decode: ListedEngine, handoff: HandoffId, name: tuple[bytes, bytes, int], tokens: int) -> None:
        key, whole, length = name
        self._counts["noted"] += 1
        self._turns[key] = KnownTurn(decode, handoff, tokens, self._now() + self._turn_s, whole, length)
        self._turns.move_to_end(key)
        while len(self._turns) > TURNS_MAX or next(iter(self._turns.values())).until < self._now():
            self._turns.popitem(last=False)
            self._counts["forgotten"] += 1

    def _find(self, call: RoutedCall) -> KnownTurn | None:
        """The longest beginning of this prompt that a D keeps; from here on it is nobody else's."""
        for key, turn in reversed(self._known(call)):
            del self._turns[key]
            now = self._now()
            if turn.until >= now and self._lists(turn.worker.peer, now):
                return turn
            self._counts["forgotten"] += 1
        return None

    def _known(self, call: RoutedCall) -> list[tuple[bytes, KnownTurn]]:
        """All beginnings of this prompt that are known, shortest first."""
        text = _text(call)
        if not text:
            said = list(_said(call))[:-1]
            return [(key, turn) for key in said if (turn := self._turns.get(key)) is not None]
        found = []
        for state, at in _steps(call, text):
            key = state.digest()
            turn = self._turns.get(key)
            # Only what is behind the step is hashed here: a client could plant turns at each of a long text's steps.
            if turn and turn.length < len(text) and _whole(state, text[at : turn.length]) == turn.name:
                found.append((key, turn))
        return found


class TurnWatch:
    """One answer on its way to the client: D's usage is read, and left out where the client did not ask for it."""

    __slots__ = ("_asks_usage", "_book", "_decode", "_handoff", "_name", "_ticket")

    def __init__(
        self,
        book: TurnBook,
        decode: ListedEngine,
        handoff: HandoffId,
        ticket: str,
        name: tuple[bytes, bytes, int],
        asks_usage: bool,
    ) -> None:
        self._book = book
        self._decode = decode
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
        self._read(answer, False)

    def stream(self, events: bytes) -> bytes:
        """Whole events as they came, as the client may see them."""
        if b'"usage"' not in events:
            return events
        kept = []
        for event in events.split(b"\n\n"):
            payload = event.removeprefix(b"data:").strip()
            if b'"usage"' in event and self._read(payload, True) and self._asks_usage:
                continue
            kept.append(event)
        return b"\n\n".join(kept)

    def _read(self, data: bytes, is_last: bool) -> bool:
        """Whether this is the usage of the whole answer."""
        try:
            told = _told.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        usage = told.usage
        if usage is None or (is_last and told.choices):
            return False
        tokens = usage.prompt_tokens + usage.completion_tokens
        if usage.prompt_tokens > 0 and usage.completion_tokens > 0 and tokens <= TOKENS_MAX:
            self._book.note(self._decode, self._handoff, self._name, tokens)
        return True


def _with(params: bytes, field: bytes) -> bytes:
    end = params.rindex(b"}")
    comma = b"" if params[:end].strip() == b"{" else b","
    return b"%b%b%b}" % (params[:end], comma, field)


def _text(call: RoutedCall) -> bytes:
    """The prompt of a completion as bytes of which a longer prompt's begin; b"" of anything else."""
    if call.kind is not BodyKind.COMPLETION:
        return b""
    prompt = call.fields.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return _encode(prompt)[:-1] + b","
    return b""


def _name(call: RoutedCall) -> tuple[bytes, bytes, int] | None:
    """Of a whole prompt: where it is looked up, its name, and the length of its text, where it has one."""
    text = _text(call)
    if not text:
        said = list(_said(call))
        return (said[-1], said[-1], 0) if said else None
    last = deque(_steps(call, text), maxlen=1)
    if not last:
        return None
    [(state, at)] = last
    return state.digest(), _whole(state, text[at:]), len(text)


def _said(call: RoutedCall) -> Iterator[bytes]:
    """Names of a chat's beginnings, message by message."""
    messages = call.fields.get("messages") if call.kind is BodyKind.CHAT else None
    name = _hash(_shape(call))
    for message in messages if isinstance(messages, list) else ():
        name = _hash(name + _encode(message))
        yield name


def _steps(call: RoutedCall, text: bytes) -> Iterator[tuple[Any, int]]:
    """A text's beginnings, each a step longer: the hash of it so far, which goes on with the next, and its length."""
    state = blake2b(_shape(call), key=_KEY, digest_size=16)
    for at in range(STEP_BYTES, min(len(text), STEPS_MAX * STEP_BYTES) + 1, STEP_BYTES):
        state.update(text[at - STEP_BYTES : at])
        yield state, at


def _whole(state: Any, rest: bytes) -> bytes:
    """The name of a text of which `state` has all but the rest."""
    state = state.copy()
    state.update(rest)
    return bytes(state.digest())


def _shape(call: RoutedCall) -> bytes:
    """What shapes the KV besides the text."""
    fields: Any = call.fields
    return _encode([call.kind.value, fields.get("model"), fields.get("cache_salt"), fields.get("tools")])


def _hash(data: bytes) -> bytes:
    return blake2b(data, key=_KEY, digest_size=16).digest()
