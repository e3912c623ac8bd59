"""What the router decides beyond one try on one pair: D alone, fallback, breakers, discards, drain, dialects."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api import request_ids
from kvbaton.api.params import Mode
from kvbaton.router.router_settings import Fallback
from tests.router.fake_workers import (
    QUICK,
    FakeWorker,
    after,
    begin_then,
    cluster,
    die,
    event,
    hang,
    lease,
    only_first,
    refuse,
    say,
    speak,
    tells,
    until,
)

BODY = {"prompt": "abc", "max_tokens": 4}
MODES = ("pull", "stream", "push")


def settings(**more: Any) -> Any:
    return msgspec.structs.replace(QUICK, **more)


LOCAL = settings(fallback=Fallback.LOCAL)


# --- fallback


async def test_a_d_that_fails_alone_is_followed_by_another_and_then_by_an_error() -> None:
    async with cluster(0, [refuse(500), speak], settings=LOCAL) as c:
        assert (await c.post(BODY))[0] == 200
    async with cluster(0, [refuse(500), refuse(500)], settings=LOCAL) as c:
        assert (await c.post(BODY))[0] == 502


# --- D alone by choice


async def test_a_short_prompt_goes_to_d_alone_and_a_long_one_does_not() -> None:
    async with cluster(settings=settings(disagg_min_tokens=100)) as c:
        assert (await c.post({**BODY, "prompt": "x" * 396}))[0] == 200
        assert (await c.post({**BODY, "prompt": [1] * 99}))[0] == 200
        assert c.p[0].bodies == []
        assert (await c.post({**BODY, "prompt": [1] * 100}))[0] == 200
        assert len(c.p[0].bodies) == 1
        assert (await c.stats())["alone_total"] == {"short": 2}


async def test_a_prompt_that_d_has_seen_goes_to_d_alone() -> None:
    async with cluster(1, 2, settings=settings(disagg_min_tokens=100)) as c:
        long = {**BODY, "prompt": "x" * 4096}
        for _ in range(3):
            assert (await c.post(long))[0] == 200
        assert len(c.p[0].bodies) == 1
        assert sorted(len(d.bodies) for d in c.d) == [0, 3]
        assert (await c.stats())["alone_total"] == {"cached": 2}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"use_beam_search": True, "n": 2}, "search"),
        ({"best_of": 3, "n": 1}, "search"),
    ],
)
async def test_an_answer_that_needs_the_whole_prompt_computed_goes_to_d_alone_and_in_one_piece(
    more: Any, why: str
) -> None:
    async with cluster() as c:
        assert (await c.post({**BODY, **more}))[0] == 200
        assert c.p[0].bodies == []
        assert c.d[0].bodies == [{**BODY, **more}]
        assert (await c.stats())["alone_total"] == {why: 1}


# --- choice of pair


async def test_with_the_prefix_policy_the_same_beginning_goes_to_the_same_p() -> None:
    async with cluster(3, 1, settings=settings(policy="prefix")) as c:
        for letter in "ab" * 4:
            await c.post({**BODY, "prompt": letter * 2048})
        assert sorted(len(p.bodies) for p in c.p) == [0, 4, 4]


async def test_the_busier_p_is_left_alone() -> None:
    gate = asyncio.Event()
    async with cluster([after(gate, lease), lease], 1) as c:
        slow = asyncio.create_task(c.post({**BODY, "prompt": [1] * 500}))
        await until(lambda: c.p[0].bodies)
        for _ in range(3):
            await c.post(BODY)
        assert [len(p.bodies) for p in c.p] == [1, 3]
        shown = {worker["name"]: worker["tokens_under_way"] for worker in (await c.get("/workers"))[1]["workers"]}
        assert shown == {"p0": 500, "p1": 0, "d0": 504}
        gate.set()
        assert (await slow)[0] == 200
        assert all(worker["tokens_under_way"] == 0 for worker in (await c.get("/workers"))[1]["workers"])


@pytest.mark.parametrize("mode", MODES)
async def test_no_failure_leaves_load_behind(mode: str) -> None:
    async with cluster([die, refuse(429)], [refuse(500)], settings=settings(suspect_s=0.01)) as c:
        for stream in (False, True):
            assert (await c.post({**BODY, "stream": stream}, x_kvbaton_mode=mode))[0] >= 400
        assert all(worker["tokens_under_way"] == 0 for worker in (await c.get("/workers"))[1]["workers"])


# --- breakers


async def test_who_is_full_or_refuses_a_request_never_breaks() -> None:
    for status in (429, 503, 400):
        async with cluster([refuse(status)], 1, settings=settings(breaker_failures=1)) as c:
            for _ in range(4):
                assert (await c.post(BODY))[0] == status
            assert (await c.stats())["breakers_opened_total"] == 0


async def test_a_handoff_that_failed_breaks_nobody() -> None:
    failed = refuse(500, "peer_gone", type="handoff_failed", code="peer_gone")
    async with cluster(1, [failed], settings=settings(breaker_failures=1)) as c:
        for _ in range(3):
            assert (await c.post(BODY))[0] == 502
        assert (await c.stats())["breakers_opened_total"] == 0


async def test_a_worker_that_recovered_beside_others_gets_its_share_again() -> None:
    quick = settings(breaker_failures=1, probe_min_s=0.05, probe_max_s=0.05, suspect_s=0.1, policy="round-robin")
    async with cluster([only_first(die, lease), lease], 1, settings=quick) as c:
        for _ in range(2):
            assert (await c.post(BODY))[0] == 200
        assert (await c.stats())["breakers_opened_total"] == 1
        asked = len(c.p[0].bodies)
        await until(lambda: c.p[0].probes)
        async with asyncio.timeout(20):
            while len(c.p[0].bodies) == asked:
                assert (await c.post(BODY))[0] == 200


async def test_a_request_that_every_worker_chokes_on_breaks_nobody() -> None:
    async with cluster([refuse(500)] * 3, 2, settings=settings(breaker_failures=1)) as c:
        for _ in range(5):
            assert (await c.post(BODY))[0] == 502
        assert (await c.stats())["breakers_opened_total"] == 0
        assert (await c.get("/health"))[0] == 200
    async with cluster([refuse(500), lease], 1, settings=settings(breaker_failures=1)) as c:
        for _ in range(2):
            assert (await c.post(BODY))[0] == 200
        assert (await c.stats())["breakers_opened_total"] == 1, "another could do it"


async def test_a_p_that_hangs_until_the_deadline_is_held_against_it() -> None:
    short = settings(deadline_s=3.0, first_byte_s=60, suspect_s=60)
    async with cluster([hang, lease], 1, settings=short) as c:
        ends = [(await c.post(BODY))[0] for _ in range(4)]
        late = ends.count(504)  # the leg and its request were due together: the machine had stood still
        assert ends.count(200) == 4 - late and late < 4
        assert len(c.p[0].bodies) == 1 + late


async def test_a_d_that_breaks_its_streams_off_is_asked_last() -> None:
    async def abort(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.abort()

    async with cluster(1, [begin_then(abort), speak], settings=settings(suspect_s=60)) as c:
        ends = [(await c.events(BODY))[-1] for _ in range(6)]
        assert [end for end in ends if end != "[DONE]"] == [end for end in ends[:2] if end != "[DONE]"]
        assert len(c.d[0].bodies) == 1


async def test_without_another_d_the_ticket_of_one_that_left_is_given_back() -> None:
    gate = asyncio.Event()
    async with cluster([after(gate, lease)], [hang]) as c:
        call = asyncio.create_task(c.post(BODY))
        await until(lambda: c.p[0].bodies)
        c.directory.lose("d0")
        gate.set()
        assert (await call)[0] == 502
        assert c.d[0].bodies == []
        assert len(c.discarded) == 1


@pytest.mark.parametrize("mode", ["stream", "push"])
async def test_a_p_that_refuses_the_routers_own_parameters_is_followed_by_another(mode: str) -> None:
    odd = refuse(400, "kv_transfer_params.ticket: odd", param="kv_transfer_params.ticket")
    asked = asyncio.Event()
    async with cluster([after(asked, odd), lease], [tells(asked, only_first(hang, speak))]) as c:
        assert (await c.post(BODY, x_kvbaton_mode=mode))[0] == 200


async def test_when_handoffs_keep_failing_fallback_local_still_answers() -> None:
    async def choosy(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        failed = refuse(500, "stale", type="handoff_failed", code="stale")
        return await (failed if "kv_transfer_params" in body else speak)(worker, request, body)

    async with cluster(3, [choosy] * 3, settings=LOCAL) as c:
        assert (await c.post(BODY))[0] == 200


async def test_p_is_asked_for_a_token_whatever_it_is() -> None:
    """MoRI-IO's P keeps nothing of a prompt that it answered with its end."""
    async with cluster() as c:
        await c.post({**BODY, "stop": ["x"], "stop_token_ids": [7], "ignore_eos": False})
        asked, told = c.p[0].bodies[0], c.d[0].bodies[0]
        assert asked["ignore_eos"] is True
        assert not {"stop", "stop_token_ids"} & set(asked)
        assert (told["stop"], told["stop_token_ids"], told["ignore_eos"]) == (["x"], [7], False)


