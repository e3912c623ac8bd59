"""Features of vLLM beside a handoff, on real engines: drafts, other connectors, weights that are replaced.

Pipelines and drafters of hybrid models end in errors of vLLM 0.32.0 for CPUs itself (no warm-up of a stage's buffers;
gated delta nets in bfloat16 only): these are held to vLLM's scheduler, by `kvbaton conformance vllm`.

Each case starts engines of its own, so this is `make vllm-full`. Rows of docs/compatibility.md name these tests.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.duo import MODES, TOKENS, Duo, Prompt, ends, prompt_of, running_duo, same
from tests.vllm.engines import Answer, Engine, post, until

pytestmark = pytest.mark.timeout(900)

LENGTHS = (2, 17, 100, 128, 129, 257, 400)
PULLED = {"do_remote_decode": True, "do_remote_prefill": False}
Tiny = Callable[[str], Path]


def prompts_of(label: str) -> list[tuple[str, Prompt]]:
    return [(mode, prompt_of(length, f"{label} {mode}")) for mode in MODES for length in LENGTHS]


def all_by_handoff(duo: Duo, label: str) -> None:
    """In every mode, each answer as D gives it alone, each by a handoff, and nothing is left."""
    before, prompts = duo.delivered(), prompts_of(label)
    found = [duo.ask(prompt, mode) for mode, prompt in prompts]
    duo.come_to_rest()
    duo.handed_over(before, len(prompts))
    alone = [duo.d.ask(prompt, TOKENS, cache_salt="alone") for _, prompt in prompts]
    assert [len(p) for (_, p), a, b in zip(prompts, found, alone, strict=True) if not same(a, b)] == []


# --- speculative decoding


def accepted(engine: Engine) -> float:
    return engine.metrics().get("vllm:spec_decode_num_accepted_tokens_total", 0.0)


def counted(engine: Engine, ask: Callable[[], Answer]) -> tuple[Answer, int]:
    """An answer, and how many drafts were accepted for it."""
    before = accepted(engine)
    return ask(), int(accepted(engine) - before)


DRAFTS: dict[str, tuple[str, Callable[[Tiny], dict[str, Any]], bool]] = {
    "n-grams": ("few-words", lambda _: {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}, False),
    "eagle": ("few-words", lambda tiny: {"method": "eagle", "model": str(tiny("eagle"))}, True),
}
"""The model, the drafter, and whether it has KV of its own, so that P must have it too."""


@pytest.mark.parametrize("drafter", DRAFTS)
def test_drafts_are_as_good_as_on_one_engine(drafter: str, vllm_python: str, tiny: Tiny, tmp_path: Path) -> None:
    """The same answers, and for each of them the same number of accepted drafts; D alone is the one engine."""
    kind, told, has_kv = DRAFTS[drafter]
    spec = ["--speculative-config", json.dumps({"num_speculative_tokens": 2, **told(tiny)})]
    with running_duo(vllm_python, tiny(kind), tmp_path, p_args=spec if has_kv else (), d_args=spec) as duo:
        handed, prompts = duo.delivered(), prompts_of(drafter)
        found = [counted(duo.d, lambda: duo.ask(prompt, mode)) for mode, prompt in prompts]  # noqa: B023
        duo.come_to_rest()
        duo.handed_over(handed, len(prompts))
        alone = [counted(duo.d, lambda: duo.d.ask(each, TOKENS, cache_salt="alone")) for _, each in prompts]  # noqa: B023
        wrong = [len(p) for (_, p), a, b in zip(prompts, found, alone, strict=True) if not same(a[0], b[0])]
        unlike = [len(p) for (_, p), a, b in zip(prompts, found, alone, strict=True) if a[1] != b[1]]
        rates = [sum(each[1] for each in of) for of in (found, alone)]
        print(f"{drafter}: accepted {rates[0]} after handoffs, {rates[1]} alone; other counts at {unlike}")
        assert (wrong, unlike) == ([], []) and rates[1] > 0


def test_a_drafter_on_d_alone_is_refused_by_name(vllm_python: str, tiny: Tiny, tmp_path: Path) -> None:
    """D computes the prompt, and its drafts are as good as if nobody had offered it."""
    spec = json.dumps({"num_speculative_tokens": 2, "method": "eagle", "model": str(tiny("eagle"))})
    with running_duo(vllm_python, tiny("few-words"), tmp_path, d_args=("--speculative-config", spec)) as duo:
        prompt = prompt_of(300, "one side")
        found = counted(duo.d, lambda: duo.decode(prompt, duo.prefill(prompt)))
        alone = counted(duo.d, lambda: duo.d.ask(prompt, TOKENS, cache_salt="alone"))
        assert same(found[0], alone[0]) and found[1] == alone[1]
        assert ends(duo.d) == {"incompatible": 1.0}
        duo.come_to_rest()
        assert "draft" in duo.d.tail(400), "the log names the field"


# --- other connectors


def together(*order: str, directory: Path) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """A MultiConnector with ours and another: in this order on P, in the other on D."""
    from kvbaton_proof.rig.offloading_host import OFFLOADING

    stored = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "shared")},
    }
    others = {"offloading": OFFLOADING, "storage": stored}

    def around(name: str, config: dict[str, Any]) -> dict[str, Any]:
        children = [{**others[each]} if each in others else config for each in order]
        outer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        extra = {"connectors": children if name == "p0" else children[::-1]}
        return {**outer, "kv_connector_extra_config": extra}

    return around


@pytest.mark.parametrize("other", ["offloading", "storage"])
def test_another_connector_beside_ours(other: str, vllm_python: str, tiny: Tiny, tmp_path: Path) -> None:
    """Ours first on P and last on D. What was handed over, and is lost from D's cache, comes from the other one."""
    (tmp_path / "shared").mkdir()
    around = together("baton", other, directory=tmp_path)
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with running_duo(vllm_python, tiny("llama"), tmp_path, around=around, env=env) as duo:
        modes = MODES if other == "offloading" else ("pull",) * 3  # that one finds what is still being written
        before, prompts = duo.delivered(), [(mode, prompt_of(400 + at, other)) for at, mode in enumerate(modes)]
        found = [duo.ask(prompt, mode) for mode, prompt in prompts]
        duo.come_to_rest()
        delivered = duo.delivered() - before
        assert delivered == (3 if other == "offloading" else 0), f"a store that P filled is asked first: {ends(duo.d)}"
        hits = duo.d.metrics()["vllm:external_prefix_cache_hits_total"]
        command(duo.d, "/reset_prefix_cache")
        again = [duo.d.ask(prompt, TOKENS) for _, prompt in prompts]
        assert duo.d.metrics()["vllm:external_prefix_cache_hits_total"] - hits >= 3 * 256
        alone = [duo.d.ask(prompt, TOKENS, cache_salt="alone") for _, prompt in prompts]
        for answers in (found, again):
            assert [at for at, (a, b) in enumerate(zip(answers, alone, strict=True)) if not same(a, b)] == []
        assert "kvbaton_ends_total" in str(list(duo.d.metrics())), "our figures are on the page beside the other's"


