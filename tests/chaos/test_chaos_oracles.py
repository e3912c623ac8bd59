"""Each promise's oracle, and that it can fail: a verdict that cannot be bad says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

import kvbaton
import kvbaton_proof
from kvbaton_proof.chaos import client_injuries, rest_oracle
from kvbaton_proof.chaos.chaos_plan import Plan
from kvbaton_proof.chaos.fleet import Fleet, FleetError
from kvbaton_proof.chaos.judged_request import Board, Ended, Found, Prompt, Verdict, Way, ask, judged
from kvbaton_proof.chaos.members import Ports, Spec, Surroundings
from kvbaton_proof.chaos.network import rooms
from kvbaton_proof.chaos.outcome import AtRest, Finds, Outcome, Row, Sample, Seen, seen
from kvbaton_proof.chaos.rest_oracle import Usage, is_there, usage

PROMPT = Prompt("hello", "abcd", 4)
QUIET: Mapping[str, Any] = {
    "pins": 0, "leases": 0, "intakes": 0, "quarantined_blocks": 0, "running": 0, "waiting": 0, "loading": 0,
    "free_blocks": 255, "blocks": 255, "faults_total": 0,
}  # fmt: skip
PLAN = Plan(name="random", seed=1, engine="embedded")


# --- answers


@contextlib.asynccontextmanager
async def _door(answer: Any) -> AsyncIterator[str]:
    """A server that answers every request by `answer(request)`."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _asked(answer: Any, *, stream: bool = False, late_s: float = 30.0) -> tuple[Found, Board]:
    async def go() -> tuple[Found, Board]:
        board = Board()
        async with _door(answer) as url, aiohttp.ClientSession() as session:
            found = await ask(session, board, PROMPT, Way(url, stream=stream, late_s=late_s))
        return found, board

    return asyncio.run(go())


def _whole(text: str) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": text}]}, headers={"x-kvbaton-pair": "p0/d1"})

    return answer


def _stream(*pieces: bytes) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


def _chunk(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"text": text}]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"
BROKE = b'data: {"error":{"code":"worker_died"}}\n\n'


def test_the_right_answer_is_right_and_says_who_gave_it() -> None:
    found, board = _asked(_whole("abcd"))
    assert (found.verdict, found.pair) == (Verdict.RIGHT, "p0/d1")
    assert board.counts().right == 1
    assert board.right_since(0.0, "d1") is not None
    assert board.right_since(0.0, "d0") is None


def test_a_planted_wrong_answer_is_caught_with_both_texts() -> None:
    found, board = _asked(_whole("abxd"))
    assert found.verdict is Verdict.WRONG
    assert board.counts().wrong == 1
    assert "expected 'abcd', got 'abxd'" in board.wrongs[0]


@pytest.mark.parametrize(
    ("pieces", "verdict", "kind"),
    [
        ((_chunk("ab"), _chunk("cd"), DONE), Verdict.RIGHT, ""),
        ((_chunk("ab"), _chunk("cx"), DONE), Verdict.WRONG, ""),
        ((_chunk("ab"), DONE), Verdict.WRONG, ""),
        ((_chunk("ab"), BROKE), Verdict.ERROR, "event:worker_died"),
        ((_chunk("ax"), BROKE), Verdict.WRONG, "event:worker_died"),
        ((_chunk("ab"),), Verdict.ERROR, "closed:no [DONE]"),
        ((_chunk("b"),), Verdict.WRONG, "closed:no [DONE]"),
        ((b"data: {]\n\n",), Verdict.ERROR, "event:malformed"),
    ],
)
def test_a_stream_must_be_the_right_answer_or_break_off_within_it(
    pieces: Sequence[bytes], verdict: Verdict, kind: str
) -> None:
    found, _ = _asked(_stream(*pieces), stream=True)
    assert (found.verdict, found.kind) == (verdict, kind)


def test_an_explicit_error_is_counted_by_kind_and_never_wrong() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "no_pair"}}, status=503)

    found, board = _asked(answer)
    assert (found.verdict, found.kind) == (Verdict.ERROR, "503:no_pair")
    assert board.kinds == {"503:no_pair": 1}


def test_a_late_request_is_caught() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    found, board = _asked(answer, late_s=0.05)
    assert found.verdict is Verdict.LATE
    assert board.counts().late == 1
    assert len(board.lates) == 1


