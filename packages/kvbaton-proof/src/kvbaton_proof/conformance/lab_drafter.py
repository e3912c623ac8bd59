"""A drafter without a model: vLLM's scheduler sees its configuration, and the runner computes its KV.

The KV of module m at a position is a function of all tokens up to m + 1 after it; where those are not known yet, it is
of a guess, which is never right. No drafts are proposed: what they would stand on is what is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbaton_proof.conformance.conformance_oracle import Memory, Words, prefix_hashes

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
        self._modules = modules

    def use_eagle(self) -> bool:
        return True

    def use_eagle_block_drop(self) -> bool:
        return True

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
