"""Streams in a simulated world: clients, and routers that own their streams.

The router's rules are the production's: what was delivered (`Delivered`), who goes on and what he is told
(`StreamLife`), whose word a history is (`TicketMinter`, `check_history`). Here is what they leave to asyncio: who is
asked next, when a connection breaks, when D is silent for too long.

Law: faults come at the tokens of streams, whatever they are at just then; all chance is the world's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import HistoryWay, Mode, source_params, target_params
from kvbaton.protocol.ids import PeerId, TransferId, WorkerId
from kvbaton.router.flow.continuing import StreamLife
from kvbaton.router.flow.delivered import Delivered
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.flow.first_token import FirstTokenRule
from kvbaton.router.flow.said_text import HistoryRoom, SeamError
from kvbaton.router.policy import Pair
from kvbaton.router.workers.directory import ListedEngine
from kvbaton_proof.sim.checks.answer_checks import Client, check_excuse
from kvbaton_proof.sim.world.sim_fronts import Connection, front, opened
from kvbaton_proof.sim.world.sim_generation import GeneratingEngine, Generation, drawn_fields, letters, task_of
from kvbaton_proof.sim.world.sim_router import Errand
from kvbaton_proof.sim.world.touches import TICKET_KEY

if TYPE_CHECKING:
    from kvbaton_proof.sim.cluster import Cluster
    from kvbaton_proof.sim.world.life import Life

TICKET_S = 30.0
CONTEXT_TOKENS = 100
ALONE, AT_ONCE = 0.15, 0.4
"""Of asks: without a P; with both engines asked at once."""
FAULTS = ("kill", "kill", "kill", "stall", "stall", "drain", "kill both", "evict")
_encode = msgspec.json.Encoder().encode


class StreamPlan(msgspec.Struct, frozen=True):
    """How the routers of a world are set, and what its clients ask for."""

    streams: int
    until_s: float
    routers: int = 2
    stall_s: float = 1.0
    moves_max: int = 8
    history_max: int = 1000
    faults: float = 0.7  # share of streams at one of whose tokens something happens
    leaves: float = 0.05  # share of clients that go
    prompts: int = 6
    first_token: bool = False  # it comes from P


@dataclass(slots=True, eq=False)
class Stream:
    """One client's, wherever it is."""

    number: int
    fields: dict[str, Any]
    life: StreamLife
    client: Client
    fault: tuple[int, str]  # when D is to say so many tokens, and what then befalls it; "" when nothing does
    at: Connection | None = None
    asked: set[PeerId] = field(default_factory=set)  # D's that were asked for this part, and the one that was left

    @property
    def delivered(self) -> Delivered:
        return self.life.delivered


