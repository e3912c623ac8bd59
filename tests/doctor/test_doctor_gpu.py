"""`kvbaton doctor` and GPUs: what the driver and the kernel say, and launches that cannot work with caches on a GPU."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli.main import main
from kvbaton.doctor import machine_checks
from kvbaton.doctor.config_checks import examine
from kvbaton.doctor.config_reading import parse
from kvbaton.engines.vllm.launch.launching import CONNECTOR
from kvbaton.transports import builtin_entries


class Machine:
    """Two GPUs that reach each other, and say so."""

    count = 2

    def __init__(self, apart: set[tuple[int, int]] | None = None, shares: bool = True) -> None:
        self.apart = apart or set()
        self.shares_all = shares

    def name(self, device: int) -> str:
        return f"GPU number {device}"

    def shares(self, device: int) -> bool:
        return self.shares_all

    def reaches(self, device: int, other: int) -> bool:
        return (device, other) not in self.apart


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a container nor a limit."""
    monkeypatch.setattr(builtin_entries, "RDMA_DEVICES", tmp_path / "none")
    monkeypatch.setattr(machine_checks, "_inode", lambda path: machine_checks.NAMESPACES[path.name])


def codes(machine: Any, device: str = "cuda") -> list[str]:
    return [each.code for each in machine_checks.examine_gpus(machine, "no driver", device)]


def test_a_machine_that_is_well_has_no_findings() -> None:
    assert codes(Machine()) == [] and machine_checks.names(Machine()) == ("GPU number 0", "GPU number 1")


def test_caches_on_a_gpu_need_one_and_others_do_not() -> None:
    assert codes(None) == ["gpu-missing"] and codes(None, "cpu") == []


@pytest.mark.parametrize("apart", [{(0, 1)}, {(1, 0)}, {(0, 1), (1, 0)}])
def test_gpus_that_cannot_read_each_other_are_named_once(apart: set[tuple[int, int]]) -> None:
    found = machine_checks.examine_gpus(Machine(apart), "", "cuda")
    assert [each.code for each in found] == ["gpu-peer"] and "0 and 1" in found[0].found


def test_a_gpu_without_ipc_is_told() -> None:
    assert codes(Machine(shares=False)) == ["gpu-ipc", "gpu-ipc"]


def test_a_container_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_checks, "_inode", lambda path: 7 if path.name == "ipc" else machine_checks.NAMESPACES["pid"]
    )
    found = machine_checks.examine_gpus(Machine(), "", "cuda")
    assert [each.code for each in found] == ["gpu-container"] and "its own ipc namespace" in found[0].found
    monkeypatch.setattr(machine_checks, "_inode", lambda _path: 0)  # no /proc: nothing can be said
    assert codes(Machine()) == []


def test_rdma_needs_memory_that_may_be_locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = [64 << 10]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit[0], limit[0]))
    assert codes(Machine()) == [], "nobody has asked for it"
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(builtin_entries, "RDMA_DEVICES", tmp_path / "infiniband")
    assert codes(Machine()) == ["memlock-small"]
    limit[0] = resource.RLIM_INFINITY
    assert codes(Machine()) == []


# --- launches


def launch(more: str = "", before: str = "", **extra: Any) -> str:
    transfer = {
        **CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"name": "p0", "keys": "/keys", **extra},
    }  # fmt: skip
    return f"{before} vllm serve m --host 127.0.0.1 {more} --kv-transfer-config '{json.dumps(transfer)}'"


def refused(text: str, device: str = "cuda") -> list[str]:
    _, found = examine(parse("prefill", "--prefill", text), device)
    return [each.found for each in found if each.code == "parallel-unsupported"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (launch("--enable-sleep-mode"), "enable_sleep_mode"),
        (launch("--enable-cumem-allocator"), "enable_cumem_allocator"),
        (launch("--enable-cumem-allocator", transport="cuda,staged-shm"), "enable_cumem_allocator"),
        (launch(before="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"), "expandable_segments"),
        (launch(before="PYTORCH_ALLOC_CONF=expandable_segments:True"), "expandable_segments"),
        (launch("--nnodes 2"), "nnodes: 2"),
        (launch("--tensor-parallel-size 2 --distributed-executor-backend ray"), "distributed_executor_backend: ray"),
    ],
)
def test_what_the_engine_would_refuse_is_found_before(text: str, said: str) -> None:
    found = refused(text)
    assert len(found) == 1 and said in found[0]


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (launch(), "cuda"),
        (launch("--enable-sleep-mode"), "cpu"),
        (launch("--enable-cumem-allocator", transport="staged-shm"), "cuda"),
        (launch(before="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"), "cuda"),
        (launch("--distributed-executor-backend ray"), "cuda"),
    ],
)
def test_what_works_is_not_refused(text: str, device: str) -> None:
    assert refused(text, device) == []


def test_the_gpus_are_on_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "look", lambda: (Machine({(0, 1)}), ""))
    main(["doctor"])
    said = capsys.readouterr().out
    assert "GPUs: 0: GPU number 0, 1: GPU number 1" in said and "[gpu-peer]" in said
    main(["doctor", "--device", "cpu"])
    assert "[gpu-peer]" not in capsys.readouterr().out


def test_without_a_gpu_caches_are_looked_for_in_host_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "look", lambda: (None, "no driver"))
    main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (
        told["gpus"] == [] and "tcp" in told["offered"] and "gpu-missing" not in {x["code"] for x in told["findings"]}
    )
    assert main(["doctor", "--json", "--device", "cuda"]) == 1
    assert "gpu-missing" in {x["code"] for x in json.loads(capsys.readouterr().out)["findings"]}