# --- tickets that nobody will use


async def test_a_ticket_that_was_used_is_not_given_back() -> None:
    async def stop(_: web.Request, response: web.StreamResponse) -> None:
        await response.write_eof()

    async with cluster(1, [only_first(speak, begin_then(stop))]) as c:
        assert (await c.post(BODY))[0] == 200
        assert "error" in (await c.events(BODY))[-1]
        assert c.discarded == []


# --- who leaves the list


@pytest.mark.parametrize("gone", [True, False])
async def test_a_ticket_is_taken_to_another_d_when_the_chosen_one_drains_meanwhile(gone: bool) -> None:
    """A prefill may outlast a drain: it is not computed again."""
    gate = asyncio.Event()
    async with cluster([after(gate, lease)], [speak, speak], settings=settings(policy="round-robin")) as c:
        call = asyncio.create_task(c.post(BODY))
        await until(lambda: c.p[0].bodies)
        if gone:
            c.directory.lose("d0")
        else:
            c.directory.drain("d0")
        gate.set()
        assert (await call)[0] == 200
        assert (len(c.p[0].bodies), len(c.d[0].bodies), len(c.d[1].bodies)) == (1, 0, 1)
        assert c.discarded == []


async def test_a_stream_of_a_worker_that_drained_and_left_is_read_to_its_end() -> None:
    gate = asyncio.Event()

    async def end(_: web.Request, response: web.StreamResponse) -> None:
        await gate.wait()
        await response.write(b"data: [DONE]\n\n")

    async with cluster(1, [begin_then(end)]) as c:
        call = asyncio.create_task(c.events(BODY))
        await until(lambda: c.d[0].bodies)
        c.directory.drain("d0")
        async with asyncio.timeout(20):
            while (await c.get("/workers"))[1]["workers"][-1]["state"] != "draining":
                await asyncio.sleep(0.01)
        c.directory.lose("d0")
        async with asyncio.timeout(20):
            while len((await c.get("/workers"))[1]["workers"]) > 1:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)  # longer than the router takes to look who left
        gate.set()
        assert (await call)[-1] == "[DONE]"
        assert (await c.stats())["legs_dropped_total"] == 0


