"""The router's failure matrix with real worker processes: each way to fail, its one outcome, and nobody left waiting.

Law: every test is one row (or one column of it). `row` ends each of them the same way: no pin, lease, intake or request
is left on either side, no ticket was used twice, and the next request of the same router is answered right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.api.params import FIELD, Mode, target_params
from kvbaton.protocol.ids import TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton.router.router_settings import Fallback, RouterSettings
from tests.e2e.cluster import eventually, pauses
from tests.e2e.router import faulty
from tests.e2e.router.crew import EVICT_S, WAITING_MAX, Crew, Got, Town, crew_in, decoded, only, row, until
from tests.e2e.router.faulty import Script, dies, first, hangs, held, loses, says, stops_after, talks_nonsense

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MODES = ("pull", "stream", "push")
TOGETHER = ("stream", "push")
QUICK = RouterSettings(
    policy="round-robin",
    deadline_s=30.0,
    first_byte_s=20.0,
    connect_s=5.0,
    suspect_s=0.05,
    settle_s=2.0,
    probe_min_s=0.2,
    probe_max_s=0.5,
    show_pair=True,
    fallback=Fallback.STRICT,
    streams_continue=False,  # what goes on is in test_streams.py; here is what becomes of a stream that cannot
)
HASTY = msgspec.structs.replace(QUICK, first_byte_s=2.0)
"""Where nobody has to answer in time."""
AMPLE_S = 3.5
AMPLE = msgspec.structs.replace(QUICK, first_byte_s=AMPLE_S)
"""Where one hangs, and others do have to."""
LOCAL = msgspec.structs.replace(QUICK, fallback=Fallback.LOCAL)
STILL_S = 0.1
"""A leg ends this much before its request, or more: while a core stood still for longer both may come due."""
LONG_TOKENS = 4000
"""Of an answer that takes seconds, all that fits: whoever is to be met in the middle of it is."""
LONG_PROMPTS = 3
"""That P computes one after the other, for the same reason; no more than may wait."""

modes = pytest.mark.parametrize("mode", MODES)
together = pytest.mark.parametrize("mode", TOGETHER)
orders = pytest.mark.parametrize("mode", ["pull", "push"])
"""Who is asked first. Where one hangs it never learns whether it would have been read behind, or written to."""
told = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

Fault = Script | None  # None: nobody listens there
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "is away": (None, 502, "worker_unreachable"),
    "answers 500": (says(500), 502, "scripted"),
    "answers 429": (says(429), 429, "scripted"),
    "answers 503": (says(503), 503, "scripted"),
    "dies": (dies, 502, "worker_died"),
    "talks nonsense": (talks_nonsense, 502, "bad_answer"),
}


def faults(table: dict[str, tuple[Fault, int, str]] = FAULTS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("fault", "status", "code"), table.values(), ids=table.keys())


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew_in(tmp_path_factory.mktemp("crew")) as made:
        yield made


@contextlib.asynccontextmanager
async def spoiled(
    town: Town, name: str, fault: Fault, after: Callable[[], object] = lambda: True
) -> AsyncIterator[None]:
    """A worker that fails, once `after` holds."""

    async def script(door: faulty.Door, request: Any, seen: faulty.Seen) -> Any:
        assert fault is not None
        await until(after)
        return await fault(door, request, seen)

    with faulty.nobody_listens() as nowhere:
        if fault is None:
            town.listing.urls[name] = nowhere
        else:
            town[name].script = script
        yield


def d_has_it(town: Town, mode: str) -> Callable[[], object]:
    """When both are asked at once, P fails after D has begun."""
    return lambda: mode == "pull" or any(seen.sent for seen in town["d0"].seen)


def is_told_when_to_come_back(got: Got) -> bool:
    return got.headers.get("Retry-After") == ("7" if got.status in (429, 503) else None)


# --- P


@modes
@faults()
async def test_the_only_p_fails(crew: Crew, mode: str, fault: Fault, status: int, code: str) -> None:
    """Told to the client with P's name; D is not asked (pull), or closed."""
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", settings=QUICK) as town:
        async with spoiled(town, "p0", fault, d_has_it(town, mode)):
            got = await town.ask(mode, prompt)
        assert got.fault == (status, code)
        assert "p0" in got.body["error"]["message"]
        assert is_told_when_to_come_back(got)
        assert got.seconds < QUICK.first_byte_s, "noticed, not waited for"
        assert mode != "pull" or town["d0"].seen == []
        await until(lambda: all(seen.left for seen in town["d0"].seen))
        await town.counted(leg_failures={f"prefill:{code}": 1}, ends={code: 1})


