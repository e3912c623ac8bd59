"""Part `features`: what vLLM does beside a handoff, on real engines: drafts, KV in 8 bits, other connectors, adapters.

Each feature is one engine alone and one or two pairs of a P and a D, all of small random models:

    eagle       an EAGLE head on P and D
    mtp         a multi-token predictor (ERNIE-4.5-like, attention alone)
    mtp-states  the same beside states (Nemotron-H-like: Mamba 2 and attention, float32)
    mtp-deltas  the same beside gated delta nets (Qwen3.5-like, bfloat16: their kernels take no float32)
    n-grams     drafts of D alone, without KV
    fp8         KV in 8 bits on both; a D of another KV dtype is refused by name
    offloading  MultiConnector with vLLM's OffloadingConnector, ours first on P and last on D, and the other way around
    lora        an adapter (bfloat16: vLLM's kernels take no float32)
    uncached    no prefix cache on P, one on D; and the other way around

Laws: an answer is compared with the engine alone as far as that one is sure, and counts only if D's own counter says
that its prompt came from P. Of drafts the *number accepted for each request* is compared: a random drafter's rate is the
same on right KV and on wrong KV, and its guesses are not. Each comparison is itself tried: with two blocks in each
other's place answers must be wrong, and counts of other prompts must not pass for those of these. A feature that fails,
or whose servers do not start, is told with its reason, and the others go on. Features begin as soon as there is room for
their servers (`Room`), and end theirs when they are done.
"""

from __future__ import annotations
