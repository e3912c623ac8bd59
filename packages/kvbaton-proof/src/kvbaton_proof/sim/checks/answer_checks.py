"""What the clients of streams read: each token once, in order, of one history, and what one engine alone would say.

Laws: nothing of this asks the router. A stream ends with its last event, or with an error whose reason is looked at:
where another D was there that could have gone on, there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.api.params import HistoryWay
from kvbaton_proof.sim.promises import HANG, NEEDLESS, WRONG, Broken
from kvbaton_proof.sim.world.sim_generation import Task, letters, unbroken

if TYPE_CHECKING:
    from kvbaton_proof.sim.cluster import Cluster
    from kvbaton_proof.sim.world.sim_streams import Stream, StreamRouter

_HEAD = ("id", "object", "created", "model")


class Client:
    """One of them, who reads events."""

    def __init__(self, number: int, fields: Mapping[str, Any]) -> None:
        self.number = number
        self.wants_ids = "return_token_ids" in fields
        self.wants_usage = "stream_options" in fields
        self.prompt_tokens = len(fields["prompt"])
        self.text = ""
        self.ids: list[int] = []
        self.why = ""  # it got no further
        self.is_over = False
        self._head: dict[str, Any] = {}
        self._finish = ""
        self._usage: Mapping[str, int] | None = None
        self._right: tuple[list[int], str] | None = None
        self._is_chance = False

    def expects(self, task: Task, history: Sequence[int]) -> None:
        """What a D is asked for. Where chance decided of the first token, any one history is right."""
        if not history:
            self._right = unbroken(task) if task.seed is not None else None
            self._is_chance = task.seed is None
        elif self._is_chance:
            self._right = None  # what the D before would have said is not this one's affair

    def answered(self, tokens: Sequence[int], finish: str) -> None:
        """The D that is read has told its answer to the end."""
        if self._is_chance:
            self._right = list(tokens), finish

    def usage(self, tokens: int) -> dict[str, int]:
        prompt = self.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def end(self, why: str) -> None:
        self.is_over, self.why = True, why

    def read(self, events: bytes) -> None:
        for event in filter(None, events.split(b"\n\n")):
            if self.is_over:
                raise self._wrong(f"it reads {event!r} behind the end")
            if event == b"data: [DONE]":
                self._done()
            else:
                self._read(msgspec.json.decode(event.removeprefix(b"data: ")))

    def _read(self, told: Mapping[str, Any]) -> None:
        head = {name: told[name] for name in _HEAD}
        self._head = self._head or head
        if head != self._head:
            raise self._wrong(f"an event is of {head}, the first was of {self._head}")
        self._usage = told.get("usage", self._usage)
        for choice in told["choices"]:
            if self._finish:
                raise self._wrong(f"it reads {choice} behind the last token")
            if ("token_ids" in choice) is not self.wants_ids:
                raise self._wrong(f"it asked for ids: {self.wants_ids}, and reads {sorted(choice)}")
            self.text += choice["text"]
            self.ids += choice.get("token_ids", ())
            self._finish = choice["finish_reason"] or ""
        self._compare()

    def _compare(self) -> None:
        if self._right is None:
            return
        right, finish = self._right
        if not letters(right).startswith(self.text) or right[: len(self.ids)] != self.ids:
            raise self._wrong(f"it reads {self.text!r} {self.ids}, one engine says {letters(right)!r} {right}")
        if self._finish and (self._finish != finish or self.text != letters(right)):
            raise self._wrong(f"its answer ends by {self._finish} as {self.text!r}, not {finish} {letters(right)!r}")

    def _done(self) -> None:
        self._compare()
        right, finish = self._right or ([], "")
        if not finish or self._finish != finish:
            raise self._wrong(f"the end comes after {self.text!r}, {finish} was to come")
        if self.wants_ids and self.ids != right:
            raise self._wrong(f"it has the ids {self.ids}, not {right}")
        if self.wants_usage and self._usage != self.usage(len(right)):
            raise self._wrong(f"its usage is {self._usage}, of {len(right)} tokens")
        self.is_over = True

    def _wrong(self, what: str) -> Broken:
        return Broken(WRONG, f"stream {self.number}: {what}")


def check_excuse(router: StreamRouter, stream: Stream, why: str, detail: str) -> None:
    """A stream ends early for what can be seen from outside, or for no reason."""
    life, plan, at = stream.life, router.plan, stream.at
    able = [name for name in sorted(router.cluster.lives) if _goes_on(router.cluster, name, stream)]
    excused = {
        "moves_max": life.moves >= plan.moves_max,
        "history_max": at is not None and at.told > plan.history_max,
        "histories_max": router.room.held + (at.told if at is not None else 0) > plan.history_max,
        "worker": at is not None and not at.worker.character.continues,
        "nobody": not able,
    }
    if not excused.get(why, False):
        raise Broken(NEEDLESS, f"stream {stream.number} is not continued: {why} {detail}; there are {able}")


def _goes_on(cluster: Cluster, name: str, stream: Stream) -> bool:
    """Whether a worker is there, was not asked, and can go on with this answer; at its beginning anybody can."""
    each = next(life for life in cluster.lives.values() if life.peer.worker == name)
    fields, way = stream.fields, each.character.continues
    plain = not (fields["temperature"] or "presence_penalty" in fields or "response_format" in fields)
    begun = stream.life.moves or stream.life.history or (stream.at is not None and stream.at.begun)
    able = not begun or way == HistoryWay.OUTPUT or (way == HistoryWay.PROMPT and plain)
    serves = each.character in cluster.plan.decode and name not in cluster.draining
    return serves and able and each.alive and each.peer not in stream.asked


def check_streams(routers: Sequence[StreamRouter]) -> None:
    """Every stream has ended."""
    for router in routers:
        for stream in router.streams:
            if not stream.client.is_over:
                raise Broken(HANG, f"stream {stream.number} never ended; it has {stream.client.text!r}")
        if router.room.held:
            raise Broken(HANG, f"a router still remembers {router.room.held} tokens of streams that are over")