@modes
@faults()
async def test_another_p_takes_over(crew: Crew, mode: str, fault: Fault, status: int, code: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d0", settings=QUICK) as town:
        async with spoiled(town, "p0", fault, d_has_it(town, mode)):
            got = await town.ask(mode, prompt, stream=True)
        assert (got.status, got.text, got.body[-1]) == (200, right, "[DONE]")
        assert got.headers["x-kvbaton-pair"] == "p1/d0"
        assert len(town["p1"].seen) == 1
        await town.counted(leg_failures={f"prefill:{code}": 1}, ends={"ok": 1}, retries={"prefill": 1})


@modes
@faults()
async def test_with_fallback_local_d_answers_when_the_only_p_fails(
    crew: Crew, mode: str, fault: Fault, status: int, code: str
) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", settings=LOCAL) as town:
        async with spoiled(town, "p0", fault, d_has_it(town, mode)):
            got = await town.ask(mode, prompt)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "-/d0")
        await town.counted(leg_failures={f"prefill:{code}": 1}, ends={"ok": 1}, alone={"fallback": 1})


@modes
async def test_a_p_that_knows_no_such_thing_is_passed_on(crew: Crew, mode: str) -> None:
    """A 4xx is the request's own fault: nobody else is asked, and D is not asked (pull) or closed."""
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d0", settings=QUICK) as town:
        async with spoiled(town, "p0", says(404), d_has_it(town, mode)):
            got = await town.ask(mode, prompt)
        assert (got.status, got.body["error"]["message"], got.body["error"]["type"]) == (
            404,
            "scripted",
            "scripted_error",
        )
        assert town["p1"].seen == []
        assert mode != "pull" or town["d0"].seen == []
        await until(lambda: all(seen.left for seen in town["d0"].seen))


@modes
@told
async def test_a_fault_that_only_the_engine_finds_is_passed_on(crew: Crew, mode: str, stream: bool) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d0", "d1", settings=QUICK) as town:
        got = await town.ask(mode, prompt, stream=stream, presence_penalty=1.5)
        assert got.fault == (400, "invalid_value")
        assert got.body["error"]["message"].startswith("presence_penalty: the embedded engine does not")
        got = await town.ask(mode, prompt, stream=stream, model="another")
        assert got.fault == (404, "model_not_found")
        asked = [len(town[name].seen) for name in ("p0", "p1", "d0", "d1")]
        assert sum(asked[:2]) == 2, "each by one P"
        assert mode != "pull" or sum(asked[2:]) == 0


@orders
async def test_the_only_p_hangs(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "d1", settings=HASTY) as town:
        town["p0"].script = hangs
        got = await town.ask(mode, prompt)
        assert got.fault == (504, "worker_timeout")
        assert got.seconds >= HASTY.first_byte_s
        await until(lambda: only(town["p0"].seen).left and all(seen.left for seen in town["d1"].seen))
        await town.counted(leg_failures={"prefill:worker_timeout": 1}, ends={"worker_timeout": 1})


