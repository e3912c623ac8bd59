"""Lets NIXL's progress thread sleep between two looks; for a peer on a machine with few cores: it would spin else.

nixl's Python API (1.5.1) hard-codes `pthrDelay = 0`, with which that thread calls poll(…, 0) for ever: a whole core per
idle engine, so that two engines on two cores starve each other. A machine with cores to spare needs no such thing. To
delete once `nixl_agent_config` takes a delay.

Laws: installed by a `sitecustomize` that only the benchmark and the chaos runs put on the path, and only into NIXL's
own module. Nothing here raises: with another nixl the thread spins, which `kvbaton bench vllm` shows as CPU time.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

DELAY_US = 1000
SITE = "from kvbaton.engines.vllm.launch.nixl_shim import install\n\ninstall()\n"
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")


def write_site(directory: Path) -> Path:
    """A directory that, on PYTHONPATH, installs this in every Python process."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(SITE)
    return directory


def install() -> None:
    """Be there when NIXL's bindings are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def rest(bindings: ModuleType, delay_us: int = DELAY_US) -> bool:
    """Make every agent's configuration keep `delay_us`, whatever is written to it; False if it has no such thing."""
    plain = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(plain, "pthrDelay", None)
    if not isinstance(plain, type) or not hasattr(delay, "__set__"):
        return False

    def keep(config: Any, _asked: int) -> None:
        delay.__set__(config, delay_us)

    calm = type("nixlAgentConfig", (plain,), {"pthrDelay": property(delay.__get__, keep)})
    vars(bindings)["nixlAgentConfig"] = calm
    return True


class _Finder(importlib.abc.MetaPathFinder):
    """Finds NIXL's bindings where they are, and sees to them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if name != "_bindings" or package not in _PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, plain: importlib.abc.Loader) -> None:
        self._plain = plain

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        if not rest(module):
            print("kvbaton: this nixl cannot be made to rest; its thread will spin", file=sys.stderr)