def command(engine: Engine, path: str, body: Any = None) -> Any:
    """An operator's command of vLLM's, behind VLLM_SERVER_DEV_MODE."""
    data = b"" if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{engine.url}{path}", data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(asked, timeout=120) as response:
        return response.read()


# --- what a request can ask for, and what an operator can do: one pair for all


@pytest.fixture(scope="module", name="pair")
def one_pair(vllm_python: str, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    directory = tmp_path_factory.mktemp("pair")
    args = (
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        f"poet={tiny('adapter')}",
        "--enable-prompt-embeds",
    )
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with running_duo(vllm_python, tiny("llama"), directory, p_args=args, d_args=args, env=env) as duo:
        yield duo


@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_s_kv_is_handed_over(pair: Duo, mode: str) -> None:
    prompt, before = prompt_of(200, f"lora {mode}"), pair.delivered()
    found = pair.ask(prompt, mode, model="poet")
    pair.handed_over(before, 1)
    assert same(found, pair.d.ask(prompt, TOKENS, model="poet", cache_salt="alone"))
    assert found.tokens != pair.d.ask(prompt, TOKENS, model="tiny").tokens, "the adapter changes the answer"


@pytest.mark.parametrize("mode", MODES)
def test_structured_outputs_begin_with_d_s_own_first_token(pair: Duo, mode: str) -> None:
    prompt, before = prompt_of(150, f"structured {mode}"), pair.delivered()
    told = {"structured_outputs": {"regex": "(ab|ba){3}"}}
    found = pair.ask(prompt, mode, **told)
    pair.handed_over(before, 1)
    assert set(found.text) == {"a", "b"} and len(found.text) == 6
    assert found.text == pair.d.ask(prompt, TOKENS, cache_salt="alone", **told).text


def test_prompt_embeddings_are_handed_over(pair: Duo) -> None:
    """P and D each know the prompt by the bytes of its embeddings."""
    import torch

    torch.manual_seed(3)
    some, others = (encoded(torch.randn(90, 256)) for _ in range(2))
    before = pair.delivered()
    body = {"model": "tiny", "max_tokens": 1, "temperature": 0}
    told = post(f"{pair.p.url}/v1/completions", {**body, "prompt_embeds": some, "kv_transfer_params": PULLED})
    params = told["kv_transfer_params"]
    ask = {**body, "max_tokens": TOKENS, "prompt_embeds": some}
    found = post(f"{pair.d.url}/v1/completions", {**ask, "kv_transfer_params": params})["choices"][0]["text"]
    pair.handed_over(before, 1)
    assert found == post(f"{pair.d.url}/v1/completions", {**ask, "cache_salt": "alone"})["choices"][0]["text"]
    told = post(f"{pair.p.url}/v1/completions", {**body, "prompt_embeds": some, "kv_transfer_params": PULLED})
    body = {**ask, "prompt_embeds": others, "kv_transfer_params": told["kv_transfer_params"]}
    post(f"{pair.d.url}/v1/completions", body)
    pair.handed_over(before, 1, "other embeddings of the same length are another prompt")
    pair.come_to_rest()


def encoded(tensor: Any) -> str:
    import torch

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


PAUSES = (
    "/pause?mode=wait",
    "/pause?mode=keep",
    "/pause?mode=abort",
    "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
)


def test_x_pauses_of_d_under_load_are_answered_as_by_an_engine_alone(pair: Duo) -> None:
    """500 once, 7 of 30 with mode=wait: a load or an answer of P was under way. And P lets go of what D gave up."""
    stop = threading.Event()

    def client(number: int) -> int:
        turn = 0
        while not stop.is_set():
            pair.ask(prompt_of(200 + 50 * number, f"pauses {number} {turn}"), MODES[turn % 3])
            turn += 1
        return turn

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, number) for number in range(6)]
        try:
            for path in PAUSES * 3:
                time.sleep(0.5)
                command(pair.d, path)  # an error unless it is 200
                if path.startswith("/pause"):
                    command(pair.d, "/resume")
        finally:
            stop.set()
        assert all(each.result(120) for each in clients)
    pair.come_to_rest(30)
    all_by_handoff(pair, "after the pauses")