@orders
async def test_a_p_that_hangs_is_followed_by_another(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d1", settings=AMPLE) as town:
        town["p0"].script = hangs
        got = await town.ask(mode, prompt)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d1")
        await until(lambda: only(town["p0"].seen).left)


@modes
@pytest.mark.parametrize("others", [(), ("p1",)], ids=["alone", "with another"])
async def test_p_is_killed_before_its_answer(crew: Crew, mode: str, others: tuple[str, ...]) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", *others, "d1", settings=QUICK) as town:
        with crew.stopped("p0"):
            call = asyncio.create_task(town.ask(mode, prompt))
            await until(lambda: town["p0"].seen and town["p0"].seen[0].sent, call)
            crew.kill("p0")
        got = await call
        if got.status == 200 and got.headers["x-kvbaton-pair"] == "p0/d1":  # D noticed it before the router did
            assert mode != "pull" and got.text == right
            return
        if others:
            assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d1")
        else:
            assert got.fault == (502, "worker_died")
        await town.counted(leg_failures={"prefill:worker_died": 1})


@modes
async def test_p_is_killed_after_its_answer(crew: Crew, mode: str) -> None:
    """Before D has come for the KV: D computes the prompt itself, or tells why it must not (policy `fail`)."""
    asked = [next(crew.prompts), next(crew.prompts)]
    settings = msgspec.structs.replace(QUICK, decode_retries=0)
    async with row(crew, mode, "p0", "d0", "strict", settings=settings) as town:
        gate = asyncio.Event()
        town["d0"].script = town["strict"].script = held(gate)
        calls = [asyncio.create_task(town.ask(mode, prompt)) for prompt, _ in asked]
        await until(lambda: len(town["p0"].seen) == 2 and all(seen.answered for seen in town["p0"].seen))
        await until(lambda: town["d0"].seen and town["strict"].seen)
        crew.kill("p0")
        gate.set()
        told = [(await call, right) for call, (_, right) in zip(calls, asked, strict=True)]
        ((got, right),) = [each for each in told if each[0].status == 200]
        assert (got.text, got.headers["x-kvbaton-pair"]) == (right, "p0/d0")
        ((got, _),) = [each for each in told if each[0].status != 200]
        assert (got.status, got.body["error"]["type"]) == (502, "handoff_failed")
        assert got.body["error"]["code"] in GONE


GONE = ("claim_timeout", "handshake_timeout", "defer_timeout", "peer_gone")
"""What D says of a P that does not answer: which depends on whether they knew each other."""


@modes
async def test_d_waits_for_no_p_that_was_killed(crew: Crew, mode: str) -> None:
    """Its host refuses connections at once. No time-out of this D is near, and its registry says it after 12 s."""
    async with row(crew, mode, "p0", "d1", settings=msgspec.structs.replace(QUICK, decode_retries=0)) as town:
        gate = asyncio.Event()
        town["d1"].script = held(gate)
        prompt, right = next(crew.prompts)
        call = asyncio.create_task(town.ask(mode, prompt))
        await until(lambda: town["p0"].seen and town["p0"].seen[0].answered and town["d1"].seen, call)
        crew.kill("p0")
        gate.set()
        began = time.monotonic()
        assert (await call).text == right  # computed by D
        assert time.monotonic() - began < EVICT_S / 2


@modes
async def test_p_is_killed_after_its_answer_and_two_others_take_over(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "strict", "d1", settings=QUICK) as town:
        gate = asyncio.Event()
        town["strict"].script = held(gate)
        call = asyncio.create_task(town.ask(mode, prompt))
        await until(lambda: town["p0"].seen and town["p0"].seen[0].answered and town["strict"].seen, call)
        crew.kill("p0")
        gate.set()
        got = await call
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d1")
        await town.counted(ends={"ok": 1}, retries={"decode": 1})


@modes
async def test_an_answer_of_p_that_is_lost_on_the_way(crew: Crew, mode: str) -> None:
    """Another P is asked. What the first has leased nobody can name: it is released when its time is over."""
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d0", settings=QUICK) as town:
        town["p0"].script = loses
        if mode != "pull":
            town["d0"].script = first(hangs)
        got = await town.ask(mode, prompt)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d0")
        assert only(town["p0"].seen).answered


@together
async def test_a_p_that_fails_after_ds_first_byte_is_counted_and_no_more(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", settings=QUICK) as town:

        async def late(door: faulty.Door, request: Any, seen: faulty.Seen) -> Any:
            await until(lambda: town["d0"].seen and town["d0"].seen[0].answered)
            return await dies(door, request, seen)

        town["p0"].script = faulty.answered_then(late)
        got = await town.ask(mode, prompt, stream=True)
        assert (got.text, got.body[-1]) == (right, "[DONE]")
        assert await eventually(_late_failures(town), 10.0) == {"prefill:late:worker_died": 1}
        await town.counted(ends={"ok": 1}, retries={})


def _late_failures(town: Town) -> Callable[[], Awaitable[Any]]:
    async def look() -> Any:
        return (await town.router_stats())["leg_failures_total"]

    return look


def answer(**params: Any) -> Script:
    return says(200, json.dumps({"choices": [], FIELD: params}).encode())


NONSENSE: dict[str, tuple[Fault, int, str]] = {
    "no JSON": (says(200, b"<html>"), 502, "bad_answer"),
    "a list": (says(200, b"[1]"), 502, "bad_answer"),
    "nothing of a ticket": (says(200, b'{"choices": []}'), 502, "bad_answer"),
    "a text": (says(200, b'{"kv_transfer_params": "odd"}'), 502, "bad_answer"),
    "a number for a ticket": (answer(do_remote_prefill=True, ticket=7), 502, "bad_answer"),
    "no ticket": (answer(do_remote_prefill=True), 502, "invalid_value"),
    "an unknown mode": (answer(do_remote_prefill=True, ticket="t", mode="odd"), 502, "invalid_value"),
    "a ticket that nobody signed": (answer(do_remote_prefill=True, ticket="odd"), 502, "ticket_forged"),
}


@faults(NONSENSE)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "with another"])
async def test_in_pull_p_answers_nonsense(crew: Crew, fault: Script, status: int, code: str, others: bool) -> None:
    """It is P's fault, never the client's, also where D is the one to find it."""
    prompt, right = next(crew.prompts)
    async with row(crew, "pull", *(("p0", "p1") if others else ("p0",)), "d0", settings=QUICK) as town:
        town["p0"].script = fault
        got = await town.ask("pull", prompt)
        if others:
            assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d0")
        else:
            assert got.fault == (status, code)
        side = "prefill" if code == "bad_answer" else "decode"
        await town.counted(leg_failures={f"{side}:{code}": 1})


def flipped(data: bytes) -> bytes:
    """P's own answer, with another character in the middle of its ticket."""
    told_so = json.loads(data)
    ticket = told_so[FIELD]["ticket"]
    at = len(ticket) // 2
    told_so[FIELD]["ticket"] = ticket[:at] + ("A" if ticket[at] != "A" else "B") + ticket[at + 1 :]
    return json.dumps(told_so).encode()


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
async def test_in_pull_a_ticket_is_spoiled_on_its_way(crew: Crew, others: bool) -> None:
    prompt, right = next(crew.prompts)
    names = ("p0", "p1", "d0", "d1") if others else ("p0", "d0")
    async with row(crew, "pull", *names, settings=QUICK) as town:
        town["p0"].script = faulty.changed(flipped)
        got = await town.ask("pull", prompt)
        if others:
            assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d1")
        else:
            assert (*got.fault, got.body["error"]["type"]) == (502, "ticket_forged", "handoff_failed")


