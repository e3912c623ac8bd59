"""One P and one D on real vLLM: every answer is that of one engine, and nothing is left behind.

The three modes share one pair of engines, since a request says how its KV goes over. Their models run in processes of
their own; those of test_data_parallel in the processes of their engine cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbaton.observe.flight.flight_records import STAGES
from kvbaton.observe.metrics import metric_names
from kvbaton.protocol.wire.ticket import seal, unseal
from kvbaton_proof.bench.router.router_toy import Toy
from tests.aiohttp_server import serving
from tests.journeys import inspect_whole
from tests.router.stream_reader import Reader
from tests.vllm import behind_sidecar
from tests.vllm.cache_memory import overwrite_cache
from tests.vllm.duo import (
    MODES,
    TOKENS,
    Duo,
    answers_behind,
    ends,
    forty_prompts,
    prompt_of,
    reference_of,
    running_duo,
    same,
)
from tests.vllm.engines import Answer, Engine, EngineError, free_port, post, until
from tests.vllm.router_process import moriio_router, nixl_router

pytestmark = pytest.mark.timeout(1200)

Oracle = Callable[[list[int]], Answer]
EXTRA_PROMPTS = 60
QUIET = (metric_names.LEASES_REFUSED, metric_names.OFFERS_REFUSED, metric_names.TURNS, metric_names.TURN_LOADS)
"""Of kvbaton's metrics, those that nothing here makes count anything."""


