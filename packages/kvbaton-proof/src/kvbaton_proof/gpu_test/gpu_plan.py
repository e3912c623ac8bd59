"""The parts, what each shows, and which of them share servers.

Law: an act is a set of parts whose servers fit on one GPU together; they are started at once, because a start costs
more than what is asked of them. Parts of an act run one after the other, so that none disturbs what another measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ABOUT: Mapping[str, str] = {
    "answers": "Greedy tokens of P and D beside one engine's, float32: modes, model runners, CUDA graphs, chunks, "
               "prefix-cache hits, preemption, and a control that damages blocks.",
    "bytes": "bfloat16, FLASH_ATTN: D goes on from P's KV with the very numbers with which P itself goes on.",
    "mla": "The same with a latent KV (MLA).",
    "hybrids": "Greedy tokens of models whose layers keep a state (Falcon-H1-, Qwen3-Next-, Nemotron-H-, Mamba2-like) "
               "beside one engine's: modes, with and without a prefix cache, and a control that damages states.",
    "features": "Drafts (EAGLE, MTP, n-grams), KV in 8 bits, vLLM's OffloadingConnector beside ours, LoRA, one side "
                "without a prefix cache: answers and accepted drafts beside one engine's, refusals, controls.",
    "turns": "Conversations of several turns, with a D that keeps them and one that does not: answers beside one "
             "engine's, turns that P took, time to first token of each turn.",
    "timing": "The shape of an 8B model, CUDA graphs, one request at a time: D's leg beside its floor, time to first "
              "token when streaming beside one engine's, NixlConnector at its best settings beside both.",
    "load": "32 requests at once of 2,000 tokens: requests per second beside NixlConnector's, and what D's streams "
            "feel of loads that arrive.",
    "faults": "The same hand does the same things to a pair with kvbaton and to a pair with NixlConnector.",
    "handoff": "Without an engine: the contract of the device's data planes, and a handoff of 2.1 GB beside its copy.",
}  # fmt: skip
STANDARD: Sequence[Sequence[str]] = (
    ("answers", "bytes", "mla"), ("hybrids",), ("features",), ("turns",), ("timing", "load"), ("faults",),
    ("handoff",),
)  # fmt: skip
QUICK: Sequence[Sequence[str]] = (("answers", "timing"), ("handoff",))
REHEARSED: Sequence[Sequence[str]] = (("answers",), ("timing", "load"), ("faults",))
"""On a CPU: what needs no device. `bytes`, `mla`, `hybrids` and `features` can be named."""


def acts(device: str, quick: bool, named: Sequence[str] | None) -> list[list[str]]:
    """Which parts run, in which acts; ValueError names a part that there is not."""
    if named is None:
        return [list(act) for act in (REHEARSED if device == "cpu" else QUICK if quick else STANDARD)]
    unknown = [name for name in named if name not in ABOUT]
    if unknown:
        raise ValueError(f"--part: got {unknown[0]!r}, expected one of {', '.join(ABOUT)}")
    found = [[name for name in act if name in named] for act in STANDARD]
    return [act for act in found if act]
