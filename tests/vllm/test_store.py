"""Two vLLM engines that know nothing of each other but a shared store: what one computed the other loads, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import StartEngine
from tests.vllm.duo import BLOCK, TOKENS, prompt_of, same
from tests.vllm.engines import Engine, connector_config, free_port, make_cluster_keys
from tests.vllm.stores import LENGTHS, SEED, StoreProcess, come_to_rest, share

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_cluster_keys(tmp_path / "keys", ["e0", "e1", "store"])


@pytest.fixture
def store(keys: Path) -> Iterator[StoreProcess]:
    process = StoreProcess(keys)
    yield process
    process.kill()


def test_what_one_engine_put_another_loads(
    engines: StartEngine, tiny: Callable[[str], Path], keys: Path, store: StoreProcess, plain: Engine
) -> None:
    writer, reader = (start(engines, tiny("llama"), name, keys, store.url) for name in ("e0", "e1"))
    for engine in (writer, reader, plain):
        engine.wait_ready()

    share(writer, reader, plain, lambda: store.figures()["values"])

    longer = [*prompt_of(LENGTHS[-1], SEED)[: 6 * BLOCK], *prompt_of(200, "another end")]
    assert same(reader.ask(longer, TOKENS), plain.ask(longer, TOKENS)), "a beginning that is alike"

    store.kill()  # with the store gone, engines compute
    other = prompt_of(900, "no store")
    assert same(reader.ask(other, TOKENS), plain.ask(other, TOKENS))
    come_to_rest(writer, reader)


def start(engines: StartEngine, model: Path, name: str, keys: Path, url: str) -> Engine:
    port = free_port()
    config = connector_config("kv_both", name, keys, port, store=url, store_timeout=6.0)  # not meant to run out
    return engines(model, name, port=port, kv_transfer_config=config)
