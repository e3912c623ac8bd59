"""Thousands of timings: every frame of every mode lost, doubled, delayed; aborts and deaths at every moment.

What must hold in all of them is checked by the harness: one end for everything, in bounded time, nothing leaked,
bytes only where they may land, and what was delivered is this prompt's KV. Where a fault is one that repetition heals,
the handoff must also be delivered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from pair import Frame, Pair
from party import Load

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Departed, SourceEnded
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.settings import Settings

pytestmark = pytest.mark.no_cover
"""Whatever these reach, other tests of the protocol reach by name; measured, they would take thrice the time."""
QUICK = Settings(
    transfer_timeout=6.0, defer_timeout=12.0, claim_timeout=4.0, lease_s=3.0, max_hold_s=40.0, revoke_timeout=2.0
)
Fates = dict[int, str]
LONGEST_S = 60.0
"""By then every handoff has ended, whatever happened."""


def pull(pair: Pair) -> Load:
    load = pair.d.want("r", pair.p.grant())
    pair.run(2)
    return load


def by_chunk(pair: Pair, push: bool = False) -> Load:
    load = pair.d.want("r", pair.router_ticket(), push=push)
    pair.run(0.2)
    p = pair.p  # the life that begins is the one that goes on, if it lives
    source = p.begin()
    for _ in range(3):
        pair.run(0.2)
        p.chunk(source, 1)
    pair.run(0.1)
    p.complete(source)
    pair.run(2)
    return load


def by_layer(pair: Pair) -> Load:
    p = pair.p
    source = p.begin()
    pair.run(0.2)
    load = pair.d.want("r", pair.router_ticket())
    pair.run(0.2)
    p.chunk(source, 2, ready=False)
    for progress in ((GroupProgress(0, 2, 1),), whole([2])):
        p.progress(source, progress)
        pair.run(0.1)
    p.chunk(source, 1)
    p.complete(source)
    pair.run(2)
    return load


def push(pair: Pair) -> Load:
    return by_chunk(pair, push=True)


MODES: list[Callable[[Pair], Load]] = [pull, by_chunk, by_layer, push]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)


def quick(fates: Fates | None = None, **habits: object) -> Pair:
    pair = Pair("p", "d", settings=QUICK)
    for party in (pair.p, pair.d):
        for name, value in habits.items():
            setattr(party.habits, name, value)
    if fates:
        pair.on_post = lambda number, frame: fates.get(number, "")
    return pair


def frames(mode: Callable[[Pair], Load]) -> int:
    """How many frames that mode takes when nothing is wrong."""
    pair = quick()
    load = mode(pair)
    assert load.end is not None and load.end.delivered
    return pair.sent


def ended_in_time(pair: Pair, load: Load) -> None:
    pair.run(LONGEST_S)
    assert load.failed is not None or load.end is not None, "it never ended"
    pair.finish()


@modes
@pytest.mark.parametrize("fate", ["lost", "doubled", "late 0.3", "late 0.7", "late 1.3"])
def test_one_fault_anywhere_is_healed(mode: Callable[[Pair], Load], fate: str) -> None:
    for number in range(1, frames(mode) + 1):
        pair = quick({number: fate})
        load = mode(pair)
        pair.run(4)
        assert load.end is not None and load.end.delivered, f"frame {number} {fate}"
        pair.finish()


@modes
@pytest.mark.parametrize("fate", ["late 2.5", "late 5", "late 10", "late 30"])
def test_a_frame_may_come_long_after_everybody_forgot_it(mode: Callable[[Pair], Load], fate: str) -> None:
    for number in range(1, frames(mode) + 1):
        pair = quick({number: fate})
        load = mode(pair)
        ended_in_time(pair, load)


@modes
def test_two_lost_frames_anywhere_are_healed(mode: Callable[[Pair], Load]) -> None:
    for pairs in combinations(range(1, frames(mode) + 1), 2):
        pair = quick(dict.fromkeys(pairs, "lost"))
        load = mode(pair)
        pair.run(6)
        assert load.end is not None and load.end.delivered, f"frames {pairs}"
        pair.finish()


@modes
@pytest.mark.parametrize("silent", ["p", "d", "both"])
@pytest.mark.parametrize("seconds", [1.5, 5.0, 1000.0])
def test_a_silence_from_any_moment_on_ends_in_time(mode: Callable[[Pair], Load], silent: str, seconds: float) -> None:
    for number in range(1, frames(mode) + 1):
        pair = quick()
        since: list[float] = []

        def cut(count: int, frame: Frame, pair: Pair = pair, number: int = number, since: list[float] = since) -> str:
            if count < number:
                return ""
            since.append(pair.now)
            return "lost" if silent in ("both", frame.source) and pair.now - since[0] < seconds else ""

        pair.on_post = cut
        load = mode(pair)
        ended_in_time(pair, load)


@modes
@pytest.mark.parametrize("late", ["", "late 1.2", "late 5"])
@pytest.mark.parametrize("copy_s", [0.0, 0.35])
@pytest.mark.parametrize("cancels", [True, False])
def test_an_abort_at_any_moment_ends_everything(
    mode: Callable[[Pair], Load], late: str, copy_s: float, cancels: bool
) -> None:
    total = frames(mode)
    for number in range(1, total + 1):
        pair = quick({number: late}, copy_s=copy_s, cancels=cancels)
        pair.on_delivery = lambda count, pair=pair, number=number: pair.d.give_up("r") if count == number else None
        load = mode(pair)
        ended_in_time(pair, load)


@modes
@pytest.mark.parametrize("dies", ["p", "d"])
@pytest.mark.parametrize("told", [False, True])
def test_a_death_at_any_moment_ends_everything(mode: Callable[[Pair], Load], dies: str, told: bool) -> None:
    """With and without word of the registry; what was on the wire reaches the next life."""
    for number in range(1, frames(mode) + 1):
        pair = quick()

        def die(count: int, pair: Pair = pair, number: int = number) -> None:
            if count == number:
                gone = pair.parties[dies].me  # type: ignore[index]
                pair.restart(dies)
                if told:
                    other = pair.parties["d" if dies == "p" else "p"]  # type: ignore[index]
                    other.tell(Departed(gone.worker, gone.incarnation))

        pair.on_delivery = die
        load = mode(pair)
        if dies == "p":
            ended_in_time(pair, load)
        else:  # nobody waits for it any more; P must let go all the same
            pair.finish()


@pytest.mark.parametrize("mode", [by_chunk, push])
@pytest.mark.parametrize("reason", [Reason.SOURCE_PREEMPTED, Reason.SOURCE_ABORTED])
def test_a_preemption_at_any_moment_ends_everything(mode: Callable[[Pair], Load], reason: Reason) -> None:
    for number in range(1, frames(mode) + 1):
        pair = quick(copy_s=0.15)

        def preempt(count: int, pair: Pair = pair, number: int = number) -> None:
            if count == number:
                for source in list(pair.p.sources.values()):
                    pair.p.tell(SourceEnded(source.lease, reason))

        pair.on_delivery = preempt
        load = mode(pair)
        ended_in_time(pair, load)


def any_fates(rng: random.Random) -> Iterator[str]:
    while True:
        roll = rng.random()
        if roll < 0.1:
            yield "lost"
        elif roll < 0.2:
            yield "doubled"
        elif roll < 0.35:
            yield f"late {rng.choice((0.1, 0.6, 1.1, 3.0, 8.0))}"
        else:
            yield ""


@modes
@pytest.mark.parametrize("block", range(4))
def test_any_mixture_of_faults_ends_everything(mode: Callable[[Pair], Load], block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(f"{mode.__name__} {seed}")
        fates = any_fates(rng)
        pair = quick(copy_s=rng.choice((0.0, 0.2, 1.5, 9.0)), cancels=rng.random() < 0.5)
        pair.on_post = lambda number, frame, fates=fates: next(fates)
        abort, quiet = rng.randint(1, 60), rng.random() < 0.5

        def act(count: int, pair: Pair = pair, abort: int = abort, quiet: bool = quiet) -> None:
            if count == abort and not quiet:
                pair.d.give_up("r")

        pair.on_delivery = act
        load = mode(pair)
        ended_in_time(pair, load)
