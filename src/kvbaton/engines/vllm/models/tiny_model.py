"""Models of random weights that vLLM can serve on any machine, made in seconds without a network.

    python -m kvbaton.engines.vllm.models.tiny_model --kind llama --seed 1 DIRECTORY

`llama`, `mla`, `gemma3` and those whose layers keep a state (`tiny_hybrids`) are of shapes that CPUs can serve; `small`
and `latent` are their like with heads as wide as the attention kernels of GPUs want them; `8b` is a shape alone,
without weights: for timing, with `--load-format dummy`; `adapter` is a LoRA adapter for `llama`.

They say nothing sensible, and are made so that a wrong KV shows: attention is sharp and as strong as the residual, so
that the answer hangs on every part of the prompt, and logits are far apart, so that rounding does not change the
choice. Only tokens of printable ASCII are ever the likeliest, and the end of the text is not among them: a greedy
answer is always as long as it may be.

Laws: the same kind and seed give the same weights and the same tokenizer. A directory is there whole or not at all, and
one that is there is never written to. Runs with vLLM's Python (needs torch, transformers, tokenizers).

Tiny models for speculative decoding: a target whose next token is easily guessed, and drafters of random weights.

Law: which drafts are accepted hangs on every position of the drafter's KV. A random drafter guesses one of the few
tokens that the target ever answers with, so some guesses are right, and others as soon as its KV is another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from kvbaton.engines.vllm.models.tiny_hybrids import HYBRIDS, Hybrid, hybrid, randomize_state

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


Plain = Literal["llama", "mla", "gemma3", "small", "latent", "8b", "adapter"]
Kind = Plain | Hybrid | Drafted
KINDS: tuple[Kind, ...] = (*get_args(Plain), *HYBRIDS, *DRAFTED)
FORMAT = 1  # raise when the same kind and seed would give other weights
MARK = "kvbaton-model.json"
POSITIONS_MAX = 4096
ADAPTER_LAYERS, ADAPTER_WIDTH = 4, 256  # of "llama"
ADAPTER_RANK = 8
POSITIONS_MAX_8B = 65536
VOCABULARY = 1024
PAD, BOS, EOS, TURN = "<pad>", "<s>", "</s>", "<turn>"
_SPECIAL = (PAD, BOS, EOS, TURN)
_CHAT = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
_TEXT = """\
Two engines share the work of one answer. The first reads the prompt and leaves behind, for every layer and every token,
a key and a value. The second goes on from there, one token after the other, and reads all of them at every step. In
between lies the handoff: what was written on one side must be there on the other, whole, in order, and in time.

A runner who passes the baton does not let go before the other holds it, and does not hold on after. Whoever drops it
says so at once. A lease is a promise to keep something for a while; a claim is the question whether it is still there;
a commit is the answer that it was there all along. When nobody comes, the promise ends and the room is free again.

Once upon a time there was a small engine at the edge of a large machine. It had two cores, no accelerator, and very
little patience. Every morning it was asked the same questions: what is the capital of France, how many legs has a
spider, write a poem about the sea, explain why the sky is blue, translate this sentence into German, sort these words.
It knew none of the answers, because its weights were random, but it always gave the same ones, and that was its work.

def handoff(prompt, max_tokens=16, temperature=0.0): return decode(copy(prefill(prompt)), max_tokens, temperature)
{"prompt": "Hello, world", "max_tokens": 32, "stream": true, "logprobs": 5, "numbers": [0, 1, 2, 3, 10, 100, 2048]}
Questions? Mail us; the number is 0123-456789 (office hours: 9 to 17). It costs $5 & takes 100 % of #1's time @ night!
"""


def make(kind: Kind, seed: int, directory: Path) -> bool:
    """Write a model; False if it is there already. A directory with anything else in it is refused."""
    wanted = {"kind": kind, "seed": seed, "format": FORMAT}
    if directory.exists():
        _refuse_others(directory, wanted)
        return False
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write(kind, seed, unfinished)
        (unfinished / MARK).write_text(json.dumps(wanted))
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, directory)
        except OSError:  # another process was faster
            _refuse_others(directory, wanted)
            return False
        return True
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refuse_others(directory: Path, wanted: dict[str, Any]) -> None:
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / MARK).read_text())
    if found != wanted:
        raise ValueError(f"{directory}: holds {found or 'something else'}, expected {wanted}; name another directory")


def _write(kind: Kind, seed: int, directory: Path) -> None:
    import torch

    torch.manual_seed(seed)
    if kind == "adapter":
        write_adapter(directory)
        return
    tokenizer = _tokenizer(POSITIONS_MAX_8B if kind == "8b" else POSITIONS_MAX)
    if kind == "8b":  # dummy weights draw any id, and P tells no first token that has no text
        tokenizer.add_tokens([f" word{number}" for number in range(len(tokenizer), VOCABULARY)])
    tokenizer.save_pretrained(directory)
    if kind == "8b":
        _shape_8b(tokenizer).save_pretrained(directory)
        return
    torch.manual_seed(seed)
    if kind == "eagle":
        write_head(directory, _shared(tokenizer))
        return
    model, printable = (
        _model("llama" if kind == "few-words" else kind, tokenizer).to(torch.float32),
        _printable(tokenizer),
    )
    _randomize(model, words_of(kind, printable) if kind in DRAFTED else printable)
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    if kind.endswith("-mtp"):
        add_mtp(kind, directory)


def _tokenizer(positions: int) -> Any:
    """Byte-level BPE: every text has tokens, and comes back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(_SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "additional_special_tokens": [TURN]}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=_CHAT, model_max_length=positions, clean_up_tokenization_spaces=False,
        **names,
    )  # fmt: skip