# --- drain


async def test_a_router_that_drains_takes_nothing_new_and_finishes_what_is_under_way() -> None:
    gate = asyncio.Event()
    async with cluster(1, [after(gate, speak)]) as c:
        call = asyncio.create_task(c.post(BODY))
        await until(lambda: c.d[0].bodies)
        ending = asyncio.create_task(c.app.drained(10))
        await asyncio.sleep(0)
        status, answer, headers = await c.post(BODY)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "draining", "1")
        status, health = await c.get("/health")
        assert (status, health["status"]) == (503, "draining")
        assert not ending.done()
        gate.set()
        assert (await call)[0] == 200
        assert await ending


async def test_draining_has_an_end() -> None:
    async with cluster(1, [hang]) as c:
        call = asyncio.create_task(c.post(BODY))
        await until(lambda: c.d[0].bodies)
        assert not await c.app.drained(0.1)
        call.cancel()


# --- bodies and headers


async def test_d_gets_the_clients_bytes_with_one_field_added() -> None:
    sent = b' { "prompt" : "abc", "max_tokens":4,"odd": [1e400, 1.50, 12345678901234567890] }\n'
    sent = sent.replace(b"1e400, ", b"")
    async with cluster() as c:
        await c.post(sent)
        raw = c.d[0].raw[0]
        assert raw.startswith(sent.rstrip()[:-1])
        assert c.d[0].bodies[0]["kv_transfer_params"]["ticket"] == "ticket-p0-1"


