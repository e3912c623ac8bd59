"""Part `streams`: streams that outlive their D: answers, gaps, drains, the time to the first token, and what it costs.

Laws: what is right of a stream is what the same router and the same engines answer while nobody is hurt; how far they
repeat themselves is seen by asking that twice. A kind that these engines cannot go on with is left out by name. Answers
are compared while other servers start; times are taken when nothing else runs. A D that was killed stays dead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton.cli import router as router_command
from kvbaton_proof.chaos.streams.stream_load import SEEDED, USAGE, Kind, body_of, sure_of
from kvbaton_proof.gpu_test import stream_times
from kvbaton_proof.gpu_test.gpu_answers import runner_of
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.trial import not_served
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.connectors import D
from kvbaton_proof.rig.flows import Flow, asked
from kvbaton_proof.rig.oracle import MARGIN
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.servers import GIB, GRAPHS, Group, Say, Site, Spec, standing

FLOAT32, BFLOAT16, FAST, FAST_ALONE = "streams-float32", "streams-bfloat16", "streams-8b", "streams-8b-alone"
SWITCHES = ("streams_continue", "first_token")
CUT_AFTER = 3  # the part of an answer that is told before D is killed
MOST = 0.5  # of the streams, which do not all begin at once
SLACK = 0.1
"""By so many of all streams a run may differ from another that repeats it."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
POSITIONS = ("--hf-overrides", '{"max_position_embeddings": 32768}')
NAMES = ("prompt", "lease", "block", "claim", "commit", "reader", "engine", "answer", "queue", "router")
GREEDY: Mapping[str, Any] = {"temperature": 0, **USAGE}
NUMBERS = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99999}, "minItems": 40, "maxItems": 60,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "keep", "description": "Keeps numbers.", "parameters": SCHEMA}}
ENDS_ITSELF: Mapping[str, Any] = {"ignore_eos": False, **USAGE}
KINDS: tuple[Kind, ...] = (
    Kind("greedy", fields={**GREEDY, "logprobs": 2}),
    Kind("greedy chat", BodyKind.CHAT, GREEDY),
    Kind("seeded", fields={**SEEDED, "top_p": 0.9, "return_token_ids": True, **USAGE}, goes_on=False),
    Kind("penalties", fields={**GREEDY, "presence_penalty": 0.7, "repetition_penalty": 1.2}, goes_on=False),
    Kind("JSON schema", BodyKind.CHAT, {**SEEDED, "response_format": FORMAT, **ENDS_ITSELF}, goes_on=False),
    Kind(
        "chat with tools", BodyKind.CHAT,
        {**SEEDED, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "keep"}}, **ENDS_ITSELF},
        goes_on=False,
    ),
)  # fmt: skip
"""`goes_on`: with model runner V1 too."""
HEAD = ("dtype", "kind", "streams", "cut", "lost", "wrong", "as the unbroken run", "that run, repeated", "no near tie")
COUNTED = ("streams", "cut", "lost", "wrong", "same", "again", "unsure")


def switches(state: str) -> tuple[str, ...]:
    """The words that turn a router's half of this on or off, of those that it knows."""
    parser = argparse.ArgumentParser(add_help=False)
    router_command.add_arguments(parser)
    known = vars(parser.parse_known_args([])[0])
    return tuple(word for name in SWITCHES if name in known for word in (f"--{name.replace('_', '-')}", state))


def specs(sizes: Sizes) -> dict[str, Spec]:
    fronts: dict[str, Any] = {
        "connector": "kvbaton", "front": "kvbaton", "front_args": ("--show-pair", *switches("on")),
    }  # fmt: skip
    longest = sizes.long_prompt + sizes.long_answer + 64
    fast = Spec(
        name=FAST_ALONE, model="8b", dtype="bfloat16", backend="FLASH_ATTN", variant=GRAPHS, cache_bytes=5 * 10**9,
        max_model_len=max(sizes.timed_tokens) + 64, chunk_tokens=8192,
    )  # fmt: skip
    found = (
        Spec(name=FLOAT32, model="small", decoders=2, chunk_tokens=sizes.chunk_tokens, args=TOOLS, **fronts),
        Spec(
            name=BFLOAT16, model="small", dtype="bfloat16", backend="FLASH_ATTN", variant=GRAPHS, store="12GiB",
            cache_bytes=5 * GIB, max_model_len=longest, chunk_tokens=8192, decoders=sizes.decoders,
            args=(*POSITIONS, *TOOLS), second_front=switches("off"), **fronts,
            own_settings={stream_times.victims(sizes.decoders)[1]: {"copies_percent": 20}},
        ),
        fast, msgspec.structs.replace(fast, name=FAST, second_front=switches("off"), **fronts),
    )  # fmt: skip
    return {spec.name: spec for spec in found}


