"""Sizes of the parts: on a GPU, in the quick plan, and in a rehearsal on a CPU. Numbers only.

Law: a rehearsal runs the same code as the GPU; what differs is here and in `rig.servers`.
"""

from __future__ import annotations

import msgspec

from kvbaton_proof.rig.connectors import Device
from kvbaton_proof.rig.servers import Variant


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """`*_tokens` are of prompts."""

    # answers
    variants: tuple[Variant, ...] = (
        Variant("V2", True),
        Variant("V2", False),
        Variant("V1", True),
        Variant("V1", False),
    )
    prompts: int = 32
    shortest_tokens: int = 40
    longest_tokens: int = 3000
    answer_tokens: int = 24
    chunk_tokens: int = 512
    at_once: int = 16
    d_blocks: int = 1400  # of D where it is to preempt
    preempt_prompts: int = 24
    preempt_tokens: int = 1300
    preempt_answer: int = 200
    damaged: int = 4
    # bytes, mla
    exact_prompts: int = 8
    exact_tokens: tuple[int, ...] = (33, 513, 2049)
    exact_answer: int = 32
    # hybrids
    hybrids: tuple[str, ...] = ("falcon-h1", "qwen3-next", "nemotron-h", "mamba2")
    hybrid_tokens: tuple[int, ...] = (2, 15, 16, 17, 100, 127, 128, 129, 300, 700, 1100, 1500)
    # features
    features: tuple[str, ...] = (
        "eagle", "mtp", "mtp-states", "fp8", "offloading", "lora", "mtp-deltas", "n-grams", "uncached",
    )  # fmt: skip
    feature_tokens: tuple[int, ...] = (2, 16, 17, 100, 128, 129, 300, 420, 700, 1100)
    feature_engines: int = 20  # at once
    # turns
    talks: int = 3
    talk_turns: int = 5
    talk_right: int = 700  # of the first prompt where answers are compared
    talk_first: int = 4096  # and where they are timed
    talk_answer: int = 128
    talk_more: int = 64
    # streams
    flows: int = 64  # at two D's, so that about 32 are cut
    flow_answer: int = 400
    flow_prompt: int = 200  # at most
    long_flows: int = 4  # at each D
    long_prompt: int = 15_000
    long_told: int = 1384  # before D is killed
    long_answer: int = 2600
    drained: int = 64  # at two D's
    drained_answer: int = 1200
    decoders: int = 5  # of which one is killed under many streams, two under long ones, and one is drained
    both_ways: int = 2  # rounds with and without
    # timing
    timed_tokens: tuple[int, ...] = (512, 4096, 16384)
    streamed_from_tokens: int = 4096
    repetitions: int = 7
    nixl: bool = True
    # load
    crowd: int = 32
    crowd_tokens: int = 2000
    crowd_answer: int = 64
    watched: int = 8  # streams that decode while loads arrive
    watched_answer: int = 600
    bursts: int = 3
    # faults
    fault_blocks: int = 0  # of P; 0: as many as its cache has room for
    fault_d_blocks: int = 1024
    clients: int = 64
    stop_s: float = 20.0
    lease_s: float = 6.0
    long_tokens: int = 1500  # of prompts of which D has not room for all
    faults: tuple[str, ...] | None = None  # titles; None: all
    # handoff
    handoff_repetitions: int = 11


STANDARD = Sizes()
QUICK = msgspec.structs.replace(
    STANDARD, variants=(Variant("V2", True), Variant("V1", False)), prompts=16, preempt_prompts=20, exact_prompts=4,
    repetitions=3, nixl=False, bursts=1, handoff_repetitions=5, talks=2,
    features=("eagle", "mtp", "mtp-states", "fp8", "offloading"), feature_tokens=(2, 17, 100, 128, 129, 420, 700),
)  # fmt: skip
CPU = Sizes(
    variants=(Variant("V1", False),), prompts=6, longest_tokens=700, answer_tokens=12, chunk_tokens=256, at_once=6,
    d_blocks=24, preempt_prompts=6, preempt_tokens=500, preempt_answer=150, damaged=2, exact_prompts=2,
    exact_tokens=(129, 513), exact_answer=12, timed_tokens=(256, 512), streamed_from_tokens=512, repetitions=2,
    nixl=False, hybrids=("falcon-h1",), hybrid_tokens=(2, 100, 128, 129, 300, 700), crowd=4,
    crowd_tokens=300, crowd_answer=12, watched=2, watched_answer=60, bursts=1, fault_blocks=128, fault_d_blocks=32,
    features=("eagle", "n-grams", "offloading", "lora", "uncached"), feature_tokens=(2, 17, 128, 129, 420),
    feature_engines=5, clients=8, stop_s=12.0, long_tokens=1000, talks=1, talk_turns=3, talk_right=300,
    talk_first=300, talk_answer=40, talk_more=30, flows=8, flow_answer=240, flow_prompt=60, long_flows=1,
    long_prompt=600, long_told=150, long_answer=1000, drained=4, drained_answer=600, decoders=4, both_ways=1,
)  # fmt: skip


def sizes_of(device: Device, quick: bool) -> Sizes:
    if device == "cpu":
        return CPU
    return QUICK if quick else STANDARD
