"""The formats that we read and write, against the real `vllm-router`: only run where it is installed.

Workers are fakes that record what reaches them; what they must receive is written down in full.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import aiohttp
import pytest
from aiohttp import web

from kvbaton.api.request_ids import Addresses, HostPort, MoriioAddress, PeerAddress, parse, parse_address, transfer_hex
from kvbaton.control.plain.announcer import (
    MoriioAnnouncer,
    MoriioRegistration,
    Role,
    TransferMode,
    p2p_nccl_registration,
    registration,
)
from kvbaton_proof.bench.router.router_toy import Toy
from kvbaton_proof.rig.client import TO_PREFILL
from tests.aiohttp_server import serving
from tests.vllm.router_process import moriio_router, nixl_router, p2p_nccl_router

P_PEER, D_PEER = MoriioAddress("127.0.0.1", 6301, 61005), MoriioAddress("127.0.0.1", 6401, 61105)
P_TP, D_TP = 2, 4
FROM_P = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 4]], "remote_engine_id": "p:1"}
PATHS = ["/v1/completions", "/v1/chat/completions"]
CLIENT_PARAMS = {"do_remote_decode": True, "remote_host": "10.9.9.9"}  # a client that would steer


class Worker:
    """Answers as an engine would and remembers what it was asked."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.address = ""
        self.form: Literal["compact", "spaced", "chunked"] = "compact"  # of a whole answer
        self.more: dict[str, Any] = {}  # in an answer
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []

    @property
    def params(self) -> dict[str, Any]:
        found: dict[str, Any] = self.bodies[-1]["kv_transfer_params"]
        return found

    @property
    def addresses(self) -> Addresses:
        found = parse(self.ids[-1])
        assert found is not None, self.ids[-1]
        return found

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/{rest:.*}", self._handle)
        app.router.add_get("/{rest:.*}", self._fine)
        return app

    async def _fine(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "data": [{"id": "tiny"}]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.ids.append(request.headers["X-Request-Id"])
        choice = {"index": 0, "text": self.role, "message": {"role": "assistant", "content": self.role}}
        answer = {"id": "x", "object": "o", "created": 1, "model": "tiny", "choices": [choice], **self.more}
        if self.role == "P":
            kept = {
                key: body["kv_transfer_params"][key] for key in ("transfer_id",) if key in body["kv_transfer_params"]
            }
            return web.json_response({**answer, "kv_transfer_params": {**FROM_P, **kept}})
        if not body.get("stream"):
            return await self._whole(request, answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in (b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"data: [DONE]\n\n"):
            await response.write(data)
        return response

    async def _whole(self, request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        if self.form != "chunked":
            text = json.dumps(answer, separators=(",", ":")) if self.form == "compact" else json.dumps(answer)
            return web.Response(body=text, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(json.dumps(answer).encode())
        return response


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    async with AsyncExitStack() as stack:
        workers = Worker("P"), Worker("D")
        for worker in workers:
            url = await stack.enter_async_context(serving(worker.app(), "127.0.0.1", 0))
            worker.address = url.removeprefix("http://")
        yield workers


@asynccontextmanager
async def announced(discovery: str, *said: MoriioRegistration) -> AsyncIterator[None]:
    announcers = [MoriioAnnouncer(discovery, one) for one in said]
    for announcer in announcers:
        announcer.start()
    try:
        yield
    finally:
        for announcer in announcers:
            assert await asyncio.to_thread(announcer.stop)
            assert announcer.counters["sent"] >= 1 and announcer.counters["failed"] == 0


@asynccontextmanager
async def moriio(mode: TransferMode) -> AsyncIterator[tuple[str, Worker, Worker]]:
    """A fresh router (it keeps the first mode it hears of), and a pair announced to it."""
    async with pair() as (p, d), moriio_router() as router:
        said = (
            registration("P", p.address, str(P_PEER), transfer_mode=mode, tp_size=P_TP),
            registration("D", d.address, str(D_PEER), transfer_mode=mode, tp_size=D_TP),
        )
        async with announced(router.discovery, *said):
            await router.until_paired()
            yield router.url, p, d


async def ask(url: str, path: str, within_s: float = 20.0, **more: Any) -> bytes:
    body = {"model": "tiny", "max_tokens": 7, "temperature": 0, "kv_transfer_params": CLIENT_PARAMS, **more}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    timeout = aiohttp.ClientTimeout(total=within_s)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url + path, json=body) as response:
        data = await response.read()
        assert response.status == 200, data
        return data


def check_ids(p: Worker, d: Worker, prefill: PeerAddress, decode: PeerAddress) -> None:
    """Both legs carry one id, and it names the pair."""
    assert p.ids[-1] == d.ids[-1]
    assert p.addresses == Addresses(prefill, decode, p.addresses.unique)


def check_legs(p: Worker, d: Worker) -> None:
    """P is asked for one token and no stream, D for what the client wanted."""
    assert len(p.bodies) == len(d.bodies)
    assert (p.bodies[-1]["max_tokens"], p.bodies[-1]["stream"]) == (1, False)
    assert d.bodies[-1]["max_tokens"] == 7


@pytest.mark.parametrize("path", PATHS)
async def test_moriio_read_hands_ps_answer_to_d(path: str) -> None:
    async with moriio("READ") as (url, p, d):
        assert json.loads(await ask(url, path))["choices"][0]["message"]["content"] == "D"
        check_legs(p, d)
        check_ids(p, d, P_PEER, D_PEER)
        transfer_id = p.params["transfer_id"]
        assert transfer_hex(transfer_id) is not None
        assert p.params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": transfer_id,
            "remote_dp_size": 1,
        }
        assert d.params == {**FROM_P, "transfer_id": transfer_id, "remote_dp_size": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_moriio_write_tells_both_at_once_with_each_others_tp_size(path: str) -> None:
    async with moriio("WRITE") as (url, p, d):
        assert (await ask(url, path, stream=True)).endswith(b"data: [DONE]\n\n")
        check_legs(p, d)
        check_ids(p, d, P_PEER, D_PEER)
        transfer_id = p.params["transfer_id"]
        assert transfer_hex(transfer_id) is not None
        nothing = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": transfer_id}
        p_side = {"do_remote_decode": True, "do_remote_prefill": False, "remote_tp_size": D_TP, "remote_dp_size": 1}
        d_side = {"do_remote_decode": False, "do_remote_prefill": True, "remote_tp_size": P_TP, "remote_dp_size": 1}
        assert p.params == nothing | p_side
        assert d.params == nothing | d_side


async def test_in_discovery_mode_only_a_compact_answer_with_its_length_arrives() -> None:
    """What a worker behind it must send. The router writes a chat answer anew and keeps the length that came with it,
    so the client waits for the rest; and it breaks the connection over a whole answer in chunks. When this fails, it
    no longer does, and workers are free."""
    async with moriio("READ") as (url, _, d):
        await ask(url, PATHS[1])
        d.form = "spaced"
        with pytest.raises(TimeoutError):
            await ask(url, PATHS[1], within_s=2.0)
        d.form = "chunked"
        for path in PATHS:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await ask(url, path)


async def test_in_discovery_mode_a_number_of_more_than_15_digits_can_cost_the_client_its_answer() -> None:
    """The router reads numbers inexactly: this one, a float32 logprob, comes back as -1.331692457199097, a digit
    shorter than the length says. Of 2,000 such, 88 changed their length; of 2,000 float64 of 15
    digits, none."""
    async with moriio("READ") as (url, _, d):
        d.more = {"logprob": -1.3316924571990967}
        with pytest.raises(TimeoutError):
            await ask(url, PATHS[1], within_s=2.0)
        d.more = {"logprob": float(f"{-1.3316924571990967:.15g}")}
        assert json.loads(await ask(url, PATHS[1]))["logprob"] == -1.3316924571991


async def test_each_request_has_a_hex_and_a_transfer_id_of_its_own() -> None:
    async with moriio("READ") as (url, p, d):
        for _ in range(5):
            await ask(url, PATHS[0])
        assert len({found.unique for found in map(parse, p.ids) if found is not None}) == 5
        assert len({body["kv_transfer_params"]["transfer_id"] for body in d.bodies}) == 5


async def test_a_worker_stays_listed_while_it_announces_and_is_forgotten_after() -> None:
    async with pair() as (p, d), moriio_router() as router:
        said = [
            registration(worker.role, worker.address, str(peer), transfer_mode="READ")
            for worker, peer in ((p, P_PEER), (d, D_PEER))
        ]
        async with announced(router.discovery, *said), aiohttp.ClientSession() as session:
            await router.until_paired()
            until = asyncio.get_running_loop().time() + 10
            while asyncio.get_running_loop().time() < until:  # two lives of a listing
                async with session.get(router.url + "/health") as response:
                    assert response.status == 200
                await asyncio.sleep(0.25)
        async with aiohttp.ClientSession() as session, asyncio.timeout(10):
            while True:
                async with session.get(router.url + "/health") as response:
                    if response.status == 503:
                        break
                await asyncio.sleep(0.1)


async def test_p2p_nccl_is_announced_and_named_by_host_and_port() -> None:
    async with pair() as (p, d), p2p_nccl_router() as router:
        said = (
            p2p_nccl_registration("P", p.address, "127.0.0.1:21001"),
            p2p_nccl_registration("D", d.address, "127.0.0.1:22001"),
        )
        async with announced(router.discovery, *said):
            await router.until_paired()
            await ask(router.url, PATHS[0])
            check_legs(p, d)
            check_ids(p, d, HostPort("127.0.0.1", 21001), HostPort("127.0.0.1", 22001))
            assert p.params == TO_PREFILL
            assert d.params == FROM_P


@pytest.mark.parametrize("path", PATHS)
async def test_nixl_url_mode_hands_ps_answer_to_d(path: str) -> None:
    async with pair() as (p, d), nixl_router([f"http://{p.address}"], [f"http://{d.address}"]) as router:
        await ask(router.url, path)
        check_legs(p, d)
        check_ids(p, d, parse_address(p.address), parse_address(d.address))
        assert p.params == TO_PREFILL  # as vLLM's toy proxy says it
        assert d.params == FROM_P


@pytest.mark.parametrize("path", PATHS)
async def test_our_toy_proxy_does_the_same_with_a_plain_id(path: str) -> None:
    async with pair() as (p, d):
        proxy = Toy(f"http://{p.address}", f"http://{d.address}")
        async with serving(proxy.app(), "127.0.0.1", 0) as url:
            assert (await ask(url, path, stream=True)).endswith(b"data: [DONE]\n\n")
        check_legs(p, d)
        assert p.ids == d.ids and parse(p.ids[0]) is None
        assert d.params == FROM_P and list(proxy.handed) == [FROM_P]
