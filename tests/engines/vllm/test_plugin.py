"""The plugin that vLLM loads: our connector's name in vLLM's list and, where there is one, in Dynamo's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.side import guard
from kvbaton.engines.vllm import plugin

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """As much of vLLM's factory as is used."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module: str, cls: str) -> None:
        assert name not in self._registry, "vLLM raises"
        self._registry[name] = (module, cls)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Factory]:
    found = Factory()
    module = SimpleNamespace(KVConnectorFactory=found)
    monkeypatch.setattr(plugin.repeated_answers, "install", lambda: True)
    monkeypatch.setattr(importlib, "import_module", lambda name: {FACTORY: module}[name])
    guard.faults.clear()
    yield found
    assert not guard.faults, "nothing failed, not even in silence"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for Dynamo's module, imported already."""
    module = ModuleType(plugin.DYNAMO)
    module.NixlConnectorProtocol = type("NixlConnectorProtocol", (), {})  # type: ignore[attr-defined]
    found = {"NixlConnector": module.NixlConnectorProtocol}
    module.KV_CONNECTOR_PROTOCOLS = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.DYNAMO, module)
    return found


def test_vllms_list_gets_the_name_once_and_dynamo_is_not_imported(factory: Factory) -> None:
    plugin.register()
    plugin.register()
    assert factory._registry == {"BatonConnector": ("kvbaton.integrations.vllm", "BatonConnector")}
    assert plugin.DYNAMO not in sys.modules


def test_dynamos_table_gets_the_name_and_keeps_what_it_has(factory: Factory, table: dict[str, Any]) -> None:
    plugin.register()
    assert table["BatonConnector"] is table["NixlConnector"]
    table["BatonConnector"] = "Dynamo's own, of a later release"
    plugin.register()
    assert table["BatonConnector"] == "Dynamo's own, of a later release"


def test_a_dynamo_that_has_changed_costs_vllm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Factory()
    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(KVConnectorFactory=found))
    monkeypatch.setitem(sys.modules, plugin.DYNAMO, ModuleType(plugin.DYNAMO))
    plugin.register()
    assert "BatonConnector" in found._registry
