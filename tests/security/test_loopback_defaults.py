"""Nothing binds wide unless an operator says so: every default address of every process, read where it is declared."""

from __future__ import annotations

import argparse
import importlib
import ipaddress

import msgspec
import pytest

from kvbaton.control import zmq
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.transports.catalogue import PlaneSettings
from kvbaton.transports.checksum.checksum_transport import SumConfig
from kvbaton.transports.mooncake.mooncake_transport import MooncakeConfig
from kvbaton.transports.staged.staged_transport import StagedConfig
from kvbaton.transports.tcp.tcp_transport import TcpConfig

CONFIGS = (
    WorkerOptions, ConnectorSettings, MooncakeConfig, PlaneSettings, StagedConfig, SumConfig, TcpConfig
)  # fmt: skip
COMMANDS = ("up", "router", "registry", "worker", "store")


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_default_host_is_loopback(config: type[msgspec.Struct]) -> None:
    hosts = [each for each in msgspec.structs.fields(config) if each.name == "host" or each.name.endswith("_host")]
    assert hosts and all(is_loopback(each.default) for each in hosts), [(each.name, each.default) for each in hosts]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_address_that_a_command_binds_by_default_is_loopback(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"kvbaton.cli.{command}").add_arguments(parser)
    hosts = {each.dest: each.default for each in parser._actions if each.dest == "host" or each.dest.endswith("_host")}
    assert hosts
    assert all(is_loopback(host) for name, host in hosts.items() if name != "no_same_host"), hosts


def test_the_control_plane_listens_on_loopback_and_plain_discovery_nowhere() -> None:
    assert is_loopback(zmq.LOOPBACK.removeprefix("tcp://").rpartition(":")[0])
    parser = argparse.ArgumentParser()
    importlib.import_module("kvbaton.cli.router").add_arguments(parser)
    assert parser.get_default("plain_discovery") is None
