"""What `kvbaton bench vllm` starts for each target, and in which order; nothing is started here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton.processes.child_process import Program
from kvbaton_proof.bench.vllm import vllm_targets
from kvbaton_proof.bench.vllm.vllm_rows import Level
from kvbaton_proof.bench.vllm.vllm_targets import TARGETS, Setup
from kvbaton_proof.cli.bench_vllm import VllmBenchPlan

SETUP = Setup(server=ServerOptions(python="py", model="/m", served_name="tiny"), prefix_caching=False)


def _engines(name: str, directory: Path) -> list[Program]:
    _, members = vllm_targets._members(name, SETUP, directory)
    return [member for member in members.values() if member.name != "router"]


def _plain(argv: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """A command without its port and its connector, and the connector."""
    words = argv[argv.index("--model") :]
    at = words.index("--port")
    del words[at : at + 2]
    if "--kv-transfer-config" not in words:
        return words, None
    at = words.index("--kv-transfer-config")
    config = json.loads(words[at + 1])
    return words[:at] + words[at + 2 :], config


@pytest.mark.parametrize("name", TARGETS)
def test_engines_of_all_targets_differ_in_their_connector_alone(name: str, tmp_path: Path) -> None:
    (alone,) = _engines("aggregated", tmp_path / "alone")
    expected, nothing = _plain(list(alone.argv))
    assert nothing is None and "--no-enable-prefix-caching" in expected
    for member in _engines(name, tmp_path / "other"):
        words, config = _plain(list(member.argv))
        assert words == expected and (config is None) == (name == "aggregated")
        assert dict(member.env).items() >= dict(alone.env).items()
        assert member.env["KVBATON_CALM"] == "1" and member.env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "aggregated"])
def test_every_pair_stands_behind_kvbatons_router(name: str, tmp_path: Path) -> None:
    url, members = vllm_targets._members(name, SETUP, tmp_path)
    assert members[url].name == "router" and len(members) == 3
    words = list(members[url].argv)
    assert ("--prefill-url" in words) == (name == "nixl") == ("--keys" not in words)
    if name == "nixl":
        assert {words[words.index("--prefill-url") + 1], words[words.index("--decode-url") + 1]} == set(members) - {url}


def test_nixls_engines_have_its_best_settings_ports_of_their_own_and_the_shim(tmp_path: Path) -> None:
    p, d = _engines("nixl", tmp_path)
    for member in (p, d):
        _, config = _plain(list(member.argv))
        assert config is not None and config["kv_connector"] == "NixlConnector" and config["kv_role"] == "kv_both"
        assert config["kv_connector_extra_config"] == {"num_threads": 0}
        assert member.env["UCX_TLS"] == "tcp" and member.env["UCX_NET_DEVICES"] == "lo"
        site = Path(member.env["PYTHONPATH"].split(":")[0])
        assert (site / "sitecustomize.py").is_file()
    assert p.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] != d.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]


def test_every_second_round_goes_backwards() -> None:
    plan = VllmBenchPlan(
        setup=SETUP, targets=("aggregated", "nixl"), levels=(Level(1, 30),), rounds=2, input_tokens=256,
        output_tokens=16, rest_s=60.0, level_s=None,
    )  # fmt: skip
    assert [plan.order(number) for number in (1, 2)] == [("aggregated", "nixl"), ("nixl", "aggregated")]
    assert plan.deadline_s(Level(1, 30)) == 135.0
