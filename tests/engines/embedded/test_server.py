"""A worker's HTTP door over a scripted backend: shapes, streams, refusals, handoffs, and aborts by closing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp
import openai
import pytest

from kvbaton.api.http.http_server import serving
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.http_worker import (
    Disown,
    Finished,
    GenerateRequest,
    ModelCard,
    RefusedError,
    Token,
    worker_app,
)
from kvbaton.protocol.errors import Reason
from tests.waiting import soon

CARD = ModelCard("tiny", 64)
BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "temperature": 0}


class FakeBackend:
    """Answers with the prompt's text in capitals, then "!" as often as asked; or fails as told."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted = 0
        self.fail_at: tuple[int, Exception] | None = None
        self.wait_at = -1
        self.is_ready = True

    def models(self) -> Sequence[ModelCard]:
        return [CARD]

    def ready(self) -> bool:
        return self.is_ready

    def stats(self) -> Mapping[str, Any]:
        return {"pins": 0, "worker": "p0", "ends_total": {"delivered": 2}}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token | Finished, None]:
        self.requests.append(request)
        text = (tokenizer.decode(request.prompt).upper() + "!" * request.max_tokens)[: request.max_tokens]
        ended = False
        try:
            for at, char in enumerate(text):
                if self.fail_at is not None and self.fail_at[0] == at:
                    raise self.fail_at[1]
                if self.wait_at == at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                yield Token(char, ((ord(char), -0.5), (ord(char), -0.5), (65, -1e-9), (66, -3.0)))
            params = {"ticket": "t", "do_remote_prefill": True} if request.handoff else None
            ended = True
            yield Finished("length", cached_tokens=1, kv_transfer_params=params)
        finally:
            self.aborted += not ended


class Door:
    def __init__(self, backend: FakeBackend, url: str, session: aiohttp.ClientSession) -> None:
        self.backend = backend
        self.url = url
        self.session = session

    async def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, body: Any, path: str = "/v1/completions") -> list[Any]:
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            texts = [line[6:] for line in (await response.text()).split("\n\n") if line]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


@contextlib.asynccontextmanager
async def door(body_bytes_max: int = 1 << 20, disown: Disown = lambda ticket, reason: None) -> AsyncIterator[Door]:
    backend = FakeBackend()
    app = worker_app(backend, body_bytes_max, disown=disown)
    async with serving(app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        yield Door(backend, url, session)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def test_a_completion_is_answered_whole_and_streamed_alike() -> None:
    async with door() as d:
        status, answer = await d.post(BODY)
        assert status == 200
        assert answer["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "length", "text": "AB!"}]
        assert answer["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        }  # fmt: skip
        assert "kv_transfer_params" not in answer
        *chunks, done = await d.events(BODY)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "AB!"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
        assert done == "[DONE]"
        assert d.backend.aborted == 0


async def test_a_chat_is_rendered_by_the_template() -> None:
    async with door() as d:
        messages = [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]},
            {"role": "assistant", "content": None},
        ]
        status, answer = await d.post({"messages": messages, "max_completion_tokens": 2}, "/v1/chat/completions")
        assert (status, answer["choices"][0]["message"]) == (200, {"role": "assistant", "content": "SU"})
        assert list(d.backend.requests[0].prompt) == tokenizer.encode_chat(
            [("system", "s"), ("user", "uv"), ("assistant", "")]
        )
        chunks = await d.events({"messages": messages, "max_tokens": 2}, "/v1/chat/completions")
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == ["S", "U", None]


async def test_several_prompts_and_choices_are_several_requests_and_one_answer() -> None:
    async with door() as d:
        body = {"prompt": [[97], [98]], "n": 2, "seed": 4, "max_tokens": 2}
        _, answer = await d.post(body)
        assert [(each["index"], each["text"]) for each in answer["choices"]] == [
            (0, "A!"), (1, "A!"), (2, "B!"), (3, "B!"),
        ]  # fmt: skip
        assert sorted(request.seed for request in d.backend.requests) == [4, 4, 5, 5]
        assert len({request.request_id for request in d.backend.requests}) == 4
        *chunks, usage, done = await d.events({**body, "stream_options": {"include_usage": True}})
        assert usage["usage"]["completion_tokens"] == 8
        assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}
        assert done == "[DONE]"


async def test_sampling_reaches_the_backend() -> None:
    async with door() as d:
        await d.post({**BODY, "min_tokens": 2, "ignore_eos": True, "seed": -3, "logprobs": 2, "cache_salt": "s"})
        request = d.backend.requests[0]
        assert (request.min_tokens, request.ignore_eos, request.temperature) == (2, True, 0.0)
        assert (request.seed, request.logprobs, request.cache_salt) == ((-3) % (1 << 63), 2, "s")
        await d.post({"prompt": "a"})
        await d.post({"prompt": "a"})
        _, one, two = d.backend.requests
        assert (one.max_tokens, one.temperature) == (16, 1.0)
        assert one.seed != two.seed


