"""vLLM's MultiConnector around ours: its front end finds our class by its name, and no statistic of ours ends it.

Needs vLLM's Python, and no server: `.venv-vllm/bin/python -m pytest tests/vllm/pairs/test_multi_connector.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from kvbaton.engines.side import guard
from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.lab import Lab, prompt_of
from tests.vllm.forking import run_forked

configs.prepare()
pytestmark = pytest.mark.timeout(300)  # the first import of vLLM alone takes a minute on a busy machine

LOOK_UP = """
import os, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
for how in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, how
        continue
    exec(how)
    found = KVConnectorFactory.get_connector_class_by_name("BatonConnector")
    assert found.__module__ == "kvbaton.engines.vllm.connector", found
    print("found", flush=True)
    os._exit(0)
"""
AS_A_CHILD = """
child = KVTransferConfig(
    kv_connector="BatonConnector", kv_connector_module_path="kvbaton.integrations.vllm", kv_role="kv_both"
)
assert KVConnectorFactory.supports_hma_config(child)  # as VllmConfig does, in every process
"""
BY_PLUGIN = """
from kvbaton.engines.vllm.plugin import register
register()
register()
"""


def test_our_class_is_found_by_its_name_in_a_process_that_knows_of_it(tmp_path: Path) -> None:
    """As a child, and with the plugin before: each in a process of its own, forked once vLLM is imported."""
    ways = [AS_A_CHILD, BY_PLUGIN + AS_A_CHILD]
    status, said = run_forked(["-c", LOOK_UP, *ways], tmp_path / "log", 240)
    assert (status, said.splitlines()[-2:]) == (0, ["found", "found"]), said[-2000:]


@pytest.fixture(name="told")
def figures() -> dict[str, Any]:
    """What one engine with a handoff behind it tells, as it reaches the front end."""
    lab, seen = Lab(), list[dict[str, Any]]()
    try:
        p, _ = lab.duo()
        genuine = p._take_stats
        p._take_stats = lambda stats: (seen.append(stats.kv_connector_stats) if stats else None, genuine(stats))[1]  # type: ignore[method-assign]
        lab.finish(lab.hand_over("pull", prompt_of(20)))
        lab.settle()
    finally:
        lab.close()
    return next(each for each in seen if each and each["counts"].get("leases_total"))


def loggers() -> tuple[Any, Any]:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

    for collector in {*prometheus_client.REGISTRY._names_to_collectors.values()}:
        if str(getattr(collector, "_name", "")).startswith(("kvbaton", "vllm:nixl")):
            prometheus_client.REGISTRY.unregister(collector)
    child = {
        "kv_connector": "BatonConnector", "kv_connector_module_path": "kvbaton.integrations.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {"name": "p0", "keys": "/keys"},
    }  # fmt: skip
    multi = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child]}
    )
    page = KVConnectorProm(SimpleNamespace(kv_transfer_config=multi), ["engine"], {0: ["0"]})
    return KVConnectorLogging(multi), page


def shown(name: str) -> float | None:
    """The figure of engine 0, with whichever labels of its own it has."""
    samples = [each for family in prometheus_client.REGISTRY.collect() for each in family.samples if each.name == name]
    return next((each.value for each in samples if each.labels["engine"] == "0"), None)


def test_the_figures_of_a_child_reach_the_log_and_the_page(told: dict[str, Any]) -> None:
    """Promise 4: the first request ended the API server, in `KVConnectorFactory.get_connector_class_by_name`."""
    lines, page = loggers()
    for _ in range(2):
        lines.observe({"BatonConnector": told})
        page.observe({"BatonConnector": told})
    said: list[str] = []
    lines.log(lambda form, text: said.append(form % text))
    assert "leases_total" in said[0]
    value = shown("kvbaton_leases_total")
    assert value is not None and value >= 2


@pytest.mark.parametrize(
    "strange",
    [
        {"counts": {"nobody_knows_total": 1, "leases_total": 2}},
        {"counts": {"leases_total": "two"}, "gauges": {"nobody": 1}, "rows": [["nobody", [], 1], "row", 7, []]},
        {"counts": {"ends_total a:b:c:d": 1, "leases_total": -1}, "rows": None},
        {"counts": 5, "gauges": [1], "rows": {"a": 1}},
        {"data": "of another release"},
        {"counts": None},
    ],
)
def test_figures_that_cannot_be_read_cost_themselves_alone(strange: dict[str, Any]) -> None:
    lines, page = loggers()
    good = {"counts": {"leases_total": 3}, "gauges": {"pinned_blocks": 4}, "rows": []}
    for figures in (strange, good, strange, good):
        lines.observe({"BatonConnector": figures})
        page.observe({"BatonConnector": figures})
    lines.log(lambda *_: None)
    value = shown("kvbaton_leases_total")
    assert value in (6, 10), "the good ones are counted, beside and between the others"
    assert shown("kvbaton_pinned_blocks") == 4


def test_a_page_that_cannot_be_made_costs_the_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbaton.engines.vllm.vllm_stats import BatonMetrics

    def fails(self: Any, *args: Any) -> None:
        raise RuntimeError("no page")

    monkeypatch.setattr(BatonMetrics, "__init__", fails)
    before = guard.faults["build_prom_metrics"]
    _, page = loggers()
    page.observe({"BatonConnector": {"counts": {"leases_total": 3}}})
    assert guard.faults["build_prom_metrics"] == before + 1


@pytest.mark.parametrize(("others", "layout"), [(["OffloadingConnector"], "LBHNC"), ([], None), (None, "BLHNC")])
def test_beside_others_ours_has_no_wish_for_a_layout(others: list[str] | None, layout: str | None) -> None:
    """On a GPU: vLLM ends an engine whose connectors want different ones. Alone, ours has its wish."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    ours = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "kvbaton.integrations.vllm",
        "kv_role": "kv_both",
    }
    children = [*({"kv_connector": name, "kv_role": "kv_both"} for name in others or ()), ours]
    around = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    transfer = KVTransferConfig(**(ours if others is None else around))
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        device_config=SimpleNamespace(device_type="cuda"),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    asked = KVConnectorFactory.get_connector_class(transfer)
    assert asked.get_required_kvcache_layout(config) == layout