@together
async def test_when_both_begin_at_once_nobody_reads_what_p_answers(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", settings=QUICK) as town:
        town["p0"].script = faulty.changed(lambda _: b"<html>")
        got = await town.ask(mode, prompt)
        assert (got.status, got.text) == (200, right)


@orders
async def test_p_is_stopped_and_another_takes_over_in_time(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d1", settings=AMPLE) as town:
        with crew.stopped("p0"):
            got = await town.ask(mode, prompt)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p1/d1")


@together
async def test_p_is_stopped_and_d_does_not_wait_for_ever(crew: Crew, mode: str) -> None:
    """D computes the prompt itself. What P leases when it comes to itself is for nobody, and it is told so."""
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", settings=QUICK) as town:
        with crew.stopped("keeper"):
            got = await town.ask(mode, prompt)
        assert (got.status, got.text) == (200, right)
        assert got.seconds < QUICK.first_byte_s
        await until(lambda: town.discarded == [("keeper", only(town["keeper"].seen).ticket)])


async def test_p_misses_its_pings(crew: Crew) -> None:
    """First suspect, so that others are asked; then gone, so that what it was asked is broken off and asked anew."""
    (first_prompt, first_right), (prompt, right) = next(crew.prompts), next(crew.prompts)
    settings = msgspec.structs.replace(QUICK, first_byte_s=5 * EVICT_S, deadline_s=6 * EVICT_S)
    async with row(crew, "pull", "p0", "p1", "d0", settings=settings) as town:
        town.listing.follows_pings = True
        with crew.stopped("p0"):
            call = asyncio.create_task(town.ask("pull", first_prompt))
            await until(lambda: town["p0"].seen and town["p0"].seen[0].sent, call)
            await eventually(_is(town, "p0", "suspect"), 20.0)
            for _ in range(3):
                got = await town.ask("pull", prompt)
                assert (got.text, got.headers["x-kvbaton-pair"]) == (right, "p1/d0")
            got = await call
            assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, first_right, "p1/d0")
            assert (await town.router_stats())["legs_dropped_total"] == 1
        await eventually(_is(town, "p0", "serving"), 20.0)


def _is(town: Town, name: str, state: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return (await town.states()).get(name) == state

    return look


# --- D before its first byte. P is the keeper: what it leased is given back, or it would be held for minutes.

D_FAULTS = {**FAULTS, "answers no answer": (says(200, b"<html>", "text/html"), 502, "bad_answer")}


def p_is_done(town: Town, mode: str) -> Callable[[], object]:
    """When both are asked at once, D fails after P has leased and answered."""
    return lambda: mode == "pull" or (town["keeper"].seen and town["keeper"].seen[-1].answered)


@modes
@told
@faults(D_FAULTS)
async def test_the_only_d_fails(crew: Crew, mode: str, stream: bool, fault: Fault, status: int, code: str) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", settings=QUICK) as town:
        async with spoiled(town, "d0", fault, p_is_done(town, mode)):
            got = await town.ask(mode, prompt, stream=stream)
        assert got.fault == (status, code)
        assert "d0" in got.body["error"]["message"]
        assert is_told_when_to_come_back(got)
        assert got.seconds < QUICK.first_byte_s, "noticed, not waited for"
        await town.counted(leg_failures={f"decode:{code}": 1}, ends={code: 1})
        assert (await town.router_stats())["tickets_discarded_total"] == len(town.discarded) == 1


@modes
@told
@faults(D_FAULTS)
async def test_another_d_takes_over(crew: Crew, mode: str, stream: bool, fault: Fault, status: int, code: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", "d1", settings=QUICK) as town:
        async with spoiled(town, "d0", fault, p_is_done(town, mode)):
            got = await town.ask(mode, prompt, stream=stream)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "keeper/d1")
        assert not stream or got.body[-1] == "[DONE]"
        asked = {1, 2} if fault is None and mode != "pull" else {2}  # of a D that is away it may hear too late
        assert len(town["keeper"].seen) in asked, "with a lease of its own"
        await town.counted(leg_failures={f"decode:{code}": 1}, ends={"ok": 1}, retries={"decode": 1})


@modes
async def test_a_fault_that_only_d_finds_is_passed_on(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", "d1", settings=QUICK) as town:
        got = await town.ask(mode, prompt, min_tokens=9)
        assert got.fault == (400, "invalid_value")
        assert got.body["error"]["message"].startswith("min_tokens: got 9")
        async with spoiled(town, "d1", says(404), p_is_done(town, mode)):
            got = await town.ask(mode, prompt)
        assert (got.status, got.body["error"]["message"]) == (404, "scripted")
        assert [len(town[name].seen) for name in ("keeper", "d0", "d1")] == [2, 1, 1]


@orders
@told
async def test_the_only_d_hangs_before_its_first_byte(crew: Crew, mode: str, stream: bool) -> None:
    """A stream's first event has a time of its own; a whole answer has the request's."""
    prompt, _ = next(crew.prompts)
    settings = AMPLE if stream else msgspec.structs.replace(QUICK, deadline_s=AMPLE_S)
    async with row(crew, mode, "keeper", "d0", settings=settings) as town:
        town["d0"].script = hangs
        got = await town.ask(mode, prompt, stream=stream)
        assert got.fault == (504, "worker_timeout" if stream else "deadline")
        await until(lambda: only(town["d0"].seen).left)


@orders
async def test_a_d_that_hangs_before_its_first_byte_is_followed_by_another(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", "d1", settings=AMPLE) as town:
        town["d0"].script = hangs
        got = await town.ask(mode, prompt, stream=True)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "keeper/d1")
        await until(lambda: only(town["d0"].seen).left)


@modes
async def test_d_is_killed_before_its_first_byte(crew: Crew, mode: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", "d1", settings=QUICK) as town:
        with crew.stopped("d0"):
            call = asyncio.create_task(town.ask(mode, prompt))
            await until(lambda: town["d0"].seen and town["d0"].seen[0].sent, call)
            crew.kill("d0")
        got = await call
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "keeper/d1")


# --- D in mid-stream

ENDS = {
    "breaks": (faulty.breaks, "worker_died"),
    "breaks in mid-event": (faulty.breaks_in_mid_event, "worker_died"),
    "ends early": (faulty.ends_early, "worker_died"),
    "breaks the framing": (faulty.breaks_the_framing, "worker_died"),
}


def ends_with(got: Got, code: str | None, events: int | None = None) -> None:
    """One error event after some good ones, and nothing after it."""
    assert got.status == 200
    assert [("error" in each) for each in got.body] == [False] * (len(got.body) - 1) + [True]
    assert got.body[-1]["error"]["code"] == code
    assert len(got.body) > 1
    assert events is None or len(got.body) == events + 1


@modes
@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS.keys())
async def test_a_stream_that_breaks_ends_with_an_error_event(crew: Crew, mode: str, end: Any, code: str) -> None:
    """No `[DONE]`, and nobody else is asked: the client has bytes already."""
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "keeper", "p0", "d0", "d1", settings=QUICK) as town:
        town["d0"].script = stops_after(3, end)
        got = await town.ask(mode, prompt, stream=True)
        ends_with(got, code, 3)
        assert "".join(each["choices"][0]["text"] for each in got.body[:-1]) == right[:3]
        assert [len(town[name].seen) for name in ("keeper", "p0", "d0", "d1")] == [1, 0, 1, 0]
        await town.counted(leg_failures={f"mid_stream:{code}": 1}, ends={code: 1}, retries={})


@modes
async def test_an_event_that_is_no_json_ends_a_stream_of_several_choices(crew: Crew, mode: str) -> None:
    """One choice goes on as the bytes that came; several are taken apart, and then it shows."""
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", settings=QUICK) as town:
        has_one = asyncio.Event()  # what comes together with the bad event is lost with it
        town["d0"].script = stops_after(2, faulty.tells_nonsense_after(has_one))
        async with town.post(mode, prompt, stream=True, n=2) as response:
            begun = await response.content.readuntil(b"\n\n")
            has_one.set()
            rest = await response.read()
        got = Got(response.status, decoded(begun + rest), response.headers, 0.0)
        ends_with(got, None)
        assert "not JSON" in got.body[-1]["error"]["message"]
        await until(lambda: all(seen.left for seen in town["d0"].seen))


@modes
async def test_d_is_killed_in_mid_stream(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", "d1", settings=QUICK) as town:
        async with town.post(mode, prompt, stream=True, max_tokens=LONG_TOKENS, ignore_eos=True) as response:
            begun = await response.content.readuntil(b"\n\n")
            crew.kill("d0")
            rest = await response.read()
        events = decoded(begun + rest)
        ends_with(Got(response.status, events, response.headers, 0.0), "worker_died")
        assert town["d1"].seen == []


# --- the client


@contextlib.asynccontextmanager
async def leaving(town: Town, mode: str, prompt: str | Sequence[str], **more: Any) -> AsyncIterator[asyncio.Task[Got]]:
    """A client that goes when the block ends, before its first byte has come."""
    call = asyncio.create_task(town.ask(mode, prompt, **more))
    yield call
    assert not call.done(), call.result()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await until(lambda: all(seen.left or seen.answered for door in town.doors.values() for seen in door.seen))
    await eventually(_ended(town), 10.0)


def _ended(town: Town) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        numbers = await town.router_stats()
        return bool(numbers["in_flight"] == 0 and numbers["ends_total"] == {"client_gone": 1})

    return look


@modes
@told
async def test_the_client_leaves_while_p_computes(crew: Crew, mode: str, stream: bool) -> None:
    prompts = [next(crew.prompts)[0] * 70 for _ in range(LONG_PROMPTS)]
    async with row(crew, mode, "keeper", "d1", settings=QUICK) as town:
        async with leaving(town, mode, prompts, stream=stream) as call:
            await town.computes("keeper", call)
        assert any(seen.left for seen in town["keeper"].seen)


@told
async def test_the_client_leaves_between_ps_answer_and_ds(crew: Crew, stream: bool) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, "pull", "keeper", "d0", settings=QUICK) as town:
        town["d0"].script = hangs
        async with leaving(town, "pull", prompt, stream=stream) as call:
            await until(lambda: town["d0"].seen, call)
            await town.holds("keeper", call, leases=1)
        assert town.discarded == [("keeper", only(town["d0"].seen).ticket)]


@together
@told
async def test_the_client_leaves_when_p_is_done_and_d_has_not_come(crew: Crew, mode: str, stream: bool) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", settings=QUICK) as town:
        town["d0"].script = hangs
        async with leaving(town, mode, prompt, stream=stream) as call:
            await until(lambda: town["keeper"].seen and town["keeper"].seen[0].answered, call)
            await town.holds("keeper", call, leases=1)
        assert town.discarded == [("keeper", only(town["d0"].seen).ticket)]


@modes
@told
async def test_the_client_leaves_while_d_waits_for_its_kv(crew: Crew, mode: str, stream: bool) -> None:
    """P is asked too late (or, in pull, is stopped before D claims): D lets go at once."""
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "keeper", "d1", settings=QUICK) as town:
        gate = asyncio.Event()
        town["d1" if mode == "pull" else "keeper"].script = held(gate) if mode == "pull" else hangs
        with contextlib.ExitStack() as stack:
            async with leaving(town, mode, prompt, stream=stream) as call:
                await until(lambda: town["d1"].seen, call)
                if mode == "pull":
                    stack.enter_context(crew.stopped("keeper"))
                    gate.set()
                await town.holds("d1", call, intakes=1, running=0)
            await town.holds("d1", waiting=0, intakes=0, loading=0)


