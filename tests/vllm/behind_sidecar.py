"""One P and one D behind the twin of llm-d's sidecar: every case that its users can bring about, on engines that run.

Law: "by a handoff" is counted in D, and every answer is compared with the one that P or D gives alone.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvbaton_proof.rig.client import TO_PREFILL
from tests.vllm.duo import TOKENS, Duo, Prompt, prompt_of, same
from tests.vllm.engines import ask, free_port, post
from tests.vllm.sidecar_twin import (
    REQUEST_ID,
    TARGETS,
    Params,
    SidecarTwin,
    coordinator,
    deaf_prefill,
    sidecar_twin,
    unchanged,
)

MORIIO_WRITE: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": "10.255.255.1", "remote_port": None, "remote_notify_port": 61005, "remote_dp_rank": 0,
    "remote_dp_rank_override": True, "remote_handshake_port": 6301, "tp_size": 1, "remote_dp_size": 1,
    "remote_hosts": ["10.255.255.1"], "remote_dp_size_local": 1,
    "transfer_id": "tx0f8fad5b-d9cb-469f-a165-70867728950e",
}  # fmt: skip
"""The sidecar's prefill leg with `--moriio-write-mode`: its transfer id has no dash behind `tx`."""


def aibrix(params: Params) -> Params:
    """AIBrix writes P's pod address into what P answered."""
    return {**(params or {}), "remote_host": "10.255.255.1"}


def meddled(params: Params) -> Params:
    """Fields of other systems, in types that they never had here."""
    return {
        **(params or {}), "remote_host": ["10.255.255.1"], "remote_port": 2**40, "remote_engine_id": 7,
        "remote_block_ids": [[-1, 2**53 + 1]], "tp_size": "1", "nested": {"a": [{"b": None}]},
    }  # fmt: skip


def moriio_write(params: Params) -> Params:
    """The decode leg of the same, where P's answer is waited for."""
    return {
        **(params or {}),
        **{name: MORIIO_WRITE[name] for name in ("transfer_id", "remote_dp_rank", "remote_hosts")},
    }


class Behind:
    """A twin before D, and P's `host:port` for its header."""

    def __init__(self, duo: Duo, twin: SidecarTwin) -> None:
        self.duo, self.twin = duo, twin
        self.p = duo.p.url.removeprefix("http://")
        self._seeds = iter(range(1000))

    def prompt(self, length: int = 300) -> Prompt:
        """One that no cache has seen."""
        return prompt_of(length, f"sidecar {next(self._seeds)}")

    def check(self, what: str, prompts: Sequence[Prompt], targets: str, handed: int, **more: Any) -> None:
        """The answers are one engine's, and that many came by a handoff."""
        before = self.duo.delivered()
        headers = {TARGETS: targets, **more.pop("headers", {})} if targets else more.pop("headers", {})
        with ThreadPoolExecutor(8) as pool:
            told = list(
                pool.map(lambda p: ask(self.twin.url, p, TOKENS, headers=headers, model="tiny", **more), prompts)
            )
        alone = [self.duo.p.ask(prompt, TOKENS, **more) for prompt in prompts]
        wrong = [len(p) for p, a, b in zip(prompts, told, alone, strict=True) if not same(a, b)]
        assert wrong == [], what
        self.duo.handed_over(before, handed, what)

    def status(self, prompt: Prompt, targets: str) -> int:
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json", TARGETS: targets}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{self.twin.url}/v1/completions", body, headers)
            ) as told:
                return int(told.status)
        except urllib.error.HTTPError as error:
            return error.code


def every_case(duo: Duo) -> None:
    """All of them on one pair: it is the start of engines that takes time."""

    async def run() -> None:
        async with sidecar_twin(duo.d.url) as twin, deaf_prefill(duo.p.url) as deaf:
            await asyncio.to_thread(_lost_answer, Behind(duo, twin), deaf)
            for case in (_targets, _request_ids, _rewriting, _streams_and_limits, _other_paths):
                await asyncio.to_thread(case, Behind(duo, twin))

    asyncio.run(run())


def _lost_answer(behind: Behind, deaf: str) -> None:
    """P computed, its answer was lost, the leg is tried again under the same id: the first lease ends by itself."""
    behind.twin.retries = 1
    behind.check("a retried leg", [behind.prompt()], deaf, handed=1)
    tried = [unique for leg, unique, _ in behind.twin.legs if leg == "prefill"]
    assert len(tried) == 2 and len(set(tried)) == 1
    behind.twin.retries = 0


