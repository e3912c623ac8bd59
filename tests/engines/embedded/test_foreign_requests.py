"""A worker's door, asked as other systems' routers ask: ids with addresses, nulls, several prompts, whole answers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvbaton.api.http.http_server import serving
from kvbaton.api.params import ForeignLookup, Mode, TransferParams
from kvbaton.engines.embedded.http_worker import GenerateRequest, worker_app
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import unseal
from tests.engines.embedded.test_server import FakeBackend

KEY = b"k" * 32
HEX = "0123456789abcdef" * 2
P_AT, D_AT = "host:10.0.0.1,handshake:7100,notify:7100", "host:10.0.0.2,handshake:7200,notify:7200"
ID = f"___prefill_addr_{P_AT}___decode_addr_{D_AT}_{HEX}"
BOOK = {("10.0.0.1", 7100): WorkerId("p0"), ("10.0.0.2", 7200): WorkerId("d0")}
TO_P: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "transfer_id": f"tx-{HEX}", "remote_dp_size": 1,
}  # fmt: skip
TO_D = {**TO_P, "do_remote_decode": False, "do_remote_prefill": True, "remote_tp_size": 1}
BODY: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 1, "temperature": 0}


class Door:
    def __init__(self, backend: FakeBackend, url: str, session: aiohttp.ClientSession) -> None:
        self.backend = backend
        self._url = url
        self._session = session

    async def post(self, params: object, request_id: str = ID, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {**BODY, "kv_transfer_params": params, **more}
        headers = {"X-Request-Id": request_id}
        async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
            data = await response.read()
            assert response.headers["Content-Length"] == str(len(data))
            assert "Transfer-Encoding" not in response.headers
            return response.status, json.loads(data)

    @property
    def handoffs(self) -> list[TransferParams | None]:
        return [request.handoff for request in sorted(self.backend.requests, key=_prompt)]


def _prompt(request: GenerateRequest) -> tuple[int, ...]:
    return request.prompt


@contextlib.asynccontextmanager
async def door(me: str, mode: Mode, modes: tuple[Mode, ...] = tuple(Mode)) -> AsyncIterator[Door]:
    lookup = ForeignLookup(mode, modes, WorkerId(me), KEY, 60.0, lambda host, port: BOOK.get((host, port)))
    backend = FakeBackend()
    async with serving(worker_app(backend, lookup=lookup), "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        yield Door(backend, url, session)


def handoff_of(params: TransferParams | None) -> str:
    assert params is not None and params.ticket is not None
    return unseal(params.ticket, [KEY], time.time()).handoff


async def test_moriio_read_asks_p_for_a_lease_and_d_with_what_p_said() -> None:
    async with door("p0", Mode.PULL) as p, door("d0", Mode.PULL) as d:
        status, answer = await p.post(TO_P)
        assert (status, p.handoffs) == (200, [TransferParams(do_remote_decode=True)])
        status, _ = await d.post({**answer["kv_transfer_params"], "remote_dp_size": 1, "later": None})
        assert (status, d.handoffs) == (200, [TransferParams(do_remote_prefill=True, ticket="t")])


@pytest.mark.parametrize("more", [{"n": 3}, {"prompt": ["a", "b", "c"]}])
async def test_moriio_write_makes_one_handoff_of_each_part_and_the_same_on_both_sides(more: dict[str, Any]) -> None:
    async with door("p0", Mode.PUSH) as p, door("d0", Mode.PUSH) as d:
        assert [(await p.post(TO_P, **more))[0], (await d.post(TO_D, **more))[0]] == [200, 200]
        found = [sorted(map(handoff_of, side.handoffs)) for side in (p, d)]
        assert found[0] == found[1] == [f"{HEX}.{n}" for n in range(3)]
        assert {each.mode for each in (*p.handoffs, *d.handoffs) if each} == {Mode.PUSH}


async def test_several_prompts_that_are_pulled_have_a_ticket_each() -> None:
    async with door("p0", Mode.PULL) as p, door("d0", Mode.PULL) as d:
        _, answer = await p.post(TO_P, prompt=["a", "b"])
        assert answer["kv_transfer_params"]["tickets"] == ["t", "t"]
        params = {**answer["kv_transfer_params"], "tickets": ["t0", "t1"]}
        assert (await d.post(params, prompt=["a", "b"]))[0] == 200
        assert [each.ticket for each in d.handoffs if each] == ["t0", "t1"]
        for odd in (["t0"], "t0", ["t0", "t0"], ["t0", 5]):
            status, answer = await d.post({**params, "tickets": odd}, prompt=["a", "b"])
            assert (status, answer["error"]["param"].partition(".")[0]) == (400, "kv_transfer_params")
        assert len(d.backend.requests) == 2


@pytest.mark.parametrize(
    ("params", "request_id", "code", "named"),
    [
        (TO_D, ID.replace("10.0.0.1", "10.0.0.9"), "peer_unknown", "host:10.0.0.9,handshake:7100"),
        (TO_D, ID.replace("10.0.0.2", "10.0.0.1"), "peer_unknown", "host:10.0.0.1,handshake:7200"),
        (TO_P, ID, "peer_unknown", "it is for p0 and d0, this is d0"),
        (TO_D, ID[:-1], "bad_message", "unique"),
        ({**TO_D, "transfer_id": "7"}, ID, "bad_message", "transfer_id"),
    ],
)
async def test_a_request_for_nobody_that_is_known_is_refused_by_name(
    params: dict[str, Any], request_id: str, code: str, named: str
) -> None:
    async with door("d0", Mode.PUSH) as d:
        status, answer = await d.post(params, request_id)
        assert (status, answer["error"]["code"]) == (400, code) and named in answer["error"]["message"]
        assert not d.backend.requests
        assert (await d.post(TO_D))[0] == 200


async def test_a_mode_that_the_worker_does_not_serve_is_refused() -> None:
    async with door("d0", Mode.PULL, (Mode.PULL,)) as d:
        status, answer = await d.post({"do_remote_prefill": True, "mode": "push", "ticket": "t"})
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.mode")


async def test_an_id_with_long_host_names_is_read_and_one_beyond_the_bound_is_not_taken() -> None:
    host = ".".join(["h" * 60] * 4)
    BOOK[host, 7100] = BOOK[host, 7200] = WorkerId("d0")
    long = ID.replace("10.0.0.1", host).replace("10.0.0.2", host)
    async with door("d0", Mode.PUSH) as d:
        assert len(long) > 256 and (await d.post(TO_D, long))[0] == 200
        assert d.backend.requests[-1].request_id.startswith(long)
        assert (await d.post(None, "x" * 1025))[0] == 200
        assert "x" not in d.backend.requests[-1].request_id