@modes
async def test_the_client_leaves_in_mid_stream(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "keeper", "d0", settings=QUICK) as town:
        async with town.post(mode, prompt, stream=True, max_tokens=LONG_TOKENS, ignore_eos=True) as response:
            await response.content.readuntil(b"\n\n")
            await town.holds("d0", running=1)
            response.close()
        await until(lambda: only(town["d0"].seen).left)
        await eventually(_ended(town), 10.0)
        await town.holds("d0", running=0)


# --- nobody


@told
async def test_without_p_strict_refuses_and_local_lets_d_answer(crew: Crew, stream: bool) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, "pull", "p0", "d0", settings=QUICK) as town:
        town.listing.gone = frozenset({"p0"})
        got = await town.ask("pull", prompt, stream=stream)
        assert (*got.fault, got.headers["Retry-After"]) == (503, "no_pair", "1")
        assert "no prefill worker is registered" in got.body["error"]["message"]
        assert town["d0"].seen == []
        assert (await town.get("/health"))["status"] == "unavailable"
    async with row(crew, "pull", "p0", "d0", settings=LOCAL) as town:
        town.listing.gone = frozenset({"p0"})
        assert (await town.get("/health"))["status"] == "degraded"
        got = await town.ask("pull", prompt, stream=stream)
        assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "-/d0")


