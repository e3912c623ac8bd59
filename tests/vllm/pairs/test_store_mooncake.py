"""Two vLLM engines that share a real Mooncake Store, and have nothing else: no keys, no names, no router.

Needs Mooncake's library beside vLLM: `make vllm-full` installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbaton.local_cluster import vllm_engine
from tests.mooncake_store.mooncake_processes import Master
from tests.vllm.conftest import StartEngine
from tests.vllm.duo import TOKENS, prompt_of, same
from tests.vllm.stores import come_to_rest, share

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def master() -> Iterator[Master]:
    process = Master(client_ttl_s=60)
    yield process
    process.kill()


def test_what_one_engine_put_another_loads_from_mooncake(
    engines: StartEngine, tiny: Callable[[str], Path], master: Master
) -> None:
    config = vllm_engine.kv_transfer_config(
        "kv_both", "recompute", {"store": f"mooncake://{master.address}?lend=128MiB"}
    )
    writer, reader = (engines(tiny("llama"), name, kv_transfer_config=config) for name in ("e0", "e1"))
    plain = engines(tiny("llama"), "plain")
    for engine in (writer, reader, plain):
        engine.wait_ready()
    share(writer, reader, plain)

    master.kill()  # with the master gone, engines compute
    other = prompt_of(900, "no master")
    assert same(reader.ask(other, TOKENS), plain.ask(other, TOKENS))
    come_to_rest(writer, reader)