class StreamRouter:
    """One router: its own tickets, its own room for histories, and streams that nobody else knows of."""

    def __init__(self, cluster: Cluster, plan: StreamPlan) -> None:
        self.cluster, self.plan = cluster, plan
        self.world = world = cluster.world
        self.minter = TicketMinter(
            TICKET_KEY,
            TICKET_S,
            wall=lambda: world.now,
            new_id=lambda: TransferId(f"{world.rng.getrandbits(128):032x}"),
        )
        self.room = HistoryRoom(plan.history_max, plan.history_max * 4)
        self.streams: list[Stream] = []

    def open(self, number: int) -> None:
        """A client asks."""
        rng = self.world.rng
        fields = drawn_fields(rng, self.plan.prompts)
        rule = FirstTokenRule(BodyKind.COMPLETION, fields) if self.plan.first_token else None
        life = StreamLife(fields, self.room, rule)
        if life._seed is not None:  # the world's chance, in place of the system's
            life._seed = rng.getrandbits(63)
        fault = (rng.randint(0, fields["max_tokens"]), rng.choice(FAULTS) if rng.random() < self.plan.faults else "")
        stream = Stream(number, fields, life, Client(number, fields), fault)
        self.streams.append(stream)
        self.world.tell(f"stream {number} {sorted(fields.items())} {fault}")
        self._ask(stream)
        if self.world.chance(self.plan.leaves):
            self.world.after(rng.uniform(0, 2.0), partial(self._leave, stream))

    def _leave(self, stream: Stream) -> None:
        """The client goes."""
        if not stream.client.is_over:
            self.world.faults["streams_left"] += 1
            self._end(stream, "left")

    # --- who is asked

    def listed(self, name: WorkerId) -> ListedEngine:
        life = self.cluster.lives[name]
        way = HistoryWay(life.character.continues or "")
        url, born = f"http://{name}", life.peer.incarnation
        return ListedEngine(name, "both", url, born, continues=way, context_tokens=CONTEXT_TOKENS)

    def others(self, stream: Stream, *, behind: bool) -> list[Life]:
        """D's that could be asked now."""
        cluster = self.cluster
        names = [each.name for each in cluster.plan.decode if each.name not in cluster.draining]
        able = [name for name in names if not behind or stream.life.takes(self.listed(name))]
        lives = [cluster.lives[name] for name in able]
        return [life for life in lives if life.peer not in stream.asked]

    def hindrance(self, stream: Stream) -> str:
        """Why it cannot move, as the production's `OwnedStream` has it."""
        if not stream.life.is_asked:
            return "worker"
        if stream.delivered.stuck:
            return stream.delivered.stuck
        if stream.life.moves >= self.plan.moves_max:
            return "moves_max"
        return "" if self.others(stream, behind=True) else "nobody"

    def _ask(self, stream: Stream) -> None:
        """A pair, or a D alone."""
        rng, life = self.world.rng, stream.life
        able = self.others(stream, behind=bool(life.moves or life.history))
        if not able:
            self._end(stream, "nobody")
            return
        target = rng.choice(able)
        stream.asked.add(target.peer)
        task = task_of(stream.fields)
        sources = [name for name in self._sources() if name != target.peer.worker]
        if not sources or rng.random() < ALONE:
            self._ask_target(stream, target, "pull", Errand(WorkerId(""), ""))
            return
        source = self.cluster.lives[rng.choice(sources)]
        mode = rng.choice(("stream", "push")) if rng.random() < AT_ONCE else "pull"
        pair = Pair(self.listed(source.peer.worker), self.listed(target.peer.worker))
        ticket = self.minter.mint(pair) if mode != "pull" else ""
        asks = _encode(source_params(Mode(mode), ticket) if ticket else {"do_remote_decode": True})
        params = opened(source, life.told(asks, pair.prefill, self.minter) or asks)
        errand = Errand(source.peer.worker, ticket)
        given = params.history.tokens[:-1] if params is not None and params.history is not None else ()
        made = self._first_of(stream, source, pair, mode)
        prompt = partial(
            self.cluster.add, stream.number, source, task.said(given), task.tokens + len(given), "prefill",
            mode=mode, ticket=ticket, generation=made,
        )  # fmt: skip
        if mode == "pull":
            prompt(then=partial(self._prefilled, stream, pair, source, target, made))
            return
        prompt(then=partial(self._computed, stream, pair, made, errand), errand=errand)
        self.world.after(rng.uniform(0, 0.01), partial(self._ask_target, stream, target, mode, errand))

    def _sources(self) -> list[WorkerId]:
        return [each.name for each in self.cluster.plan.prefill if each.name not in self.cluster.draining]

    def _first_of(self, stream: Stream, source: Life, pair: Pair, mode: str) -> Generation | None:
        """What P samples, where the client may have it."""
        life = stream.life
        if not life.wants_first(pair.prefill, pair.decode, Mode(mode)):
            return None
        task = task_of({**stream.fields, **msgspec.json.decode(b"{%b}" % life.sampled()[1:])})
        stream.client.expects(task if life.seed is None else msgspec.structs.replace(task, seed=life.seed), ())
        assert isinstance(source.engine, GeneratingEngine)
        return source.engine.generation(msgspec.structs.replace(task, max_tokens=1), (), lambda token: None)

    def _ends_at_first(self, stream: Stream, pair: Pair, made: Generation | None) -> bool:
        """The client reads P's token, if it may; whether the answer ends there."""
        if made is None or not made.finished:
            return False
        choice = {"index": 0, "text": letters(made.answer), "token_ids": made.answer}  # an end is told whole
        choice |= {"finish_reason": made.finished, "prompt_token_ids": [1] * stream.client.prompt_tokens}
        head = {"id": f"cmpl-p-{stream.number}", "created": int(self.world.now), "model": "sim"}
        answer = {**head, "choices": [choice], "usage": stream.client.usage(len(made.answer))}
        assert stream.life.first is not None
        said = stream.life.first.told(_encode(answer), pair.prefill, pair.decode)
        if said is None:
            return False
        self.world.faults["streams_first_token"] += 1
        self.world.tell(f"stream {stream.number} begins with {pair.prefill.name}'s {made.answer} {made.finished}")
        self._show(stream, stream.life.say_first(said))
        return said.is_last

    def _computed(self, stream: Stream, pair: Pair, made: Generation | None, errand: Errand, how: str, _: str) -> None:
        """P is done, where D was asked with it."""
        self.cluster.router.on_source(errand, how)
        at = stream.at
        if stream.client.is_over or at is None or at.errand is not errand or at.begun or at.closed:
            return  # D was first, or is not asked any more
        if how == "prefilled" and self._ends_at_first(stream, pair, made):
            self.cluster.router.drop(errand)

    def _prefilled(
        self, stream: Stream, pair: Pair, source: Life, target: Life, made: Generation | None, how: str, ticket: str
    ) -> None:
        """P has the prompt, or D computes it."""
        if stream.client.is_over:
            return
        errand = Errand(source.peer.worker, ticket) if how == "prefilled" else Errand(WorkerId(""), "")
        if how == "prefilled" and self._ends_at_first(stream, pair, made):
            self.cluster.router.drop(errand)
            return
        self.world.after(self.world.rng.uniform(0, 0.02), partial(self._ask_target, stream, target, "pull", errand))

    def _ask_target(self, stream: Stream, target: Life, mode: str, errand: Errand) -> None:
        if stream.client.is_over:
            return
        life, listed = stream.life, self.listed(target.peer.worker)
        body = life.asked(_encode(stream.fields), listed)
        params = _encode(target_params(Mode(mode), errand.ticket)) if errand.ticket else None
        params = life.told(params, listed, self.minter)
        target = self.cluster.lives[target.peer.worker]
        stream.at = connection = Connection(self, stream, target, errand, int(self.world.now))
        task = task_of(msgspec.json.decode(body))
        stream.client.expects(task, life.history)
        front(connection, task, params, mode)
        connection.wait()
        self.strike(stream, connection, 0)

    # --- what comes

    def came(self, stream: Stream, data: bytes) -> None:
        """Bytes of whole events."""
        if not stream.life.is_asked:
            self._show(stream, data)
            return
        try:
            shown = stream.delivered.told(data)
        except SeamError as error:
            self._end(stream, "differs", str(error))
            return
        self._show(stream, shown)
        if stream.delivered.broken_off and not stream.client.is_over:
            self.broke(stream, "died")

    def _show(self, stream: Stream, shown: bytes) -> None:
        stream.client.read(shown)
        if stream.client.is_over:
            self._end(stream, "")
        elif self._drains(stream) and not self.hindrance(stream):
            self.broke(stream, "draining")

    def _drains(self, stream: Stream) -> bool:
        at = stream.at
        return at is not None and not at.closed and at.worker.peer.worker in self.cluster.draining

    def broke(self, stream: Stream, why: str) -> None:
        """D is left."""
        assert stream.at is not None
        connection, life = stream.at, stream.life
        hindrance, rest = self.hindrance(stream), stream.delivered.rest() if life.is_asked else b""
        connection.close()
        if rest:
            self._show(stream, rest)
            return
        if not connection.begun:  # another pair, as for any request
            self._ask(stream)
            return
        self.world.faults[f"streams_{why}"] += 1
        if hindrance:
            self._end(stream, hindrance)
            return
        left = connection.worker.peer
        life.moves += 1
        life.history = stream.delivered.history
        stream.delivered.moved()
        stream.asked = {left}
        self.world.faults["streams_moved"] += 1
        self.world.tell(f"stream {stream.number} moves from {left} behind {life.history}")
        self._ask(stream)

    def _end(self, stream: Stream, why: str, detail: str = "") -> None:
        """Of the stream; `why` it got no further, if it did not."""
        if stream.at is not None:
            stream.at.close()
        self.world.tell(f"stream {stream.number} ends {why} {detail}")
        self.world.faults[f"streams_{why or 'whole'}"] += 1
        stream.client.end(why)
        if why not in ("", "left"):
            check_excuse(self, stream, why, detail)
        stream.delivered.close()

    # --- what befalls it

    def strike(self, stream: Stream, connection: Connection, said: int) -> None:
        """What was drawn for a token of this stream, once D has said it."""
        at, what = stream.fault
        cluster, life = self.cluster, connection.worker
        if not what or said < at or cluster.healed or connection.closed:
            return
        stream.fault = 0, ""
        self.world.after(self.world.rng.choice((0.0, 0.005, 0.05)), partial(self._strike, what, life))
        if what == "kill both":
            other = cluster.lives[self.world.rng.choice(self._sources() or [life.peer.worker])]
            self.world.after(0.01, partial(self._strike, "kill", other))

    def _strike(self, what: str, life: Life) -> None:
        faults = self.cluster.worker_faults
        if self.cluster.healed or not life.alive or life.paused:
            return
        if what in ("kill", "kill both"):
            faults.fall(life)
        elif what == "stall":
            faults.stop(life)
        elif what == "drain":
            faults.drain(life)
        else:
            life.engine.preempt_all()
            life.wake_engine()


def open_streams(cluster: Cluster, plan: StreamPlan) -> list[StreamRouter]:
    """Several routers, and their clients in time."""
    routers = [StreamRouter(cluster, plan) for _ in range(plan.routers)]
    for number in range(plan.streams):
        at_s = cluster.world.rng.uniform(0, plan.until_s)
        cluster.world.after(at_s, partial(routers[number % plan.routers].open, number))
    return routers
