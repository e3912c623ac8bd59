"""What is made of gaps, numbers, memory and times."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from aiohttp import web

from kvbaton_proof.gpu_test import exact, gpu_load, gpu_machine, timing
from kvbaton_proof.gpu_test.exact import difference
from kvbaton_proof.gpu_test.sizes import CPU
from kvbaton_proof.rig.client import Streamed
from kvbaton_proof.rig.record import Book
from tests.rig.test_client import serving


class TestGaps:
    def test_only_gaps_while_loads_arrive_count(self) -> None:
        stream = Streamed(begun=100.0, times=(1.0, 2.0, 4.0, 4.5, 9.0))
        assert gpu_load.gaps_between([stream], 103.0, 104.2) == [2.0, 0.5]

    def test_a_gap_that_spans_all_of_it_counts(self) -> None:
        stream = Streamed(begun=0.0, times=(1.0, 9.0))
        assert gpu_load.gaps_between([stream], 3.0, 4.0) == [8.0]

    def test_nothing_seen_is_not_good(self) -> None:
        felt = gpu_load.Felt([], 0.1, 0)
        assert felt.ratio == math.inf and felt.cells()[1] == "-"

    def test_one_slow_gap_of_fifty_shows_in_the_ratio(self) -> None:
        felt = gpu_load.Felt([0.01] * 49 + [0.1], 0.1, 0)
        assert felt.ratio > gpu_load.P99_OVER_MEDIAN
        assert gpu_load.Felt([0.01] * 50, 0.1, 0).ratio == pytest.approx(1.0)


class TestExact:
    def test_the_same_to_the_last_digit_or_not(self) -> None:
        one = (("0 a", -1.25), ("1 b", -0.5))
        assert difference(one, one) == 0.0
        assert difference(one, (("0 a", -1.25), ("1 b", -0.5000001))) == pytest.approx(1e-7)
        assert difference(one, (("0 a", -1.25), ("1 c", -0.5))) == math.inf
        assert difference(one, "status 500") == math.inf
        assert difference((), ()) == math.inf, "an answer without tokens proves nothing"

    def test_numbers_are_those_of_every_token(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            likely = [{"b": -2.0, "a": -1.0}, {"c": -0.5}]
            return web.json_response({"choices": [{"logprobs": {"top_logprobs": likely}}]})

        async def main() -> exact.Numbers | str:
            async with serving(answer) as (session, url):
                return await exact.numbers(session, url, [1], 2)

        assert asyncio.run(main()) == (("0 a", -1.0), ("0 b", -2.0), ("1 c", -0.5))


class TestFreed:
    def watch(self, levels: list[int | None], wanted: int, within_s: float = 5.0) -> gpu_machine.Freed | None:
        left = list(levels)
        return asyncio.run(gpu_machine.freed(lambda: left.pop(0) if len(left) > 1 else left[0], 100, wanted, within_s))

    def test_memory_that_comes_back(self) -> None:
        found = self.watch([100, 90, 40], 60)
        assert found is not None and found.fell == 60 and found.after_s is not None

    def test_memory_that_stays_mapped(self) -> None:
        found = self.watch([100, 80], 60, 0.3)
        assert found is not None and found.fell == 20 and found.after_s is None

    def test_where_nobody_says_nothing_is_claimed(self) -> None:
        assert self.watch([None], 60) is None


class TestTiming:
    def watch(self, times: dict[str, float]) -> timing.Stopwatch:
        found = timing.Stopwatch(None, {})  # type: ignore[arg-type]
        for way, seconds in times.items():
            found.keep(way, 4096, seconds)
        return found

    def judged(self, tmp_path: Path, times: dict[str, float]) -> dict[str, bool]:
        page = Book(tmp_path, "standard", "cuda", {}, "").begin("timing")
        timing._judge(self.watch(times), 4096, CPU, True, page, True)
        return {each.name.split(": ")[1]: each.ok for each in page.part.verdicts}

    def test_bounds_hold_or_are_missed(self, tmp_path: Path) -> None:
        good = {timing.FLOOR: 0.010, timing.OUR_D: 0.0129, timing.AGGREGATED: 0.1, timing.STREAM: 0.109}
        assert all(self.judged(tmp_path, good).values())
        bad = self.judged(tmp_path, {**good, timing.OUR_D: 0.0131, timing.STREAM: 0.111})
        assert not bad["D's leg over its floor"] and not bad["streaming TTFT over one engine's"]

    @pytest.mark.parametrize("times", [{}, {timing.FLOOR: 0.01}, {timing.FLOOR: 0.01, timing.OUR_D: math.inf}])
    def test_what_was_not_measured_or_failed_is_missed(self, tmp_path: Path, times: dict[str, float]) -> None:
        found = self.judged(tmp_path, times)
        assert not found["D's leg over its floor"] and not found["streaming TTFT over one engine's"]

    def test_cells_say_what_was_not_run(self) -> None:
        cells = dict(zip(timing.HEAD, timing._cells(self.watch({timing.FLOOR: 0.01}), 4096), strict=True))
        assert cells[timing.FLOOR] == "10.0" and cells[timing.NIXL_D] == "-" and cells["D / floor"] == "-"
