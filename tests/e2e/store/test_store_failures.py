"""Every way in which a put can fail under a running engine: the answer is right, and no pin is left (seed 003, more).

The first two are the seed's: an exception out of the existence check, and one out of the put, kept blocks for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engines.embedded import store_access
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.store.interface import Backend
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.testing.store_harness import FaultyBackend
from tests.e2e.store.storehouse import House, house, key_directory
from tests.mooncake_store.mooncake_processes import Master, Owner

PROMPT = "What a prompt this is, of so many words that it takes a few blocks. " * 2
OTHER = "Quite another one, to see that the engine is alive and has its blocks back. " * 2
ANYWHERE = "tcp://127.0.0.1:1"  # never dialled here
Run = Callable[[House, FaultyBackend], Coroutine[Any, Any, None]]


class Everything(dict[str, str]):
    """Has an error for every key."""

    def __contains__(self, _: object) -> bool:
        return True

    def get(self, *_: object) -> str:  # type: ignore[override]
        return "no space"


@pytest.fixture(scope="module")
def right() -> list[str]:
    return reference_answers([PROMPT, OTHER], 12)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend, test: Run, **options: object) -> None:
    """Have `test` use one engine on `backend`; afterwards the engine has no pin left, before and after its stop."""
    faulty = FaultyBackend(backend)
    monkeypatch.setattr(store_access, "opener", lambda *_, **__: (lambda: faulty, True))

    async def scenario() -> None:
        async with house(key_directory(tmp_path), ANYWHERE, "p0", **options) as one:
            await test(one, faulty)
            faulty.go_on()

    asyncio.run(scenario())


async def served(one: House, prompt: str, right: str) -> None:
    assert await one.answer("p0", prompt) == right


@pytest.mark.parametrize("what", ["exists", "put"])
def test_an_exception_of_the_back_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[str], what: str
) -> None:
    async def test(one: House, faulty: FaultyBackend) -> None:
        faulty.raises[what] = RuntimeError("mooncake down")
        await served(one, PROMPT, right[0])
        await one.at_rest()
        assert one.stat("p0", "store_puts_total") == 0
        assert one.stat("p0", "store_errors_total") >= 1
        await served(one, OTHER, right[1])
        await one.at_rest()

    run(tmp_path, monkeypatch, MemoryBackend(1 << 24), test)


def test_errors_of_single_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[str]) -> None:
    async def test(one: House, faulty: FaultyBackend) -> None:
        faulty.refuses = Everything()
        await served(one, PROMPT, right[0])
        await one.at_rest()
        assert faulty.calls["put"] == 1
        assert (one.stat("p0", "store_puts_total"), one.stat("p0", "store_errors_total")) == (0, 1)

    run(tmp_path, monkeypatch, MemoryBackend(1 << 24), test)


@pytest.mark.parametrize("what", ["exists", "put"])
def test_a_put_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[str], what: str
) -> None:
    async def test(one: House, faulty: FaultyBackend) -> None:
        faulty.hangs.add(what)
        await served(one, PROMPT, right[0])
        await one.at_rest()
        assert faulty.inside >= 1, "it hangs still"
        assert one.stat("p0", "store_errors_total") >= 1
        await served(one, OTHER, right[1])
        await one.at_rest()

    run(tmp_path, monkeypatch, MemoryBackend(1 << 24), test, transfer_timeout=3.0, store_timeout=1.5)


@pytest.mark.parametrize("what", ["exists", "put"])
def test_a_shutdown_while_putting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[str], what: str) -> None:
    async def test(one: House, faulty: FaultyBackend) -> None:
        if what == "put":
            faulty.hangs.add("put")
        await served(one, PROMPT, right[0])
        if what == "exists":
            await one.at_rest()
            faulty.hangs.add("exists")
            asked = asyncio.create_task(one.answer("p0", OTHER))
            await one.until(lambda: faulty.inside == 1)
            await one.stop("p0")
            await asyncio.gather(asked, return_exceptions=True)
            return
        await one.until(lambda: faulty.inside == 1)
        assert one["p0"].store is not None
        assert one["p0"].node.doorway.put_blocks == len(PROMPT) // 16
        await one.stop("p0")

    run(tmp_path, monkeypatch, MemoryBackend(1 << 24), test)


# --- on a real Mooncake master, with the only memory in a process of its own


@pytest.fixture
def master() -> Iterator[Master]:
    master = Master(client_ttl_s=60)
    owner = Owner(master)
    yield master
    owner.kill()
    master.kill()


@pytest.mark.library("mooncake")
def test_a_master_killed_before_the_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[str], master: Master
) -> None:
    """During a call, and who lent the memory: tests/mooncake_store."""

    async def test(one: House, faulty: FaultyBackend) -> None:
        await served(one, PROMPT, right[0])
        await one.until(lambda: one.stat("p0", "store_puts_total") == 1)
        master.child.kill()
        master.child.wait(20)
        await served(one, OTHER, right[1])
        await one.at_rest()
        assert one.stat("p0", "store_puts_total") == 1
        assert one.stat("p0", "store_errors_total") >= 1

    run(tmp_path, monkeypatch, MooncakeBackend(MooncakeSettings(master=master.address)), test)
