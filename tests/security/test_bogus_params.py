"""Whatever a client sends as `kv_transfer_params` or request id, at the router and at an engine's own port: a refusal
or the right answer, an engine that lives, and no connection to any host that the client chose.

Promises 1, 2, 4 and 5. The rows are those under which vLLM's NIXL connector hung, answered wrong or died (measured in
this project's baseline), and CVE-2026-94622, 94623, 94624 and 94626.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbaton.api.params import Mode
from kvbaton.control import keyring as keys
from kvbaton.engines.side.asks import ForeignLookup, Target, ask_of
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, unseal
from tests.e2e.cluster import all_at_rest
from tests.security.strangers.besieged import ANSWER_TOKENS, Siege, siege

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HEX = "0123456789abcdef" * 2
DELETE = object()
PROMPT = 3
OTHER = 4

ROWS: Mapping[str, Mapping[str, Any]] = {
    "nothing but the flag": dict.fromkeys(
        ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"), DELETE
    ),
    "wrong engine id": {"remote_engine_id": "nobody"},
    "no engine id": {"remote_engine_id": DELETE},
    "engine id a list": {"remote_engine_id": ["p0"]},
    "engine id an object": {"remote_engine_id": {"a": 1}},
    "no request id": {"remote_request_id": DELETE},
    "request id a number": {"remote_request_id": 5},
    "unknown request id": {"remote_request_id": "cmpl-unknown"},
    "no host": {"remote_host": DELETE},
    "host a number": {"remote_host": 7},
    "unroutable host": {"remote_host": "192.0.2.1"},
    "metadata service": {"remote_host": "169.254.169.254", "remote_port": 80},
    "bad name": {"remote_host": "no.such.host.invalid"},
    "closed port": {"remote_port": 1},
    "port out of range": {"remote_port": 99999999},
    "port a text": {"remote_port": "x"},
    "no tp_size": {"tp_size": DELETE},
    "tp_size 0": {"tp_size": 0},
    "tp_size 8": {"tp_size": 8},
    "tp_size beyond memory": {"tp_size": 1 << 62},
    "tp_size a text": {"tp_size": "x"},
    "no block ids": {"remote_block_ids": DELETE},
    "empty block ids": {"remote_block_ids": []},
    "an empty group": {"remote_block_ids": [[]]},
    "flat block ids": {"remote_block_ids": [1, 2]},
    "block ids a text": {"remote_block_ids": "abc"},
    "block ids of texts": {"remote_block_ids": [["a"]]},
    "two groups": {"remote_block_ids": [[1], [2]]},
    "large block ids": {"remote_block_ids": [[10**6]]},
    "huge block ids": {"remote_block_ids": [[1 << 62]]},
    "negative block ids": {"remote_block_ids": [[-1]]},
    "too many block ids": {"remote_block_ids": [list(range(10_000))]},
    "floats": {"remote_port": 1.5, "tp_size": 0.1, "remote_block_ids": [[1.5]]},
    "both flags": {"do_remote_decode": True},
    "a flag that is no flag": {"do_remote_prefill": "yes"},
    "a mode that there is not": {"mode": "teleport"},
    "a mode that is no text": {"mode": 5},
    "a ticket that is no text": {"ticket": 5},
    "a long ticket": {"ticket": "t" * (TICKET_CHARS_MAX + 1)},
    "a forged ticket": {"ticket": "AAAA" * 40},
    "tickets that are no list": {"tickets": "x"},
    "another number of tickets": {"tickets": ["a", "b"]},
    "a transfer id": {"transfer_id": f"tx-{HEX}"},
    "a transfer id that is none": {"transfer_id": "tx-" + "z" * 10_000},
    "push without a source": {"mode": "push"},
}


class Front:
    """An honest cluster, the addresses of its engines, and an address that nobody should dial."""

    def __init__(self, town: Siege, canary: socket.socket) -> None:
        self.town = town
        self.canary = canary
        self.address = canary.getsockname()
        listed = asyncio.run(self._workers())
        self.p, self.d = listed["p0"], listed["d0"]

    async def _workers(self) -> dict[str, str]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.town.cluster.url}/workers") as response:
            return {each["name"]: each["url"] for each in (await response.json())["workers"]}

    def foreign(self) -> dict[str, Any]:
        """What vLLM's NIXL connector would have been told."""
        host, port = self.address
        told = {"remote_host": host, "remote_port": port, "remote_request_id": "cmpl-1", "tp_size": 1}
        return {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_block_ids": [[1, 2]], **told}

    async def post(
        self, session: aiohttp.ClientSession, url: str, params: Any, number: int, name: str = "", **more: Any
    ) -> tuple[int, Any]:
        body = {"prompt": self.town.prompts[number], "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        headers = {"X-Request-Id": name} if name else {}
        if params is not None:
            body["kv_transfer_params"] = params
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def prefilled(self, session: aiohttp.ClientSession, number: int) -> dict[str, Any]:
        """Parameters that P gave for a prompt, good for D once."""
        status, told = await self.post(session, self.p, {"do_remote_decode": True}, number, max_tokens=1)
        assert status == 200
        return dict(told["kv_transfer_params"])

    def well(self) -> None:
        """Nobody dialled, everybody lives, nothing went wrong inside and nothing is held."""
        with pytest.raises(BlockingIOError):
            self.canary.accept()
        assert all(os.path.exists(f"/proc/{pid}") for pid in self.town.pids)
        stats = asyncio.run(all_at_rest(self.town.cluster, {"p0", "d0"}))
        assert [each["faults_total"] for each in stats.values()] == [0, 0]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    flags = ("--lease-s", "1", "--claim-timeout", "1", "--defer-timeout", "1", "--transfer-timeout", "2")
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        with siege(tmp_path_factory.mktemp("front"), *flags) as town:
            yield Front(town, canary)


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))


