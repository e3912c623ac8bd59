"""Part `features`: what vLLM does beside a handoff, on real engines: drafts, KV in 8 bits, other connectors, adapters.

Each feature is one engine alone and one or two pairs of a P and a D, all of small random models:

    eagle       an EAGLE head on P and D
    mtp         a multi-token predictor on P and D (ERNIE-4.5-like, attention alone)
    mtp-states  the same beside states (Nemotron-H-like: Mamba 2 and attention)
    mtp-deltas  the same beside gated delta nets (Qwen3-Next-like; bfloat16, since their kernels take no float32; vLLM
                must have its kernels for experts)
    n-grams     drafts of D alone, which have no KV
    fp8         KV in 8 bits on both; a D of another KV dtype is refused by name
    offloading  MultiConnector with vLLM's OffloadingConnector: ours first on P and last on D, and the other way around
    lora        an adapter (bfloat16, since vLLM's kernels for it take no float32)
    uncached    a prefix cache on D alone, and on P alone

Laws: an answer is compared with that of the engine alone, as far as that one is sure, and counts only if D's own
counter says that its prompt came from P. Of drafts the number accepted *for each request* is compared: a random drafter
is right as often on wrong KV as on right KV, but not at the same places. Each comparison is itself tried: with
blocks misplaced answers must be wrong, and counts of other prompts must not pass for those of these. A
feature that fails, or whose servers do not start, is told with its reason, and the others go on. A feature begins as
soon as there is room for its servers, and they are gone when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton_proof.gpu_test.feature_trial import DRAFTS_HEAD, FeatureTrial
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.trial import HEAD, not_served
from kvbaton_proof.rig.connectors import D, P
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.servers import GIB, Group, Say, Site, Spec, standing

READY_S = {"cuda": 240.0, "cpu": 600.0}
TRIAL_S = 300.0  # of what is asked of one feature's servers
NOTE_CHARS = 2000
ADAPTER = "poet"
DRAFTED_TOKENS = 2
UNCACHED = "--no-enable-prefix-caching"
OFFLOADING = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 12 << 20},
}  # fmt: skip
"""Little, since it lies in /dev/shm, of which a container often has 64 MiB: 3,000 tokens of the tiny Llama."""
NEAR = 0.1
NEAR_16 = 0.25
"""In nats: nearer to each other two tokens may change places between two ways to compute them; and in 16 bits."""
ALIKE = 0.9
ALIKE_16 = 0.6
"""The share of requests with the same answer that must have as many accepted drafts as on one engine."""


class VllmFeature(msgspec.Struct, frozen=True, kw_only=True):
    """One engine alone and pairs; names of servers are the feature's own and a suffix."""

    name: str
    model: str
    alone: tuple[str, ...] = ()  # more words of the engine alone
    pairs: tuple[Spec, ...]  # names, words and connectors; the rest is shared
    refused: tuple[Spec, ...] = ()  # pairs whose D takes nothing over
    field: str = ""  # of the compatibility key, by which it is refused
    dtype: str = "float32"
    has_drafts: bool = False
    offloads: bool = False
    asks: Mapping[str, str] = {}  # more in the body of each request
    changed_by: str = ""  # an adapter

    @property
    def is_coarse(self) -> bool:
        """Another batch changes more than the last digit of 32 bits."""
        return self.dtype != "float32" or _FP8[-1] in self.alone


def _pair(name: str = "", **own: object) -> Spec:
    return msgspec.convert({"name": name, "model": "", "connector": "kvbaton", "front": "kvbaton", **own}, Spec)


def _drafter(**told: object) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps({"num_speculative_tokens": DRAFTED_TOKENS, **told}))


def _drafted(name: str, target: str, dtype: str = "float32", **told: object) -> VllmFeature:
    """With a drafter that has KV, on P and D alike."""
    words = _drafter(**told)
    return VllmFeature(name=name, model=target, dtype=dtype, alone=words, pairs=(_pair(args=words),), has_drafts=True)


_NGRAMS = _drafter(method="ngram", prompt_lookup_max=2, prompt_lookup_min=1)
_FP8 = ("--kv-cache-dtype", "fp8")
_LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={{model:adapter}}")
FEATURES: Mapping[str, VllmFeature] = {
    each.name: each
    for each in (
        _drafted("eagle", "few-words", method="eagle", model="{model:eagle}"),
        _drafted("mtp", "ernie-mtp", method="mtp"),
        _drafted("mtp-states", "nemotron-h-mtp", method="mtp"),
        VllmFeature(
            name="fp8", model="llama", alone=_FP8, pairs=(_pair(args=_FP8),),
            refused=(_pair("refused", p_args=_FP8, front=""),), field="kv_dtype",
        ),
        VllmFeature(
            name="offloading", model="llama", offloads=True,
            pairs=(_pair(beside=OFFLOADING, first=P), _pair("turned", beside=OFFLOADING, first=D)),
        ),
        VllmFeature(
            name="lora", model="few-words", dtype="bfloat16", alone=_LORA, pairs=(_pair(args=_LORA),),
            asks={"model": ADAPTER}, changed_by=ADAPTER,
        ),
        _drafted("mtp-deltas", "qwen3-next-mtp", "bfloat16", method="mtp"),
        VllmFeature(name="n-grams", model="few-words", alone=_NGRAMS, pairs=(_pair(d_args=_NGRAMS),), has_drafts=True),
        VllmFeature(
            name="uncached", model="llama",
            pairs=(_pair("p", p_args=(UNCACHED,)), _pair("d", d_args=(UNCACHED,))),
        ),
    )
}  # fmt: skip


