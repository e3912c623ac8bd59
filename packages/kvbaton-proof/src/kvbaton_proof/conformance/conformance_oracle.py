"""The expected value of each byte of KV: a function of the tokens up to its position, the layer and the head.

Law: "computing" writes exactly what `expected` says and reading compares with it, so a block that holds anything else
(another prompt's KV, an older life's, another head's, poison) is seen by the first request that attends to it. A state
is a function of all tokens so far and of the rank; one that has counted a token too many or too few is another. A
drafter's KV of module m at a position is a function of all tokens up to m + 1 after it; where those are not known yet,
it is of a guess, which is never right. No drafts are proposed: what they would stand on is what is checked.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton_proof.conformance.configs import EOS, VOCAB, EngineShape, layer_index

Words = npt.NDArray[np.uint64]

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_MASK = (1 << 64) - 1
_TOKENS_BELOW = 3  # padding, BOS and EOS are never sampled by chance


class WrongKvError(Exception):
    """Promise 1 is broken: a request attended to bytes that are not its prompt's KV."""


def prefix_hashes(tokens: Sequence[int], before: int = 0x5EED) -> Words:
    """One number per position; it depends on all tokens up to there."""
    found = np.empty(len(tokens), np.uint64)
    state = before
    for at, token in enumerate(tokens):
        state = (state * 0x9E3779B97F4A7C15 + token + 1) & _MASK
        state ^= state >> 29
        found[at] = state
    return found


