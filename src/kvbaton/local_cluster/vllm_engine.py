"""vLLM servers as this program's commands start them: their options, and their connector's settings.

Law: an option here is an option of `kvbaton up`, `bench` or `chaos`. Command line and environment of a server are
`integrations.vllm.launching`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.api.http.fetch import fetch as fetch_answer
from kvbaton.engines.embedded.worker_options import Policy
from kvbaton.engines.vllm.launch.launching import (
    HOST,
    PROBE_S,
    PYTHON_VARIABLE,
    environment,
    find_python,
    kv_transfer_config,
    server_argv,
    shown,
    tiny_model,
)
from kvbaton.processes.child_process import Child, Say, ready

__all__ = [
    "HOST",
    "KV_ROLES",
    "PROBE_S",
    "PYTHON_VARIABLE",
    "ServerOptions",
    "VllmHandoff",
    "environment",
    "fetch",
    "find_python",
    "kv_transfer_config",
    "server_argv",
    "serving",
    "shown",
    "tiny_model",
]  # fmt: skip

GET_S = 20.0
KV_ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


class VllmHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's settings; the names are those of `kv_connector_extra_config`."""

    name: str
    keys: str
    registry: str
    http_address: str
    registry_name: str = "router"
    control_host: str = HOST
    control_port: int = 0
    transport: str = "auto"
    mode: str = "pull"
    lease_s: float = 15.0
    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    claim_timeout: float = 10.0
    max_hold_s: float = 180.0
    otlp_endpoint: str = ""
    turn_s: float = 0.0
    role: str = ""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all servers of a cluster share."""

    python: str
    model: str
    served_name: str
    kv_gib: int = 1
    max_model_len: int = 2048
    block_tokens: int | None = None  # vLLM's default: 128 on CPU
    max_num_seqs: int | None = None
    policy: Policy = "recompute"

    def argv(self, port: int, tp: int = 1, kv_config: Mapping[str, Any] | None = None, *, dp: int = 1) -> list[str]:
        words = server_argv(self.python, self.model, self.served_name, port, max_model_len=self.max_model_len)
        for flag, value in (("--block-size", self.block_tokens), ("--max-num-seqs", self.max_num_seqs)):
            words += [] if value is None else [flag, str(value)]
        words += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
        words += ["--data-parallel-size", str(dp)] if dp > 1 else []
        return words if kv_config is None else [*words, "--kv-transfer-config", msgspec.json.encode(kv_config).decode()]


async def serving(url: str, child: Child, within_s: float, say: Say, stop: asyncio.Event | None = None) -> None:
    """Wait until it is ready to serve."""

    async def missing() -> list[str]:
        await fetch(f"{url}/health")
        return []

    await ready(missing, [child], within_s, say, stop=stop, look_s=0.25)


async def fetch(url: str) -> str:
    """The body at a URL; OSError if there is none."""
    answer = await fetch_answer(url, GET_S)
    if answer.status != 200:
        raise OSError(f"{url}: status {answer.status}")
    return answer.text
