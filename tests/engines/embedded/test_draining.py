"""Draining, decided on virtual instants; then the loop and the door around it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import pytest

from kvbaton.control.registry import HeldReport
from kvbaton.engines.embedded.http_worker import Finished, RefusedError, Token
from kvbaton.engines.embedded.server_plan import GenerateRequest, ModelCard
from kvbaton.engines.embedded.worker_draining import Drain, DrainingDoor, DrainSettings, DrainStep, Stopping, drain
from tests.waiting import soon

SETTINGS = DrainSettings(drain_s=30.0, quiet_s=1.0, confirm_s=2.0)
NOTHING = HeldReport()
BUSY = HeldReport(requests=1)
REQUEST = GenerateRequest(request_id="r", prompt=(1, 2, 3), max_tokens=4)
QUICK = DrainSettings(drain_s=20.0, quiet_s=0.02, confirm_s=0.02)


def begun(**changes: float) -> Drain:
    """A drain that began at 100, on a worker that had done nothing for long."""
    made = Drain(100.0, SETTINGS)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class TestDecision:
    def test_an_idle_worker_goes_a_quiet_second_after_the_router_knows(self) -> None:
        state = begun(known_at=100.1)
        assert [state.step(NOTHING, now) for now in (100.1, 101.0, 101.1)] == [
            DrainStep.SERVE,
            DrainStep.SERVE,
            DrainStep.LEAVE,
        ]

    def test_a_registry_that_does_not_answer_is_not_waited_for_longer_than_confirm_s(self) -> None:
        state = begun()
        assert state.step(NOTHING, 102.9) is DrainStep.SERVE
        assert state.step(NOTHING, 103.0) is DrainStep.LEAVE

    @pytest.mark.parametrize(
        "held", [HeldReport(requests=1), HeldReport(leases=1), HeldReport(intakes=1), HeldReport(claims=1)]
    )
    def test_whatever_is_held_keeps_it_and_new_requests_are_served_in_the_first_half(self, held: HeldReport) -> None:
        state = begun(known_at=100.0)
        assert state.step(held, 114.9) is DrainStep.SERVE
        assert state.step(held, 115.0) is DrainStep.FINISH
        assert state.step(held, 129.9) is DrainStep.FINISH
        assert state.step(held, 130.0) is DrainStep.LEAVE

    def test_it_stays_a_quiet_second_after_the_last_request_so_that_its_answer_arrives(self) -> None:
        state = begun(known_at=100.0, busy_at=105.0)
        assert state.step(NOTHING, 105.9) is DrainStep.SERVE
        assert state.step(NOTHING, 106.0) is DrainStep.LEAVE

    def test_routers_that_get_no_word_have_time_to_forget(self) -> None:
        state = Drain(100.0, DrainSettings(forget_s=6.0), known_at=100.0)
        assert state.step(NOTHING, 105.9) is DrainStep.SERVE
        assert state.step(NOTHING, 106.0) is DrainStep.LEAVE

    def test_the_operators_bound_goes_before_all_else(self) -> None:
        state = Drain(100.0, DrainSettings(drain_s=0.5, forget_s=6.0))
        assert state.step(BUSY, 100.5) is DrainStep.LEAVE


class Engine:
    """A backend whose requests end when they are told to."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    def models(self) -> Sequence[ModelCard]:
        return (ModelCard("tiny", 64),)

    def ready(self) -> bool:
        return True

    def stats(self) -> Mapping[str, Any]:
        return {"pins": 0}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token | Finished, None]:
        yield Token("a")
        await self.may_end.wait()
        yield Finished("length")


class Listing:
    """A registry that confirms at once, or never."""

    def __init__(self, answers: bool = True) -> None:
        self.drained = 0
        self.told: list[str] = []
        self._answers = answers

    def drain(self) -> None:
        self.drained += 1

    @property
    def is_known_to_drain(self) -> bool:
        return self.drained > 0 and self._answers

    def tell_held(self, held: str) -> None:
        self.told.append(held)


