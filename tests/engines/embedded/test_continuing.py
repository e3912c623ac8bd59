"""An answer that another engine began: the one that goes on with it says what the unbroken run would have said."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvbaton.api.http.http_server import serving
from kvbaton.api.params import FIELD, Mode, source_params, target_params
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker
from kvbaton.engines.embedded.engine_request import EngineRequest, RejectedError, Sampling
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.protocol.ids import RequestId, WorkerId
from kvbaton.protocol.wire.ticket import seal_history
from tests.e2e.pair import Pair, pair

from .helpers import SLIDING, answers, engine, finish, prompt, request
from .sent import post, streamed

TOKENS = 30
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "hot": {"temperature": 3.0, "seed": 5},
    "at least so many": {"temperature": 2.5, "seed": 8, "min_tokens": 20},
}
TEXT = "A relay is run by several, and the baton is what they have in common. "


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_goes_on_at_every_token_as_the_unbroken_run_did(kind: str) -> None:
    sampling = {"answer": TOKENS, "ignore_eos": False, **KINDS[kind]}
    for length in (1, 8, 27):
        tokens = prompt(length, length)
        whole = _said(request("a", tokens, **sampling))
        for told in range(1, len(whole)):
            begun = msgspec.structs.replace(request("a", tokens, **sampling), history=tuple(whole[:told]))
            assert whole[:told] + _said(begun) == whole, f"{kind}, prompt of {length}, after {told}"


def _said(asked: EngineRequest) -> list[int]:
    subject = engine(SLIDING, blocks=128, step_tokens_max=16)
    subject.add_request(asked)
    return answers(finish(subject))[asked.request_id]


def test_a_history_that_leaves_nothing_to_generate_or_is_of_no_tokens_is_refused() -> None:
    subject = engine()
    for history, said in (((65,) * 4, "leaves none"), ((65, tokenizer.VOCAB), "history tokens must be within")):
        with pytest.raises(RejectedError, match=said):
            subject.add_request(EngineRequest(RequestId("a"), (256, 65), Sampling(max_tokens=4), history=history))


class Doors:
    """Two real workers, seen from their router."""

    def __init__(self, both: Pair, p_url: str, d_url: str) -> None:
        self.both, self.p_url, self.d_url = both, p_url, d_url

    def history(self, tokens: list[int], target: str, late_s: float = -60.0) -> dict[str, Any]:
        proof = seal_history(tokens, WorkerId(target), time.time() - late_s, self.both.key)
        return {"tokens": tokens, "proof": proof}

    async def continued(self, path: str, body: dict[str, Any], tokens: list[int], mode: str) -> Any:
        """What D answers, with the prompt's KV from P."""
        p, d = self.history(tokens, "p0"), self.history(tokens, "d0")
        source = {key: value for key, value in body.items() if key not in ("stop", "logprobs", "top_logprobs")}
        source |= {"max_tokens": 1, "min_tokens": 0}
        if mode == "alone":
            return await streamed(self.d_url + path, body | {FIELD: {"history": d}})
        if mode == "pull":
            asked = source | {FIELD: {"do_remote_decode": True, "history": p}}
            status, answer = await post(self.p_url + path, asked)
            assert status == 200, answer
            return await streamed(self.d_url + path, body | {FIELD: {**answer[FIELD], "history": d}})
        ticket = self.both.ticket()
        asked = source | {FIELD: {**source_params(Mode(mode), ticket), "history": p}}
        target = body | {FIELD: {**target_params(Mode(mode), ticket), "history": d}}
        (status, answer), told = await asyncio.gather(
            post(self.p_url + path, asked), streamed(self.d_url + path, target)
        )
        assert status == 200, answer
        return told


def _app(worker: EmbeddedWorker) -> Any:
    return worker_app(worker.door, lookup=worker.lookup)


@contextlib.asynccontextmanager
async def doors(tmp_path: object, **options: Any) -> AsyncIterator[Doors]:
    async with (
        pair(tmp_path, **options) as both,
        serving(_app(both.p), "127.0.0.1", 0) as p,
        serving(_app(both.d), "127.0.0.1", 0) as d,
    ):
        yield Doors(both, p, d)


BODIES = {
    "text": ("/v1/completions", {"prompt": TEXT * 3}),
    "text with log probabilities": ("/v1/completions", {"prompt": TEXT, "logprobs": 2, "seed": 3}),
    "text that is stopped": ("/v1/completions", {"prompt": TEXT * 2, "seed": 6, "ignore_eos": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "seed": 9}),
    "chat with log probabilities": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "seed": 4, "logprobs": True, "top_logprobs": 2},
    ),
}
WANTED = {"return_token_ids": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS, "temperature": 2.0}


@pytest.mark.parametrize("mode", ["pull", "stream", "push", "alone"])
@pytest.mark.parametrize("kind", BODIES)
async def test_a_d_tells_the_whole_answer_and_goes_on_as_the_first_d_would_have(tmp_path, kind, mode):
    path, asked = BODIES[kind]
    body = {**WANTED, "seed": 1, **asked}
    async with doors(tmp_path) as both:
        whole = await streamed(both.d_url + path, body)
        if kind == "text that is stopped":
            body["stop"] = whole.text[17:20]
            whole = await streamed(both.d_url + path, body)
            assert whole.finish_reason == "stop" and len(whole.tokens) <= 20
        for told in {1, 2, 15, 16, 17, len(whole.tokens) - 1}:
            found = await both.continued(path, body, whole.tokens[:told], mode)
            assert found.all_but_logprobs == whole.all_but_logprobs, f"after {told}"
            assert found.logprobs[told:] == whole.logprobs[told:]
            assert len(found.logprobs) == len(whole.logprobs)
        if mode != "alone":
            assert both.both.ends() == {"delivered": 6}
        await both.both.at_rest()


