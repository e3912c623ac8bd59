"""Shared stores for tests with real vLLM engines: a `kvbaton store` process, and a real `mooncake_master`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.vllm.duo import BLOCK, TOKENS, Prompt, prompt_of, same
from tests.vllm.engines import Answer, Engine, free_port, until

STOP_S = 20.0
SEED = "store"
LENGTHS = (5, 127, 128, 129, 257, 384, 700, 1300)


class StoreProcess:
    """`kvbaton store`, with this Python."""

    def __init__(self, key_directory: Path) -> None:
        words = ["-m", "kvbaton.cli.main", "store", "--keys", str(key_directory), "--port", "0", "--json"]
        self.child = subprocess.Popen(
            [sys.executable, *words, "--bytes", "1GiB"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.url = str(self._line()["endpoint"])

    def figures(self) -> Any:
        os.kill(self.child.pid, signal.SIGUSR1)
        return self._line()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(STOP_S)
        assert self.child.stdout is not None
        self.child.stdout.close()

    def _line(self) -> Any:
        assert self.child.stdout is not None
        said = self.child.stdout.readline()
        assert said, "kvbaton store ended before it said anything"
        return json.loads(said)


class MooncakeMaster:
    """`mooncake_master`, as it is installed beside this Python or found on the path."""

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("mooncake_master")
        binary = str(beside) if beside.exists() else shutil.which("mooncake_master")
        assert binary, "no mooncake_master: install mooncake-transfer-engine-non-cuda beside this Python"
        port = free_port()
        self.url = f"mooncake://127.0.0.1:{port}?lend=128MiB"
        words = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
        quiet = {**os.environ, "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "error"}
        self.child = subprocess.Popen(
            [binary, *words, "--enable_metric_reporting=false"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet,
        )  # fmt: skip

        def answers() -> bool:
            assert self.child.poll() is None, "mooncake_master ended"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(answers, STOP_S, "mooncake_master answers")

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(STOP_S)


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
