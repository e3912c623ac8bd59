"""What is made of answers, streams, memory and logs; against small servers in this process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvbaton_proof.gpu_test import exact, gpu_client, gpu_load, gpu_machine, servers, timing
from kvbaton_proof.gpu_test.exact import difference
from kvbaton_proof.gpu_test.gpu_answers import runner_of
from kvbaton_proof.gpu_test.gpu_client import Streamed, streamed
from kvbaton_proof.gpu_test.gpu_record import Book
from kvbaton_proof.gpu_test.gpu_watching import Order, watching
from kvbaton_proof.gpu_test.servers import Site, Spec, anywhere, last_words, made
from kvbaton_proof.gpu_test.sizes import CPU, STANDARD


@asynccontextmanager
async def serving(handler: web.Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def answer_in_chunks(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(body["max_tokens"]):
        chunk = json.dumps({"choices": [{"text": str(number)}]})
        await response.write(f"data: {chunk}\n\n".encode())
    await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
    return response


class TestStreamed:
    def test_every_chunk_with_tokens_has_its_moment(self) -> None:
        async def main() -> Streamed:
            async with serving(answer_in_chunks) as (session, url):
                return await streamed(session, url, [1, 2], tokens=5)

        found = asyncio.run(main())
        assert len(found.times) == 5 and not found.error
        assert list(found.times) == sorted(found.times) and found.first_s == found.times[0]
        assert found.moments[0] == found.begun + found.times[0]

    def test_an_error_is_infinitely_slow(self) -> None:
        async def refuse(request: web.Request) -> web.Response:
            return web.Response(status=503, text="not now")

        async def main() -> Streamed:
            async with serving(refuse) as (session, url):
                return await streamed(session, url, [1], tokens=1)

        found = asyncio.run(main())
        assert found.first_s == math.inf and found.error == "status 503: not now"

    def test_an_error_within_an_answer_is_one(self) -> None:
        async def fail(request: web.Request) -> web.Response:
            return web.Response(body=b'data: {"error": {"message": "load failed"}}\n\n')

        async def main() -> Streamed:
            async with serving(fail) as (session, url):
                return await streamed(session, url, [1], tokens=1)

        assert "load failed" in asyncio.run(main()).error

    def test_an_answer_that_never_comes_is_late(self) -> None:
        async def hang(request: web.Request) -> web.Response:
            await asyncio.sleep(5)
            return web.Response()

        async def main() -> Streamed:
            async with serving(hang) as (session, url):
                return await streamed(session, url, [1], tokens=1, deadline_s=0.05)

        assert asyncio.run(main()).error == "late"

    def test_streams_are_watched_from_another_process(self) -> None:
        async def main() -> list[Streamed]:
            async with serving(answer_in_chunks) as (_, url), watching(Order(url, [[1], [2]], 6)) as watch:
                return await watch.ended()

        assert [len(each.times) for each in asyncio.run(main())] == [6, 6]


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


class TestFigures:
    def test_ends_and_deliveries_of_either_connector(self) -> None:
        ours = {'kvbaton_ends_total{end="delivered",engine="0"}': 3.0, 'kvbaton_ends_total{end="stale"}': 1.0}
        assert gpu_client.delivered(ours) == 3 and gpu_client.ends(ours) == {"delivered": 3, "stale": 1}
        assert gpu_client.delivered({gpu_client.NIXL_READS: 5.0}) == 5
        assert gpu_client.delivered(None) == 0

    def test_what_is_not_told_is_not_at_rest(self) -> None:
        assert gpu_client.held(None) is None
        assert gpu_client.held({"kvbaton_pinned_blocks": 1.0}) is True
        assert gpu_client.held({"vllm:kv_cache_usage_perc": 0.0}) is False


class TestServers:
    def site(self, tmp_path: Path, device: str = "cuda") -> Site:
        site = Site("cpu" if device == "cpu" else "cuda", "/usr/bin/python3", tmp_path, tmp_path / "logs")
        site.models |= {kind: tmp_path / kind for kind in ("small", "8b", "llama")}
        return site

    def test_a_pair_differs_from_one_alone_in_its_connector_and_nothing_else(self, tmp_path: Path) -> None:
        spec = Spec(name="a", model="small")
        alone = made(self.site(tmp_path), spec).alone.command
        pair = made(self.site(tmp_path), Spec(name="b", model="small", connector="kvbaton"))

        def plain(command: list[str]) -> list[str]:
            return command[: command.index("--port")] + command[command.index("--port") + 2 :]

        for engine in (pair.p, pair.d):
            command = list(engine.command)
            at = command.index("--kv-transfer-config")
            assert plain(command[:at] + command[at + 2 :]) == plain(list(alone))

    def test_roles_keys_and_the_fault_are_where_they_belong(self, tmp_path: Path) -> None:
        pair = made(self.site(tmp_path), Spec(name="b", model="small", connector="kvbaton", has_control=True))
        p, d = (json.loads(each.command[-1]) for each in (pair.p, pair.d))
        assert (p["kv_role"], d["kv_role"]) == ("kv_producer", "kv_consumer")
        assert p["kv_connector_extra_config"]["keys"] == d["kv_connector_extra_config"]["keys"]
        assert "fault_misplace_while" not in p["kv_connector_extra_config"]
        assert d["kv_connector_extra_config"]["fault_misplace_while"] == str(pair.flag)
        assert "registry" in p["kv_connector_extra_config"] and "router" in pair.engines

    def test_what_is_timed_has_no_fault_built_in(self, tmp_path: Path) -> None:
        for spec in timing.specs(STANDARD):
            for engine in made(self.site(tmp_path), spec).engines.values():
                assert "fault_" not in " ".join(engine.command)

    def test_the_other_runner_is_asked_for_by_its_variable(self, tmp_path: Path) -> None:
        for variant, wanted in ((servers.EAGER, None), (CPU.variants[0], "0")):
            pair = made(self.site(tmp_path), Spec(name=variant.label, model="small", variant=variant))
            assert pair.alone.variables.get("VLLM_USE_V2_MODEL_RUNNER") == wanted

    def test_commands_have_no_paths_of_this_machine(self, tmp_path: Path) -> None:
        pair = made(self.site(tmp_path), Spec(name="b", model="8b", connector="kvbaton"))
        for line in pair.commands():
            assert str(tmp_path) not in line and "/usr/bin" not in line
        assert " python -m vllm" in anywhere(pair.commands()[-1], pair)
        assert "--model 8B" in pair.commands()[-1]

    def test_an_engine_says_which_runner_it_uses(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("(EngineCore pid=7) INFO [worker.py:1] Using V2 Model Runner\n")
        assert runner_of(log) == "V2"
        log.write_text("(EngineCore pid=7) INFO [worker.py:1] fine\n")
        assert runner_of(log) == "V1"

    def test_the_cause_is_found_in_a_log(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("INFO fine\nERROR something\nValueError: kvbaton: refused because\nINFO later\n")
        assert last_words(log) == "ValueError: kvbaton: refused because"
        log.write_text("one\ntwo\n")
        assert last_words(log) == "one | two"
        assert last_words(tmp_path / "none") == ""


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