async def test_what_was_computed_elsewhere_is_read_and_only_the_last_token_of_the_history_is_computed(tmp_path):
    body = {**WANTED, "prompt": TEXT * 3, "temperature": 0, "ignore_eos": True}
    async with doors(tmp_path, d={"block_tokens": 8}) as both:
        whole = await streamed(both.d_url + "/v1/completions", body | {"cache_salt": "other"})
        await both.continued("/v1/completions", body | {"cache_salt": "this"}, whole.tokens[:21], "pull")
        moved = both.both.d.stats()["prompt_tokens_total"]
        assert moved["handoff"] == len(tokenizer.encode(TEXT * 3)) + 20


async def test_a_history_that_is_all_of_the_answer_ends_it(tmp_path):
    body = {**WANTED, "prompt": TEXT, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    async with doors(tmp_path) as both:
        whole = await streamed(both.d_url + "/v1/completions", body)
        found = await both.continued("/v1/completions", body, whole.tokens, "alone")
        assert found.all_but_logprobs == whole.all_but_logprobs and found.finish_reason == "length"
        found = await both.continued("/v1/completions", body, [*whole.tokens[:3], tokenizer.EOS], "alone")
        assert (found.text, found.finish_reason) == (whole.text[:3], "stop")


async def test_an_answer_that_is_not_streamed_goes_on_too(tmp_path):
    body = {"prompt": TEXT, "max_tokens": 9, "seed": 2, "return_token_ids": True, "ignore_eos": True}
    async with doors(tmp_path) as both:
        _, whole = await post(both.d_url + "/v1/completions", body)
        choice = whole["choices"][0]
        assert choice["prompt_token_ids"] == tokenizer.encode(TEXT)
        history = both.history(choice["token_ids"][:4], "d0")
        _, found = await post(both.d_url + "/v1/completions", body | {FIELD: {"history": history}})
        assert found["choices"] == whole["choices"]
        assert found["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 9


async def test_nobody_but_the_router_says_how_an_answer_begins(tmp_path):
    """A client that reaches a worker itself: without a proof, with another's, with one of other tokens, with an old
    one."""
    body = {"prompt": TEXT, "max_tokens": 9}
    async with doors(tmp_path) as both:
        mine = both.history([65, 66], "d0")
        ticket = both.both.ticket()
        for history, code in (
            ({"tokens": [65, 66], "proof": ""}, "ticket_forged"),
            ({"tokens": [65, 66], "proof": ticket}, "ticket_forged"),
            (both.history([65, 66], "p0"), "ticket_forged"),
            ({**mine, "tokens": [65, 67]}, "ticket_forged"),
            (both.history([65, 66], "d0", late_s=5.0), "ticket_expired"),
        ):
            for stream in (False, True):
                asked = body | {FIELD: {"history": history}, "stream": stream}
                status, answer = await post(both.d_url + "/v1/completions", asked)
                assert 400 <= status < 600, answer
                assert (answer["error"]["code"], answer["error"]["param"]) == (code, f"{FIELD}.history")
        source = body | {"max_tokens": 1, FIELD: {"do_remote_decode": True, "history": mine}}
        status, answer = await post(both.p_url + "/v1/completions", source)
        assert status == 400 and answer["error"]["code"] == "ticket_forged"
        assert both.both.d.stats()["ends_total"] == {} and both.both.d.engine.stats().running == 0


async def test_a_history_is_of_one_answer_and_no_longer_than_it(tmp_path):
    async with doors(tmp_path) as both:
        history = both.history([65] * 10, "d0")
        for changed, field in (({"n": 2}, FIELD), ({"max_tokens": 9}, f"{FIELD}.history.tokens")):
            body = {"prompt": TEXT, "max_tokens": 30, FIELD: {"history": history}, **changed}
            status, answer = await post(both.d_url + "/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_a_p_says_its_token_as_a_stream_and_hands_over_all_the_same(tmp_path, mode):
    """The client's first token can come from P: D goes on behind it."""
    body = {"prompt": TEXT * 2, "seed": 3, **WANTED}
    source = body | {"max_tokens": 1}
    async with doors(tmp_path) as both:
        ticket = both.both.ticket()
        asked = {"do_remote_decode": True} if mode == "pull" else source_params(Mode(mode), ticket)
        first = await streamed(both.p_url + "/v1/completions", source | {FIELD: asked})
        assert first.params is not None and first.finish_reason == "length" and len(first.tokens) == 1
        params = first.params | {"history": both.history(first.tokens, "d0")}
        found = await streamed(both.d_url + "/v1/completions", body | {FIELD: params})
        whole = await streamed(both.d_url + "/v1/completions", body)
        assert found.all_but_logprobs == whole.all_but_logprobs and found.tokens[:1] == first.tokens
        assert both.both.ends() == {"delivered": 1}
        await both.both.at_rest()
