"""Tiny models with layers that keep a state, alone or beside attention: shapes and weights for `tiny_model`.

Law: an answer hangs on the state. Decays are slow, so that a state remembers the whole prompt, and what it adds to the
residual is as strong as attention; a state of other tokens, or of one token more, gives another answer.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

Hybrid = Literal["falcon-h1", "qwen3-next", "nemotron-h", "mamba2", "jamba", "lfm2"]
HYBRIDS: tuple[Hybrid, ...] = get_args(Hybrid)
"""Mamba 2 beside attention in each layer; gated delta nets; Mamba 2 and attention in turns; Mamba 2 alone; Mamba 1;
short convolutions."""

STEP = 0.05
"""How much of a state one token replaces, about: a prompt of 100 tokens is remembered."""


def hybrid(kind: Hybrid, shared: dict[str, Any], *, experts_first: bool = False) -> Any:
    """The model, of the weights that transformers gives it. `shared`: what all tiny models have in common."""
    import transformers

    own: dict[str, Any]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    if kind == "falcon-h1":
        own = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32}
        config = transformers.FalconH1Config(**shared | heads | own, num_hidden_layers=3, mamba_chunk_size=64)
        return transformers.FalconH1ForCausalLM(config)
    if kind == "qwen3-next":
        linear = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
        layers = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
        # Experts in one layer alone: vLLM takes no model of this kind without any, and no MTP layer, whose number is 0.
        without = range(1, len(layers)) if experts_first else range(len(layers) - 1)
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": list(without)}
        experts |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
        own = {**linear, "linear_num_value_heads": 4, "layer_types": layers, "num_hidden_layers": len(layers)}
        config = transformers.Qwen3NextConfig(**shared | heads | experts | own)
        return transformers.Qwen3NextForCausalLM(config)
    if kind == "nemotron-h":
        own = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 64}
        types = ["mamba", "attention", "mamba", "mlp"]
        config = transformers.NemotronHConfig(**shared | heads | own, layers_block_type=types)
        return transformers.NemotronHForCausalLM(config)
    if kind == "mamba2":
        own = {"num_heads": 16, "head_dim": 32, "state_size": 32, "n_groups": 1, "chunk_size": 64}
        plain = {name: shared[name] for name in shared if name not in ("intermediate_size", "num_attention_heads")}
        config = transformers.Mamba2Config(**plain | own, num_hidden_layers=3)
        return transformers.Mamba2ForCausalLM(config)
    if kind == "jamba":
        own = {"attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False}
        few = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return transformers.JambaForCausalLM(transformers.JambaConfig(**shared | few | own, num_hidden_layers=4))
    types = ["conv", "full_attention", "conv", "conv"]
    few = {"num_attention_heads": 4, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False}
    config = transformers.Lfm2Config(**shared | few, layer_types=types, num_hidden_layers=len(types))
    return transformers.Lfm2ForCausalLM(config)


def randomize_state(name: str, weight: Any) -> bool:
    """Set a weight that only layers with states have; False if it is none of these."""
    last = name.rsplit(".", 2)[-2:]
    if name.endswith("A_log"):
        weight.zero_()  # decays by e to the power of minus the step
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        weight.fill_(math.log(math.expm1(STEP)))
    elif name.endswith(".D"):
        weight.fill_(0.2)
    elif name.endswith("conv1d.bias"):
        weight.zero_()
    elif last in (["conv1d", "weight"], ["conv", "weight"]):
        weight.normal_(0.0, 1.0 / weight.shape[-1] ** 0.5)
    elif name.endswith("in_proj_ba.weight"):
        weight.normal_(0.0, 0.5 / weight.shape[-1] ** 0.5)
    else:
        return False
    return True
