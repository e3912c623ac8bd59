"""Of the part `streams`, what takes time: gaps of streams whose D dies or is drained or is well, and first tokens.

Laws: a gap is what the client sees: the longest one after D was hurt, until the stream flows again. It is told beside
what the same router takes to have as long a prompt computed anew. Ways that are compared take turns in one run.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import aiohttp
import msgspec

from kvbaton.processes.child_process import KVBATON_ARGV
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.chaos.streams.stream_load import Kind
from kvbaton_proof.gpu_test.gpu_load import Watched, watching
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.trial import not_served
from kvbaton_proof.rig.client import Streamed, percentile, prompt_of, streamed
from kvbaton_proof.rig.flows import Flow, Flows, asked
from kvbaton_proof.rig.record import Page
from kvbaton_proof.rig.server import Engine
from kvbaton_proof.rig.servers import OPERATOR, SECOND, Group, Say

LONG = Kind("long", fields={"temperature": 0})
DRAIN_S, DRAIN_MAX_S = 60.0, 10.0
GAP_OVER_USUAL = 3.0
SETTLE_S = 1.0
CAUGHT_UP_S = 30.0
UNDER_WAY = 20
FIRST_OVER_ALONE: Mapping[int, float] = {512: 1.15, 4096: 1.03, 16384: 1.03}
GAPS_OVER_OFF = 1.03
WARM_UPS, TOKENS = 2, 4
COPIED, LOADED = "kvbaton_store_copied_blocks_total", "kvbaton_store_hits_blocks_total"
STREAM = {MODE_HEADER: "stream"}
GAPS = ("what", "streams", "gap p50 ms", "gap p99 ms")
FIRSTS = (
    "prompt tokens", "aggregated", "first token of P", "off", "first of P / aggregated", "off / aggregated",
    "second token", "second token, off",
)  # fmt: skip


def victims(decoders: int) -> tuple[str, str, str]:
    """Of the group of several D's: killed without copies, killed with copies, drained. The last one survives."""
    first, second, third = (f"d{number}" for number in range(decoders - 4, decoders - 1))
    return first, second, third