@pytest.fixture(scope="module")
def discovery() -> str:
    """Where P and D announce themselves as MoRI-IO's workers do, besides registering; mostly nothing listens there."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def setup(
    vllm_python: str,
    tiny: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    plain: Engine,
    discovery: str,
) -> Iterator[tuple[Duo, Oracle]]:
    """P, D and what one aggregated engine answers."""
    answers: dict[tuple[int, ...], Answer] = {}
    prompts = [prompt for mode in MODES for prompt in forty_prompts(mode)]
    prompts += [prompt_of(length, "extra") for length in range(300, 300 + EXTRA_PROMPTS)]

    def learn() -> None:
        plain.wait_ready()
        for prompt, answer in zip(prompts, reference_of(plain, prompts), strict=True):
            answers[tuple(prompt)] = answer

    extra = {"moriio": {"router": discovery, "transfer_mode": "READ"}}
    directory = tmp_path_factory.mktemp("duo")
    p_extra = {**extra, "drain_file": str(directory / "drain")}
    (directory / "drain").touch()  # of an earlier life
    with running_duo(
        vllm_python, tiny("llama"), directory, p_extra=p_extra, d_extra=extra, before_waiting=learn
    ) as duo:
        yield duo, lambda prompt: answers[tuple(prompt)]


@pytest.fixture
def duo(setup: tuple[Duo, Oracle]) -> Iterator[Duo]:
    """Whatever a test did, both engines live and hold nothing afterwards: promises 2, 3 and 4."""
    yield setup[0]
    setup[0].come_to_rest()


@pytest.fixture
def oracle(setup: tuple[Duo, Oracle]) -> Oracle:
    return setup[1]


def extra(number: int) -> list[int]:
    """A prompt of its own for each test."""
    assert 0 <= number < EXTRA_PROMPTS
    return prompt_of(300 + number, "extra")


@pytest.mark.parametrize("mode", MODES)
def test_forty_answers_are_those_of_one_engine(duo: Duo, oracle: Oracle, mode: str) -> None:
    prompts = forty_prompts(mode)
    before, counted = duo.delivered(), ends(duo.d)
    answers = duo.ask_all(prompts, mode)
    wrong = [len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if not same(answer, oracle(prompt))]
    duo.come_to_rest()
    assert wrong == []
    failures = {name: count - counted.get(name, 0) for name, count in ends(duo.d).items() if name != "delivered"}
    duo.handed_over(before, len(prompts), f"every one by a handoff; others ended as {failures}")


def test_what_d_has_already_is_not_moved_again(duo: Duo, oracle: Oracle) -> None:
    prompt = extra(0)  # 300 tokens: two whole blocks and a part
    moved = []
    for _ in range(2):
        before = duo.d.metrics().get("kvbaton_bytes_total", 0)
        assert same(duo.ask(prompt, "pull"), oracle(prompt))
        duo.come_to_rest()
        moved.append(duo.d.metrics()["kvbaton_bytes_total"] - before)
    assert moved[1] == moved[0] / 3, "the second time only the last block"


def test_vllm_tells_the_metrics_that_every_worker_tells(duo: Duo) -> None:
    for number, mode in enumerate((*MODES, *MODES)):
        duo.ask(extra(40 + number), mode)
    duo.come_to_rest()
    wanted = {
        series for metric in metric_names.of(metric_names.Where.VLLM) if metric not in QUIET for series in metric.series
    }

    def told() -> bool:
        """With the step after the next request, at the latest."""
        duo.ask(extra(46), "pull")
        return not wanted - {*duo.p.metrics(), *duo.d.metrics()}

    until(told, 30, "all metrics of the list")
    page = duo.d.metrics()
    for mode in MODES:
        shown = {name for name in page if name.startswith("kvbaton_stage_seconds_count{") and f'mode="{mode}"' in name}
        assert all(any(f'stage="{stage}"' in name for name in shown) for stage in STAGES), (mode, shown)
        assert any(name.startswith("kvbaton_handoffs_total{") and f'mode="{mode}"' in name for name in page)


def test_chat_and_streaming_go_through(duo: Duo) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "tell me a story " * 40}], "max_tokens": 10}
    body |= {"temperature": 0}
    plain = post(f"{duo.d.url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    for mode in MODES:
        whole = post(f"{duo.url}/v1/chat/completions", body, {"x-kvbaton-mode": mode})
        assert whole["choices"][0]["message"]["content"] == plain
        assert "".join(streamed(f"{duo.url}/v1/chat/completions", {**body, "stream": True}, mode)) == plain


def test_first_tokens_come_from_p_and_the_rest_is_what_one_engine_says(duo: Duo, oracle: Oracle) -> None:
    """With model runner V1 the history is more of D's prompt: greedy answers alone."""
    before, delivered = first_tokens_of_pull(duo), duo.delivered()
    greedy = {"model": "tiny", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    prompts = [prompt for prompt in map(extra, range(5, 20)) if begins_with_text(oracle(prompt))][: len(MODES)]
    for prompt, mode in zip(prompts, MODES, strict=True):
        body = {**greedy, "prompt": prompt, "max_tokens": TOKENS, "logprobs": 1, "return_token_ids": True}
        found, alone = (read_stream(url, body, mode) for url in (duo.url, duo.d.url))
        assert (found.texts, found.ids, found.usages) == (alone.texts, alone.ids, alone.usages)
        assert found.texts == {("text",): oracle(prompt).text}
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
        assert (len(found.heads), found.finishes, found.dones, found.errors) == (1, ["length"], 1, [])
    duo.come_to_rest()
    duo.handed_over(delivered, len(MODES))
    assert first_tokens_of_pull(duo) == before + 1, "where both are asked at once, D may be first"
    one = {**greedy, "prompt": prompts[0], "max_tokens": 1}
    for mode in MODES:
        first = read_stream(duo.url, one, mode)
        assert (first.finishes, first.dones) == (["length"], 1)
        assert first.usages[0]["completion_tokens"] == 1
        assert first.texts == {("text",): oracle(prompts[0]).tokens[0]}
    assert first_tokens_of_pull(duo) == before + 2


def begins_with_text(answer: Answer) -> bool:
    """And not with half a character, or with what is never shown."""
    return "\ufffd" not in answer.tokens[0] and answer.text.startswith(answer.tokens[0])


def first_tokens_of_pull(duo: Duo) -> int:
    with urllib.request.urlopen(f"{duo.url}/stats", timeout=60) as answer:
        return int(json.load(answer)["first_tokens_total"].get("pull", 0))


def read_stream(url: str, body: dict[str, Any], mode: str) -> Reader:
    headers, reader = {"Content-Type": "application/json", "x-kvbaton-mode": mode}, Reader()
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        reader.read(answer.read())
    return reader


def test_responses_go_through_whole_and_streamed(duo: Duo) -> None:
    body = {"model": "tiny", "input": "tell me another story " * 30, "max_output_tokens": 10, "temperature": 0}

    def texts(told: dict[str, Any]) -> list[str]:
        return [part["text"] for item in told["output"] if item["type"] == "message" for part in item["content"]]

    plain = texts(post(f"{duo.d.url}/v1/responses", {**body, "cache_salt": "alone"}))
    assert plain and plain[0]
    for mode in MODES:
        before = duo.delivered()
        asked = {**body, "cache_salt": mode}
        assert texts(post(f"{duo.url}/v1/responses", asked, {"x-kvbaton-mode": mode})) == plain
        events = list(response_events(f"{duo.url}/v1/responses", {**asked, "stream": True}, mode))
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == plain[0]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")  # vLLM 0.33: cut by its limit
        duo.come_to_rest()
        duo.handed_over(before, 2)


def response_events(url: str, body: dict[str, Any], mode: str) -> Iterator[dict[str, Any]]:
    headers = {"Content-Type": "application/json", "x-kvbaton-mode": mode}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        yield from (json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}], ids=str)