def test_a_late_poison_and_a_late_slow_reader_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TimeoutError` is an `OSError`: whoever asks for the latter first takes a hang for a closed connection."""
    monkeypatch.setattr(client_injuries, "LATE_S", 0.05)
    monkeypatch.setattr(client_injuries, "POISON_S", 0.0)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def go() -> Board:
        async with _door(answer) as url, aiohttp.ClientSession() as session:
            host, port = url.removeprefix("http://").split(":")
            spec = Spec("router", "router", host, Ports(int(port), 1))
            fleet = SimpleNamespace(specs={"router": spec}, pass_for=lambda _: {})
            scene: Any = SimpleNamespace(
                fleet=fleet, board=Board(), session=session, now=asyncio.get_running_loop().time, answers=[PROMPT],
                way=lambda name, mode, **_: Way(url, mode, stream=True),
            )  # fmt: skip
            assert await client_injuries._poisoned(scene, "router", "warm", PROMPT) == "late"
            assert await client_injuries._read_slowly(scene, 0.01, 0) == "late"
        return scene.board  # type: ignore[no-any-return]

    assert asyncio.run(go()).counts().late == 2


def test_a_link_is_well_when_both_of_its_ends_serve_together() -> None:
    board = Board()
    board.note(Ended(1.0, 2.0, Verdict.RIGHT, pair="p0/d0"))
    board.note(Ended(1.0, 3.0, Verdict.RIGHT, pair="-/d1"))
    assert board.right_since(0.0, "p0-d1") is None
    assert board.right_since(0.0, "d0-p0") == 2.0
    assert board.right_since(0.0, "router-d1") == 3.0
    assert board.right_since(0.0) == 2.0


TRACE = """2026-11-15 kvbaton-discovery: fault 1; going on
Traceback (most recent call last):
  File "{where}/looping.py", line 92, in _guard
    action()
KeyError: 'x'
more
"""


def test_a_traceback_of_our_own_in_a_log_is_a_problem() -> None:
    assert rest_oracle.unexpected("p0", "--- life 1\n" + TRACE.format(where="/home/kvbaton/aiohttp")) == []
    for package in (kvbaton, kvbaton_proof):  # two distributions, which may lie in two places
        assert rest_oracle.unexpected("p0", TRACE.format(where=Path(str(package.__file__)).parent / "control")) == [
            "p0: 1 tracebacks in its log, the first: KeyError: 'x'"
        ]


def test_what_is_no_answer_at_all_is_wrong() -> None:
    assert judged(PROMPT, b"{}").verdict is Verdict.WRONG


# --- at rest


def test_a_worker_that_holds_nothing_is_fine() -> None:
    assert rest_oracle.judge_worker("p0", QUIET, is_healthy=True) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pins": 3, "free_blocks": 252}, "p0: holds 3 pins, 3 used blocks"),
        ({"leases": 1}, "p0: holds 1 leases"),
        ({"free_blocks": 250}, "p0: holds 5 used blocks"),
        ({"quarantined_blocks": 2, "free_blocks": 253}, "p0: holds 2 quarantined blocks, 2 used blocks"),
        ({"running": 1}, "p0: holds 1 running"),
        ({"faults_total": 2}, "p0: 2 faults inside; its log has them"),
    ],
)
def test_what_is_left_over_is_named(change: Mapping[str, int], said: str) -> None:
    assert rest_oracle.judge_worker("p0", {**QUIET, **change}, is_healthy=True) == [said]


def test_a_worker_that_is_gone_or_ill_is_named() -> None:
    assert rest_oracle.judge_worker("d0", None, is_healthy=False) == ["d0: does not answer"]
    assert rest_oracle.judge_worker("d0", QUIET, is_healthy=False) == ["d0: says that it is not healthy"]


BEFORE = Usage(60, 20, 80.0)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Usage(300, 20, 80.0), "d0: file descriptors grew from 60 to 300, more than 40"),
        (Usage(60, 90, 80.0), "d0: threads grew from 20 to 90, more than 8"),
        (Usage(60, 20, 400.0), "d0: MiB resident grew from 80 to 400, more than 64"),
        (None, "d0: its process is gone"),
    ],
)
def test_what_has_grown_is_named(after: Usage | None, said: str) -> None:
    assert rest_oracle.grown("d0", BEFORE, after) == [said]


def test_what_a_few_links_more_cost_is_no_growth() -> None:
    assert rest_oracle.grown("d0", BEFORE, Usage(70, 23, 95.0)) == []


def test_the_kernel_is_asked_for_descriptors(tmp_path: Path) -> None:
    before = usage(os.getpid())
    with contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context((tmp_path / str(number)).open("w"))
        after = usage(os.getpid())
    assert before is not None
    assert after is not None
    assert after.fds >= before.fds + 50, "what earlier tests left may be closed meanwhile, but it is not as much"
    assert usage(2**22 + 1) is None
    assert not is_there(2**22 + 1)


def test_memory_that_rises_has_a_slope_and_memory_that_does_not_has_none() -> None:
    rising = [(float(at), 80.0 + at / 60) for at in range(0, 600, 2)]
    level = [(float(at), 80.0) for at in range(0, 600, 2)]
    assert rest_oracle.growth_mib_per_minute(rising) == pytest.approx(1.0)
    assert rest_oracle.growth_mib_per_minute(level) == 0.0
    assert rest_oracle.growth_mib_per_minute(level[:5]) is None


def test_a_long_life_whose_memory_is_not_level_breaks_the_verdict() -> None:
    leaking = [(float(at), 80.0 + 8 * at / 60) for at in range(0, 600, 2)]
    filling = [(float(at), 80.0 + min(30.0, at / 6)) for at in range(0, 600, 2)]  # up to its bound, in half of its life
    assert "p1: memory was not level" in rest_oracle.keeps_growing("p1", leaking)[0]
    assert rest_oracle.keeps_growing("p1", filling) == []
    assert rest_oracle.keeps_growing("p1", leaking[:60]) == []  # young: caches fill
    assert rest_oracle.keeps_growing("p1", []) == []


def test_files_left_in_shared_memory_are_named() -> None:
    said = rest_oracle.left_files(frozenset({"kvbaton-a"}), frozenset({"kvbaton-a", "kvbaton-b"}))
    assert said == ["/dev/shm/kvbaton-b was left behind"]


# --- engines that die


class _Only(SimpleNamespace):
    """A network on which every member is this command."""

    def __init__(self, *words: str) -> None:
        super().__init__(command=lambda name, argv: list(words))


def test_an_engine_that_ends_though_nobody_hurt_it_is_a_death(tmp_path: Path) -> None:
    async def go() -> list[str]:
        specs = {"store": Spec("store", "store", "127.0.0.1", Ports(1, 2))}
        around = Surroundings(str(tmp_path), "", str(tmp_path), False, "tcp")
        dying = _Only("sh", "-c", "echo the last words; exit 3")
        async with Fleet(specs, dying, around, tmp_path, lambda _: None) as fleet:
            await fleet.start("store")
            async with asyncio.timeout(20):
                while not fleet.deaths:
                    await asyncio.sleep(0.01)
            return list(fleet.deaths)

    deaths = asyncio.run(go())
    assert "store ended by itself with status 3" in deaths[0]
    assert "the last words" in deaths[0]


def test_one_that_was_killed_is_not_and_none_outlives_the_fleet(tmp_path: Path) -> None:
    async def go() -> tuple[list[str], int, int]:
        specs = {"store": Spec("store", "store", "127.0.0.1", Ports(1, 2))}
        around = Surroundings(str(tmp_path), "", str(tmp_path), False, "tcp")
        async with Fleet(specs, _Only("sleep", "600"), around, tmp_path, lambda _: None) as fleet:
            await fleet.start("store")
            first = fleet.pid("store")
            await fleet.kill("store")
            await fleet.start("store")
            fleet.stop("store")
            return fleet.deaths, first, fleet.pid("store")

    deaths, first, second = asyncio.run(go())
    assert deaths == []
    assert not is_there(first)
    assert not is_there(second)


def test_a_start_that_takes_too_long_says_what_the_member_answered(tmp_path: Path) -> None:
    async def go() -> str:
        async with _door(_whole("")) as url:  # which has no /stats
            host, port = url.removeprefix("http://").split(":")
            specs = {name: Spec(name, name, host, Ports(int(port), 2)) for name in ("router", "prefill")}
            around = Surroundings(str(tmp_path), "", str(tmp_path), False, "tcp")
            async with Fleet(specs, _Only("sleep", "600"), around, tmp_path, lambda _: None) as fleet:
                with pytest.raises(FleetError) as caught:
                    await fleet.wait_listed("prefill", within_s=0.0)
        return str(caught.value)

    said = asyncio.run(go())
    assert "prefill does not serve after 0 s (prefill: /stats: status 404; router: /workers: status 404)" in said


# --- the verdict over all of it


def _finds(**changes: Any) -> Finds:
    rest = {"d0": AtRest(1, BEFORE, BEFORE, rest_oracle.held(QUIET))}
    made = {
        "seconds": 1.0,
        "network": "loopback",
        "rows": (),
        "at_rest": rest,
        "samples": {},
        "deaths": (),
        "problems": (),
    }
    return Finds(**{**made, **changes})


def _seen(*verdicts: Verdict, **changes: Any) -> Seen:
    board = Board()
    for verdict in verdicts or (Verdict.RIGHT,):
        board.note(Ended(10.0, 11.0, verdict, "kind"))
    return seen(PLAN, board, _finds(**changes), 10.0)


def _verdict(*verdicts: Verdict, **changes: Any) -> Outcome:
    return _seen(*verdicts, **changes).outcome


def test_right_answers_and_errors_are_a_good_run() -> None:
    outcome = _verdict(Verdict.RIGHT, Verdict.ERROR)
    assert outcome.ok
    assert (outcome.requests, outcome.right, outcome.errors) == (2, 1, 1)


@pytest.mark.parametrize(
    "outcome",
    [
        _verdict(Verdict.RIGHT, Verdict.WRONG),
        _verdict(Verdict.RIGHT, Verdict.LATE),
        _verdict(Verdict.ERROR),
        _verdict(deaths=("d0 ended by itself",)),
        _verdict(problems=("d0: holds 1 pins",)),
        _verdict(at_rest={"d0": AtRest(1, BEFORE, BEFORE, rest_oracle.held({**QUIET, "pins": 1}))}),
        _verdict(at_rest={"d0": AtRest(1, BEFORE, None)}),
        _verdict(at_rest={"d0": AtRest(1, BEFORE, Usage(600, 20, 80.0))}),
        _verdict(rows=(Row(at_s=1, title="kill d0", fault="kill", promises=(1,), recover_s=None),)),
    ],
)
def test_each_broken_promise_breaks_the_verdict(outcome: Outcome) -> None:
    assert not outcome.ok


def test_memory_is_judged_within_one_life() -> None:
    samples = [Sample(at, 1, 1, 1, 80.0) for at in range(0, 40, 2)]
    samples += [Sample(at, 2, 1, 1, 70.0 + at) for at in range(40, 60, 2)]
    (member,) = _verdict(samples={"d0": samples}).members
    assert member.rss_mib_per_minute == 0.0


def test_requests_are_counted_by_the_second_and_by_the_row() -> None:
    board = Board()
    for at, verdict in ((0.5, Verdict.RIGHT), (0.6, Verdict.ERROR), (2.5, Verdict.WRONG)):
        board.note(Ended(0.0, at, verdict))
    told = seen(PLAN, board, _finds(), 0.0).seconds
    assert msgspec.to_builtins(told) == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert board.between(0.55, 3.0).requests == 2


END_S = 30.0

WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab") as out:
            out.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def _run(folder: Path, how_full: bool, script: str) -> subprocess.CompletedProcess[bytes]:
    words = rooms.command(str(folder), 65536, ["sh", "-c", script], full=how_full)
    return subprocess.run(words, capture_output=True, timeout=END_S, check=False)


def test_a_room_has_space_a_full_one_has_none_and_both_are_gone_with_their_process(tmp_path: Path) -> None:
    roomy = _run(tmp_path, False, f"echo word > {tmp_path}/file && cat {tmp_path}/file")
    full = _run(tmp_path, True, f"echo word > {tmp_path}/file")
    if rooms.are_allowed():
        assert roomy.stdout == b"word\n"
    assert (roomy.returncode == 0) == rooms.are_allowed()
    assert full.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_room_is_filled_and_cleared_from_outside(tmp_path: Path) -> None:
    if not rooms.are_allowed():
        return  # then `allow_no_writes` is what is used, below
    script = f"echo here; while read -r _; do echo word > {tmp_path}/file && echo written || echo full; done"
    words = rooms.command(str(tmp_path), 65536, ["sh", "-c", script])
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        assert process.stdout.readline() == "here\n"
        assert rooms.fill(process.pid, str(tmp_path)) == 65536
        assert ask() == "full"
        rooms.clear(process.pid, str(tmp_path))
        rooms.clear(process.pid, str(tmp_path))
        assert ask() == "written"
        process.stdin.close()
        assert process.wait(END_S) == 0
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_rooms_a_process_may_write_nothing_for_a_while(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        assert ask() == "written"
        rooms.allow_no_writes(process.pid)
        assert ask() == "27"  # EFBIG
        rooms.allow_writes(process.pid)
        assert ask() == "written"
        process.stdin.close()
        assert process.wait(END_S) == 0
