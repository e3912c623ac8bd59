"""Answers that are generated in simulated worlds: what their tokens depend on, that nothing of it can be forgotten
unseen, and that streams are moved (rules 37 to 39)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import pytest

from kvbaton.api import sse
from kvbaton.api.params import HistoryWay
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import RequestId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.ticket import seal_history
from kvbaton.router.flow.continuing import StreamLife
from kvbaton_proof.sim.answer_worlds import answer_world
from kvbaton_proof.sim.checks.answer_checks import Client
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.promises import NEEDLESS, WRONG, Broken
from kvbaton_proof.sim.run import quietly
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.sim_fronts import opened
from kvbaton_proof.sim.world.sim_generation import GeneratingEngine, Task, letters, task_of, unbroken
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest
from kvbaton_proof.sim.world.sim_streams import Stream
from kvbaton_proof.sim.world.sim_transport import Fabric, TransportFaults
from kvbaton_proof.sim.world.touches import TICKET_KEY
from kvbaton_proof.sim.world.world import World

KINDS = {
    "greedy": Task(7, 5, 12, greedy=True),
    "seeded": Task(7, 5, 12, seed=3),
    "penalised": Task(7, 5, 12, seed=3, penalty=True),
    "grammar": Task(7, 5, 12, seed=3, grammar=True),
}
WIDE = Shape(ranks=2)


class Alone:
    """One engine, whose node nobody steps."""

    def __init__(self, way: HistoryWay = HistoryWay.OUTPUT, shape: Shape = WIDE, seed: int = 5) -> None:
        self.world = World(seed)
        character = Character(WorkerId("w"), shape, ("tcp",), Settings(), continues=str(way))
        fabric = Fabric(self.world, TransportFaults())
        self.life = Life(self.world, character, Network(self.world, NetworkFaults()), fabric)
        assert isinstance(self.life.engine, GeneratingEngine)
        self.engine = self.life.engine
        self.ends: list[tuple[str, str]] = []

    def ask(self, task: Task, history: Sequence[int] = ()) -> SimRequest:
        request = SimRequest(
            RequestId("w.r1"), task.said(history), task.tokens, "both", lambda *end: self.ends.append(end)
        )
        request.generation = self.engine.generation(task, history, lambda token: None)
        request.tokens = request.generation.given
        self.engine.add(request)
        self.life.wake_engine()
        return request

    def answer(self, task: Task, history: Sequence[int] = ()) -> list[int]:
        made = self.ask(task, history).generation
        assert made is not None
        self.world.run(self.world.now + 60)
        assert self.ends.pop() == ("answered", made.finished) and not self.engine.pool.total
        return made.answer


@pytest.mark.parametrize("shape", [Shape(), Shape(ranks=2, block_tokens=4, group_layers=(2, 1), blocks_first=True)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_alone_says_what_is_said_unbroken_whatever_its_shape(kind: str, shape: Shape) -> None:
    assert Alone(shape=shape).answer(KINDS[kind]) == unbroken(KINDS[kind])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_continues_by_output_says_the_same_behind_every_token(kind: str) -> None:
    whole, alone = unbroken(KINDS[kind])[0], Alone()
    for said in range(1, len(whole)):
        assert alone.answer(KINDS[kind], whole[:said]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_takes_a_history_for_the_prompt_is_right_for_greedy_alone(kind: str) -> None:
    whole = unbroken(KINDS[kind])[0]
    told = [Alone(HistoryWay.PROMPT).answer(KINDS[kind], whole[:said]) == whole for said in range(1, len(whole))]
    assert all(told) if kind == "greedy" else not any(told)


def test_a_preempted_answer_goes_on_where_it_was() -> None:
    task = KINDS["penalised"]
    alone = Alone()
    request = alone.ask(task)
    while request.generation is not None and len(request.generation.answer) < 4:
        alone.world.run(alone.world.now + 0.01)
    alone.engine._preempt(request)
    assert request.phase is Phase.WAITING and not request.blocks
    alone.world.run(60)
    assert request.generation is not None and request.generation.answer == unbroken(task)[0]


def test_tokens_come_of_the_kv_that_lies_there() -> None:
    """Another prompt's cell in one layer of one rank, and the answer is another one."""
    task = KINDS["greedy"]
    alone = Alone()
    request = alone.ask(task)
    made = request.generation
    assert made is not None
    while len(made.answer) < 4:
        alone.world.run(alone.world.now + 0.01)
    alone.engine.device.write(8, request.blocks, 2, 3, 1, 1)
    alone.world.run(60)
    assert made.answer[:4] == unbroken(task)[0][:4] and made.answer != unbroken(task)[0]


