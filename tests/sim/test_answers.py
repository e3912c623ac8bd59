"""Answers that are generated in simulated worlds: what their tokens depend on, and that nothing of it can be forgotten
unseen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbaton.api.params import HistoryWay
from kvbaton.protocol.ids import RequestId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.sim_generation import GeneratingEngine, Task, unbroken
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest
from kvbaton_proof.sim.world.sim_transport import Fabric, TransportFaults
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