async def test_a_null_where_the_router_writes_is_overwritten() -> None:
    async with cluster() as c:
        await c.post({**BODY, "kv_transfer_params": None})
        assert c.d[0].raw[0].count(b"kv_transfer_params") == 1
        assert c.d[0].bodies[0]["kv_transfer_params"]["do_remote_prefill"] is True


# --- /v1/responses


def stream_of(*events: Any) -> Any:
    async def script(_: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in events:
            await response.write(b"event: " + each["type"].encode() + b"\n" + event(each))
        return response

    return script


CREATED = {"response": {"id": "resp_1"}, "sequence_number": 0, "type": "response.created"}
DELTA = {"delta": "A", "sequence_number": 1, "type": "response.output_text.delta"}
COMPLETED = {"response": {"id": "resp_1"}, "sequence_number": 2, "type": "response.completed"}
ASK = {"input": "abc", "max_output_tokens": 9, "min_tokens": 3}
PATH = "/v1/responses"


@pytest.mark.parametrize("mode", MODES)
async def test_a_response_is_handed_over_like_everything_else(mode: str) -> None:
    async with cluster(1, [say(b'{"id": "resp_1", "output": [], "kv_transfer_params": null}')]) as c:
        status, answer, _ = await c.post(ASK, PATH, x_kvbaton_mode=mode)
        assert (status, answer) == (200, {"id": "resp_1", "output": []})
        asked = c.p[0].bodies[0]
        assert (asked["max_output_tokens"], asked["min_tokens"], asked["stream"], asked["store"]) == (
            1,
            1,
            False,
            False,
        )
        assert "max_tokens" not in asked
        assert c.d[0].bodies[0]["max_output_tokens"] == 9


async def test_the_stream_of_a_response_ends_with_its_last_event() -> None:
    async with cluster(1, [stream_of(CREATED, DELTA, COMPLETED)]) as c:
        async with c.session.post(c.url + PATH, json={**ASK, "stream": True}) as answer:
            data = await answer.read()
        assert data.count(b"event: ") == 3
        assert b"error" not in data


async def test_the_stream_of_a_response_that_stops_short_ends_with_an_error_event() -> None:
    async with cluster(1, [stream_of(CREATED, DELTA)]) as c:
        async with c.session.post(c.url + PATH, json={**ASK, "stream": True}) as answer:
            data = await answer.read()
        assert data.rstrip().split(b"\n")[-2] == b"event: error"
        assert b"worker_died" in data


async def test_a_d_that_fails_after_it_only_said_that_it_began_is_followed_by_another() -> None:
    async def abort(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.abort()

    began = b"event: response.created\n" + event(CREATED)
    async with cluster(1, [begin_then(abort, began), stream_of(CREATED, DELTA, COMPLETED)]) as c:
        async with c.session.post(c.url + PATH, json={**ASK, "stream": True}) as answer:
            data = await answer.read()
        assert data.count(b"response.created") == 2  # as an event's name and as its type
        assert b"response.completed" in data


async def test_what_needs_a_memory_is_refused_by_name() -> None:
    async with cluster() as c:
        for field, value in (("previous_response_id", "resp_0"), ("background", True)):
            status, answer, _ = await c.post({**ASK, field: value}, PATH)
            assert (status, answer["error"]["param"]) == (400, field)
        assert c.p[0].bodies == []


# --- dialects

MORIIO = {"dialect": "moriio", "address": "host:127.0.0.1,handshake:{port},notify:{port}", "tp_size": 2}


async def leased(worker: FakeWorker, _: web.Request, body: dict[str, Any]) -> web.Response:
    """P of MoRI-IO in READ."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_host": "x"}
    return web.json_response(
        {"kv_transfer_params": {**params, "transfer_id": body["kv_transfer_params"]["transfer_id"]}}
    )


def addresses(worker: FakeWorker) -> request_ids.Addresses:
    found = request_ids.parse(worker.headers[-1]["X-Request-Id"])
    assert found is not None
    return found


async def test_moriio_read_has_addresses_in_the_id_and_ps_answer_goes_to_d() -> None:
    async with cluster([leased], [speak], modes=(Mode.PULL,), key=None, **MORIIO) as c:
        status, answer, headers = await c.post(BODY, X_Request_Id="mine")
        assert (status, answer["choices"][0]["text"], headers["X-Request-Id"]) == (200, "ABC", "mine")
        asked, told = c.p[0].params[0], c.d[0].params[0]
        assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
        assert told["remote_block_ids"] == [[1, 2]]
        assert told["transfer_id"] == asked["transfer_id"]
        assert addresses(c.p[0]) == addresses(c.d[0])
        assert str(addresses(c.p[0]).prefill) == "host:127.0.0.1,handshake:6300,notify:6300"
        assert request_ids.transfer_hex(asked["transfer_id"]) is not None


async def test_moriio_write_sends_both_off_at_once_under_one_transfer() -> None:
    async with cluster([say(b"{}")], [speak], modes=(Mode.PUSH,), key=None, **MORIIO) as c:
        assert (await c.post(BODY))[0] == 200
        assert (await c.events(BODY))[-1] == "[DONE]"
        for turn in range(2):
            asked, told = c.p[0].params[turn], c.d[0].params[turn]
            assert asked["transfer_id"] == told["transfer_id"]
            assert asked["remote_tp_size"] == told["remote_tp_size"] == 2
            assert told["do_remote_prefill"] is True
        assert c.p[0].params[0]["transfer_id"] != c.p[0].params[1]["transfer_id"]
        assert addresses(c.p[0]) == addresses(c.d[0])


@pytest.mark.parametrize("answers", [True, False])
async def test_p2p_nccl_has_addresses_in_the_id_and_needs_no_answer_of_p(answers: bool) -> None:
    p = lease if answers else say(b'{"choices": []}')
    more = {"dialect": "p2p_nccl", "address": "[::1]:{port}"}
    async with cluster([p], [speak], modes=(Mode.PULL,), key=None, **more) as c:
        assert (await c.post(BODY))[0] == 200
        assert str(addresses(c.d[0]).decode) == "[::1]:6301"
        assert ("kv_transfer_params" in c.d[0].bodies[0]) == answers


async def test_sglang_has_ps_bootstrap_and_a_room_in_the_body() -> None:
    """Both legs at once, in one new room a try; what a client says of rooms and addresses goes nowhere."""
    more = {"dialect": "sglang", "address": "[::1]:{port}"}
    async with cluster([say(b'{"choices": []}')], [speak], modes=(Mode.STREAM,), key=None, **more) as c:
        own = {"bootstrap_host": "10.0.0.66", "bootstrap_room": 5}
        assert (await c.post({**BODY, **own}))[0] == 200
        assert (await c.events(BODY))[-1] == "[DONE]"
        rooms = []
        for legs in zip(c.p[0].bodies, c.d[0].bodies, strict=True):
            told = [(body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"]) for body in legs]
            assert told[0] == told[1] and told[0][:2] == ("::1", 6300)
            assert not any("kv_transfer_params" in body for body in legs)
            rooms.append(told[0][2])
        assert all(0 < room < 1 << 63 and room != 5 for room in rooms) and rooms[0] != rooms[1]
        assert b"10.0.0.66" not in c.p[0].raw[0] + c.d[0].raw[0]
        assert c.p[0].bodies[0]["max_tokens"] == 1


async def test_of_a_response_the_id_stands_in_the_body_too() -> None:
    whole = say(b'{"id": "resp_1"}')
    async with cluster([whole], [whole], modes=(Mode.PUSH,), key=None, **MORIIO) as c:
        assert (await c.post(ASK, PATH))[0] == 200
        for worker in (c.p[0], c.d[0]):
            assert worker.bodies[0]["request_id"] == worker.headers[0]["X-Request-Id"]


# --- answers that cannot be joined, bodies that cannot be let in


@pytest.mark.parametrize("odd", [b'{"choices": 5}', b'{"choices": [5]}'])
async def test_answers_that_cannot_be_joined_are_the_workers_fault(odd: bytes) -> None:
    async with cluster(1, [say(odd)]) as c:
        status, answer, _ = await c.post({**BODY, "n": 2})
        assert (status, answer["error"]["code"]) == (502, "bad_answer")
    stream = say(b"data: " + odd + b"\n\ndata: [DONE]\n\n", "text/event-stream")
    async with cluster(1, [stream]) as c:
        status, answer, _ = await c.post({**BODY, "n": 2, "stream": True})
        assert (status, answer["error"]["code"]) == (502, "bad_answer")


async def test_what_could_never_be_let_in_is_the_clients_to_change() -> None:
    async with cluster(settings=settings(in_flight_max=4)) as c:
        status, answer, _ = await c.post({**BODY, "n": 5})
        assert (status, answer["error"]["param"]) == (400, "n")
    async with cluster() as c:
        status, answer, _ = await c.post({**BODY, "prompt": "x" * (3 << 20), "n": 64})
        assert (status, answer["error"]["param"]) == (400, "n")
        status, answer, _ = await c.post({**BODY, "ec_transfer_params": {"a": 1}})
        assert (status, answer["error"]["param"]) == (400, "ec_transfer_params")


async def test_embeddings_of_a_prompt_go_to_d_alone() -> None:
    async with cluster(1, [say(b'{"choices": []}')]) as c:
        assert (await c.post({"prompt_embeds": "AAAA", "max_tokens": 3}))[0] == 200
        assert c.p[0].bodies == []
        assert (await c.stats())["alone_total"] == {"prompt_embeds": 1}


async def test_a_prompt_that_is_only_repeated_goes_to_d_alone_and_as_it_came() -> None:
    """`echo` with `max_tokens: 0` was 400 here and is 200 at vLLM."""
    async with cluster() as c:
        body = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 0, "echo": True, "n": 2}
        assert (await c.post(body))[0] == 200
        assert c.p[0].raw == [] and len(c.d[0].bodies) == 1
        assert {name: c.d[0].bodies[0][name] for name in body} == body
        for more in ({}, {"echo": False}):
            status, answer, _ = await c.post({"model": "tiny", "prompt": "ab", "max_tokens": 0, **more})
            assert (status, answer["error"]["param"]) == (400, "max_tokens")
            assert "0 only with echo" in answer["error"]["message"]