def test_without_a_seed_chance_decides() -> None:
    assert len({tuple(Alone(seed=seed).answer(Task(7, 5, 12, seed=None))) for seed in range(3)}) > 1


FIELDS = {"prompt": [7] * 5, "max_tokens": 12, "temperature": 1.0, "seed": 3, "return_token_ids": True}
HEAD = {"id": "a", "object": "text_completion", "created": 1, "model": "sim"}


def events(tokens: Sequence[int], finish: str | None = None, **changes: object) -> bytes:
    choice = {"index": 0, "text": letters(tokens), "token_ids": list(tokens), "finish_reason": finish}
    return sse.event({**HEAD, "choices": [choice | changes]})


class TestClient:
    """Who reads a stream is not to be deceived."""

    def reader(self) -> Client:
        client = Client(1, FIELDS)
        client.expects(task_of(FIELDS), ())
        return client

    def test_what_one_engine_says_is_right_however_it_is_cut(self) -> None:
        client, (right, finish) = self.reader(), unbroken(KINDS["seeded"])
        for data in (events(right[:3]), events([]), events(right[3:]), events([], finish), sse.DONE):
            assert not client.is_over
            client.read(data)
        assert client.is_over and client.text == letters(right)

    @pytest.mark.parametrize("wrong", ["twice", "lost", "order", "behind", "head", "early", "unasked", "reason"])
    def test_anything_else_is_wrong(self, wrong: str) -> None:
        right, finish = unbroken(KINDS["seeded"])
        said = {
            "twice": events(right[:4]) + events(right[3:]),
            "lost": events(right[:4]) + events(right[5:]),
            "order": events([right[1], right[0], *right[2:]]),
            "behind": events(right) + events([], finish) + sse.DONE + events([]),
            "head": events(right[:4]) + sse.event({**HEAD, "id": "b", "choices": []}),
            "early": events(right[:4]) + sse.DONE,
            "unasked": events(right[:4]).replace(b'"token_ids"', b'"ids"'),
            "reason": events(right) + events([], "stop" if finish == "length" else "length"),
        }
        with pytest.raises(Broken) as caught:
            self.reader().read(said[wrong])
        assert caught.value.promise == WRONG


@pytest.fixture(scope="module")
def worlds() -> list[Cluster]:
    with quietly():
        return [world for seed in range(60) if (world := answer_world(seed)) is not None]


def streams_of(worlds: Sequence[Cluster]) -> list[Stream]:
    return [stream for world in worlds for router in world.streams for stream in router.streams]


def test_streams_are_moved_for_every_reason_and_finish(worlds: list[Cluster]) -> None:
    seen = Counter[str]()
    for world in worlds:
        seen.update(world.world.faults)
    assert all(seen[f"streams_{why}"] for why in ("died", "stalled", "draining", "whole", "left")), seen
    moved = [stream for stream in streams_of(worlds) if stream.life.moves]
    assert sum(not stream.client.why for stream in moved) > len(moved) / 2 > 10
    kinds = {
        (bool(s.fields["temperature"]), "presence_penalty" in s.fields, "response_format" in s.fields) for s in moved
    }
    assert len(kinds) >= 6


def test_the_same_seed_gives_the_same_streams() -> None:
    with quietly():
        hashes = {answer_world(2).world.trace_hash() for _ in range(2)}
    assert len(hashes) == 1


def test_where_nothing_is_ever_continued_worlds_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamLife, "takes", lambda self, worker: False)
    with quietly(), pytest.raises(Broken) as caught:
        for seed in range(40):
            answer_world(seed)
    assert caught.value.promise == NEEDLESS and "is not continued" in caught.value.what


def test_a_history_that_no_router_of_the_cluster_signed_is_taken_by_nobody() -> None:
    life, tokens = Alone().life, (3, 4)
    for target, key, refused in (("w", TICKET_KEY, False), ("v", TICKET_KEY, True), ("w", b"?" * 32, True)):
        proof = seal_history(tokens, WorkerId(target), 5.0, key)
        raw = msgspec.json.encode({"do_remote_decode": True, "history": {"tokens": tokens, "proof": proof}})
        with pytest.raises(ProtocolError) if refused else nullcontext():
            assert opened(life, raw) is not None


def test_clients_of_every_second_world_get_ps_first_token(worlds: list[Cluster]) -> None:
    told = [world.world.faults["streams_first_token"] for world in worlds]
    assert sum(told) > 30, told
    moved = [
        s for world in worlds if world.world.faults["streams_first_token"] for r in world.streams for s in r.streams
    ]
    assert any(stream.life.moves and not stream.client.why for stream in moved)
