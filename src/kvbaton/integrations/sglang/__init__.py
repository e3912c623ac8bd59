"""SGLang's side of kvbaton: `sglang serve … --disaggregation-transfer-backend kvbaton`, by SGLang's own entry point;
and `BatonHiCache`, a storage backend of its HiCache (`"module_path": "kvbaton.integrations.sglang"`).

Importing this package is cheap and needs no SGLang; SGLang calls `register` in each of its processes.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


def register() -> None:
    """For the entry point `sglang.srt.plugins`."""
    from kvbaton.engines.sglang.plugin import register as put_in

    put_in()


@functools.cache
def _hicache() -> type:
    from kvbaton.engines.sglang.hicache_store import hicache_class

    return hicache_class(importlib.import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorage)


def __getattr__(name: str) -> Any:
    if name == "BatonHiCache":
        return _hicache()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
