"""Several things at once, of which the first failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.gather import all_of, interleave


async def numbers(count: int, closed: list[int], fail_at: int = -1) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            if number == fail_at:
                raise ApiError(502, "broke")
            yield number
            await asyncio.sleep(0)
        if fail_at == count:
            await asyncio.Event().wait()
    finally:
        closed.append(count)


async def test_joined_streams_give_all_items_in_the_order_of_each() -> None:
    closed: list[int] = []
    items = [item async for item in interleave([numbers(3, closed), numbers(200, closed)])]
    assert [number for which, number in items if which == 1] == list(range(200))
    assert len(items) == 203
    assert sorted(closed) == [3, 200]


async def test_the_first_error_ends_all_joined_streams() -> None:
    closed: list[int] = []
    with pytest.raises(ApiError):
        async for _ in interleave([numbers(5, closed, 5), numbers(7, closed, 2)]):
            pass
    assert sorted(closed) == [5, 7]


async def test_the_first_error_of_several_things_cancels_the_rest() -> None:
    cancelled = asyncio.Event()

    async def wait() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1

    async def fail() -> int:
        raise ApiError(400, "no")

    with pytest.raises(ApiError):
        await all_of([wait(), fail()])
    assert cancelled.is_set()

    async def give(value: int) -> int:
        await asyncio.sleep(0.001 * (3 - value))
        return value

    assert await all_of([give(1), give(2), give(3)]) == [1, 2, 3]
