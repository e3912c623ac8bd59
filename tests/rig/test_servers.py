"""Servers as they are started: what each group's commands and variables are; nothing is started here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engines.vllm.models.tiny_model import KINDS
from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton_proof.bench.vllm import vllm_levels
from kvbaton_proof.bench.vllm.vllm_levels import TARGETS, Setup, VllmBenchPlan
from kvbaton_proof.bench.vllm.vllm_rows import Level
from kvbaton_proof.gpu_test import gpu_features, timing
from kvbaton_proof.gpu_test.gpu_answers import runner_of
from kvbaton_proof.gpu_test.gpu_features import FEATURES, specs
from kvbaton_proof.gpu_test.sizes import CPU, STANDARD
from kvbaton_proof.rig import servers
from kvbaton_proof.rig.connectors import CONNECTORS, Seat, fixed
from kvbaton_proof.rig.servers import Group, Site, Spec, anywhere, last_words, made

SETUP = Setup(server=ServerOptions(python="py", model="/m", served_name="kv"), prefix_caching=False)


def plain(command: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """A command without its port and its connector, and the connector."""
    words = list(command[command.index("--model") :])
    at = words.index("--port")
    del words[at : at + 2]
    if "--kv-transfer-config" not in words:
        return words, None
    at = words.index("--kv-transfer-config")
    config = json.loads(words[at + 1])
    return words[:at] + words[at + 2 :], config


def of(engine: servers.Engine) -> dict[str, Any]:
    """Its connector's configuration."""
    config = plain(engine.command)[1]
    assert config is not None
    return config


def site_in(tmp_path: Path, device: Any = "cuda") -> Site:
    site = Site(device, "/usr/bin/python3", tmp_path, tmp_path / "logs")
    site.models |= {kind: tmp_path / kind for kind in ("small", "8b", "llama", "model")}
    return site


