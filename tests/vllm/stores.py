"""A shared store between real vLLM engines: what one puts another loads, and nothing is held afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.vllm.duo import BLOCK, TOKENS, Prompt, prompt_of, same
from tests.vllm.engines import Answer, Engine, until

STOP_S = 20.0
SEED = "store"
LENGTHS = (5, 127, 128, 129, 257, 384, 700, 1300)


def count(engine: Engine, name: str) -> int:
    """One of kvbaton's numbers; those that never moved are 0."""
    return int(engine.metrics().get(f"kvbaton_{name}", 0))


def share(writer: Engine, reader: Engine, plain: Engine, values: Callable[[], int] | None = None) -> None:
    """What `writer` computes `reader` loads, and both answer what an engine without a connector answers."""
    prompts = [prompt_of(length, SEED) for length in LENGTHS]
    expected = _ask_all(plain, prompts)
    assert all(map(same, _ask_all(writer, prompts), expected))
    puts = sum(length >= BLOCK for length in LENGTHS)
    until(lambda: count(writer, "store_puts_total") == puts, 40, f"{puts} prompts are put")
    assert values is None or values() == sum(length // BLOCK for length in LENGTHS), "each whole block, once"
    assert count(writer, "store_gets_total") == 0, "the store was empty"

    assert all(map(same, _ask_all(reader, prompts), expected))
    loaded = sum((length - 1) // BLOCK for length in LENGTHS)
    until(lambda: count(reader, "store_hits_blocks_total") == loaded, 20, f"{loaded} blocks came from the store")
    assert reader.metrics()["vllm:external_prefix_cache_hits_total"] == loaded * BLOCK


def come_to_rest(*engines: Engine) -> None:
    """Nothing is held, and nothing went wrong inside."""

    def at_rest() -> bool:
        found = [engine.metrics() for engine in engines]
        pins = ("kvbaton_pinned_blocks", "kvbaton_store_pins", "vllm:kv_cache_usage_perc")
        return not any(each.get(name, 0) for each in found for name in pins)

    until(at_rest, 40, "no pins and no used blocks")
    assert all(engine.is_healthy() and count(engine, "faults_total") == 0 for engine in engines)


def _ask_all(engine: Engine, prompts: list[Prompt]) -> list[Answer]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda prompt: engine.ask(prompt, TOKENS), prompts))
