"""Turns of conversations: D keeps what a request ended with, and the P of the next turn takes it from there."""

from __future__ import annotations

import asyncio
import json
import secrets
import time

import aiohttp
import msgspec
import pytest

from kvbaton.api.params import Mode, TransferParams, TurnOffer, source_params, target_params
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.protocol.ids import HandoffId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from tests.e2e.cluster import up
from tests.e2e.pair import Pair, generate, pair

pytestmark = pytest.mark.timeout(120)
ANSWER_TOKENS = 40
FIRST = "A conversation begins here, and it is long enough to be of several blocks of tokens. " * 4
MORE = ("And what is more, tell me about batons.", "Thank you. One last question about relays.")


def ticket_of(both: Pair, handoff: HandoffId, target: str = "") -> str:
    return seal(Ticket(handoff, WorkerId("d0"), time.time() + 60, target=WorkerId(target)), both.key)


async def one_turn(both: Pair, prompt: str, turn: TurnOffer | None, keep: HandoffId) -> tuple[str, TurnOffer]:
    """An answer, and what the router would tell the P of the next turn."""
    params = TransferParams(do_remote_decode=True, turn=turn)
    _, told = await generate(both.p, prompt, 1, params)
    asked = TransferParams.parse({**(told or {}), "keep": ticket_of(both, keep)})
    text, _ = await generate(both.d, prompt, ANSWER_TOKENS, asked)
    tokens = len(tokenizer.encode(prompt)) + len(text)
    return text, TurnOffer(ticket_of(both, keep, "p0"), tokens)


def new_handoff() -> HandoffId:
    return handoff_id(TransferId(secrets.token_hex(16)))


async def talk(both: Pair) -> list[tuple[str, str]]:
    prompt, turn, said = FIRST, None, []
    for more in (*MORE, ""):
        text, turn = await one_turn(both, prompt, turn, new_handoff())
        said.append((prompt, text))
        prompt += text + more
    return said


@pytest.mark.parametrize(("p", "d"), [({}, {}), ({"block_tokens": 32}, {"block_tokens": 8}), ({"tp": 2}, {})])
async def test_the_next_turn_takes_from_d_what_it_need_not_compute(tmp_path, p, d):
    async with pair(tmp_path, p=p, d={"turn_s": 30.0, **d}) as both:
        said = await talk(both)
        assert [text for _, text in said] == reference_answers([prompt for prompt, _ in said], ANSWER_TOKENS)
        stats, kept = both.p.stats(), both.d.stats()
        assert stats["turn_loads_total"] == {"taken": 2}
        size = p.get("block_tokens", 16)  # P has what it computed itself, in whole blocks
        computed = [len(tokenizer.encode(prompt)) // size * size for prompt, _ in said[:2]]
        had = [len(tokenizer.encode(prompt + text)) - 1 for prompt, text in said[:2]]
        assert stats["turn_tokens_total"] == sum(had) - sum(computed)
        assert kept["turns_total"] == {"kept": 3, "taken": 2}
        assert kept["pins"] == kept["turn_blocks"] > 0, "the third waits for a fourth turn"


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.PUSH])
async def test_a_d_that_was_asked_at_once_waits_for_a_p_that_takes_a_turn(tmp_path, mode):
    """P's prompt begins with a load; D reads behind what P computes, or is written to, from the load on."""
    async with pair(tmp_path, d={"turn_s": 30.0}) as both:
        text, turn = await one_turn(both, FIRST, None, new_handoff())
        prompt, ticket = FIRST + text + MORE[0], both.ticket()
        source = msgspec.structs.replace(TransferParams.parse(source_params(mode, ticket)), turn=turn)
        target = TransferParams.parse(target_params(mode, ticket))
        _, (said, _) = await asyncio.gather(
            generate(both.p, prompt, 1, source), generate(both.d, prompt, ANSWER_TOKENS, target)
        )
        assert [said] == reference_answers([prompt], ANSWER_TOKENS)
        assert both.p.stats()["turn_loads_total"] == {"taken": 1}
        assert both.d.stats()["ends_total"] == {"delivered": 2}
        await both.at_rest()