def next_token(tokens: Sequence[int]) -> int:
    """What this "model" answers: the same on every engine, never EOS."""
    last = int(prefix_hashes(tokens)[-1])
    return _TOKENS_BELOW + (last >> 17) % (VOCAB - _TOKENS_BELOW)


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What one engine alone would answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def expected(hashes: Words, layer: int, heads: range, words: int) -> Words:
    """The KV of these positions: [positions, heads, words]."""
    head = np.arange(heads.start, heads.stop, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    word = np.arange(words, dtype=np.uint64) * np.uint64(0x165667B19E3779F9)
    mixed: Words = hashes[:, None, None] + head[None, :, None] + word[None, None, :]
    mixed ^= np.uint64((layer + 1) * 0xD6E8FEB86659FD93 & _MASK)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    return mixed


class Memory:
    """One rank's KV memory, as vLLM allocates it."""

    def __init__(self, shape: EngineShape, kv_cache_config: Any, rank: int) -> None:
        import torch
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        layout = KVCacheLayout[shape.layout]
        with _pages_of_its_own(torch):
            self.tensors: dict[str, Any] = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        self.groups = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        owned = [(group, layer) for group, layers in enumerate(self.groups) for layer in layers]
        self.in_order = sorted(owned, key=lambda each: layer_index(each[1]))  # as a model computes them
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.windows = [getattr(spec, "sliding_window", None) for spec in specs]
        self.states = {at: spec.block_size for at, spec in enumerate(specs) if hasattr(spec, "mamba_type")}
        """Groups of states, and how many tokens one of their blocks is for."""
        self.block_tokens = shape.block_tokens
        self._rank = rank
        heads = shape.heads_per_rank
        first = 0 if shape.latent else rank * shape.kv_heads // shape.ranks
        self._heads = range(first, first + heads)
        self._words: dict[str, Words] = {
            name: tensor.view(torch.int64).numpy().view(np.uint64) for name, tensor in self.tensors.items()
        }

    def write(self, layer: str, blocks: Sequence[int], first: int, hashes: Words) -> None:
        """Compute positions `first..` of one layer."""
        where, slots = self._places(blocks, first, len(hashes))
        memory = self._words[layer]
        memory[where, :, slots, :] = expected(hashes, layer_index(layer), self._heads, memory.shape[3])

    def check(self, layer: str, blocks: Sequence[int], first: int, hashes: Words, whose: str) -> None:
        """Attend to positions `first..` of one layer; WrongKvError names the first that is not what it must be."""
        where, slots = self._places(blocks, first, len(hashes))
        memory = self._words[layer]
        wrong = memory[where, :, slots, :] != expected(hashes, layer_index(layer), self._heads, memory.shape[3])
        if wrong.any():
            position = int(np.argwhere(wrong)[0][0])
            held = memory[where[position], 0, slots[position], 0]
            what = "poison (never written)" if held == POISON else "another's bytes"
            count = int(wrong.any(axis=(1, 2)).sum())
            raise WrongKvError(
                f"{whose}: {layer} position {first + position} (block {where[position]}) holds {what}; "
                f"{count} of {len(hashes)} positions are wrong"
            )

    def write_state(self, layer: str, block: int, state: Words) -> None:
        """The last of `state` is of all tokens so far."""
        self._words[layer][block, 0, 0] = self._state(layer, state)

    def check_state(self, layer: str, block: int, state: Words, whose: str) -> None:
        held = self._words[layer][block, 0, 0]
        if (held != self._state(layer, state)).any():
            what = "poison (never written)" if (held == POISON).any() else "another"
            raise WrongKvError(f"{whose}: {layer}: its state after {len(state)} tokens (block {block}) is {what}")

    def zero(self, blocks: Sequence[int]) -> None:
        """As vLLM does with fresh blocks of a model that has states, whichever group they are for."""
        for words in self._words.values():
            words[list(blocks)] = 0

    def _state(self, layer: str, state: Words) -> Words:
        words = self._words[layer].shape[3]
        found: Words = expected(state[-1:], layer_index(layer), range(self._rank, self._rank + 1), words)[0, 0]
        return found

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """Whatever a fresh block held is undefined; make sure that nobody can live on it."""
        for layer in self.groups[group]:
            self._words[layer][list(blocks)] = POISON

    def is_poisoned(self, group: int, blocks: Sequence[int]) -> bool:
        """Whether something of these blocks was never written since."""
        return any(bool((self._words[layer][list(blocks)] == POISON).any()) for layer in self.groups[group])

    def _places(self, blocks: Sequence[int], first: int, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        positions = np.arange(first, first + count)
        return np.asarray(blocks, dtype=np.int64)[positions // self.block_tokens], positions % self.block_tokens


@contextlib.contextmanager
def _pages_of_its_own(torch: Any) -> Iterator[None]:
    """A real cache is too large for the heap and gets pages of its own; these small ones must be given theirs."""
    genuine = torch.zeros

    def zeros(size: int, dtype: Any, device: Any) -> Any:
        assert dtype is torch.int8 and device.type == "cpu"
        return torch.frombuffer(
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype, count=size
        )

    torch.zeros = zeros
    try:
        yield
    finally:
        torch.zeros = genuine


__all__ = ["EOS", "POISON", "Memory", "WrongKvError", "answer", "expected", "next_token", "prefix_hashes"]


GUESS = np.uint64(0x6E55_6E55_6E55_6E55)


class LabDrafter:
    """What vLLM's scheduler and its planning ask of a speculative configuration."""

    def __init__(self, modules: int, *, overlapped: bool) -> None:
        """Overlapped, vLLM schedules drafts before there are any; then none are promised."""
        self.method = "mtp" if modules > 1 else "eagle"
        self.num_speculative_tokens = 0 if overlapped else modules
        self.num_speculative_tokens_per_batch_size = None
        self.max_num_new_slots_for_drafting = 0
        self.draft_model_config = None
        self.kv_cache_dtype = None
        self.disable_eagle_block_drop = self.disable_lookahead_block_hashes = False
        self._modules = modules

    def use_eagle(self) -> bool:
        return True

    def use_eagle_block_drop(self) -> bool:
        return True

    needs_eagle_block_drop = use_eagle_block_drop

    def use_multi_module_mtp(self) -> bool:
        return self._modules > 1

    def use_dflash(self) -> bool:
        return False

    use_dspark = uses_draft_model = uses_dynamic_speculative_decoding = use_dflash


def ahead_of(tokens: Sequence[int], module: int, first: int, last: int) -> Words:
    """What the KV of positions `first` to `last` is of: the tokens up to `module` + 1 after each, or a guess."""
    hashes = prefix_hashes(tokens)[first + module + 1 : last + module + 1]
    missing = last - first - len(hashes)
    return np.concatenate([hashes, np.full(missing, GUESS)]) if missing else hashes


def draft(memory: Memory, module: int, layer: str, group: int, work: Any) -> None:
    """One module, after a step has sampled: look at its past, then write what the step adds."""
    tokens, blocks, past = work.state.tokens, work.state.blocks[group], work.past
    known = min(past, len(tokens) - module - 1)
    if known > 0 and (work.is_fresh or module == 0):
        memory.check(layer, blocks, 0, ahead_of(tokens, module, 0, known), f"the drafter of {work.name}")
    memory.write(layer, blocks, past, ahead_of(tokens, module, past, past + work.count))