async def consumed(door: DrainingDoor) -> list[Token | Finished]:
    return [event async for event in door.generate(REQUEST)]


def held_by(door: DrainingDoor) -> Callable[[], HeldReport]:
    return lambda: HeldReport(requests=door.inside)


class TestDoor:
    async def test_it_counts_those_inside_and_refuses_when_shut(self) -> None:
        engine = Engine()
        door = DrainingDoor(engine)
        under_way = asyncio.create_task(consumed(door))
        await soon(lambda: door.inside == 1)
        door.is_shut = True
        with pytest.raises(RefusedError, match="draining") as refused:
            await consumed(door)
        assert refused.value.kind == "stopping"
        engine.may_end.set()
        assert await under_way == [Token("a"), Finished("length")]
        assert (door.inside, door.came) == (0, 1)

    async def test_leaving_early_leaves_the_engine_too(self) -> None:
        door = DrainingDoor(Engine())
        events = door.generate(REQUEST)
        await anext(events)
        await events.aclose()
        assert door.inside == 0

    async def test_health_is_refused_from_the_beginning_of_a_drain(self) -> None:
        door = DrainingDoor(Engine())
        assert door.ready() and door.stats() == {"pins": 0, "draining": 0}
        door.is_draining = True
        assert not door.ready() and door.stats() == {"pins": 0, "draining": 1}
        assert [card.id for card in door.models()] == ["tiny"]


class TestLoop:
    async def test_a_request_that_comes_late_is_served_and_waited_for(self) -> None:
        engine, listing = Engine(), Listing()
        door = DrainingDoor(engine)
        shut: list[bool] = []
        settings = DrainSettings(drain_s=60.0, quiet_s=3.5, confirm_s=1.0)
        ending = asyncio.create_task(
            drain(door, listing, held_by(door), settings, asyncio.Event(), lambda: shut.append(True))
        )
        await soon(lambda: listing.drained)
        late = asyncio.create_task(consumed(door))  # well before the quiet is over
        await soon(lambda: "1 request" in listing.told)
        assert not ending.done() and not shut
        engine.may_end.set()
        assert len(await late) == 2
        assert (await ending).nothing and shut == [True] and door.is_shut
        assert listing.drained == 1

    def test_a_registry_that_is_away_does_not_keep_it(self) -> None:
        async def story() -> HeldReport:
            door = DrainingDoor(Engine())
            return await drain(door, Listing(answers=False), held_by(door), QUICK, asyncio.Event())

        assert asyncio.run(story()).nothing

    async def test_a_second_word_ends_it_with_what_is_left(self) -> None:
        stop = Stopping()
        door = DrainingDoor(Engine())
        under_way = asyncio.create_task(consumed(door))
        await soon(lambda: door.inside)
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.begun.wait()
            assert not stop.at_once.is_set()
            ending = asyncio.create_task(drain(door, Listing(), held_by(door), SETTINGS, stop.at_once))
            await soon(lambda: door.is_draining)
            stop.ask_from_thread()
            await asyncio.sleep(0)
            assert not stop.at_once.is_set(), "the registry's order repeats the first word, it is not a second"
            os.kill(os.getpid(), signal.SIGINT)
            assert (await ending).requests == 1
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way

    async def test_a_signal_after_the_registrys_order_does_not_hurry_it(self) -> None:
        stop = Stopping()
        stop.ask_from_thread()
        await stop.begun.wait()
        stop.ask()
        assert not stop.at_once.is_set()
        stop.ask()
        assert stop.at_once.is_set()

    def test_at_the_bound_it_goes_with_what_is_left(self) -> None:
        async def story() -> HeldReport:
            settings = DrainSettings(drain_s=0.05)
            return await drain(
                DrainingDoor(Engine()), Listing(), lambda: HeldReport(leases=2), settings, asyncio.Event()
            )

        assert asyncio.run(story()) == HeldReport(leases=2)

    async def test_a_hangup_stops_at_once(self) -> None:
        stop = Stopping()
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.begun.wait()
            assert stop.at_once.is_set()