def test_y_after_sleep_and_waking_up_handoffs_go_on(pair: Duo) -> None:
    """On CPUs vLLM keeps its memory asleep; a lease that nobody has claimed is over before it sleeps."""
    prompt = prompt_of(140, "sleep")
    params = pair.prefill(prompt)
    command(pair.p, "/sleep?level=1")
    command(pair.p, "/wake_up")
    until(pair.p.is_healthy, 30, "P serves again")
    before = pair.delivered()
    answer = pair.decode(prompt, params)
    assert pair.delivered() == before, "what was promised before is gone"
    assert same(answer, pair.d.ask(prompt, TOKENS, cache_salt="alone"))
    all_by_handoff(pair, "awake")


def test_z_after_a_reload_nothing_of_before_is_handed_over(pair: Duo, tiny: Tiny) -> None:
    """P reloads its weights; D does not take over what it computes until it has reloaded the same."""
    prompt = prompt_of(140, "before the reload")
    params = pair.prefill(prompt)
    command(pair.p, "/collective_rpc", {"method": "reload_weights"})
    before = pair.delivered()
    pair.decode(prompt, params)
    after = prompt_of(141, "after the reload")
    pair.decode(after, pair.prefill(after))
    assert pair.delivered() == before, ends(pair.d)
    command(pair.d, "/collective_rpc", {"method": "reload_weights"})
    all_by_handoff(pair, "both reloaded")