def test_what_needs_the_whole_prompt_computed_is_answered_by_d_alone(duo: Duo, more: dict[str, Any]) -> None:
    """A prompt's own log probabilities are not in its KV."""
    body = {"model": "tiny", "prompt": extra(4), "max_tokens": 4, "temperature": 0, **more}
    before = duo.delivered()
    routed, alone = (post(f"{url}/v1/completions", body)["choices"] for url in (duo.url, duo.d.url))
    assert routed == alone
    duo.come_to_rest()
    assert duo.delivered() == before


def streamed(url: str, body: dict[str, Any], mode: str) -> Iterator[str]:
    headers = {"Content-Type": "application/json", "x-kvbaton-mode": mode}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


def test_each_prompt_and_each_of_n_gets_a_handoff_of_its_own(duo: Duo, oracle: Oracle) -> None:
    prompts, before = [extra(1), extra(2)], duo.delivered()
    body = {"model": "tiny", "prompt": prompts, "max_tokens": TOKENS, "temperature": 0, "n": 2}
    told = post(f"{duo.url}/v1/completions", body, {"x-kvbaton-mode": "push"})
    texts = [choice["text"] for choice in sorted(told["choices"], key=lambda choice: choice["index"])]
    assert texts == [oracle(prompt).text for prompt in prompts for _ in range(2)]
    duo.come_to_rest()
    duo.handed_over(before, 4)


def test_an_end_of_text_as_first_token_is_handed_over_too(duo: Duo, oracle: Oracle) -> None:
    """P stops, not for length: its lease is granted all the same."""
    prompt = extra(3)
    first = post(f"{duo.p.url}/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0,
                 "return_token_ids": True})["choices"][0]["token_ids"][0]  # fmt: skip
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    told = duo.p.ask(prompt, 1, kv_transfer_params=params, stop_token_ids=[first])
    assert told.finish == "stop" and told.kv_transfer_params is not None
    before = duo.delivered()
    assert same(duo.decode(prompt, told.kv_transfer_params), oracle(prompt))
    duo.come_to_rest()
    duo.handed_over(before, 1)


MESSAGES: dict[str, Any] = {
    "model": "tiny", "max_tokens": TOKENS, "temperature": 0, "system": "Count.",
    "messages": [{"role": "user", "content": "one two three " * 60}],
}  # fmt: skip


def told_by_events(url: str, mode: str) -> str:
    """The text of Anthropic's stream, which must come to its end."""
    head = {"Content-Type": "application/json", "x-kvbaton-mode": mode}
    asked = urllib.request.Request(url, json.dumps({**MESSAGES, "stream": True}).encode(), head)
    with urllib.request.urlopen(asked, timeout=120) as response:
        events = [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop"), events
    return "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta")


def test_messages_and_paths_of_one_worker_are_answered_as_one_engine_answers_them(duo: Duo, plain: Engine) -> None:
    """Anthropic's API by a handoff in each mode; tokens, counts and refusals by a worker alone."""
    right = post(f"{plain.url}/v1/messages", MESSAGES)
    before = duo.delivered()
    for mode in MODES:
        found = post(f"{duo.url}/v1/messages", MESSAGES, {"x-kvbaton-mode": mode})
        assert (found["content"], found["stop_reason"]) == (right["content"], right["stop_reason"]), mode
        assert found["usage"]["output_tokens"] == right["usage"]["output_tokens"] and "kv_transfer_params" not in found
        assert told_by_events(f"{duo.url}/v1/messages", mode) == right["content"][0]["text"], mode
    duo.come_to_rest()
    duo.handed_over(before, 2 * len(MODES))
    chat = {"model": "tiny", "messages": MESSAGES["messages"]}
    for path, body in (
        ("/tokenize", {"model": "tiny", "prompt": "one two three"}),
        ("/tokenize", chat),
        ("/detokenize", {"model": "tiny", "tokens": [11, 12, 13, 14]}),
        ("/v1/messages/count_tokens", chat),
    ):
        assert post(duo.url + path, body) == post(plain.url + path, body), path
    for path in ("/v1/embeddings", "/classify", "/rerank"):
        for url in (duo.url, plain.url):
            with pytest.raises(EngineError, match="status 404"):
                post(url + path, {"model": "tiny", "input": "x", "query": "x", "documents": ["y"]})
    with pytest.raises(EngineError, match="status 403"):
        post(f"{duo.url}/collective_rpc", {})
    with urllib.request.urlopen(f"{duo.url}/version", timeout=20) as response:
        assert json.loads(response.read())["version"].startswith("0.")
    with urllib.request.urlopen(f"{duo.url}/openapi.json", timeout=20) as response:
        described = json.loads(response.read())
    assert "ChatCompletionRequest" in described["components"]["schemas"] and "/sleep" not in described["paths"]
    assert "requestBody" in described["paths"]["/v1/messages"]["post"]