def changed(params: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**params, **change}
    return {key: value for key, value in merged.items() if value is not DELETE}


def judged(front: Front, status: int, answer: Any, number: int = PROMPT) -> None:
    """A refusal that the client can act on, or the one right answer."""
    if status == 200:
        assert answer["choices"][0]["text"] == front.town.answers[number]
    else:
        assert 400 <= status < 500 and answer["error"]["message"], (status, answer)


def test_bogus_parameters_at_an_engines_own_port_are_refused_or_harmless(front: Front) -> None:
    async def story() -> None:
        async with session() as talk:
            for name, change in ROWS.items():
                for params in (changed(front.foreign(), change), changed(await front.prefilled(talk, PROMPT), change)):
                    try:
                        judged(front, *await front.post(talk, front.d, params, PROMPT))
                    except (AssertionError, TimeoutError) as error:
                        raise AssertionError(f"{name}: {error!r}") from error

    asyncio.run(story())
    front.well()


def test_parameters_that_are_no_object_are_refused(front: Front) -> None:
    async def story() -> None:
        async with session() as talk:
            for params in ("x", [1], 5, True, [{"do_remote_prefill": True}]):
                for url in (front.d, front.p, front.town.cluster.url):
                    status, _ = await front.post(talk, url, params, PROMPT)
                    assert status == 400

    asyncio.run(story())
    front.well()


def test_the_router_takes_no_parameters_from_a_client_at_all(front: Front) -> None:
    async def story() -> None:
        async with session() as talk:
            good = await front.prefilled(talk, PROMPT)
            for params in (good, front.foreign(), {}, {"do_remote_prefill": True}):
                status, told = await front.post(talk, front.town.cluster.url, params, PROMPT)
                assert (status, told["error"]["param"]) == (400, "kv_transfer_params")

    asyncio.run(story())
    front.well()


def test_a_ticket_is_good_once_and_for_its_own_prompt(front: Front) -> None:
    async def story() -> None:
        async with session() as talk:
            params = await front.prefilled(talk, PROMPT)
            for number in (PROMPT, PROMPT, OTHER):  # used, replayed, and taken to another prompt
                status, told = await front.post(talk, front.d, params, number)
                judged(front, status, told, number)
            again = await front.prefilled(talk, PROMPT)
            judged(front, *await front.post(talk, front.d, again, OTHER), OTHER)

    asyncio.run(story())
    front.well()


def test_addresses_in_request_ids_lead_nowhere(front: Front) -> None:
    """Nobody dials the canary: not from an id, not from a transfer id with it, not from parameters beside it."""
    host, port = front.address
    ids = [
        f"___prefill_addr_{host}:{port}___decode_addr_{host}:{port}_{HEX}",
        f"___prefill_addr_host:{host},handshake:{port},notify:{port}"
        f"___decode_addr_host:{host},handshake:{port},notify:{port}_{HEX}",
        f"cmpl-___prefill_addr_{host}:{port}___decode_addr_{host}:{port}_{HEX}-0-12345678",
        f"___prefill_addr_{host}:{port}",
    ]
    asked = ({**front.foreign(), "transfer_id": f"tx-{HEX}"}, {"do_remote_prefill": True, "transfer_id": f"tx-{HEX}"})

    async def story() -> None:
        async with session() as talk:
            for name in ids:
                for params in (None, *asked):
                    judged(front, *await front.post(talk, front.d, params, PROMPT, name))
                    judged(front, *await front.post(talk, front.town.cluster.url, params, PROMPT, name))

    asyncio.run(story())
    front.well()


