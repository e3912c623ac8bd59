"""Tiny models for speculative decoding: a target whose next token is easily guessed, and drafters of random weights.

Law: which drafts are accepted hangs on every position of the drafter's KV. A random drafter guesses one of the few
tokens that the target ever answers with, so some guesses are right, and others as soon as its KV is another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

Drafted = Literal["few-words", "eagle", "qwen3-next-mtp", "ernie-mtp", "nemotron-h-mtp"]
DRAFTED: tuple[Drafted, ...] = get_args(Drafted)
"""A Llama that answers with few tokens; an EAGLE head for it; models with an MTP layer: gated delta nets and experts,
attention alone, Mamba 2 beside attention."""
WORDS, FEW_WORDS = 6, 3
"""Tokens that a target answers with. An MTP layer is right less often than an EAGLE head, by the way its input is made:
its targets, but for the oldest, have fewer."""
_ATTENTION, _EXPERTS = 2, 0
"""The layers of the hybrid of gated delta nets whose shapes its MTP layer has: full attention, experts."""


def words_of(kind: str, printable: list[int]) -> list[int]:
    """The tokens that such a model answers with."""
    count = FEW_WORDS if kind in ("ernie-mtp", "nemotron-h-mtp") else WORDS
    return printable[:: max(1, len(printable) // count)][:count]


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


def add_mtp(kind: str, directory: Path) -> None:
    """Into a saved model: one layer that predicts the token after the next, under the names that vLLM looks for."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    found = load_file(path)
    config = json.loads((directory / "config.json").read_text())
    if kind == "ernie-mtp":
        added, config = _of_ernie(found), config | {"num_nextn_predict_layers": 1}
    elif kind == "nemotron-h-mtp":
        added, config = _of_nemotron(found), _nemotron_config(config)
    else:
        added, config = _of_qwen(found), config | {"num_nextn_predict_layers": 1}
    save_file(found | added, path, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _of_qwen(found: dict[str, Any]) -> dict[str, Any]:
    parts = ((_ATTENTION, "self_attn."), (_ATTENTION, "input_"), (_ATTENTION, "post_"), (_EXPERTS, "mlp."))
    alike = {name: weight for layer, part in parts for name, weight in _layer(found, layer, part).items()}
    width = alike["input_layernorm.weight"].shape[0]
    norms = {
        f"mtp.{name}.weight": _plain(width, 0.0) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    layer = {f"mtp.layers.0.{name}": _random(name, weight) for name, weight in alike.items()}
    return {**layer, "mtp.fc.weight": _joining(width), **norms}


def _of_ernie(found: dict[str, Any]) -> dict[str, Any]:
    alike = _layer(found, 0, "")
    width = alike["input_layernorm.weight"].shape[0]
    norms = {f"model.{name}.0.weight": _plain(width, 1.0) for name in ("mtp_emb_norm", "mtp_hidden_norm")}
    layer = {f"model.mtp_block.0.{name}": _random(name, weight) for name, weight in alike.items()}
    return {**layer, "model.mtp_linear_proj.0.weight": _joining(width), **norms}


def _of_nemotron(found: dict[str, Any]) -> dict[str, Any]:
    """Attention and nothing else: vLLM has experts as the only other kind of layer here."""
    query = next(name for name in found if name.endswith(".mixer.q_proj.weight"))
    prefix = query.removesuffix("mixer.q_proj.weight")
    alike = {name.removeprefix(prefix): weight for name, weight in found.items() if name.startswith(prefix)}
    width = alike["norm.weight"].shape[0]
    norms = {f"mtp.layers.0.{name}.weight": _plain(width, 1.0) for name in ("enorm", "hnorm", "final_layernorm")}
    layer = {f"mtp.layers.0.{name}": _random(name, weight) for name, weight in alike.items()}
    return {**layer, "mtp.layers.0.eh_proj.weight": _joining(width), **norms}


def _nemotron_config(config: dict[str, Any]) -> dict[str, Any]:
    """The kind of layer has another name in each release of transformers: the one that this release has written."""
    types = next(config[name] for name in ("layers_block_type", "layer_types") if config.get(name))
    attention = next(each for each in types if "attention" in each and "linear" not in each)
    return config | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": [attention]}


def _layer(found: dict[str, Any], number: int, part: str) -> dict[str, Any]:
    prefix = f"model.layers.{number}."
    return {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix + part)}


def _joining(width: int) -> Any:
    """Of the next token's embedding and the last hidden state one hidden state."""
    import torch

    return torch.randn(width, 2 * width) / (2 * width) ** 0.5


def _plain(width: int, value: float) -> Any:
    import torch

    return torch.full((width,), value)


def _random(name: str, weight: Any) -> Any:
    import torch

    if "norm" in name:
        return weight.detach().clone()
    return torch.randn(weight.shape) * (1.6 / weight.shape[-1] ** 0.5)
