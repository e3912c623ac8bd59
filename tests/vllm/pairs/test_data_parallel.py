"""A dense model on two data-parallel ranks, P and D alike: every answer is that of one engine, in every mode, whichever
ranks serve it; behind kvbaton's router and behind the real vllm-router. The KV goes over NIXL.

All cases share one pair of servers, since a request says how its KV goes over. Other shapes: test_data_parallel_shapes;
one rank a side over NIXL, without a registry: test_routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.duo import MODES, TOKENS, Duo, answers_behind, by_rank, ends, label, prompt_of, running_duo, same
from tests.vllm.engines import IN_THE_CORE, free_port
from tests.vllm.router_process import moriio_router

pytestmark = pytest.mark.timeout(1200)

LENGTHS = (5, 127, 128, 129, 300, 512, 777, 1300)


@pytest.fixture(scope="module")
def discovery() -> str:
    """Where P and D announce themselves as MoRI-IO's workers do, besides registering."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def duo(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, discovery: str
) -> Iterator[Duo]:
    extra = {"mode": "push", "transport": "nixl", "moriio": {"router": discovery, "transfer_mode": "WRITE"}}
    directory = tmp_path_factory.mktemp("ranks")
    with running_duo(
        vllm_python, tiny("llama"), directory,
        p_extra=extra, d_extra=extra, p_args=IN_THE_CORE, d_args=IN_THE_CORE, ranks=(2, 2),
    ) as duo:  # fmt: skip
        yield duo


def on_rank(rank: int) -> dict[str, Any]:
    return {"headers": {"X-data-parallel-rank": str(rank)}}


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_hand_over_and_answer_as_one_engine(duo: Duo, mode: str) -> None:
    prompts = [prompt_of(length, f"ranks {mode}") for length in LENGTHS]
    before, ranks = duo.delivered(), by_rank(duo.d, "kvbaton_ends_total")
    answers = duo.ask_all(prompts, mode, at_once=4)
    duo.come_to_rest()
    duo.handed_over(before, len(prompts), mode)
    served = by_rank(duo.d, "kvbaton_ends_total")
    assert {rank for rank in served if served[rank] > ranks.get(rank, 0)} == {"0", "1"}, "both ranks of D"
    alone = [duo.p.ask(prompt, TOKENS, **on_rank(0)) for prompt in prompts]
    assert [len(x) for x, a, b in zip(prompts, answers, alone, strict=True) if not same(a, b)] == [], mode


def test_a_ticket_of_either_rank_is_good_at_either_rank_and_no_header_is_needed(duo: Duo) -> None:
    """A pull behind any proxy: P's answer names the rank that has the KV."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "mode": "pull"}
    before = duo.delivered()
    legs = [(p, d) for p in (on_rank(0), on_rank(1), {}) for d in (on_rank(1), on_rank(0), {})]
    prompts = [prompt_of(300 + number, "either") for number in range(len(legs))]
    for prompt, (p, d) in zip(prompts, legs, strict=True):
        told = duo.p.ask(prompt, 1, kv_transfer_params=params, **p).kv_transfer_params
        answer = duo.d.ask(prompt, TOKENS, kv_transfer_params=told, **d)
        assert same(answer, duo.p.ask(prompt, TOKENS)), (p, d)
    duo.come_to_rest()
    duo.handed_over(before, len(legs))


async def test_push_behind_the_real_router_while_leases_end_that_nobody_came_for(duo: Duo, discovery: str) -> None:
    """Both ranks of both sides; those of P idle when the leases that each still has run out."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "mode": "pull"}
    for rank in (0, 1):
        told = duo.p.ask(prompt_of(400, f"left {rank}"), 1, kv_transfer_params=params, **on_rank(rank))
        assert told.kv_transfer_params is not None and told.kv_transfer_params["do_remote_prefill"] is True

    async with moriio_router("--intra-node-data-parallel-size", "2", address=discovery) as router:
        await router.until_paired()
        await asyncio.to_thread(answers_behind, router.url, duo, "vllm-router, MoRI-IO WRITE, two ranks")


def test_an_address_that_no_engine_has_costs_a_local_prefill(duo: Duo) -> None:
    stranger = "___prefill_addr_host:10.255.255.1,handshake:6301,notify:61005___decode_addr_host:127.0.0.1,"
    stranger += f"handshake:1,notify:1_{'a' * 32}"
    params = {"do_remote_prefill": True, "transfer_id": "tx-" + "a" * 32}
    prompt = prompt_of(200, "stranger")
    told = duo.d.ask(prompt, TOKENS, kv_transfer_params=params, headers={"X-Request-Id": stranger})
    assert same(told, duo.p.ask(prompt, TOKENS))
    assert ends(duo.d).get("peer_unknown") == 1


def test_zz_no_handoff_met_another_rank_than_it_was_for(duo: Duo) -> None:
    found = ends(duo.d)
    assert set(found) == {"delivered", "peer_unknown"}, found
    planes = {label(name, "transport") for name in duo.d.metrics() if name.startswith("kvbaton_links_total{")}
    assert planes == {"nixl"}
    assert all(by_rank(duo.p, "vllm:prompt_tokens_total").values()), "both ranks of P computed prompts"