def _printable(tokenizer: Any) -> list[int]:
    """The tokens that an answer may have: those whose bytes are printable ASCII."""
    plain = set(map(chr, range(33, 127))) | {"Ġ"}  # "Ġ" is how byte-level BPE writes a space
    words = tokenizer.get_vocab()
    return sorted(at for word, at in words.items() if word not in _SPECIAL and set(word) <= plain)


def _shared(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "max_position_embeddings": POSITIONS_MAX, "tie_word_embeddings": False, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip


def _shape_8b(tokenizer: Any) -> Any:
    """128 KiB of KV a token in 16 bits."""
    import transformers

    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
    wide |= {"num_hidden_layers": 32, "num_key_value_heads": 8, "max_position_embeddings": POSITIONS_MAX_8B}
    return transformers.LlamaConfig(**_shared(tokenizer) | wide, architectures=["LlamaForCausalLM"], dtype="bfloat16")


def _model(kind: Kind, tokenizer: Any) -> Any:
    import transformers

    shared = _shared(tokenizer)
    if kind in HYBRIDS:
        return hybrid(kind, shared)
    if kind == "qwen3-next-mtp":
        return hybrid("qwen3-next", shared, experts_first=True)
    if kind == "nemotron-h-mtp":
        return hybrid("nemotron-h", shared)
    if kind == "ernie-mtp":  # without experts: every layer is before the first that would have some
        own = {"num_hidden_layers": 4, "num_key_value_heads": 4, "moe_layer_start_index": 4, "moe_num_experts": 0}
        return transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**shared | own))
    if kind == "small":
        wide = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "head_dim": 64}
        config = transformers.LlamaConfig(**shared | wide, num_hidden_layers=8, num_key_value_heads=8)
        return transformers.LlamaForCausalLM(config)
    if kind == "llama":
        config = transformers.LlamaConfig(**shared, num_hidden_layers=4, num_key_value_heads=4, head_dim=32)
        return transformers.LlamaForCausalLM(config)
    if kind in ("mla", "latent"):  # kernels are compiled for these two sizes of the latent and its rotary part alone
        heads, width = (8, 32) if kind == "mla" else (16, 128)
        latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": width, "v_head_dim": width}
        dense = {"first_k_dense_replace": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": None}
        own = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 4}
        config = transformers.DeepseekV2Config(**shared | latent | dense | own)
        return transformers.DeepseekV2ForCausalLM(config)
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        **shared, num_hidden_layers=len(layers), layer_types=layers, sliding_window=256, num_key_value_heads=4,
        head_dim=32, query_pre_attn_scalar=32,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def _randomize(model: Any, printable: list[int]) -> None:
    """Replace the initial weights (of 0.02, at which every prompt has the same answer)."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.fill_(0.6)  # Gemma's norms multiply by 1 + weight
            elif "norm" in name or randomize_state(name, weight):
                continue
            elif "embed" in name:
                weight.normal_(0.0, 1.0 / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
            elif "lm_head" in name:
                weight.normal_(0.0, 4.0 / weight.shape[-1] ** 0.5)  # logits of 4
                hidden = torch.ones(len(weight), dtype=torch.bool)
                hidden[printable] = False
                weight[hidden] = 0.0
            else:
                weight.normal_(0.0, 1.6 / weight.shape[-1] ** 0.5)  # attention scores of 1.6 ** 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tiny_model", description="Write a model of random weights for vLLM.")
    parser.add_argument(
        "--kind", choices=KINDS, default="llama", help="grouped heads, a latent, sliding windows, or states"
    )
    parser.add_argument("--seed", type=int, default=1, help="of its weights")
    parser.add_argument("--under", action="store_true", help="make a directory within DIRECTORY, named after the model")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    args = parser.parse_args(argv)
    directory = args.directory / f"tiny-{args.kind}-{args.seed}-v{FORMAT}" if args.under else args.directory
    try:
        made = make(args.kind, args.seed, directory)
    except ValueError as error:
        print(f"tiny_model: {error}", file=sys.stderr)
        return 2
    print(f"{'made' if made else 'there already'}: {directory}")
    return 0


def write_adapter(directory: Path) -> None:
    """A LoRA adapter of random weights, strong enough to change an answer: for the query projections alone, so that the
    KV of the layers after the first is another one."""
    import torch
    from safetensors.torch import save_file

    weights = {}
    for layer in range(ADAPTER_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(ADAPTER_RANK, ADAPTER_WIDTH) * 0.1
        weights[f"{name}.lora_B.weight"] = torch.randn(ADAPTER_WIDTH, ADAPTER_RANK) * 0.5
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