async def run(
    sizes: Sizes, groups: Mapping[str, Group], session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    """`judged`: on a CPU times are told and not held against anything. What follows a group that is not there is not
    asked."""
    for name, group in groups.items():
        if not group.is_up:
            not_served(page, group)
        elif group.spec.decoders > 1:
            await _gaps_without_faults(sizes, group, page, say, judged)
            await _killed(sizes, group, session, page, say)
            await _drained(sizes, group, session, page, say, judged)
        elif name + "-alone" in groups and groups[name + "-alone"].is_up:
            await _first_tokens(sizes, group, groups[name + "-alone"], session, page, say, judged)


def _long(count: int, length: int, answer: int, seed: str) -> list[tuple[Kind, dict[str, Any]]]:
    prompts = [prompt_of(length, f"{seed} {number}") for number in range(count)]
    return [(LONG, {"prompt": each, "max_tokens": answer, "ignore_eos": True, **LONG.fields}) for each in prompts]


def _ms(gaps: Sequence[float]) -> tuple[str, str]:
    return f"{percentile(gaps, 50) * 1000:.1f}", f"{percentile(gaps, 99) * 1000:.1f}"


# --- without faults


async def _gaps_without_faults(sizes: Sizes, group: Group, page: Page, say: Say, judged: bool) -> None:
    """Of the same streams through a router that can go on with them, and through one that cannot."""
    found: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * sizes.both_ways):
        name = ("on", "off")[(number + number // 2) % 2]
        url = (group.router if name == "on" else group.engines[SECOND]).url
        own = [prompt_of(64, f"quiet {number} {each}") for each in range(sizes.drained // 2)]
        async with watching(Watched(url, own, sizes.drained_answer // 3)) as watch:
            streams = await watch.ended()
        found[name] += [gap for stream in streams for gap in _between(stream)]
    table = page.table("Gaps between tokens without faults, streams through a router with and without", GAPS)
    for name, gaps in found.items():
        page.row(table, name, len(gaps), *_ms(gaps))
    ratio = percentile(found["on"], 99) / percentile(found["off"], 99)
    say(f"ITL: on {_ms(found['on'])}, off {_ms(found['off'])} ms, p99 {ratio:.3f}")
    page.verdict(
        "ITL p99, on over off", f"{ratio:.3f}", f"at most {GAPS_OVER_OFF}", ratio <= GAPS_OVER_OFF, judged=judged
    )


def _between(stream: Streamed) -> list[float]:
    """Without the first ones, in which the others' prompts are computed."""
    moments = stream.moments[UNDER_WAY:]
    return [b - a for a, b in pairwise(moments)]


# --- D dies


async def _killed(sizes: Sizes, group: Group, session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    """One D after the other, under the same long streams."""
    table = page.table(
        f"Gaps that clients see when D is killed: prompts of {sizes.long_prompt:,} tokens, at least "
        f"{sizes.long_told:,} told, {sizes.long_flows} streams at each D", GAPS,
    )  # fmt: skip
    plain, copying, _ = victims(sizes.decoders)
    up = [each for name, each in group.workers.items() if name != "p0" and each.is_alive]
    loaded = await _blocks(LOADED, group, session)
    flows = asked(
        session, group.router.url, _long(sizes.long_flows * len(up), sizes.long_prompt, sizes.long_answer, "killed")
    )
    if not await flows.until(sizes.long_told):
        page.note("not all long streams were under way when D was killed")
    copied = await _blocks(COPIED, group, session)
    gaps = {name: await _gap_of(flows, group.engines[name]) for name in (plain, copying)}
    loaded = await _blocks(LOADED, group, session) - loaded
    every = await flows.ended()
    for name, what in ((plain, "D killed, no copies"), (copying, "D killed, with copies")):
        page.row(table, what, len(gaps[name]), *_ms(gaps[name]))
        say(f"{what}: {len(gaps[name])} streams, p50 and p99 {_ms(gaps[name])} ms")
        page.verdict(f"{what}: streams cut", len(gaps[name]), "some", bool(gaps[name]))
    anew = await asked(
        session, group.router.url, _long(sizes.long_flows, sizes.long_prompt + sizes.long_told, 2, "anew")
    ).ended()
    firsts = [flow.moments[0] - flow.begun for flow in anew if flow.moments]
    page.row(
        table,
        f"a prompt of {sizes.long_prompt + sizes.long_told:,} tokens anew, as many at once",
        len(firsts),
        *_ms(firsts),
    )
    page.verdict(f"blocks of answers that {copying} copied", copied, "some", copied > 0)
    page.figure("blocks", {"copied": copied, "loaded from the store": loaded})
    say(f"anew: {_ms(firsts)} ms; {copied} blocks copied, {loaded} loaded from the store")
    _all_there("killed, long", every, page)


async def _gap_of(flows: Flows, engine: Engine) -> list[float]:
    """Of the streams that began at this D, when it is killed; until they flow again, or not."""
    clock = asyncio.get_running_loop().time
    hurt = [flow for flow in flows.at(engine.name) if not flow.is_over]
    engine.send(signal.SIGKILL)
    moment = clock()
    counts = [len(flow.moments) for flow in hurt]
    while any(
        not flow.is_over and len(flow.moments) <= count + UNDER_WAY for flow, count in zip(hurt, counts, strict=True)
    ) and clock() < moment + CAUGHT_UP_S:  # fmt: skip
        await asyncio.sleep(0.01)
    ended = clock()
    await asyncio.to_thread(engine.kill)
    await asyncio.sleep(SETTLE_S)
    # What a dead engine had sent is still on its way for a while, so the gap is not the one around the moment.
    return [max(flow.gaps(moment, ended), default=float("inf")) for flow in hurt]


async def _blocks(name: str, group: Group, session: aiohttp.ClientSession) -> int:
    """As those that live count them."""
    told = [await each.figures(session) or {} for each in group.workers.values() if each.is_alive]
    return int(sum(each.get(name, 0.0) for each in told))


def _all_there(what: str, every: Sequence[Flow], page: Page) -> None:
    bad = [flow.loss or flow.problem for flow in every if flow.loss or flow.problem]
    page.verdict(f"{what}: lost, twice or missing", f"{len(bad)} of {len(every)} {bad[:2]}", "0", not bad)


# --- D is drained


async def _drained(
    sizes: Sizes, group: Group, session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    clock, drained = asyncio.get_running_loop().time, victims(sizes.decoders)[2]
    flows = asked(session, group.router.url, _long(sizes.drained, 64, sizes.drained_answer, "drained"))
    if not await flows.until(sizes.drained_answer // 4):
        page.note("not all streams were under way when D was drained")
    begun = clock() - SETTLE_S
    there = [flow for flow in flows.at(drained) if not flow.is_over]
    usual = [gap for flow in there for gap in flow.gaps(begun, clock())]
    begun = clock()
    words = ["drain", drained, "--keys", str(group.keys), "--registry", group.registry, "--name", OPERATOR, "--json"]
    command = await asyncio.create_subprocess_exec(
        *KVBATON_ARGV, *words, "--timeout-s", str(DRAIN_S), "--force", stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    said, _ = await command.communicate()
    ended = clock()
    try:
        told = msgspec.json.decode(said)
    except msgspec.DecodeError:
        told = {"outcome": f"status {command.returncode}"}
    gaps = [gap for flow in there for gap in flow.gaps(begun, ended)]
    every = await flows.ended()
    seconds = float(told.get("seconds", ended - begun))
    table = page.table(f"Gaps of the streams at a D that is drained under {len(there)} of them", GAPS)
    page.row(table, "the second before", len(usual), *_ms(usual))
    page.row(table, "while it is drained", len(gaps), *_ms(gaps))
    page.row(
        table,
        "the largest of each stream",
        len(there),
        *_ms([max(flow.gaps(begun, ended), default=0.0) for flow in there]),
    )
    ratio = percentile(gaps, 99) / percentile(usual, 99) if usual and gaps else float("inf")
    say(f"drain: {told}; gaps {_ms(usual)} before, {_ms(gaps)} ms while it was drained, p99 {ratio:.2f}")
    page.figure("drain", told)
    page.verdict(
        f"drain of a D with {len(there)} streams", f"{seconds:.1f} s, {told.get('outcome')}",
        f"at most {DRAIN_MAX_S:.0f} s", command.returncode == 0 and seconds <= DRAIN_MAX_S, judged=judged,
    )  # fmt: skip
    page.verdict(
        "gap p99 while it is drained over its usual p99", f"{ratio:.2f}", f"at most {GAP_OVER_USUAL:.0f}",
        ratio <= GAP_OVER_USUAL, judged=judged,
    )  # fmt: skip
    _all_there("drained", every, page)


# --- first tokens


async def _first_tokens(
    sizes: Sizes, group: Group, alone: Group, session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    """One request at a time, in mode stream; all ways in turn."""
    ways = {"alone": alone.alone.url, "on": group.router.url, "off": group.engines[SECOND].url}
    page.commands([*alone.commands(), *group.commands()])
    table = page.table("Time to the first token, ms, medians, one request at a time, 8b shape, mode stream", FIRSTS)
    for size in sizes.timed_tokens:
        found: dict[str, list[Streamed]] = {name: [] for name in ways}
        for number in range(-WARM_UPS, sizes.repetitions):
            for name, url in ways.items():
                prompt, headers = prompt_of(size, f"first {name} {number}"), None if name == "alone" else STREAM
                answer = await streamed(session, url, prompt, tokens=TOKENS, headers=headers)
                if number >= 0:
                    found[name].append(answer)
        bad = [each.error for of in found.values() for each in of if each.error]
        first = {name: median(each.first_s for each in of) for name, of in found.items()}
        second = {name: median((*each.times, *[float("inf")] * 2)[1] for each in of) for name, of in found.items()}
        on, off = first["on"] / first["alone"], first["off"] / first["alone"]
        shown = [f"{each * 1000:.1f}" for each in (first["alone"], first["on"], first["off"])]
        later = [f"{second[name] * 1000:.1f}" for name in ("on", "off")]
        page.row(table, f"{size:,}", *shown, f"{on:.2f}", f"{off:.2f}", *later)
        told = f"aggregated {shown[0]}, on {shown[1]} ({on:.2f}), off {shown[2]} ({off:.2f}) ms; second {later}"
        say(f"{size:,} tokens: {told}")
        bound = FIRST_OVER_ALONE.get(size, max(FIRST_OVER_ALONE.values()))
        page.verdict(
            f"{size:,} tokens: first token over one engine's", f"{on:.2f}{f' {bad[:1]}' if bad else ''}",
            f"at most {bound}", on <= bound and not bad, judged=judged,
        )  # fmt: skip
        page.verdict(
            f"{size:,} tokens: second token no later than the first one without", f"{later[0]} ms",
            f"at most {shown[2]} ms", second["on"] <= first["off"], judged=judged,
        )  # fmt: skip
