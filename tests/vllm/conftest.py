"""Fixtures for tests with real vLLM servers. Run them with vLLM's Python: `.venv-vllm/bin/python -m pytest tests/vllm`.

Law: whatever a test starts through `engines` is gone, with all its processes, when the test is over.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.local_cluster import vllm_engine
from tests.vllm.engines import IN_THE_CORE, Engine, free_port, start_engine

SEED = 1
StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """A Python that has vLLM and kvbaton: this one, or what KVBATON_VLLM_PYTHON names."""
    named = os.environ.get("KVBATON_VLLM_PYTHON")
    if named is None and importlib.util.find_spec("vllm") is None:
        pytest.fail("no vLLM beside this Python; make vllm, then .venv-vllm/bin/python -m pytest tests/vllm")
    return named or sys.executable


@pytest.fixture(scope="session")
def tiny(vllm_python: str) -> Callable[[str], Path]:
    """The directory of a tiny model by its kind (llama, mla, gemma3), made once per machine."""
    found: dict[str, Path] = {}

    def of_kind(kind: str) -> Path:
        if kind not in found:
            found[kind] = vllm_engine.tiny_model(vllm_python, kind, SEED)
        return found[kind]

    return of_kind


@pytest.fixture(scope="session")
def plain(vllm_python: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One aggregated engine without a connector, whose answers are right; wait for it."""
    log = tmp_path_factory.mktemp("plain") / "plain.log"
    engine = start_engine(vllm_python, tiny("llama"), free_port(), extra_args=IN_THE_CORE, log=log)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def engines(vllm_python: str, tmp_path: Path) -> Iterator[StartEngine]:
    """Start an engine: `engines(model, "p0", kv_transfer_config=…)`. Several start side by side; wait for each."""
    started: list[Engine] = []

    def begin(model: Path, name: str, *, port: int | None = None, **more: Any) -> Engine:
        log = tmp_path / f"{name}.log"
        engine = start_engine(vllm_python, model, free_port() if port is None else port, log=log, **more)
        started.append(engine)
        return engine

    try:
        yield begin
    finally:
        for engine in started:
            engine.stop()
