"""The way from a router to a D in a simulated world: D's front end, which tells answers in events, and the connection.

Laws: a connection keeps its order, and may break with what is still on its way. What is closed is not read. An answer
is told from its first token on, wherever it was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.api import sse
from kvbaton.api.params import TransferParams
from kvbaton.protocol.wire.ticket import check_history
from kvbaton_proof.sim.world.sim_generation import GeneratingEngine, Generation, Task, letters
from kvbaton_proof.sim.world.sim_router import Errand

if TYPE_CHECKING:
    from kvbaton_proof.sim.world.life import Life
    from kvbaton_proof.sim.world.sim_streams import Stream, StreamRouter

FIRST_S = 25.0
"""Before a D's first event, handoffs and their time-outs included."""
LOSES = 0.5
"""Of connections that break, those that take with them what is on its way."""
LATE, LATE_S, JOINS = 0.1, 0.3, 0.2
LEFT = "the worker left"
"""Of who leaves in peace: he says so in the stream."""


@dataclass(slots=True, eq=False)
class Connection:
    """From a router to one D, for one stream."""

    router: StreamRouter
    stream: Stream
    worker: Life
    errand: Errand
    created: int  # in seconds, as D says it
    closed: bool = False
    begun: bool = False  # its first event has come
    lost: bool = False  # it broke, and nothing more comes of it
    told: int = 0  # tokens that were said
    shown: int = 0  # of them, those whose text was said
    _at: float = 0.0
    _held: bytes = b""  # events that are read with the next ones
    _silent: int = 0  # counts what came: whoever looks for silence compares

    # --- D's end

    def say(self, made: Generation) -> None:
        """D's front end tells what is new, from the answer's first token on."""
        stream, tokens = self.stream, made.answer[self.told :]
        if not self.told:
            tokens = self._repeat(made, tokens)
        self._tell(tokens, self._text(made), None)
        self.router.strike(stream, self, len(made.answer))

    def _repeat(self, made: Generation, tokens: list[int]) -> list[int]:
        """A history is told in one piece or in several."""
        rng = self.router.world.rng
        while len(tokens) > 1 and rng.random() < 0.5:
            count = rng.randint(1, len(tokens) - 1)
            self._tell(tokens[:count], letters(tokens[:count]), None)
            self.shown += count
            tokens = tokens[count:]
        return tokens

    def _text(self, made: Generation) -> str:
        """Half a character is told with its other half, or at the end."""
        upto = made.whole_characters
        text = letters(made.answer[self.shown : upto])
        self.shown = max(self.shown, upto)
        return text

    def end(self, made: Generation, how: str, detail: str) -> None:
        """D is done with the request, or dead."""
        if self.errand.ticket:
            self.router.cluster.router.on_target(self.errand, how)
        if how != "answered":
            if detail == LEFT and self.told and self.stream.life.is_asked:
                self._send(sse.event({"error": {"message": detail, "code": 503}}))
            self.lost = how == "error" and self.router.world.chance(LOSES)
            self._send(None)
            return
        if not self.closed:
            self.stream.client.answered(made.answer, made.finished)
        if not self.told:  # all of it was in its history
            self.say(made)
        self._tell([], letters(made.answer[self.shown :]), made.finished)
        if self.stream.client.wants_usage:
            self._send(sse.event({**self._head(), "choices": [], "usage": self.stream.client.usage(len(made.answer))}))
        self._send(sse.DONE)

    def _tell(self, tokens: Sequence[int], text: str, finish: str | None) -> None:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        if self.stream.life.is_asked or self.stream.client.wants_ids:
            choice["token_ids"] = list(tokens)
            if not self.told:
                choice["prompt_token_ids"] = [1] * self.stream.client.prompt_tokens
        self.told += len(tokens)
        self._send(sse.event({**self._head(), "choices": [choice]}))

    def _head(self) -> dict[str, Any]:
        name = f"cmpl-{self.worker.peer.incarnation & 0xFFFF:x}-{self.stream.number}"
        return {"id": name, "object": "text_completion", "created": self.created, "model": "sim"}

    # --- on the way

    def _send(self, data: bytes | None) -> None:
        """None: it breaks, or ends without an answer."""
        world = self.router.world
        late_s = world.rng.uniform(0, LATE_S if world.chance(LATE) else 0.01)
        self._at = max(self._at, world.now + late_s)
        world.after(self._at - world.now, partial(self._arrive, data))

    def _arrive(self, data: bytes | None) -> None:
        if self.closed or (self.lost and data is not None):
            return
        self._held += data or b""
        if data and data != sse.DONE and self.router.world.chance(JOINS):
            return
        self._silent += 1
        events, self._held = self._held, b""
        if events:
            if not self.begun:
                self.begun, self.stream.asked = True, {self.worker.peer}
            self.router.came(self.stream, events)
        if data is not None:
            self.wait()
        elif not self.closed:
            self.router.broke(self.stream, "died")

    # --- the router's end

    def wait(self) -> None:
        settings, world = self.router.plan, self.router.world
        patience_s = settings.stall_s if self.begun else FIRST_S
        world.after(patience_s, partial(self._look, self._silent))

    def _look(self, silent: int) -> None:
        if self.closed or self._silent != silent:
            return
        if self.begun and self.router.hindrance(self.stream):
            self.wait()  # nobody else would go on: it may be slow
            return
        self.router.broke(self.stream, "stalled")

    def close(self) -> None:
        """Whatever D still says is nobody's, and D is to hear of it."""
        self.closed = True
        for cancel in self.errand.cancels:
            self.router.world.after(self.router.world.rng.uniform(0, 0.05), cancel)


def front(connection: Connection, task: Task, raw: bytes | None, mode: str) -> None:
    """D's own front end: what is over already, and what its engine goes on with."""
    worker, stream = connection.worker, connection.stream
    engine, params = worker.engine, opened(worker, raw)
    assert isinstance(engine, GeneratingEngine)
    told = () if params is None or params.history is None else params.history.tokens
    made: Generation = engine.generation(task, told, lambda token: connection.say(made))
    if len(told) >= task.max_tokens and worker.alive:
        made.finished = "length"
        connection.end(made, "answered", "")
        return
    connection.router.cluster.add(
        stream.number, worker, task.said(told), made.given, "decode" if connection.errand.ticket else "both",
        partial(connection.end, made), mode, connection.errand.ticket, errand=connection.errand, generation=made,
    )  # fmt: skip


def opened(worker: Life, raw: bytes | None) -> TransferParams | None:
    """What a worker reads of its parameters. Only its routers say how an answer begins."""
    params = None if raw is None else TransferParams.parse(msgspec.json.decode(raw))
    if params is not None and params.history is not None:
        config, told = worker.doorway.config, params.history
        check_history(told.proof, told.tokens, worker.peer.worker, config.ticket_keys, config.wall())
    return params
