"""Every kind of cache that the installed vLLM describes is handed over, or refused by name with a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

from kvbaton.engines.vllm.memory import vllm_layout

pytestmark = pytest.mark.timeout(300)


def test_no_kind_of_cache_is_unknown() -> None:
    import vllm.v1 as home
    from vllm.v1.kv_cache_interface import KVCacheSpec

    for module in pkgutil.iter_modules(home.__path__):
        if module.name.startswith("kv_cache"):
            importlib.import_module(f"vllm.v1.{module.name}")
    found, open_ = set(), [KVCacheSpec]
    while open_:
        each = open_.pop()
        found.add(each.__name__)
        open_ += each.__subclasses__()
    known = {*vllm_layout.HANDED_OVER, *vllm_layout.REFUSED, *vllm_layout.CONTAINERS}
    assert len(found) > 10 and found <= known, f"not in cache_specs: {sorted(found - known)}"
    assert known <= found, f"in cache_specs, and not in vLLM: {sorted(known - found)}"


def test_what_is_read_from_specs_is_there() -> None:
    from vllm.v1 import kv_cache_interface as specs

    def fields(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind)} | set(getattr(kind, "__dataclass_fields__", ()))

    wanted = {
        specs.MambaSpec: {
            "shapes", "dtypes", "mamba_type", "state_content_size_bytes", "tp_replicated", "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
        },
        specs.SlidingWindowSpec: {"sliding_window", "extra_retained_tokens"},
        specs.SlidingWindowMLASpec: {"bounded_replay", "tokens_per_state"},
        specs.MLAAttentionSpec: {"tokens_per_state"},
        specs.ChunkedLocalAttentionSpec: {"attention_chunk_size"},
    }  # fmt: skip
    missing = {kind.__name__: names - fields(kind) for kind, names in wanted.items() if names - fields(kind)}
    assert not missing