def named(names: Sequence[str]) -> tuple[str, ...]:
    """ValueError names one that there is not."""
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"--features: got {name!r}, expected one of {', '.join(FEATURES)}")
    return tuple(dict.fromkeys(names))


def specs(sizes: Sizes, feature: VllmFeature) -> list[Spec]:
    """The servers of one feature: alone, pairs, and pairs that shall be refused."""
    shared = {
        "model": feature.model, "dtype": feature.dtype, "chunk_tokens": sizes.chunk_tokens, "cache_bytes": GIB,
        "max_model_len": 2048, "at_once": sizes.at_once,
        "settings": {"kvbaton": {"claim_timeout": 20.0, "transfer_timeout": 20.0}},
    }  # fmt: skip
    alone = msgspec.structs.replace(
        _pair(connector="", front=""), name=f"{feature.name}-alone", args=feature.alone, **shared
    )
    found = [alone]
    for pair in (*feature.pairs, *feature.refused):
        name = f"{feature.name}-{pair.name}" if pair.name else feature.name
        takes = pair in feature.pairs
        found.append(msgspec.structs.replace(pair, name=name, has_control=takes, **shared))
    return found


@dataclass(slots=True)
class ServerRoom:
    """For so many engines at once; a feature that needs more gets all of it."""

    engines: int
    _free: asyncio.Condition = field(default_factory=asyncio.Condition)
    _taken: int = 0

    @contextlib.asynccontextmanager
    async def taken(self, wanted: int) -> AsyncIterator[None]:
        count = min(wanted, self.engines)
        async with self._free:
            await self._free.wait_for(lambda: self._taken + count <= self.engines)
            self._taken += count
        try:
            yield
        finally:
            async with self._free:
                self._taken -= count
                self._free.notify_all()


Standing = Callable[..., contextlib.AbstractAsyncContextManager[dict[str, Group]]]


async def run(
    sizes: Sizes, site: Site, session: aiohttp.ClientSession, page: Page, say: Say, stands: Standing = standing
) -> None:
    """All features, as many at once as there is room for."""
    room, table = (
        ServerRoom(sizes.feature_engines),
        page.table("Answers beside one engine's, greedy", ("pair", "what", *HEAD)),
    )
    drafts = page.table("Drafts accepted, beside one engine's", DRAFTS_HEAD)

    async def one(name: str) -> None:
        feature = FEATURES[name]
        wanted = specs(sizes, feature)
        async with room.taken(sum(2 if spec.connector else 1 for spec in wanted)):
            begun = asyncio.get_running_loop().time()
            try:
                async with stands(site, wanted, session, say, READY_S[site.device]) as groups:
                    async with asyncio.timeout(TRIAL_S):
                        await _tried(sizes, feature, groups, session, page, (table, drafts), say)
            except Exception as error:  # noqa: BLE001 - whatever one feature stumbles over, the others are run
                page.note(f"{name}: {''.join(traceback.format_exception(error))[-NOTE_CHARS:]}")
                page.verdict(f"{name}: ran to its end", f"no: {type(error).__name__}: {error}", "yes", False)
            say(f"{name}: over after {asyncio.get_running_loop().time() - begun:.0f} s")

    await asyncio.gather(*map(one, sizes.features))


async def _tried(
    sizes: Sizes,
    feature: VllmFeature,
    groups: Mapping[str, Group],
    session: aiohttp.ClientSession,
    page: Page,
    tables: tuple[Table, Table],
    say: Say,
) -> None:
    alone, *pairs = groups.values()
    for group in groups.values():
        page.commands(group.commands()[-2:])
        if not group.is_up:
            not_served(page, group)
    refused = {f"{feature.name}-{each.name}" for each in feature.refused}
    near, alike = (NEAR_16, ALIKE_16) if feature.is_coarse else (NEAR, ALIKE)

    def trial_of(pair: Group) -> FeatureTrial:
        return FeatureTrial(
            sizes, pair, session, page, tables[0], say, (pair.name,), feature.asks, alone=alone,
            drafts_table=tables[1], near=near, alike_min=alike,
        )  # fmt: skip

    for pair in pairs:
        if pair.is_up and pair.name in refused:
            await trial_of(pair).refused(feature.field)
    if not alone.is_up:
        return
    for pair in pairs:
        if pair.is_up and pair.name not in refused:
            trial = trial_of(pair)
            await trial.learn(feature.has_drafts, feature.changed_by)
            await trial.handed_over()
            if feature.offloads:
                await trial.offloaded()
            await trial.rest()
            await trial.damaged()