BAD_PARAMS: dict[str, Any] = {
    "null": None,
    "empty": {},
    "only do_remote_prefill": {"do_remote_prefill": True},
    "both ways": {"do_remote_prefill": True, "do_remote_decode": True, "ticket": "x"},
    "wrong types": {"do_remote_prefill": "yes", "ticket": 5, "mode": []},
    "unknown mode": {"do_remote_prefill": True, "ticket": "abc", "mode": "teleport"},
    "not a ticket": {"do_remote_prefill": True, "ticket": "AAAA"},
    "huge ticket": {"do_remote_prefill": True, "ticket": "A" * 1_000_000},
    "deep": {"do_remote_prefill": True, "ticket": {"a": [[[[[{}]]]]]}},
    "of NIXL": {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1, 2]],
                "remote_host": "10.0.0.1",
                "remote_port": 1, "remote_request_id": "r", "tp_size": 1},
    "of MoRI-IO": {"do_remote_prefill": True, "transfer_id": "tx-" + "a" * 32, "remote_host": "10.255.255.1",
                   "remote_handshake_port": 6301, "remote_notify_port": 61005},
    "negative blocks": {"do_remote_prefill": True, "remote_block_ids": [-1, 2**62], "remote_engine_id": "p0"},
    "unknown fields": {"do_remote_prefill": True, "ticket": "x", "address": "http://169.254.169.254/"},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_parameters_cost_a_local_prefill(duo: Duo, oracle: Oracle, name: str) -> None:
    """Promise 4 and 5: as any client could send them to D's own port. `recompute` makes them an ordinary request."""
    prompt = extra(4 + list(BAD_PARAMS).index(name))
    assert same(duo.decode(prompt, BAD_PARAMS[name]), oracle(prompt))


@pytest.mark.parametrize("params", [[1, 2], "text", 5])
def test_parameters_that_are_no_object_are_refused_by_vllm(duo: Duo, params: object) -> None:
    with pytest.raises(EngineError, match="status 400"):
        duo.decode(extra(20), params)


def test_a_ticket_is_good_once_and_for_its_prompt_only(duo: Duo, oracle: Oracle) -> None:
    """Promise 1: replayed, expired, forged, or sent with another prompt, it never makes an answer wrong."""
    prompt, other = extra(21), extra(22)
    params = duo.prefill(prompt)
    assert same(duo.decode(other, params), oracle(other)), "another prompt"
    assert same(duo.decode(prompt, params), oracle(prompt))
    assert same(duo.decode(prompt, params), oracle(prompt)), "again"
    for number in (23, 24, 25):
        assert same(duo.decode(extra(number), params), oracle(extra(number))), "again, with yet another prompt"
    ticket = params["ticket"]
    forged = ticket[:-4] + ("AAAA" if ticket[-4:] != "AAAA" else "BBBB")
    assert same(duo.decode(extra(26), {**params, "ticket": forged}), oracle(extra(26)))
    content = unseal(ticket, duo.keyring.ticket_keys, time.time())
    stranger = seal(content, b"\0" * 32)
    assert same(duo.decode(extra(27), {**params, "ticket": stranger}), oracle(extra(27)))
    late = {**params, "mode": "stream", "ticket": duo.router_ticket(ttl_s=-1)}
    assert same(duo.decode(extra(28), late), oracle(extra(28)))
    nobody = {**params, "mode": "stream", "ticket": duo.router_ticket(source="p9")}
    assert same(duo.decode(extra(29), nobody), oracle(extra(29)))
    for prompt in (extra(21), extra(22), extra(23)):
        assert same(duo.decode(prompt, None), oracle(prompt)), "D's prefix cache holds nothing wrong"
    reasons = ends(duo.d)
    assert {"content_mismatch", "ticket_forged", "ticket_expired", "peer_unknown"} <= set(reasons), reasons


@pytest.mark.parametrize("mode", MODES)
def test_every_handoff_can_be_seen_from_router_p_and_d(duo: Duo, oracle: Oracle, mode: str) -> None:
    """What vLLM's engines did, stage by stage, as `kvbaton inspect` shows it: their reports come by the registry."""
    first = 31 + 5 * MODES.index(mode)
    for number in range(first, first + 5):
        assert same(duo.ask(extra(number), mode), oracle(extra(number)))
    inspect_whole(duo.url, 5, mode, lambda _: False)


