"""A Ray cluster of this test's own, and the application on it: tiny model, small caches, any number of replicas.

Law: everything that is started is ended with the block, by the process or the session that it belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbaton.engines.vllm.launch.launching import environment
from kvbaton.processes.child_process import free_ports

MODEL = "tiny"
DECODE, PREFILL = f"Decode:{MODEL}", f"Prefill:{MODEL}"
START_S = 900.0
START_TRIES = 3


def llm_config(model: Path, extra: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """One configuration for all replicas of a deployment."""
    variables = {**environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "deployment_config": {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.1}},
        "engine_kwargs": {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 32,
            "kv_transfer_config": {"kv_connector_extra_config": dict(extra)},
        },
        "runtime_env": {"env_vars": variables},
        "log_engine_metrics": True,
    }


class RayApp:
    """The application, running."""

    def __init__(self, url: str, metrics_url: str) -> None:
        self.url = url
        self._metrics_url = metrics_url

    def replicas(self, deployment: str) -> dict[str, int]:
        """Replicas that serve, by their id: the process of each."""
        from ray import serve
        from ray.serve.schema import ReplicaState

        told = serve.status().applications["default"].deployments
        assert deployment in told
        found = _details()["applications"]["default"]["deployments"][deployment]["replicas"]
        return {each["replica_id"]: each["pid"] for each in found if each["state"] == ReplicaState.RUNNING}

    def scale(self, deployment: str, replicas: int) -> None:
        import ray
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        controller = _get_global_client()._controller
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, "default"), replicas))

    def wait_for(self, deployment: str, replicas: int, within_s: float = START_S) -> dict[str, int]:
        """Until so many serve; the newest answer."""
        return until(lambda: _if(len(found := self.replicas(deployment)) == replicas, found), within_s,
                     f"{replicas} replicas of {deployment}")  # fmt: skip

    def ends(self) -> Counter[str]:
        """How handoffs have ended, over all decode replicas that Ray still tells of."""
        with urllib.request.urlopen(self._metrics_url, timeout=20) as answer:
            text = answer.read().decode()
        found: Counter[str] = Counter()
        for line in text.splitlines():
            if line.startswith("ray_kvbaton_ends_total{"):
                name, _, value = line.rpartition(" ")
                found[name.partition('end="')[2].partition('"')[0]] += int(float(value))
        return found


@contextlib.contextmanager
def ray_app(prefill: dict[str, Any], decode: dict[str, Any], kvbaton: Mapping[str, Any]) -> Iterator[RayApp]:
    """Prefill and decode as configured, behind one ingress."""
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray's spelling; others' memory is not our end
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray leaves a token in the home directory
    import ray
    from ray import serve

    from kvbaton.integrations.ray.pd_app import build_pd_app

    directory = tempfile.mkdtemp(prefix="kvr-", dir="/tmp")  # short: Ray's UNIX sockets lie in it
    http, metrics = free_ports(2)
    try:
        _start_ray(directory, metrics)
        serve.start(http_options={"host": "127.0.0.1", "port": http})
        args = {
            "prefill_config": prefill,
            "decode_config": decode,
            "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        }
        serve.run(build_pd_app(args, kvbaton=kvbaton), blocking=False, external_scaler_enabled=True)
        yield RayApp(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}/metrics")
    except BaseException:
        _show_logs(Path(directory))
        raise
    finally:
        if ray.is_initialized():  # else it would start a cluster of its own to shut it down
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
        left = processes_of(directory)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if os.environ.get("KVBATON_RAY_KEEP") != "1":
            shutil.rmtree(directory, ignore_errors=True)


def _start_ray(directory: str, metrics_port: int) -> None:
    """Ray gives its own processes 30 s; on a busy machine that may take a second attempt."""
    import ray

    for left in reversed(range(START_TRIES)):
        try:
            ray.init(
                num_cpus=8, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=directory,
                _metrics_export_port=metrics_port, _system_config={"metrics_report_interval_ms": 1000},
                log_to_driver=False,
            )  # fmt: skip
            return
        except Exception as error:
            if not left:
                raise
            print(f"ray-test: Ray did not start ({error}); again", flush=True)
            ray.shutdown()


def processes_of(directory: str) -> list[int]:
    """Processes that belong to the Ray session in `directory`: named in their command or environment."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            with contextlib.suppress(OSError):
                said = (each / "cmdline").read_bytes() + b"\0" + (each / "environ").read_bytes()
                if directory.encode() in said:
                    found.append(int(each.name))
    return found


def children_of(process: int) -> list[int]:
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                if int((each / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                    found.append(int(each.name))
    return found


def engine_of(process: int) -> int:
    """The process of the engine that a replica started."""
    return next(each for each in children_of(process) if b"EngineCore" in Path(f"/proc/{each}/cmdline").read_bytes())


def until(look: Callable[[], Any], within_s: float, what: str) -> Any:
    """What `look` finds, once it finds something."""
    end = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.25)


def _if(is_so: bool, value: Any) -> Any:
    return value if is_so else None


def _details() -> dict[str, Any]:
    import ray
    from ray.serve.context import _get_global_client

    found: dict[str, Any] = ray.get(_get_global_client()._controller.get_serve_instance_details.remote())
    return found


def _show_logs(directory: Path) -> None:
    """The end of what each replica said, where a run failed."""
    for path in sorted(directory.glob("session_*/logs/serve/replica_*.log")):
        lines = path.read_text(errors="replace").splitlines()
        print(f"--- {path.name}", *lines[-15:], sep="\n", flush=True)
    print(json.dumps({"logs": str(directory)}), flush=True)
