"""The scripts of `tools/`, which are no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[1] / "tools"


def tool_module(name: str) -> ModuleType:
    """`docs/glossary_docs`, say."""
    spec = importlib.util.spec_from_file_location(name.rpartition("/")[2], TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
