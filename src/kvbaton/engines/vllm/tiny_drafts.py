"""Tiny models for speculative decoding: a target whose next token is easily guessed, and drafters of random weights.

Law: which drafts are accepted hangs on every position of the drafter's KV. A random drafter guesses one of the few
tokens that the target ever answers with, so some guesses are right, and others as soon as its KV is another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

Drafted = Literal["few-words", "eagle", "qwen3-next-mtp"]
DRAFTED: tuple[Drafted, ...] = get_args(Drafted)
"""A Llama that answers with few tokens; an EAGLE head for it; the hybrid of gated delta nets with an MTP layer."""
WORDS = 6
_ATTENTION, _EXPERTS = 2, 0
"""The layers of the hybrid whose shapes an MTP layer has: full attention of one, experts of the other."""


def words_of(printable: list[int]) -> list[int]:
    """The tokens that such a model answers with."""
    return printable[:: max(1, len(printable) // WORDS)][:WORDS]


def write_head(directory: Path, shared: dict[str, Any]) -> None:
    """EAGLE: one layer over the target's last hidden state and the next token's embedding, which is the target's."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(**shared, num_hidden_layers=1, num_key_value_heads=4, head_dim=32)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    layer = transformers.LlamaForCausalLM(config).model.layers[0]
    found = {f"layers.0.{name}": _random(name, weight) for name, weight in layer.named_parameters()}
    found.pop("layers.0.input_layernorm.weight")
    width = config.hidden_size
    found["fc.weight"] = torch.randn(width, 2 * width) / (2 * width) ** 0.5
    save_file(found, directory / "model.safetensors")


def add_mtp(directory: Path) -> None:
    """Into a saved hybrid: one layer that predicts the token after the next."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    found = load_file(path)
    parts = ((_ATTENTION, "self_attn."), (_ATTENTION, "input_"), (_ATTENTION, "post_"), (_EXPERTS, "mlp."))
    alike = {
        name.removeprefix(f"model.layers.{layer}."): weight
        for layer, part in parts
        for name, weight in found.items()
        if name.startswith(f"model.layers.{layer}.{part}")
    }
    found |= {f"mtp.layers.0.{name}": _random(name, weight) for name, weight in alike.items()}
    width = alike["input_layernorm.weight"].shape[0]
    found["mtp.fc.weight"] = torch.randn(width, 2 * width) / (2 * width) ** 0.5
    found |= {
        f"mtp.{name}.weight": torch.zeros(width) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    save_file(found, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2))


def _random(name: str, weight: Any) -> Any:
    import torch

    if "norm" in name:
        return weight.detach().clone()
    return torch.randn(weight.shape) * (1.6 / weight.shape[-1] ** 0.5)
