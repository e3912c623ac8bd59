"""What must be equal for one vLLM's KV to mean the same in another: the compatibility key of an engine.

Laws: paths and versions do not matter, bytes do; names stand for nothing. Weights are known by their digest
(`engines.shared.weights_digest`).

What speculative decoding adds to a handoff: layers of a drafter, and how far ahead of a token they look.

A drafter of the EAGLE kind computes its KV of position i from token i and from token i + 1; the module number m of
several (MTP) looks m tokens further. So the KV of the last positions of a prompt hangs on tokens that P has guessed:
D takes over what hangs on the prompt alone, and computes the rest, as it does the last token in any case. Where layers
keep a state, P stops earlier and never sees the token after: there it is told which one to answer with.

Law: a drafter with KV of its own is part of the compatibility key, on both sides or on neither: D cannot compute a
drafter's KV without computing the whole prompt, and drafts on KV that was never written would be worth nothing. Nothing
here can make an answer wrong, since the model itself judges each draft. Drafters without KV (n-grams) may differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from typing import Any

from kvbaton.engines.shared.weights_digest import weights_digest

LOOKS_AHEAD = ("eagle", "eagle3", "mtp", "dflash", "dspark")
HAS_KV = (*LOOKS_AHEAD, "draft_model")
NAMES_ITS_MODEL = ("eagle", "eagle3", "dflash", "draft_model")
"""Those whose weights are not among the model's own files."""


def lookahead(vllm_config: Any) -> int:
    """How many tokens after a position its drafter's KV hangs on."""
    told = getattr(vllm_config, "num_prefill_lookahead_tokens", None)  # vLLM 0.32
    if isinstance(told, int):
        return told
    return 1 if _method(vllm_config) in LOOKS_AHEAD else 0


def draft_key(vllm_config: Any, weights_of: Callable[[str, str | None], str]) -> dict[str, str]:
    """The field of the compatibility key that a drafter with KV adds; none without one, as in earlier releases."""
    method, config = _method(vllm_config), getattr(vllm_config, "speculative_config", None)
    if method not in HAS_KV:
        return {}
    model = getattr(config, "draft_model_config", None)
    told = [method, str(getattr(config, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype)]
    if lookahead(vllm_config) > 1:
        told.append(f"{lookahead(vllm_config)} tokens ahead")
    if model is not None and method in NAMES_ITS_MODEL:
        told.append(_weights(model, weights_of))
    return {"draft": " ".join(told)}


def _weights(model: Any, weights_of: Callable[[str, str | None], str]) -> str:
    """By content; by name where there are no files to look at: a wrong one costs drafts, and no answer."""
    try:
        return weights_of(model.model, getattr(model, "revision", None))
    except ValueError:
        return hashlib.blake2b(str(model.model).encode(), digest_size=8).hexdigest()


def _method(vllm_config: Any) -> str:
    return str(getattr(getattr(vllm_config, "speculative_config", None), "method", None) or "")


def answers_with(request: Any, token: int) -> None:
    """Have vLLM "sample" this token: of a prompt that was shortened it is the one that comes next in truth."""
    sampling = getattr(request, "sampling_params", None)
    if sampling is not None and getattr(request, "structured_output_request", None) is None:
        sampling.allowed_token_ids = [token]


_SCALED = (["Llama4ForCausalLM"], ["Llama4ForConditionalGeneration"])
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "name_or_path", "torch_dtype", "dtype"})


def compat_key(vllm_config: Any, page: str, model_id: str, versions: Mapping[str, str]) -> dict[str, str]:
    """The key of an engine with this configuration; `page` says how the inside of its pages is ordered."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "model": ",".join(getattr(model.hf_config, "architectures", None) or ["?"]),
        "config": config_digest(model.hf_config),
        "weights": model_id or weights_digest(model.model, getattr(model, "revision", None)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization or "none"),
        "positions": _positions(model),
        "page": page,
        **draft_key(vllm_config, weights_digest),
        "info.model": str(model.model)[-200:],
        "info.machine": platform.machine(),
        **{f"info.{name}": version for name, version in versions.items()},
    }


def _positions(model: Any) -> str:
    """What vLLM derives from max_model_len and not from the config: LongRoPE's factors, Llama 4's temperature."""
    depends = "longrope" in str(model.hf_config.to_dict()) or (model.hf_config.architectures or [])[:1] in _SCALED
    return f"for {model.max_model_len} tokens" if depends else "of the config"


def cpu_page(vllm_config: Any, block_sizes: set[int]) -> str:
    """How CPU attention orders a page: by instruction set and block size, both of which P and D must share."""
    from vllm.v1.attention.backends import cpu_attn

    model = vllm_config.model_config
    blocks = ",".join(map(str, sorted(block_sizes)))
    choose = getattr(cpu_attn, "_get_attn_isa", None)
    isa = choose(model.dtype, max(block_sizes), model.get_head_size()) if choose is not None else platform.machine()
    return f"CPU_ATTN {isa}, block of {blocks}"


def device_page(vllm_config: Any, page: str) -> str:
    """How a device's attention orders a page: by its backends, whose rows may mean different things."""
    from vllm.distributed.kv_transfer.kv_connector import utils

    backends = sorted({backend.get_name() for backend in utils.get_current_attn_backends(vllm_config)})
    return f"{page}, {' '.join(backends)}"


def state_page(device: str) -> str:
    """How a state is ordered inside: by the layout of convolutions, and on CPUs by the instructions of the kernels."""
    from vllm.model_executor.layers.mamba import mamba_utils

    layout = mamba_utils.get_conv_state_layout()
    return f"states {layout}" if device != "cpu" else f"states {layout} {_cpu_instructions()}"


def _cpu_instructions() -> str:
    import torch

    named = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    found = (name for name in named if getattr(torch.cpu, name, lambda: False)())
    return next(found, platform.machine()).removeprefix("_is_").removesuffix("_supported")


def config_digest(hf_config: Any) -> str:
    """A digest of the model's configuration, without what differs between machines."""
    fields = _stable(hf_config.to_dict())
    return hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(each) for key, each in value.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_stable(each) for each in value]
    return value