@modes
@pytest.mark.parametrize("settings", [QUICK, LOCAL], ids=["strict", "local"])
async def test_without_d_nobody_answers(crew: Crew, mode: str, settings: RouterSettings) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", settings=settings) as town:
        town.listing.gone = frozenset({"d0"})
        got = await town.ask(mode, prompt)
        assert (*got.fault, got.headers["Retry-After"]) == (503, "no_pair", "1")
        assert "no decode worker is registered" in got.body["error"]["message"]
        assert (await town.get("/health"))["status"] == "unavailable"
        await town.counted(ends={"no_pair": 1}, leg_failures={})
        assert town["p0"].seen == []


@contextlib.asynccontextmanager
async def filled(town: Town, name: str, source: str) -> AsyncIterator[None]:
    """A worker whose queue holds all that it may: requests that wait for KV of `source`, which never begins."""
    url = f"{town.crew.url(name)}/v1/completions"
    async with aiohttp.ClientSession() as session:
        waiting = [asyncio.create_task(_waits(session, url, town, name, source)) for _ in range(WAITING_MAX)]
        try:
            await town.holds(name, waiting=WAITING_MAX)
            yield
            assert not any(each.done() for each in waiting)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)


async def _waits(session: aiohttp.ClientSession, url: str, town: Town, name: str, source: str) -> None:
    handoff = handoff_id(TransferId(secrets.token_hex(16)))
    ticket = seal(
        Ticket(handoff, WorkerId(source), time.time() + 60, target=WorkerId(name)), town.crew.keyring.ticket_keys[0]
    )
    body = {"prompt": "waits", "max_tokens": 1, FIELD: target_params(Mode.STREAM, ticket)}
    async with session.post(url, json=body) as response:
        await response.read()


