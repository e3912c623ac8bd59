"""The faults: one list, from which plans are drawn and which `kvbaton chaos --list` prints.

Law: a fault names the promises it tries; a plan holds no fault that is not here, and a fault here can be carried out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

PROMISES: Mapping[int, str] = {
    1: "no wrong answer",
    2: "no hang",
    3: "no leak",
    4: "no engine death",
    5: "no stranger let in",
    6: "no lost stream",
}


class Target(enum.StrEnum):
    """Whom a fault is done to. A link is two names with a dash: p0-d1."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    LINK = "link"
    CLIENT = "client"
    MACHINE = "machine"


class Moment(enum.StrEnum):
    """When in a handoff's life; `ANY`: whatever is under way."""

    ANY = "any"
    BEFORE_CLAIM = "before-claim"
    MID_COPY = "mid-copy"
    BEFORE_COMMIT = "before-commit"
    MID_STREAM = "mid-stream"


EVERY_MOMENT = tuple(Moment)
ANY = (Moment.ANY,)


class Fault(msgspec.Struct, frozen=True):
    """`vllm`: it is in the standard plan too, which runs on real vLLM with either connector."""

    name: str
    what: str
    targets: tuple[Target, ...]
    promises: tuple[int, ...]
    moments: tuple[Moment, ...] = ANY
    vllm: bool = False


_ENGINES = (Target.PREFILL, Target.DECODE)

FAULTS: tuple[Fault, ...] = (
    Fault("kill", "kill -9, then start again at the same address", _ENGINES, (1, 2, 3, 4, 6), EVERY_MOMENT,
          vllm=True),
    Fault("kill-router", "kill -9 of the router, then start it again", (Target.ROUTER,), (2, 3, 4), EVERY_MOMENT),
    Fault("stop", "SIGSTOP for some seconds, then SIGCONT", _ENGINES, (1, 2, 3, 6), EVERY_MOMENT, vllm=True),
    Fault("drain", "an orderly end under load, then start again at the same address", _ENGINES, (1, 2, 3, 6)),
    Fault("stop-router", "SIGSTOP of the router for some seconds, then SIGCONT", (Target.ROUTER,), (2, 3),
          EVERY_MOMENT),
    Fault("reconfigure", "restart at the same address with other weights or another shape of KV", _ENGINES, (1, 4),
          vllm=True),
    Fault("partition", "no packet passes either way", (Target.LINK,), (1, 2, 3)),
    Fault("one-way", "packets pass one way only", (Target.LINK,), (1, 2, 3)),
    Fault("delay", "every packet is late", (Target.LINK,), (1, 2)),
    Fault("loss", "some packets are lost", (Target.LINK,), (1, 2)),
    Fault("full-disk", "no byte more fits on the disk of the shared store", (Target.MACHINE,), (1, 2, 3, 4)),
    Fault("full-shm", "no byte more fits in /dev/shm while an engine starts again", (Target.MACHINE,), (2, 3, 4)),
    Fault("exhausted", "more blocks are asked for than there are, all at once", (Target.CLIENT,), (2, 3), vllm=True),
    Fault("late-decode", "D is asked after P's lease ran out and its blocks were used again", (Target.CLIENT,), (1, 3),
          vllm=True),
    Fault("slow-reader", "clients that read an answer a byte at a time", (Target.CLIENT,), (2, 3)),
    Fault("clock-step", "an engine's wall clock jumps by hours, forth or back", _ENGINES, (1, 2, 3)),
    Fault("abort", "clients that hang up at any moment", (Target.CLIENT,), (1, 3, 4), vllm=True),
    Fault("flood", "many times more requests than the cluster can serve", (Target.CLIENT,), (2, 3, 4), vllm=True),
    Fault("poison", "malformed, huge and forged requests, at the router and at the engines", (Target.CLIENT,),
          (1, 2, 4, 5), vllm=True),
    Fault("replay", "a used or foreign ticket is presented again", (Target.CLIENT,), (1, 3, 5), vllm=True),
    Fault("liar", "a member with a valid key that lies to everybody, in every protocol", _ENGINES, (1, 2, 3, 4, 5)),
    Fault("false-registry", "one of two registries lies in the lists that it sends", (Target.MACHINE,), (1, 2, 5)),
    Fault("false-writes", "a P says Written of what it did not write, or wrote elsewhere or later", (Target.MACHINE,),
          (1,)),
    Fault("false-kv", "a P gives false KV, also to the store; then its key is removed", (Target.MACHINE,), (1,)),
    Fault("strangers", "garbage, huge frames, half-open and idle connections on every port", (Target.MACHINE,),
          (2, 4, 5), vllm=True),
)  # fmt: skip

ON_STREAMS: tuple[Fault, ...] = (
    Fault("roll", "an orderly end of every D, one after the other, each started again", (Target.MACHINE,),
          (1, 2, 3, 6)),
)  # fmt: skip
"""In the plan `streams` alone: in a soak of the random one, a D lives from beginning to end."""

ON_VLLM: tuple[Fault, ...] = (
    Fault("reset", "the prefix cache is reset, with all that runs and all that is leased", _ENGINES, (1, 2, 3, 4),
          vllm=True),
)  # fmt: skip
"""What only vLLM can be told to do; in plans of `kvbaton_proof.gpu_test`."""

BY_NAME: Mapping[str, Fault] = {fault.name: fault for fault in FAULTS}
KNOWN: Mapping[str, Fault] = {**BY_NAME, **{fault.name: fault for fault in (*ON_STREAMS, *ON_VLLM)}}
