"""Kill -9 and SIGSTOP of P and of D under load, restart on the same ports: one line of docs/faults.md each.

Each test prints its line. The load goes through kvbaton's router in all three modes at once; `SECONDS_STOPPED` is 60.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.duo import MODES, Duo, prompt_of, reference_of, running_duo, same
from tests.vllm.engines import Answer, Engine, EngineError, free_port, start_engine, until

pytestmark = pytest.mark.timeout(900)

SECONDS_STOPPED = 60.0
CLIENTS = 12
PROMPTS = [prompt_of(150 + 23 * number, f"faults {number}") for number in range(40)]


class Load:
    """Clients that never stop asking, and what they were told."""

    def __init__(self, duo: Duo, expected: list[Answer]) -> None:
        self.told: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._duo = duo
        self._expected = expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(240)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def settled(self, count: int) -> Load:
        """Until so many more were answered rightly."""
        goal = self.told["right"] + count
        until(lambda: self.told["right"] >= goal, 120, f"{count} right answers; so far {dict(self.told)}")
        return self

    def _client(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            index, mode = turn % len(PROMPTS), MODES[turn % 3]
            begun = time.monotonic()
            try:
                answer = self._duo.ask(PROMPTS[index], mode)
                self.told["right" if same(answer, self._expected[index]) else "wrong"] += 1
            except EngineError as error:
                self.told[str(error).partition("status ")[2][:3] or "error"] += 1
                self._stop.wait(0.2)
            except OSError as error:
                self.told[type(error).__name__] += 1
                self._stop.wait(0.2)
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            turn += CLIENTS + 1

    def line(self, name: str, more: str = "") -> str:
        errors = {told: count for told, count in self.told.items() if told not in ("right", "wrong")}
        return (
            f"FAULT | {name} | {self.told['right']} right, {self.told['wrong']} wrong, errors {errors or 'none'} | "
            f"slowest answer {self.slowest_s:.1f} s | {more}"
        )


@pytest.fixture(scope="module")
def setup(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Duo, list[Answer]]]:
    directory, model = tmp_path_factory.mktemp("faults"), tiny("llama")
    alone = start_engine(vllm_python, model, free_port(), log=directory / "alone.log")
    expected: list[Answer] = []

    def learn() -> None:
        expected.extend(reference_of(alone.wait_ready(), PROMPTS))
        alone.stop()

    off = ("--no-enable-prefix-caching",)  # so that every request really moves its KV
    try:
        with running_duo(
            vllm_python, model, directory, p_args=off, d_args=off, before_waiting=learn,
            p_extra={"control_port": free_port()}, d_extra={"control_port": free_port()},
        ) as duo:  # fmt: skip
            yield duo, expected
    finally:
        alone.stop()


@pytest.fixture
def load(setup: tuple[Duo, list[Answer]]) -> Iterator[Load]:
    """Before and after the fault everything is well, and nothing is left in either engine."""
    duo, expected = setup
    duo.come_to_rest()
    with Load(duo, expected) as load:
        yield load.settled(60)
        load.settled(60)
    duo.come_to_rest(60)
    assert load.told["wrong"] == 0


@pytest.fixture
def duo(setup: tuple[Duo, list[Answer]]) -> Duo:
    return setup[0]


@pytest.mark.parametrize("who", ["p", "d"])
def test_stopped_for_a_minute(who: str, duo: Duo, load: Load) -> None:
    engine: Engine = getattr(duo, who)
    engine.sigstop()
    time.sleep(SECONDS_STOPPED)
    engine.sigcont()
    begun = time.monotonic()
    load.settled(20)
    print(
        load.line(f"SIGSTOP {SECONDS_STOPPED:.0f} s of {who.upper()}", f"well {time.monotonic() - begun:.1f} s after")
    )


@pytest.mark.parametrize("who", ["p", "d"])
def test_killed_and_started_again_on_the_same_ports(who: str, duo: Duo, load: Load) -> None:
    other: Engine = duo.d if who == "p" else duo.p
    engine: Engine = getattr(duo, who)
    engine.kill9()
    begun = time.monotonic()
    until(lambda: _free_of_pins(other), 60, "the survivor holds nothing for the dead")
    freed_s = time.monotonic() - begun
    setattr(duo, who, engine.start_again())
    getattr(duo, who).wait_ready()
    ready = time.monotonic()
    load.settled(20)
    more = (
        f"survivor free of pins after {freed_s:.1f} s, well {time.monotonic() - ready:.1f} s after the new one serves"
    )
    print(load.line(f"kill -9 of {who.upper()}, restart on its ports", more))


def _free_of_pins(engine: Engine) -> bool:
    found = engine.metrics()
    return found.get("kvbaton_leases_held", 0) == 0 and found.get("kvbaton_intakes", 0) == 0