@modes
@told
@pytest.mark.parametrize("others", [False, True], ids=["all", "one of two"])
async def test_d_is_full(crew: Crew, mode: str, stream: bool, others: bool) -> None:
    prompt, right = next(crew.prompts)
    names = ("keeper", "d1", *(("d0",) if others else ()))
    async with row(crew, mode, *names, settings=QUICK) as town:
        async with filled(town, "d1", "keeper"):
            got = await town.ask(mode, prompt, stream=stream)
        if others:
            assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "keeper/d0")
        else:
            assert (got.status, got.headers["Retry-After"]) == (429, "1")
            assert got.body["error"]["type"] == "overloaded_error"
        await town.counted(leg_failures={"decode:worker_failed": 1})
        assert (await town.states())["d1"] == "serving", "who is full is alive"


@modes
@pytest.mark.parametrize("others", [False, True], ids=["all", "one of two"])
async def test_p_is_full(crew: Crew, mode: str, others: bool) -> None:
    prompt, right = next(crew.prompts)
    names = ("keeper", *(("p0",) if others else ()), "d1")
    async with row(crew, mode, *names, settings=QUICK) as town:
        async with filled(town, "keeper", "d1"):
            got = await town.ask(mode, prompt)
        if others:
            assert (got.status, got.text, got.headers["x-kvbaton-pair"]) == (200, right, "p0/d1")
        else:
            assert (got.status, got.headers["Retry-After"]) == (429, "1")
            assert got.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(("victim", "other"), [("keeper", "d1"), ("d1", "keeper")])
async def test_all_are_draining(crew: Crew, victim: str, other: str) -> None:
    """Told to stop while it still has something to do: nothing new comes to it, and it goes when that is done."""
    prompt, _ = next(crew.prompts)
    async with row(crew, "pull", "keeper", "d1", settings=QUICK) as town:
        async with filled(town, victim, other):
            crew.signal(victim, signal.SIGTERM)
            await eventually(_is(town, victim, "draining"), 20.0)
            got = await town.ask("pull", prompt)
        assert (*got.fault, got.headers["Retry-After"]) == (503, "no_pair", "1")
        assert "worker is draining" in got.body["error"]["message"]
        assert await asyncio.to_thread(crew.wait_ended, victim, 40.0) == 0


async def test_the_router_is_full(crew: Crew) -> None:
    prompt, right = next(crew.prompts)
    settings = msgspec.structs.replace(QUICK, in_flight_max=1)
    async with row(crew, "pull", "p0", "d0", settings=settings) as town:
        gate = asyncio.Event()
        town["p0"].script = held(gate)
        call = asyncio.create_task(town.ask("pull", prompt))
        await until(lambda: town["p0"].seen, call)
        got = await town.ask("pull", prompt)
        assert (*got.fault, got.headers["Retry-After"]) == (429, "full", "1")
        await town.counted(ends={"full": 1})
        gate.set()
        got = await call
        assert (got.status, got.text) == (200, right)


@orders
@pytest.mark.parametrize(("where", "stream"), [("keeper", False), ("d1", False), ("d1", True)])
async def test_the_deadline_passes_before_the_first_byte(crew: Crew, mode: str, stream: bool, where: str) -> None:
    """A silent leg ends just before the request and is held against its worker; D with a whole answer is not."""
    prompt, _ = next(crew.prompts)
    settings = msgspec.structs.replace(QUICK, deadline_s=2.0 if where == "keeper" else AMPLE_S)
    async with row(crew, mode, "keeper", "d1", settings=settings) as town:
        town[where].script = hangs
        with pauses() as longest:
            got = await town.ask(mode, prompt, stream=stream)
        is_leg = stream or where == "keeper"
        if longest[0] > STILL_S and got.fault == (504, "deadline"):
            is_leg = False  # both were due when the machine went on
        code = "worker_timeout" if is_leg else "deadline"
        assert got.fault == (504, code)
        assert got.seconds < settings.deadline_s + 10.0
        await until(lambda: only(town[where].seen).left)
        side = "prefill" if where == "keeper" else "decode"
        await town.counted(ends={code: 1}, leg_failures={f"{side}:{code}": 1} if is_leg else {})