async def test_a_turn_of_other_words_is_computed_and_shows_nothing(tmp_path):
    """Promises 1 and 5: a ticket that is valid, with a conversation that is not the one it is of."""
    async with pair(tmp_path, d={"turn_s": 30.0}) as both:
        text, turn = await one_turn(both, FIRST, None, new_handoff())
        other = FIRST + "x" * len(text) + MORE[0]
        said, _ = await one_turn(both, other, turn, new_handoff())
        assert [said] == reference_answers([other], ANSWER_TOKENS)
        assert both.p.stats()["turn_loads_total"] == {"content_mismatch": 1}
        assert both.d.stats()["turns_total"]["content_mismatch"] == 1, "and its blocks are free again"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_turn_that_nobody_has_costs_one_question(tmp_path, policy):
    async with pair(tmp_path, p={"policy": policy}, d={"turn_s": 0.0}) as both:
        text, turn = await one_turn(both, FIRST, None, new_handoff())
        prompt = FIRST + text + MORE[0]
        said, _ = await one_turn(both, prompt, turn, new_handoff())
        assert [said] == reference_answers([prompt], ANSWER_TOKENS)
        assert both.p.stats()["turn_loads_total"] == {"unknown_lease": 1}
        await both.at_rest()


async def test_turns_go_when_requests_need_their_blocks(tmp_path):
    """Promise 3: a D whose cache turns have filled serves what fits into it without them."""
    options = {"turn_s": 60.0, "turn_percent": 100.0, "blocks": 64}
    async with pair(tmp_path, d=options) as both:
        prompts = [f"{index} " + FIRST for index in range(8)]
        texts = [(await one_turn(both, prompt, None, new_handoff()))[0] for prompt in prompts]
        assert texts == reference_answers(prompts, ANSWER_TOKENS)
        stats = both.d.stats()
        assert stats["turns_total"]["discarded"] > 0
        assert stats["turn_blocks"] <= 64
        assert stats["faults_total"] == 0


async def completed(session: aiohttp.ClientSession, url: str, said: list[str], stream: bool) -> str:
    """The answer to a conversation's text so far."""
    asked = {"prompt": "".join(said), "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": stream}
    data = await posted(session, f"{url}/v1/completions", asked)
    if not stream:
        return json.loads(data)["choices"][0]["text"]
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]" and b"usage" not in data
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def responded(session: aiohttp.ClientSession, url: str, said: list[str], stream: bool) -> str:
    """The same by responses: a text at first, later the messages."""
    told = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(said)]
    asked = {"input": told if len(told) > 1 else said[0], "max_output_tokens": ANSWER_TOKENS, "temperature": 0}
    data = await posted(session, f"{url}/v1/responses", {**asked, "stream": stream})
    if stream:
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]
        return events[-1]["response"]["output"][0]["content"][0]["text"]
    return json.loads(data)["output"][0]["content"][0]["text"]


async def posted(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> bytes:
    async with session.post(url, json=body) as answer:
        data = await answer.read()
        assert answer.status == 200, data
    assert b"kv_transfer_params" not in data
    return data


def prompt_of(ask: object, said: list[str]) -> str | list[int]:
    if ask is completed:
        return "".join(said)
    return tokenizer.encode_chat((("user", "assistant")[at % 2], each) for at, each in enumerate(said))


@pytest.mark.slow
def test_a_cluster_takes_turns_over_and_clients_see_nothing_of_it(tmp_path):
    with up(tmp_path, "--turn-s", "60", "--prefill", "1", "--decode", "2") as cluster:

        async def go() -> None:
            prompts: list[str | list[int]] = []
            answers: list[str] = []
            async with aiohttp.ClientSession() as session:
                for ask, stream in ((completed, False), (completed, True), (responded, False), (responded, True)):
                    said = [f"{stream} " + FIRST]
                    for more in (*MORE, ""):
                        text = await ask(session, cluster.url, said, stream)
                        prompts.append(prompt_of(ask, said))
                        answers.append(text)
                        said += [text, more]
                async with session.get(f"{cluster.url}/stats") as answer:
                    turns = (await answer.json())["turns_total"]
            assert answers == reference_answers(prompts, ANSWER_TOKENS)
            assert turns == {"noted": 12, "offered": 8}
            stats = await cluster.workers()
            assert stats["p0"]["turn_loads_total"] == {"taken": 8}
            assert stats["p0"]["turn_tokens_total"] > 8 * ANSWER_TOKENS
            assert sum(stats[name]["turns_total"]["taken"] for name in ("d0", "d1") if stats[name]["turns_total"]) == 8

        asyncio.run(go())
