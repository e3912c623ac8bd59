"""Data-parallel ranks in other numbers than two and two, and ranks that each have an HTTP server of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.vllm.duo import MODES, TOKENS, Duo, ends, kvbaton_router, prompt_of, running_duo, same
from tests.vllm.engines import Engine, connector_config, free_port, make_cluster_keys, start_engine, until

pytestmark = pytest.mark.timeout(1800)

LENGTHS = (5, 128, 129, 300, 777, 1300)


def answers_in_every_mode(duo: Duo, label: str) -> None:
    for mode in MODES:
        prompts = [prompt_of(length, f"{label} {mode}") for length in LENGTHS]
        before = duo.delivered()
        answers = duo.ask_all(prompts, mode, at_once=4)
        duo.come_to_rest()
        duo.handed_over(before, len(prompts), mode)
        alone = [duo.d.ask(prompt, TOKENS, cache_salt="alone") for prompt in prompts]
        assert [len(x) for x, a, b in zip(prompts, answers, alone, strict=True) if not same(a, b)] == [], mode
    assert set(ends(duo.d)) == {"delivered"}


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_unequal_sizes(vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path, ranks: tuple[int, int]) -> None:
    with running_duo(vllm_python, tiny("llama"), tmp_path, ranks=ranks) as duo:
        answers_in_every_mode(duo, f"{ranks}")


def test_ranks_that_step_together(vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """By its configuration vLLM takes the tiny DeepSeek for a mixture of experts, though none of its layers is one: its
    ranks are in lock-step, and those without requests run dummy batches while others decode, load or hold leases."""
    with running_duo(vllm_python, tiny("mla"), tmp_path, ranks=(2, 2)) as duo:
        answers_in_every_mode(duo, "lock-step")


@contextlib.contextmanager
def external(python: str, model: Path, directory: Path) -> Iterator[tuple[Duo, Sequence[Engine]]]:
    """P's two ranks are servers of their own, started from one configuration but for their HTTP address."""
    key_directory = make_cluster_keys(directory / "keys", ["p0.dp0", "p0.dp1", "d0"])
    engines: list[Engine] = []
    rpc = free_port()
    with kvbaton_router(key_directory) as (url, registry, listed):
        try:
            for name, role, rank in (("p0", "kv_producer", 0), ("p0", "kv_producer", 1), ("d0", "kv_consumer", None)):
                port = free_port()
                config = connector_config(role, name, key_directory, port, registry=registry)
                args = [] if rank is None else ["--data-parallel-size", "2", "--data-parallel-rank", str(rank)]
                args += [] if rank is None else ["--data-parallel-rpc-port", str(rpc)]
                log = directory / f"{name}{rank}.log"
                engines.append(start_engine(python, model, port, kv_transfer_config=config, extra_args=args, log=log))
            for engine in engines:
                engine.wait_ready()
            until(lambda: listed() == {"p0.dp0", "p0.dp1", "d0"}, 60, "all ranks are registered")
            yield Duo(engines[0], engines[2], url, key_directory), engines
        finally:
            for engine in engines:
                engine.stop()


def test_ranks_with_servers_of_their_own(vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """External load balancing: a server knows its one rank as 0, and refuses the number that it has among all. vLLM has
    it for mixtures of experts alone, for one of which it takes the tiny DeepSeek."""
    with external(vllm_python, tiny("mla"), tmp_path) as (duo, engines):
        answers_in_every_mode(duo, "external")
        assert all(engine.metrics()["vllm:prompt_tokens_total"] > 0 for engine in engines[:2]), "both served"