def test_several_prompts_and_answers_with_one_ticket_are_refused_or_right(front: Front) -> None:
    """CVE-2026-94623: a body of several prompts met an assertion in the engine."""
    texts = [front.town.prompts[PROMPT], front.town.prompts[OTHER]]
    right = [front.town.answers[PROMPT], front.town.answers[OTHER]]

    async def story() -> None:
        async with session() as talk:
            for more in ({"prompt": texts}, {"n": 3}, {"prompt": texts, "n": 2}):
                for params in (front.foreign(), await front.prefilled(talk, PROMPT)):
                    status, told = await front.post(talk, front.d, params, PROMPT, **more)
                    assert 400 <= status < 500, told
            status, told = await front.post(talk, front.town.cluster.url, None, PROMPT, prompt=texts, n=2)
            assert status == 200
            assert [each["text"] for each in told["choices"]] == [right[0], right[0], right[1], right[1]]

    asyncio.run(story())
    front.well()


def test_log_probabilities_of_a_prompt_are_never_told_from_memory_that_nobody_computed(front: Front) -> None:
    """CVE-2026-116180: the embedded engine has none, and says so, with and without KV from elsewhere."""

    async def story() -> None:
        async with session() as talk:
            for more in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}, {"echo": True}):
                good = await front.prefilled(talk, PROMPT)
                for url, params in ((front.d, good), (front.d, None), (front.town.cluster.url, None)):
                    status, told = await front.post(talk, url, params, PROMPT, **more)
                    assert status == 400 and told["error"]["param"] in more, told

    asyncio.run(story())
    front.well()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mode", list(Mode))
def test_the_vllm_connector_takes_the_same_rows_for_a_handoff_nothing_or_one_refusal(row: str, mode: Mode) -> None:
    """Before its scheduler sees anything; nothing but ProtocolError, which costs that request a local prefill."""
    foreign = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_block_ids": [[1]], "remote_host": "x"}
    lookup = ForeignLookup(mode, tuple(Mode), WorkerId("d0"), b"k" * 32, 60.0, lambda host, port: None)
    for name in ("cmpl-1-0-12345678", f"___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.9:2_{HEX}"):
        asked = SimpleNamespace(kv_transfer_params=changed(foreign, ROWS[row]), request_id=name)
        try:
            found = ask_of(asked, lookup)
        except ProtocolError as error:
            assert error.detail
        else:
            assert found is None or (isinstance(found, Target) and found.ticket)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "do_remote_decode", "do_remote_prefill", "mode", "ticket", "tickets", "transfer_id", "remote_engine_id",
        "remote_block_ids", "remote_host", "remote_port", "tp_size", "remote_request_id",
    ]
)  # fmt: skip
PARAMS = st.dictionaries(FIELDS, JSON | st.just(True) | st.sampled_from(["push", "stream", "pull"]), max_size=6)


@given(many=st.lists(st.tuples(PARAMS, st.text(max_size=40)), min_size=8, max_size=24))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parameters_are_refused_or_harmless(front: Front, many: list[tuple[dict[str, Any], str]]) -> None:
    async def story() -> None:
        async with session() as talk:

            async def one(params: dict[str, Any], name: str) -> None:
                printable = "".join(char for char in name if char.isascii() and char.isprintable())
                tokens = 1 if params.get("do_remote_decode") is True else ANSWER_TOKENS
                status, told = await front.post(talk, front.d, params, PROMPT, printable, max_tokens=tokens)
                if status != 200 or tokens > 1:
                    judged(front, status, told)

            await asyncio.gather(*(one(*each) for each in many))

    asyncio.run(story())


def test_after_all_of_it_nobody_was_dialled_and_nothing_is_held(front: Front) -> None:
    front.well()
    figures = front.town.honest(0.5)
    assert not figures.bad and figures.right


def test_requests_that_share_an_id_share_nothing_else(front: Front) -> None:
    """CVE-2026-94627: ids that clients choose collide; those by which KV goes over are minted by servers."""

    async def story() -> None:
        async with session() as talk:
            for url in (front.town.cluster.url, front.d):
                asked = (front.post(talk, url, None, number, "the-same-id") for number in range(8))
                answers = await asyncio.gather(*asked)
                assert [told["choices"][0]["text"] for _, told in answers] == front.town.answers[:8]
            tickets = [(await front.prefilled(talk, PROMPT))["ticket"] for _ in range(8)]
            keyring = keys.load(front.town.key_directory(), "p0")
            minted = {unseal(ticket, keyring.ticket_keys, time.time()).handoff for ticket in tickets}
            assert len(minted) == 8 and all(re.fullmatch(r"[0-9a-f]{32}(\.0)?", each) for each in minted)

    asyncio.run(story())
    front.well()
