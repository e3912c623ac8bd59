"""Contenders by name: which engines stand, what is before them, and how they are asked.

    aggregated, single        engines that each compute prompt and answer: as many as the pair has, or one
    pull, stream, push        kvbaton, in this mode; `+turns`: D keeps turns; `+store`: all share a store
    nixl                      vLLM with its NixlConnector
    offloading                aggregated engines with vLLM's OffloadingConnector
    NAME                      vLLM with a connector of the user's (`--contender NAME=JSON`)
    …@vllm-router, …@toy      the same behind another front than kvbaton's router

Law: contenders of one name without its mode are one cluster, asked in several ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit.run_facts import AGGREGATED, SINGLE
from kvbaton_proof.rig.connectors import CONNECTORS
from kvbaton_proof.rig.fronts import FRONTS, Front

if TYPE_CHECKING:
    from kvbaton_proof.rig.servers import Spec

MODES = ("pull", "stream", "push")
TURNS, STORE = "turns", "store"
KVBATON = "kvbaton"
MODEL = "model"
TIMED, COMPARED = "8b", "small"
SHAPES = (TIMED, COMPARED)
"""Of models on GPUs: an 8B model's in bfloat16 with CUDA graphs; a small one in float32, whose answers are compared."""
TURN_S, STORE_BYTES = 60.0, "1GiB"
LOCAL = ("--fallback", "local")
"""For a router: engines without a P serve alone."""


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """A name, taken apart."""

    name: str
    connector: str = ""  # "": none
    mode: str | None = None  # of kvbaton
    more: tuple[str, ...] = ()  # of TURNS and STORE
    front: Front = "kvbaton"
    is_single: bool = False

    @property
    def cluster(self) -> str:
        """Contenders of one cluster stand once. A front of others knows no modes: then the engines have it fixed."""
        if self.connector != KVBATON:
            return self.name
        fixed = self.mode if self.header is None else ""
        return "-".join(filter(None, (KVBATON, fixed, *self.more, "" if self.front == KVBATON else self.front)))

    @property
    def header(self) -> str | None:
        """The mode that is asked for with each request."""
        return self.mode if self.front == KVBATON else None

    @property
    def is_embedded(self) -> bool:
        """Whether embedded engines can play it."""
        return self.name in (AGGREGATED, SINGLE, *MODES)


def contender(name: str) -> Contender:
    """ValueError says what is wrong with the name."""
    words, _, front = name.partition("@")
    base, *more = words.split("+")
    known = (AGGREGATED, SINGLE, *MODES, *(each for each in CONNECTORS if each != KVBATON))
    is_ours = base in MODES
    wrong = [word for word in more if not is_ours or word not in (TURNS, STORE)]
    if base not in known or wrong or (front and front not in FRONTS) or name.endswith("@"):
        raise ValueError(f"got {name!r}, expected some of {', '.join(known)}; "
                         f"of kvbaton with +{TURNS} or +{STORE}, all with @{' or @'.join(FRONTS)}")  # fmt: skip
    return Contender(
        name=name, connector=KVBATON if is_ours else base if base in CONNECTORS else "", mode=base if is_ours else None,
        more=tuple(sorted(set(more))), front=front or KVBATON, is_single=base == SINGLE,  # type: ignore[arg-type]
    )  # fmt: skip


def spec_of(
    one: Contender, *, prefill: int, decode: int, max_model_len: int, transport: str, router_args: tuple[str, ...],
    lease_s: float | None, args: tuple[str, ...] = (), places: tuple[str, ...] = (), shape: str = MODEL,
    kv_gib: int = 1,
) -> Spec:  # fmt: skip
    """The servers of its cluster; the engines differ in their connector alone, and in their places."""
    from kvbaton_proof.rig.servers import EAGER, GIB, GRAPHS, Spec  # bring aiohttp, which names can do without

    is_alone = not one.connector or CONNECTORS[one.connector].is_alone
    settings: dict[str, object] = {}
    if one.connector == KVBATON:
        settings = {"transport": transport, **({} if one.header or one.mode is None else {"mode": one.mode})}
    if lease_s is not None and one.connector:
        field = CONNECTORS[one.connector].lease_field
        if not field and not is_alone:
            raise CommandError(
                f"argument --lease-s: it is not known how {one.connector} is told; give it a lease_field"
            )
        settings |= {field: lease_s if one.connector == KVBATON else max(1, round(lease_s))} if field else {}
    if is_alone:
        router_args = (*(word for word in router_args if word not in ("--fallback", "strict", "local")), *LOCAL)
    count = decode if not is_alone else 1 if one.is_single else prefill + decode
    return Spec(
        name=one.cluster, model=shape, connector=one.connector, front=one.front, prefillers=prefill, decoders=count,
        max_model_len=max_model_len, chunk_tokens=0, at_once=0, settings={one.connector: settings},
        front_args=router_args if one.front == KVBATON else (), turn_s=TURN_S if TURNS in one.more else 0.0,
        store=STORE_BYTES if STORE in one.more else "", args=args, places=places, cache_bytes=kv_gib * GIB,
        **({"dtype": "bfloat16", "backend": "FLASH_ATTN", "variant": GRAPHS} if shape == TIMED else {"variant": EAGER}),
    )  # fmt: skip