@orders
async def test_the_deadline_passes_in_mid_stream(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    settings = msgspec.structs.replace(HASTY, first_byte_s=5.0, deadline_s=6.5)
    async with row(crew, mode, "keeper", "d0", settings=settings) as town:
        town["d0"].script = stops_after(2, faulty.stalls)
        got = await town.ask(mode, prompt, stream=True)
        ends_with(got, "deadline", 2)
        await town.counted(ends={"deadline": 1}, leg_failures={"mid_stream:deadline": 1})
        await until(lambda: only(town["d0"].seen).left)


# --- how often others are asked


@modes
@pytest.mark.parametrize("retries", [0, 1])
async def test_other_ps_are_asked_a_bounded_number_of_times(crew: Crew, mode: str, retries: int) -> None:
    prompt, _ = next(crew.prompts)
    settings = msgspec.structs.replace(QUICK, prefill_retries=retries)
    names = ("p0", "p1", "keeper")
    async with row(crew, mode, *names, "d0", settings=settings) as town:
        for name in names:
            town[name].script = says(500)
        got = await town.ask(mode, prompt)
        assert got.fault == (502, "scripted")
        assert sum(len(town[name].seen) for name in names) == 1 + retries


@modes
@pytest.mark.parametrize("retries", [0, 1])
async def test_other_ds_are_asked_a_bounded_number_of_times(crew: Crew, mode: str, retries: int) -> None:
    prompt, _ = next(crew.prompts)
    settings = msgspec.structs.replace(QUICK, decode_retries=retries)
    names = ("d0", "d1", "strict")
    async with row(crew, mode, "keeper", *names, settings=settings) as town:
        for name in names:
            town[name].script = says(500)
        got = await town.ask(mode, prompt)
        assert got.fault == (502, "scripted")
        assert sum(len(town[name].seen) for name in names) == 1 + retries
        tickets = [ticket for name in names for ticket in town[name].tickets]
        assert [ticket for _, ticket in town.discarded] == tickets, "each was given back, and used once"


# --- whom the router has given up


@modes
async def test_a_dead_p_is_probed_instead_of_asked_and_its_next_life_serves(crew: Crew, mode: str) -> None:
    settings = msgspec.structs.replace(QUICK, breaker_failures=2, suspect_s=0.01)
    async with row(crew, mode, "p0", "p1", "d0", settings=settings) as town:
        crew.kill("p0")

        async def asked() -> Got:
            prompt, right = next(crew.prompts)
            got = await town.ask(mode, prompt)
            assert (got.status, got.text) == (200, right)
            return got

        while (await town.states())["p0"] != "broken":
            assert (await asked()).headers["x-kvbaton-pair"] == "p1/d0"
        assert len(town["p0"].seen) == settings.breaker_failures
        for _ in range(4):
            await asked()
        assert len(town["p0"].seen) == settings.breaker_failures, "never while it is broken"
        await eventually(_was_silent(town), 20.0)
        assert (await town.router_stats())["breakers_opened_total"] == 1
        await asyncio.to_thread(crew.need, "p0")
        await eventually(_is(town, "p0", "serving"), 20.0)
        served = {(await asked()).headers["x-kvbaton-pair"] for _ in range(2)}
        assert served == {"p0/d0", "p1/d0"}, "the router was not restarted for it"


def _was_silent(town: Town) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return bool((await town.router_stats())["probes_total"].get("silent"))

    return look


@orders
async def test_a_p_that_comes_to_itself_serves_after_a_probe(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    settings = msgspec.structs.replace(HASTY, first_byte_s=1.0, breaker_failures=1, probe_s=0.3)
    async with row(crew, mode, "p0", "d1", settings=settings) as town:
        with crew.stopped("p0"):
            got = await town.ask(mode, prompt)
            assert got.fault == (504, "worker_timeout")
            assert (await town.states())["p0"] == "broken"
            got = await town.ask(mode, prompt)
            assert (*got.fault, got.headers["Retry-After"]) == (503, "no_pair", "1")
            assert "no prefill worker responds" in got.body["error"]["message"]
        await eventually(_is(town, "p0", "serving"), 20.0)
        assert (await town.router_stats())["probes_total"]["answered"] == 1


@modes
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_worker_leaves_the_list_while_it_is_asked(crew: Crew, mode: str, victim: str) -> None:
    prompt, right = next(crew.prompts)
    async with row(crew, mode, "p0", "p1", "d0", "d1", settings=QUICK) as town:
        town[victim].script = hangs
        call = asyncio.create_task(town.ask(mode, prompt))
        await until(lambda: town[victim].seen, call)
        town.listing.gone = frozenset({victim})
        got = await call
        assert (got.status, got.text) == (200, right)
        assert victim not in got.headers["x-kvbaton-pair"]
        assert (await town.router_stats())["legs_dropped_total"] == 1


@modes
async def test_a_d_that_leaves_the_list_in_mid_stream_ends_it(crew: Crew, mode: str) -> None:
    prompt, _ = next(crew.prompts)
    async with row(crew, mode, "p0", "d0", "d1", settings=QUICK) as town:
        town["d0"].script = stops_after(2, faulty.stalls)
        async with town.post(mode, prompt, stream=True) as response:
            begun = await response.content.readuntil(b"\n\n")
            town.listing.gone = frozenset({"d0"})
            rest = await response.read()
        ends_with(Got(response.status, decoded(begun + rest), response.headers, 0.0), "worker_died")
        assert town["d1"].seen == []
