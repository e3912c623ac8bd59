"""vLLM servers as this program's commands start them: what is set for one, and what its connector is told.

Law: an option here is an option of `kvbaton up`, `bench` or `chaos`. Words and surroundings of a server are
`integrations.vllm.launching`'s; what that refuses ends a command here, with the same line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.cli.arguments import CommandError
from kvbaton.engines.embedded.worker_options import Policy
from kvbaton.engines.vllm import launching
from kvbaton.engines.vllm.launching import (
    HOST,
    PROBE_S,
    PYTHON_VARIABLE,
    environment,
    free_ports,
    kv_transfer_config,
    server_argv,
    shown,
)

__all__ = [
    "HOST", "KV_ROLES", "PROBE_S", "PYTHON_VARIABLE", "Handoff", "ServerOptions", "environment", "find_python",
    "free_ports", "kv_transfer_config", "server_argv", "shown", "tiny_model",
]  # fmt: skip

KV_ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What the connector is told; the names are those of `kv_connector_extra_config`."""

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


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What all servers of a cluster share."""

    python: str
    model: str
    served_name: str
    kv_gib: int = 1
    max_model_len: int = 2048
    block_tokens: int | None = None  # vLLM's own choice: 128 on CPU
    max_num_seqs: int | None = None
    policy: Policy = "recompute"

    def argv(self, port: int, tp: int = 1, kv_config: Mapping[str, Any] | None = None) -> list[str]:
        words = server_argv(self.python, self.model, self.served_name, port, max_model_len=self.max_model_len)
        for flag, value in (("--block-size", self.block_tokens), ("--max-num-seqs", self.max_num_seqs)):
            words += [] if value is None else [flag, str(value)]
        words += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
        return words if kv_config is None else [*words, "--kv-transfer-config", msgspec.json.encode(kv_config).decode()]


def find_python(given: str | None) -> str:
    """The Python that has vLLM: as given, as the environment says, this one, or that of `make vllm`."""
    try:
        return launching.find_python(given)
    except launching.LaunchError as error:
        raise CommandError(str(error)) from None


def tiny_model(python: str, kind: str, seed: int) -> Path:
    """The directory of a tiny model in the cache, made now if need be."""
    try:
        return launching.tiny_model(python, kind, seed)
    except launching.LaunchError as error:
        raise CommandError(str(error)) from None