def _targets(behind: Behind) -> None:
    dead = f"127.0.0.1:{free_port()}"
    behind.check("one prefill server", [behind.prompt(length) for length in (5, 128, 129, 777)], behind.p, handed=4)
    behind.check("a list", [behind.prompt()], f" {behind.p} , {dead}", handed=1)
    behind.check("no header", [behind.prompt()], "", handed=0)
    behind.check("a header without a server", [behind.prompt()], " , ", handed=0)
    behind.twin.legs.clear()
    assert behind.status(behind.prompt(), f"{dead},{behind.p}") == 502, "the sidecar asks neither the next nor D"
    assert [leg for leg, _, _ in behind.twin.legs] == ["prefill"]


def _request_ids(behind: Behind) -> None:
    behind.twin.legs.clear()
    body = {"model": "tiny", "prompt": behind.prompt(), "max_tokens": 2, "temperature": 0}
    before = behind.duo.delivered()
    told = post(f"{behind.twin.url}/v1/completions", body, {TARGETS: behind.p})
    behind.duo.handed_over(before, 1)
    (_, first, _), (_, second, _) = behind.twin.legs
    assert first == second and first in told["id"]
    same_id = {REQUEST_ID: "one-id-for-all"}
    prompts = [behind.prompt(200 + 60 * number) for number in range(6)]
    behind.check("six clients at once with one id", prompts, behind.p, handed=6, headers=same_id)


def _rewriting(behind: Behind) -> None:
    for rewrite in (coordinator, aibrix, meddled):
        behind.twin.rewrite = rewrite
        behind.check(rewrite.__name__, [behind.prompt()], behind.p, handed=1)
    behind.twin.rewrite = lambda _params: coordinator(None)
    behind.check("a coordinator that lost P's answer", [behind.prompt()], behind.p, handed=0)
    behind.twin.to_prefill, behind.twin.rewrite = MORIIO_WRITE, moriio_write
    behind.check("MoRI-IO WRITE, one leg after the other", [behind.prompt()], behind.p, handed=1)
    behind.twin.rewrite = lambda _params: {**MORIIO_WRITE, "do_remote_decode": False, "do_remote_prefill": True}
    behind.check("MoRI-IO WRITE, both legs at once", [behind.prompt()], behind.p, handed=0)
    behind.twin.to_prefill, behind.twin.rewrite = TO_PREFILL, unchanged


def _streams_and_limits(behind: Behind) -> None:
    body = {
        "model": "tiny", "max_tokens": 10, "min_tokens": 10, "temperature": 0, "cache_salt": "alone",
        "messages": [{"role": "user", "content": "tell me a story of llamas " * 30}],
    }  # fmt: skip
    path, before = "/v1/chat/completions", behind.duo.delivered()
    plain = post(f"{behind.duo.d.url}{path}", body)["choices"][0]["message"]["content"]
    headers = {TARGETS: behind.p}
    whole = post(f"{behind.twin.url}{path}", {**body, "cache_salt": "whole"}, headers)
    assert whole["choices"][0]["message"]["content"] == plain and whole["usage"]["completion_tokens"] == 10
    asked = {**body, "cache_salt": "stream", "stream": True, "stream_options": {"include_usage": True}}
    asked["max_completion_tokens"] = asked.pop("max_tokens")
    lines = _lines(f"{behind.twin.url}{path}", asked, headers)
    texts = [choice["delta"].get("content") or "" for line in lines for choice in line["choices"]]
    assert "".join(texts) == plain and len(texts) > 5, "as they are made"
    assert lines[-1]["usage"]["completion_tokens"] == 10
    behind.duo.handed_over(before, 2)


def _other_paths(behind: Behind) -> None:
    """Those that the sidecar splits besides: each by a handoff, and as D answers alone."""
    words = "a story of alpacas " * 30
    messages = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": words}]}
    responses = {"model": "tiny", "max_output_tokens": 8, "temperature": 0, "input": words}
    for path, body, part in (("/v1/messages", messages, "content"), ("/v1/responses", responses, "output")):
        before = behind.duo.delivered()
        told = post(f"{behind.twin.url}{path}", body, {TARGETS: behind.p})
        alone = post(f"{behind.duo.d.url}{path}", body)
        assert _texts(told[part]) == _texts(alone[part]), path
        behind.duo.handed_over(before, 1, path)


def _texts(value: Any) -> list[str]:
    """The texts in an answer, wherever they are."""
    if isinstance(value, list):
        return [found for each in value for found in _texts(each)]
    if not isinstance(value, dict):
        return []
    own = [value["text"]] if "text" in value else []
    return own + [found for each in value.values() for found in _texts(each)]


def _lines(url: str, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