async def test_log_probabilities_come_in_both_formats() -> None:
    async with door() as d:
        _, answer = await d.post({**BODY, "logprobs": 1})
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["A", "B", "!"], "token_logprobs": [-0.5] * 3,
            "top_logprobs": [{"A": -0.5}, {"B": -0.5}, {"!": -0.5}], "text_offset": [0, 1, 2],
        }  # fmt: skip
        messages = [{"role": "user", "content": "a"}]
        chat = {"messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
        _, answer = await d.post(chat, "/v1/chat/completions")
        (told,) = answer["choices"][0]["logprobs"]["content"]
        assert (told["token"], told["logprob"], len(told["top_logprobs"])) == ("A", -0.5, 2)
        assert told["top_logprobs"][1] == {"token": "A", "logprob": 0.0, "bytes": [65]}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_before_its_stop_text_and_the_request_is_aborted(stream: bool) -> None:
    async with door() as d:
        body = {**BODY, "prompt": "abcd", "max_tokens": 9, "stop": ["CD", "zz"]}
        if stream:
            *chunks, _ = await d.events(body)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            _, answer = await d.post(body)
            text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        assert (text, reason) == ("AB", "stop")
        await soon(lambda: d.backend.aborted == 1)


async def test_a_handoff_is_parsed_at_the_door_and_its_params_come_back() -> None:
    async with door() as d:
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "mode": "pull"}
        _, answer = await d.post({**BODY, "max_tokens": 1, "stop": "A", "kv_transfer_params": asked})
        assert answer["kv_transfer_params"] == {"ticket": "t", "do_remote_prefill": True}
        handoff = d.backend.requests[0].handoff
        assert handoff is not None
        assert handoff.do_remote_decode
        assert d.backend.aborted == 0  # a stop text is not for P, whose token nobody reads


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"kv_transfer_params": "odd"}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.ticket"),
        ({"kv_transfer_params": {"do_remote_prefill": True, "ticket": "t"}, "n": 2}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": True}, "stream": True}, "max_tokens"),
        ({"prompt": "x" * 64}, "prompt"),
        ({"prompt": "x", "max_tokens": 63}, "prompt"),
        ({"prompt": [5, 264]}, "prompt"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_field_and_reaches_no_engine(
    change: dict[str, Any], param: str
) -> None:
    async with door() as d:
        status, answer = await d.post({**BODY, **change})
        assert (status, answer["error"]["param"]) == (400, param)
        assert d.backend.requests == []


async def test_odd_chats_and_paths_and_models_are_refused() -> None:
    async with door(1000) as d:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        status, answer = await d.post({"messages": image}, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, "messages[0].content")
        status, answer = await d.post({**BODY, "model": "huge"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "only tiny" in answer["error"]["message"]
        assert (await d.post(BODY, "/v1/nothing"))[0] == 404
        assert (await d.post({"prompt": "x" * 2000}))[0] == 413
        assert (await d.post(b"\x00"))[0] == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RefusedError("invalid", "too long", param="prompt"), 400, "invalid_request_error", None),
        (RefusedError("full", "queue is full"), 429, "overloaded_error", None),
        (RefusedError("stopping", "bye"), 503, "service_unavailable_error", None),
        (RefusedError("handoff", "P is gone", "peer_gone"), 500, "handoff_failed", "peer_gone"),
        (RefusedError("handoff", "not ours", "ticket_forged"), 400, "handoff_failed", "ticket_forged"),
        (RefusedError("handoff", "odd", "no_such_reason"), 500, "handoff_failed", "no_such_reason"),
        (RuntimeError("bug"), 500, "internal_error", "internal"),
    ],
)
async def test_a_refusal_before_the_first_token_is_a_status(
    error: Exception, status: int, kind: str, code: str | None, stream: bool
) -> None:
    async with door() as d:
        d.backend.fail_at = (0, error)
        got, answer = await d.post({**BODY, "stream": stream})
        assert (got, answer["error"]["type"], answer["error"]["code"]) == (status, kind, code)
        assert "bug" not in answer["error"]["message"]


async def test_a_refusal_after_the_first_token_is_an_event_and_no_done() -> None:
    async with door() as d:
        d.backend.fail_at = (1, RefusedError("broken", "the engine died"))
        first, error = await d.events(BODY)
        assert first["choices"][0]["text"] == "A"
        assert error["error"]["message"] == "the engine died"


@pytest.mark.parametrize("wait_at", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_aborts_all_of_its_requests(stream: bool, wait_at: int) -> None:
    async with door() as d:
        d.backend.wait_at = wait_at
        call = asyncio.create_task(d.post({**BODY, "n": 3, "stream": stream}))
        await soon(lambda: len(d.backend.requests) == 3)
        call.cancel()
        await soon(lambda: d.backend.aborted == 3)


async def test_health_models_stats_and_metrics() -> None:
    async with door() as d:
        for path, expected in (("/health", 200), ("/stats", 200), ("/v1/models", 200)):
            async with d.session.get(d.url + path) as response:
                assert response.status == expected
        async with d.session.get(f"{d.url}/metrics") as response:
            assert 'kvbaton_ends_total{worker="p0",end="delivered"} 2' in await response.text()
        d.backend.is_ready = False
        async with d.session.get(f"{d.url}/health") as response:
            assert response.status == 503


async def test_an_unmodified_openai_client_is_served() -> None:
    async with door() as d, openai.AsyncOpenAI(base_url=f"{d.url}/v1", api_key="k", max_retries=0) as client:
        whole = await client.completions.create(model="tiny", prompt="hey", max_tokens=4, logprobs=1)
        assert whole.choices[0].text == "HEY!"
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hey"}], max_tokens=3, stream=True
        )
        parts = [part async for part in stream]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "HEY"
        assert [model.id async for model in await client.models.list()] == ["tiny"]


FOR_D = {"do_remote_prefill": True, "mode": "pull", "ticket": "t"}


@pytest.mark.parametrize(
    ("body", "refusal", "told"),
    [
        ({"temperature": "hot"}, None, [("t", Reason.BAD_MESSAGE)]),
        ({"prompt": "a" * 100}, None, [("t", Reason.BAD_MESSAGE)]),
        ({"kv_transfer_params": {**FOR_D, "mode": "carrier pigeon"}}, None, [("t", Reason.BAD_MESSAGE)]),
        ({"kv_transfer_params": {**FOR_D, "tickets": ["t", 5]}}, None, [("t", Reason.BAD_MESSAGE)]),
        ({}, RefusedError("full", "too many"), [("t", Reason.BUSY)]),
        ({"stream": True}, RefusedError("full", "too many"), [("t", Reason.BUSY)]),
        ({}, RefusedError("stopping", "bye"), [("t", Reason.DRAINING)]),
        ({"kv_transfer_params": {"do_remote_decode": True, "mode": "push", "ticket": "t"}, "prompt": 5}, None, []),
        ({"kv_transfer_params": {**FOR_D, "ticket": {"t": 1}}}, None, []),
        ({"kv_transfer_params": 5}, None, []),
        ({}, None, []),
    ],
)  # fmt: skip
async def test_whoever_leased_for_a_refused_request_is_told(
    body: dict[str, Any], refusal: RefusedError | None, told: list[tuple[str, Reason]]
) -> None:
    """Promise 3: else P keeps its blocks for nobody until the lease runs out. One that is served tells nothing."""
    heard: list[tuple[str, Reason]] = []
    async with door(disown=lambda ticket, reason: heard.append((ticket, reason))) as d:
        d.backend.fail_at = (0, refusal) if refusal is not None else None
        status, _ = await d.post({**BODY, "kv_transfer_params": FOR_D, **body})
        assert (status != 200) == bool(body or refusal)
        assert heard == told
        assert (await d.post(b"\xff{not json"))[0] == 400
    assert heard == told


async def test_tokens_of_a_text_and_back() -> None:
    async with door() as d:
        status, found = await d.post({"prompt": "ab\u00e9"}, "/tokenize")
        assert (status, found["tokens"], found["count"]) == (200, [256, 97, 98, 195, 169], 5)
        status, bare = await d.post({"prompt": "ab", "add_special_tokens": False}, "/tokenize")
        assert (status, bare["tokens"], bare["token_strs"]) == (200, [97, 98], None)
        status, chat = await d.post(
            {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}, "/tokenize"
        )
        assert (status, chat["tokens"], len(chat["token_strs"])) == (200, [256, 259, 97, 260], 4)
        assert await d.post({"tokens": found["tokens"]}, "/detokenize") == (200, {"prompt": "ab\u00e9"})
        for path, odd, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
            ("/tokenize", {"prompt": "a", "model": "another"}, "model"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {"tokens": [264]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", b"[]", "body"),
        ):
            status, answer = await d.post(odd, path)
            assert (status in (400, 404), answer["error"]["param"]) == (True, param), (path, odd)