class TestServers:
    def test_a_pair_differs_from_one_alone_in_its_connector_and_nothing_else(self, tmp_path: Path) -> None:
        spec = Spec(name="a", model="small")
        alone = made(site_in(tmp_path), spec).alone
        for connector in CONNECTORS:
            pair = made(site_in(tmp_path), Spec(name="b", model="small", connector=connector))
            for engine in pair.workers.values():
                assert plain(engine.command)[0] == plain(alone.command)[0]

    def test_roles_keys_and_the_fault_are_where_they_belong(self, tmp_path: Path) -> None:
        pair = made(
            site_in(tmp_path), Spec(name="b", model="small", connector="kvbaton", front="kvbaton", has_control=True)
        )
        p, d = of(pair.p), of(pair.d)
        assert (p["kv_role"], d["kv_role"]) == ("kv_producer", "kv_consumer")
        assert p["kv_connector_extra_config"]["keys"] == d["kv_connector_extra_config"]["keys"]
        assert "fault_misplace_while" not in p["kv_connector_extra_config"]
        assert d["kv_connector_extra_config"]["fault_misplace_while"] == str(pair.flag)
        assert "registry" in p["kv_connector_extra_config"] and "router" in pair.engines

    def test_what_is_timed_has_no_fault_built_in(self, tmp_path: Path) -> None:
        for spec in timing.specs(STANDARD):
            for engine in made(site_in(tmp_path), spec).engines.values():
                assert "fault_" not in " ".join(engine.command)

    def test_the_other_runner_is_asked_for_by_its_variable(self, tmp_path: Path) -> None:
        for variant, wanted in ((servers.EAGER, None), (CPU.variants[0], "0")):
            pair = made(site_in(tmp_path), Spec(name=variant.label, model="small", variant=variant))
            assert pair.alone.variables.get("VLLM_USE_V2_MODEL_RUNNER") == wanted

    def test_commands_have_no_paths_of_this_machine(self, tmp_path: Path) -> None:
        pair = made(site_in(tmp_path), Spec(name="b", model="8b", connector="kvbaton"))
        for line in pair.commands():
            assert str(tmp_path) not in line and "/usr/bin" not in line
        assert " python -m vllm" in anywhere(pair.commands()[-1], pair)
        assert "--model 8B" in pair.commands()[-1]

    def test_an_engine_says_which_runner_it_uses(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("(EngineCore pid=7) INFO [worker.py:1] Using V2 Model Runner\n")
        assert runner_of(log) == "V2"
        log.write_text("(EngineCore pid=7) INFO [worker.py:1] fine\n")
        assert runner_of(log) == "V1"

    def test_the_cause_is_found_in_a_log(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("INFO fine\nERROR something\nValueError: kvbaton: refused because\nINFO later\n")
        assert last_words(log) == "ValueError: kvbaton: refused because"
        log.write_text("one\ntwo\n")
        assert last_words(log) == "one | two"
        assert last_words(tmp_path / "none") == ""

    def test_anybodys_connector_is_a_line_of_configuration(self, tmp_path: Path) -> None:
        theirs = fixed(
            "theirs", {"kv_connector": "X", "kv_role": "kv_both", "at": "{side_port}"}, {"HOME": "{home}"}, handed="x"
        )
        seat = Seat(name="p0", home=tmp_path, device="cpu", port=1, side_port=2, other_side_port=3, settings={"a": 1})
        config, variables = theirs.parts(seat)
        assert config == {
            "kv_connector": "X", "kv_role": "kv_both", "at": "2", "kv_connector_extra_config": {"a": 1},
        }  # fmt: skip
        assert variables == {"HOME": str(tmp_path)}


def by_feature(name: str) -> dict[str, Spec]:
    return {spec.name: spec for spec in specs(STANDARD, FEATURES[name])}


class TestFeatures:
    def group(self, tmp_path: Path, spec: Spec, device: Any = "cuda") -> Group:
        site = Site(device, "/usr/bin/python3", tmp_path, tmp_path / "logs")
        site.models |= {kind: Path(f"/somewhere/models/tiny-{kind}-1-v1") for kind in KINDS}
        return made(site, spec)

    def test_words_name_the_directory_of_a_model_and_what_is_shown_does_not(self, tmp_path: Path) -> None:
        pair = self.group(tmp_path, by_feature("eagle")["eagle"])
        for engine in (pair.p, pair.d):
            told = json.loads(engine.command[engine.command.index("--speculative-config") + 1])
            assert told == {
                "num_speculative_tokens": 2,
                "method": "eagle",
                "model": "/somewhere/models/tiny-eagle-1-v1",
            }
        assert '"model": "EAGLE"' in pair.commands()[-1] and "/somewhere" not in pair.commands()[-1]
        lora = self.group(tmp_path, by_feature("lora")["lora"])
        assert "poet=/somewhere/models/tiny-adapter-1-v1" in lora.d.command
        assert "poet=ADAPTER" in lora.commands()[-1]

    def test_words_of_one_side_are_of_that_side_alone(self, tmp_path: Path) -> None:
        pair = self.group(tmp_path, by_feature("uncached")["uncached-d"])
        assert gpu_features.UNCACHED in pair.d.command and gpu_features.UNCACHED not in pair.p.command

    @pytest.mark.parametrize(("name", "ours_first"), [("offloading", "p0"), ("offloading-turned", "d0")])
    def test_ours_is_first_on_one_side_and_last_on_the_other(self, tmp_path: Path, name: str, ours_first: str) -> None:
        pair = self.group(tmp_path, by_feature("offloading")[name])
        for engine in (pair.p, pair.d):
            told = of(engine)
            assert (told["kv_connector"], told["kv_role"]) == ("MultiConnector", "kv_both")
            children = told["kv_connector_extra_config"]["connectors"]
            ours, other = children if engine.name == ours_first else children[::-1]
            assert (ours["kv_connector"], other["kv_connector"]) == ("BatonConnector", "OffloadingConnector")
            assert ours["kv_role"] == ("kv_producer" if engine.name == "p0" else "kv_consumer")
            assert "spec_name" not in other["kv_connector_extra_config"], "on a GPU it is vLLM's own"

    def test_on_a_cpu_the_other_connector_gets_a_worker_that_runs_there(self, tmp_path: Path) -> None:
        pair = self.group(tmp_path, by_feature("offloading")["offloading"], "cpu")
        children = of(pair.d)["kv_connector_extra_config"]["connectors"]
        assert children[0]["kv_connector_extra_config"]["spec_name"] == "HostOffloadingSpec"


class TestTargets:
    """Of `kvbaton bench vllm`."""

    def group(self, name: str, tmp_path: Path) -> Group:
        return made(site_in(tmp_path, "cpu"), vllm_levels.spec(name, SETUP))

    @pytest.mark.parametrize("name", TARGETS)
    def test_engines_of_all_targets_differ_in_their_connector_alone(self, name: str, tmp_path: Path) -> None:
        alone = self.group("aggregated", tmp_path / "alone").alone
        words, nothing = plain(alone.command)
        assert nothing is None and "--no-enable-prefix-caching" in words
        assert not {"--max-num-seqs", "--max-num-batched-tokens"} & set(words), "as vLLM chooses"
        words[words.index("--model") + 1] = ""
        for engine in self.group(name, tmp_path / "other").workers.values():
            own, config = plain(engine.command)
            own[own.index("--model") + 1] = ""
            assert own == words and (config is None) == (name == "aggregated")
            assert dict(engine.variables).items() >= dict(alone.variables).items()
            assert engine.variables["KVBATON_CALM"] == "1" and engine.variables["OMP_NUM_THREADS"] == "1"

    @pytest.mark.parametrize("name", [name for name in TARGETS if name != "aggregated"])
    def test_every_pair_stands_behind_kvbatons_router(self, name: str, tmp_path: Path) -> None:
        group = self.group(name, tmp_path)
        assert group.url == group.router.url and len(group.engines) == 3
        words = list(group.router.command)
        assert ("--prefill-url" in words) == (name == "nixl") == ("--keys" not in words)
        if name == "nixl":
            urls = [words[words.index(flag) + 1] for flag in ("--prefill-url", "--decode-url")]
            assert urls == [group.p.url, group.d.url]

    def test_nixls_engines_have_its_best_settings_ports_of_their_own_and_the_shim(self, tmp_path: Path) -> None:
        group = self.group("nixl", tmp_path)
        for engine in (group.p, group.d):
            config = of(engine)
            assert config["kv_connector"] == "NixlConnector" and config["kv_role"] == "kv_both"
            assert config["kv_connector_extra_config"] == {"num_threads": 0}
            assert engine.variables["UCX_TLS"] == "tcp" and engine.variables["UCX_NET_DEVICES"] == "lo"
            site = Path(engine.variables["PYTHONPATH"].split(":")[0])
            assert (site / "sitecustomize.py").is_file()
        port = "VLLM_NIXL_SIDE_CHANNEL_PORT"
        assert group.p.variables[port] != group.d.variables[port]


def test_every_second_round_goes_backwards() -> None:
    plan = VllmBenchPlan(
        setup=SETUP, targets=("aggregated", "nixl"), levels=(Level(1, 30),), rounds=2, input_tokens=256,
        output_tokens=16, rest_s=60.0, level_s=None,
    )  # fmt: skip
    assert [plan.order(number) for number in (1, 2)] == [("aggregated", "nixl"), ("nixl", "aggregated")]
    assert plan.deadline_s(Level(1, 30)) == 135.0
