"""The adapter's modules where there is no vLLM: its base classes are stood in for while a test lasts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

THEIRS = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BASES = ("KVConnectorMetadata", "KVConnectorHandshakeMetadata", "KVConnectorWorkerMetadata")
OURS = "kvbaton.engines.vllm."


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the adapter, and forgets all that it brought along."""
    parts = THEIRS.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    for name in BASES:
        monkeypatch.setattr(sys.modules[THEIRS], name, type(name, (), {"__slots__": ()}), raising=False)
    before = set(sys.modules)
    yield lambda name: importlib.import_module(OURS + name)
    for name in set(sys.modules) - before:
        if name.startswith(OURS):
            del sys.modules[name]