async def run(sizes: Sizes, site: Site, session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    made, judged = specs(sizes), site.device == "cuda"
    table = page.table(f"{sizes.flows} streams through the router while D is killed (kill -9)", HEAD)
    if len(switches("on")) < 2 * len(SWITCHES):
        page.verdict(
            "the router goes on with streams, and sends P's first token", "it has no such settings", "yes", False
        )

    async def answers(groups: Mapping[str, Group]) -> None:
        for name in (FLOAT32, BFLOAT16):
            if name in groups:
                await _hurt(sizes, groups[name], session, page, table, say)

    async def exact() -> None:
        async with standing(site, [made[FLOAT32]], session, say) as groups:
            await answers(groups)

    if not judged:  # a small machine has room for one group at a time, and no other numbers in bfloat16
        await exact()
        for names in ((BFLOAT16,), (FAST_ALONE, FAST)):
            async with standing(site, [made[name] for name in names], session, say) as groups:
                await stream_times.run(sizes, groups, session, page, say, judged)
        return
    first = asyncio.create_task(exact())
    try:
        async with standing(site, [made[BFLOAT16], made[FAST_ALONE], made[FAST]], session, say) as groups:
            await first
            await answers(groups)
            await stream_times.run(sizes, groups, session, page, say, judged)
    finally:
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first


def bodies(kinds: Sequence[Kind], sizes: Sizes) -> Iterator[tuple[Kind, Mapping[str, Any]]]:
    """Of each kind as many as of the others, about as many as are wanted."""
    rng = random.Random("gpu_test streams")
    for number in range(sizes.flows):
        words = rng.choices(NAMES, k=rng.randrange(5, sizes.flow_prompt))
        kind = kinds[number % len(kinds)]
        yield kind, body_of(kind, f"{number} {' '.join(words)}", sizes.flow_answer)


async def _hurt(sizes: Sizes, group: Group, session: aiohttp.ClientSession, page: Page, table: Table, say: Say) -> None:
    """The same streams three times; the third time D dies."""
    name = group.spec.dtype
    if not group.is_up:
        not_served(page, group)
        return
    page.commands(group.commands()[:4])
    runner = runner_of(group.d.log)
    kinds = [kind for kind in KINDS if runner == "V2" or kind.goes_on]
    if left := [kind for kind in KINDS if kind not in kinds]:
        names = ", ".join(kind.name for kind in left)
        page.note(f"{name}: asked and not cut: {names}: model runner {runner} goes on with greedy sampling alone")
        others = await asked(session, group.router.url, list(bodies(left, sizes))[: len(left)]).ended()
        failed = [f"{flow.kind.name}: {flow.loss or flow.problem}" for flow in others if flow.loss or flow.problem]
        page.verdict(f"{name}: the others, not cut", f"{failed}", "none failed", not failed)
    every = list(bodies(kinds, sizes))
    unbroken = await asked(session, group.router.url, every).ended()
    again = await asked(session, group.router.url, every).ended()
    flows = asked(session, group.router.url, every)
    if not await flows.until(sizes.flow_answer // CUT_AFTER, MOST):
        page.note(f"{name}: most streams were not under way when D was killed")
    cut = [bool(flow.moments) and not flow.is_over and flow.decoder == D for flow in flows.every]
    group.d.send(signal.SIGKILL)
    broken = await flows.ended()
    await asyncio.to_thread(group.d.kill)
    _told(name, unbroken, again, broken, cut, sizes.flows // (2 * group.spec.decoders), page, table, say)
    figures = await group.router.figures(session) or {}
    moves = {each: count for each, count in figures.items() if each.startswith("kvbaton_router_moves")}
    page.figure(f"{name}: the router's moves", moves)
    say(f"{name}: {moves}")
    calm = await meters.at_rest([each for each in group.workers.values() if each.is_alive])
    page.verdict(f"{name}: nothing held afterwards", "yes" if calm else "no", "yes", calm)


def _told(
    name: str,
    unbroken: Sequence[Flow],
    again: Sequence[Flow],
    broken: Sequence[Flow],
    cut: Sequence[bool],
    least_cut: int,
    page: Page,
    table: Table,
    say: Say,
) -> None:
    counts: dict[str, Counter[str]] = {}
    for one, other, flow, was_cut in zip(unbroken, again, broken, cut, strict=True):
        row = counts.setdefault(flow.kind.name, Counter())
        sure = _sure(one)
        row["streams"] += 1
        row["cut"] += was_cut
        row["lost"] += bool(flow.loss)
        row["wrong"] += not flow.loss and bool(flow.problem)
        row["same"] += flow.choice.text == one.choice.text
        row["again"] += other.choice.text == one.choice.text
        row["unsure"] += not flow.loss and sure is not None and flow.choice.text[:sure] != one.choice.text[:sure]
    for kind, row in counts.items():
        page.row(
            table, name, kind, *(row[each] for each in ("streams", "cut", "lost", "wrong", "same", "again", "unsure"))
        )
        say(f"{name}: {kind}: {dict(row)}")
    total = sum(counts.values(), Counter[str]())
    lost = Counter(flow.loss for flow in broken if flow.loss)
    wrong = Counter(flow.problem for flow in broken if flow.problem and not flow.loss)
    before = [flow.loss or flow.problem for flow in (*unbroken, *again) if flow.loss or flow.problem]
    page.verdict(f"{name}: unbroken streams that failed", f"{len(before)} {before[:2]}", "0", not before)
    page.verdict(f"{name}: streams cut", total["cut"], f"at least {least_cut}", total["cut"] >= least_cut)
    page.verdict(f"{name}: lost", f"{total['lost']} {dict(lost.most_common(3))}", "0", not total["lost"])
    page.verdict(f"{name}: twice, missing, two heads", f"{total['wrong']} {dict(wrong.most_common(3))}", "0", not wrong)
    least = total["again"] - SLACK * total["streams"]
    page.verdict(
        f"{name}: equal to the unbroken run", f"{total['same']} of {total['streams']}",
        f"as often as that run repeated ({total['again']}), less {SLACK:.0%}", total["same"] >= least,
        judged=name == "float32",
    )  # fmt: skip
    page.verdict(
        f"{name}: greedy, differing where the unbroken run is sure", total["unsure"], "0", not total["unsure"],
        judged=name == "float32",
    )  # fmt: skip


def _sure(flow: Flow) -> int | None:
    """Characters before the first near tie, where the stream tells."""
    return sure_of(flow.choice, MARGIN) if flow.choice.logprobs else None
