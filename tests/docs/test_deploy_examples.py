"""The examples in deploy/: settings, systemd units, a compose file and containers, each as the product takes it."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from docs_commands import ROOT
from docs_rules import check_transfer_config, parsed

from kvbaton.cli import main as cli
from kvbaton.cli.settings import layers
from kvbaton.cli.settings.file import read

DEPLOY = ROOT / "deploy"
SETTINGS = DEPLOY / "config" / "cluster.yaml"
INSTALLED = "/etc/kvbaton/cluster.yaml"  # where the units expect it
YAML_PYTHON = ROOT / ".venv-docs" / "bin" / "python"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
IN_CONTAINERS = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "USER", "ENTRYPOINT"}


def settled(words: list[str], variables: dict[str, str]) -> argparse.Namespace:
    """What a command would run with, held to the checks that it makes before it opens anything."""
    command = words[0]
    args = layers.parse(cli.build_parser(command, cli.module_of(command)), command, words, dict(variables))
    cli.module_of(command).refuse(args)
    return args


def yaml_of(path: Path) -> Any:
    words = [YAML_PYTHON, "-c", "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"]
    done = subprocess.run(words, input=path.read_text(), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml_of(DEPLOY / "compose.yaml")


def test_the_settings_are_right_and_any_yaml_reader_sees_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--check", str(SETTINGS)]) == 0, capsys.readouterr().out
    ours: dict[str, dict[str, str]] = {}
    for entry in read(str(SETTINGS)).entries:
        ours.setdefault(entry.section, {})[entry.key] = entry.texts[0]
    theirs = {name: {key: str(value) for key, value in below.items()} for name, below in yaml_of(SETTINGS).items()}
    assert ours == theirs and set(ours) == set(layers.CONFIGURED), "an example of every section"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_and_stops_commands_that_there_are(path: Path) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    assert {"Unit", "Service", "Install"} == set(unit.sections())
    service = unit["Service"]
    page = unit["Unit"]["Documentation"].rpartition("/main/")[2]
    assert (ROOT / page).exists()
    ran = [shlex.split(text) for name, text in service.items() if name.startswith("Exec")]
    for words in ran:
        words = [word.replace("%i", "p0").replace(INSTALLED, str(SETTINGS)) for word in words]
        if "-m" in words:
            assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
            assert {"--model", "--port", "--kv-transfer-config"} <= set(words) and service["EnvironmentFile"]
        elif words[1] in layers.CONFIGURED:
            args = settled(words[1:], {})
            drain_s = getattr(args, "drain_s", 0.0)
            assert float(service["TimeoutStopSec"]) > drain_s, "it would be killed while it drains"
        else:
            parsed(["kvbaton", *words[1:]])
    assert service["User"] == "kvbaton" and service["NoNewPrivileges"] == "yes"


def test_the_variables_of_an_engine_s_unit_are_a_configuration_of_the_connector() -> None:
    found = {}
    for line in (DEPLOY / "systemd" / "p0.env").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            (found[name],) = shlex.split(value)
    check_transfer_config(found["KV_TRANSFER_CONFIG"])
    unit = (DEPLOY / "systemd" / "kvbaton-vllm@.service").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", unit)) == set(found)
    extra = json.loads(found["KV_TRANSFER_CONFIG"])["kv_connector_extra_config"]
    assert extra["http_address"].endswith(f":{found['PORT']}")


def test_every_service_of_the_compose_file_is_a_command_with_settings_that_it_takes(compose: Any) -> None:
    services = compose["services"]
    address = {name: one["networks"]["cluster"]["ipv4_address"] for name, one in services.items() if "networks" in one}
    seen = {}
    for name, one in services.items():
        assert (ROOT / one["build"]["dockerfile"]).exists()
        if "entrypoint" in one:
            parsed(shlex.split(one["entrypoint"][2].partition("|| ")[2]))
            continue
        args = seen[name] = settled(one["command"], one["environment"])
        assert args.keys == "/keys/cluster" and any(volume.startswith("keys:/keys") for volume in one["volumes"])
        assert set(one["depends_on"]) == {"keys"}
    assert seen["router"].registry_host == address["router"]
    assert seen["store"].host == address["store"]
    for name in ("p0", "d0"):
        args = seen[name]
        assert args.name == name and args.registry == f"tcp://{address['router']}:{seen['router'].registry_port}"
        assert args.store == f"tcp://{address['store']}:{seen['store'].port}"
        assert {args.http_host, args.control_host} == {address[name]}
    assert {args.role for args in seen.values() if hasattr(args, "role")} == {"prefill", "decode"}


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("Containerfile*")), ids=lambda path: path.name)
def test_a_container_has_what_its_steps_need(path: Path) -> None:
    """They are read here, linted by `make dist`, and built by hand: no test can count on an image registry."""
    text = path.read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {step[0] for step in steps} <= IN_CONTAINERS
    copied = [words.split() for kind, words in steps if kind == "COPY" and "--from" not in words]
    sources = {word for words in copied for word in words[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "setup.py", "src", project["readme"], *project["license-files"]} <= sources
    users = [words for kind, words in steps if kind == "USER"]
    assert users[-1].startswith("10001"), "it does not run as root"
