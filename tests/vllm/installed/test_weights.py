"""Weights replaced in place, as vLLM's own engine core does it: every way that replaces them begins an epoch.

Needs vLLM's Python, and no server: `.venv-vllm/bin/python -m pytest tests/vllm/installed/test_weights.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.vllm.content import weights_epoch
from kvbaton.engines.vllm.content.weights_epoch import REPLACING, WeightsEpoch, salted
from kvbaton_proof.conformance import configs

configs.prepare()
pytestmark = pytest.mark.timeout(300)  # the first import of vLLM alone takes a minute on a busy machine


@pytest.fixture(name="core")
def a_core() -> Any:
    """An engine core that has an executor and nothing else."""
    from vllm.v1.engine.core import EngineCore

    weights_epoch.watch_core()
    core = object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=lambda *args: ["done"], sleep=lambda level: None)
    core.pause_scheduler = lambda mode, clear_cache: None
    return core


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(8) + b"the weights of the start")
    return tmp_path


def watched(files: Path | str = "") -> WeightsEpoch:
    epoch = WeightsEpoch(str(files))
    epoch.watch(lambda: None)
    return epoch


def request(epoch: WeightsEpoch, salt: str | None = None) -> Any:
    found = SimpleNamespace(cache_salt=salt)
    epoch.mark(found)
    return found


def test_every_method_of_a_worker_that_replaces_weights_is_known_by_its_name() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert {name for name in REPLACING if not hasattr(Worker, name)} == set()
    unknown = {name for name in vars(Worker) if "weight" in name and not name.startswith("_")} - REPLACING
    harmless = {"init_weight_transfer_engine", "shutdown_weight_transfer_engine", "compute_weight_checksums",
                "start_draft_weight_update", "supports_draft_weight_updates"}  # fmt: skip
    assert unknown - harmless == set(), "does one of these replace weights?"


@pytest.mark.parametrize("method", sorted(REPLACING))
def test_a_call_that_replaces_weights_begins_an_epoch_and_others_do_not(core: Any, method: str) -> None:
    epoch = watched()
    assert core.collective_rpc("check_health") == ["done"] and epoch.count == 0
    assert salted(request(epoch, "salt")) == "salt"
    core.collective_rpc(method)
    assert epoch.count == 1 and "only here" in salted(request(epoch, "salt"))


def test_one_that_fails_half_way_has_replaced_them_too(core: Any) -> None:
    epoch = watched()

    def fails(*args: Any) -> None:
        raise RuntimeError("half of it")

    core.model_executor.collective_rpc = fails
    with pytest.raises(RuntimeError, match="half of it"):
        core.collective_rpc("update_weights", kwargs={"update_info": {}})
    assert epoch.count == 1


def test_two_engines_that_reload_the_same_files_agree_and_others_do_not(core: Any, files: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(bytes(8) + b"other weights, retrained")
    p, d = watched(files), watched(files)
    core.collective_rpc("reload_weights")
    assert salted(request(p)) == salted(request(d)) != ""
    before = salted(request(p))
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    assert salted(request(p)) == salted(request(d)) != before


def test_after_a_trainer_s_update_engines_agree_once_the_version_is_named(core: Any) -> None:
    p, d = watched(), watched()
    core.collective_rpc("finish_weight_update")
    assert salted(request(p)) != salted(request(d))
    core.set_weight_version("step 12")
    assert salted(request(p)) == salted(request(d)) == "weights version step 12\0"
    assert p.count == 2
    core.set_weight_version("step 12")
    assert p.count == 2, "the same name is no other weights"


def test_kv_of_two_weights_is_known_as_such_when_the_first_are_back() -> None:
    """A version that is rolled back: its text is the same, and what was computed in between is not."""
    epoch = WeightsEpoch()
    first = request(epoch)
    assert epoch.is_of(first)
    epoch.begin("version 1")
    long = request(epoch)
    assert epoch.is_of(long) and not epoch.is_of(first)
    epoch.begin("version 2")
    epoch.begin("version 1")
    assert salted(request(epoch)) == salted(long) and not epoch.is_of(long)


@pytest.mark.parametrize(("level", "count"), [(0, 0), (1, 0), (2, 1)])
def test_sleep_throws_weights_away_from_level_2_on(core: Any, level: int, count: int) -> None:
    epoch = watched()
    core.sleep(level)
    assert epoch.count == count


def test_what_the_engine_has_on_its_way_is_let_go_of_and_a_failure_there_costs_nothing_else(core: Any) -> None:
    told: list[str] = []
    live = SimpleNamespace(
        prefill=SimpleNamespace(voided=lambda: told.append("prefill")),
        voided=lambda: told.append("loads"),
        stored=SimpleNamespace(reset=lambda: told.append("store")),
        door=SimpleNamespace(cache_replaced=lambda: told.append("door")),
        pool=SimpleNamespace(forget_cached=lambda: told.append("pool")),
    )
    epoch, broken = WeightsEpoch(), WeightsEpoch()
    epoch.watch(lambda: live)
    broken.watch(SimpleNamespace)
    core.collective_rpc("reload_weights")
    assert (told, epoch.count, broken.count) == (["prefill", "loads", "store", "door", "pool"], 1, 1)
