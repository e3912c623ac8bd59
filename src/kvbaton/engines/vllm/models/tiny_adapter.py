"""A LoRA adapter of random weights for the tiny Llama, strong enough to change an answer."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, WIDTH = 4, 256  # of `tiny_model`'s "llama"
RANK = 8


def write_adapter(directory: Path) -> None:
    """For the query projections alone, so that the KV of the layers after the first is another one."""
    import torch
    from safetensors.torch import save_file

    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, WIDTH) * 0.1
        weights[f"{name}.lora_B.weight"] = torch.randn(WIDTH, RANK) * 0.5
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