def test_clients_that_leave_leave_nothing_behind(duo: Duo, oracle: Oracle) -> None:
    """64 clients hang up at every moment of a request, in every mode."""

    def leave(number: int) -> None:
        body = {"model": "tiny", "prompt": extra(number % 20), "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "x-kvbaton-mode": MODES[number % 3]}
        request = urllib.request.Request(f"{duo.url}/v1/completions", json.dumps(body).encode(), headers)
        with contextlib.suppress(OSError):  # its time is up: that is the point
            urllib.request.urlopen(request, timeout=0.02 * (number + 1)).close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(64)))
    duo.come_to_rest(90)
    assert same(duo.ask(extra(30), "pull"), oracle(extra(30)))


async def test_pull_behind_a_toy_proxy_and_the_real_router_by_urls_and_by_discovery(duo: Duo, discovery: str) -> None:
    async with serving(Toy(duo.p.url, duo.d.url).app(), "127.0.0.1", 0) as url:
        await asyncio.to_thread(answers_behind, url, duo, "toy proxy")
    async with nixl_router([duo.p.url], [duo.d.url]) as router:
        await asyncio.to_thread(answers_behind, router.url, duo, "vllm-router, URLs")
    async with moriio_router(address=discovery) as router:
        await router.until_paired()
        await asyncio.to_thread(answers_behind, router.url, duo, "vllm-router, MoRI-IO READ")


def test_pull_behind_the_twin_of_llm_ds_sidecar(duo: Duo) -> None:
    behind_sidecar.every_case(duo)


def test_vllms_own_load_generator_finds_every_request_answered(
    duo: Duo, vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """The command as docs/bench.md has it, of the environment that `make vllm` makes."""
    command = [
        str(Path(vllm_python).parent / "vllm"), "bench", "serve", "--base-url", duo.url, "--model", str(tiny("llama")),
        "--served-model-name", "tiny", "--dataset-name", "random", "--random-input-len", "256", "--random-output-len",
        "8", "--num-prompts", "4", "--max-concurrency", "2", "--header", "x-kvbaton-mode=push", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "load.json", "--disable-tqdm",
    ]  # fmt: skip
    before = duo.delivered()
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "load.json").read_text())
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (4, 0, 32)
    until(lambda: duo.delivered() - before >= 4, 20, "each by a handoff")


def test_streams_that_are_cut_mid_answer_free_both_sides(duo: Duo) -> None:
    """And while one runs the dashboard shows it at D, with blocks in use; at P nothing runs any more."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "count " * 100}], "max_tokens": 1200}
    body |= {"stream": True, "temperature": 0, "ignore_eos": True}
    for _text in streamed(f"{duo.url}/v1/chat/completions", body, "stream"):
        until(lambda: columns(duo)["d0"][0] == 1 and columns(duo)["d0"][2] > 0, 30, "D's columns to show the request")
        break
    until(lambda: columns(duo) == {"p0": (0, 0, 0), "d0": (0, 0, 0)}, 30, "nothing runs, waits or holds blocks")


def columns(duo: Duo) -> dict[str, tuple[int, int, int]]:
    """Running, waiting, and KV cache blocks in use, of each worker, as the dashboard has them."""
    with urllib.request.urlopen(f"{duo.url}/dashboard/state", timeout=10) as answer:
        workers = json.loads(answer.read())["workers"]
    return {each["name"]: (each["running"], each["waiting"], each["blocks"] - each["free_blocks"]) for each in workers}


def test_zz_a_damaged_block_changes_the_answer(duo: Duo, oracle: Oracle) -> None:
    """The oracle is sensitive: D really decodes on what it took from P. Last, since it ruins P's cache."""
    prompt = extra(59)
    params, before = duo.prefill(prompt), duo.delivered()
    assert overwrite_cache(duo.p) > 0
    answer = duo.decode(prompt, params)
    duo.come_to_rest()
    duo.handed_over(before, 1, "by a handoff")
    assert not same(answer, oracle(prompt))


def test_zzz_a_file_orders_p_to_drain(duo: Duo) -> None:
    """After all others: it is not undone. The same name lay there when P began, and P serves."""
    file = duo.p.log.parent / "drain"
    assert not file.exists() and not draining(duo)
    file.touch()
    until(lambda: draining(duo) == {"p0"}, 30, "P drains")


def draining(duo: Duo) -> set[str]:
    with urllib.request.urlopen(f"{duo.url}/workers", timeout=10) as answer:
        return {worker["name"] for worker in json.loads(answer.read())["workers"] if worker["state"] == "draining"}
