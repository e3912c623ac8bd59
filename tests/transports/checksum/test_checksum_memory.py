"""The digests are the library's, whichever way they are had."""

from __future__ import annotations

import random
import threading
from array import array

import pytest
import xxhash

from kvbaton.transports.checksum import checksum_memory
from kvbaton.transports.checksum.checksum_memory import Digesters, digests

DATA = memoryview(bytearray(random.Random(1).randbytes(1 << 20)))


@pytest.fixture(params=["native", "fallback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fallback":
        monkeypatch.setattr(checksum_memory, "_native", None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("width", [2, 3])
def test_each_row_has_its_own_digest(width: int) -> None:
    rng = random.Random(2)
    places = [(rng.randrange(1 << 19), size) for size in (0, 1, 3, 8, 16, 100, 200, 241, 5000, 300_000)]
    spans = array("q", [n for at, size in places for n in ((at, size) if width == 2 else (at, 7, size))])
    expected = [xxhash.xxh3_64_intdigest(DATA[at : at + size]).to_bytes(8, "little") for at, size in places]
    assert digests(DATA, spans, width, bytearray(1)) == b"".join(expected)


@pytest.mark.usefixtures("way")
def test_it_stops_when_told() -> None:
    assert digests(DATA, array("q", (0, 8)), 2, bytearray(b"\1")) == b""


@pytest.mark.usefixtures("way")
def test_empty_memory_has_a_digest() -> None:
    assert len(digests(memoryview(bytearray()), array("q", (0, 0)), 2, bytearray(1))) == 8


def test_the_native_way_is_taken_here() -> None:
    """If a new wheel no longer exports it, this says so: digesting would hold other threads up again."""
    assert checksum_memory._native is not None


def test_a_pool_outlives_a_task_that_raises_and_ends_with_its_last() -> None:
    pool, done = Digesters("pool", 1), threading.Event()

    def bad() -> None:
        raise ValueError("on purpose")

    pool.add(bad)
    pool.add(done.set)
    assert done.wait(5)
    assert pool.close(5) and pool.close(5)
    ran = threading.Event()
    pool.add(ran.set)
    assert not ran.is_set() and not any(thread.is_alive() for thread in pool._threads)


def test_a_closing_pool_begins_nothing_that_waits() -> None:
    pool, go, begun, ran = Digesters("pool", 1), threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go.wait(20)

    pool.add(first)
    pool.add(ran.set)
    assert begun.wait(5)
    assert not pool.close(0), "the task under way has not ended"
    go.set()
    assert pool.close(5) and not ran.is_set()


def test_a_task_may_close_its_own_pool() -> None:
    pool, ended = Digesters("pool", 1), threading.Event()

    def last() -> None:
        pool.close(5)
        ended.set()

    pool.add(last)
    assert ended.wait(5)
