"""Part `faults`: one plan, done by one hand to a pair with kvbaton and to a pair with NixlConnector, on one GPU.

The steps, and how they are judged, are those of `kvbaton chaos --engine vllm` (docs/faults.md); what is added is the
GPU's memory: what a P that was killed had must be free within its lease and 5 s, so that a successor can start in it.

Laws: both pairs go through the plan side by side, but nobody kills or starts one while another's memory is watched.
Answers are tokens in float32, compared with those of an engine without a connector as far as that one is sure; it lives
on, for a second opinion about what is wrong. A step that there was no time for
is told as not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import msgspec

from kvbaton.chaos import vllm_page
from kvbaton.chaos.faults import Moment
from kvbaton.chaos.outcome import Outcome, Row
from kvbaton.chaos.plan import Plan, Step
from kvbaton.chaos.vllm_client import TOKENS, Prompt, Told, prompt_of
from kvbaton.chaos.vllm_judge import examined
from kvbaton.chaos.vllm_pair import LEARN_AT_ONCE, LONG, USUAL, Pair
from kvbaton.chaos.vllm_plan import D, P
from kvbaton.chaos.vllm_process import Engine
from kvbaton.chaos.vllm_run import judged, line, outcome
from kvbaton.chaos.vllm_steps import CLIENTS, LATE, Scene
from kvbaton.gpu_test import machine, oracle
from kvbaton.gpu_test.oracle import Doubt, Right
from kvbaton.gpu_test.record import Page
from kvbaton.gpu_test.servers import GIB, Group, Say, Site, Spec, standing
from kvbaton.gpu_test.sizes import Sizes

SEED = 1
PLAN_S = 450.0
"""After which no step begins, the start of servers included: a part has to end within nine minutes."""
FREE_GRACE_S = 5.0
SHARE = 0.5  # of the clients that hang up
SPARE = 1.5  # times as many prompts are learned as are asked
ALONE = "faults-alone"
PAIRS: dict[Literal["kvbaton", "nixl"], str] = {"kvbaton": "faults-kvbaton", "nixl": "faults-nixl"}
POISONS = ("only the flag", "no blocks", "half the blocks", "a number of 2**62", "unknown source")


def steps(sizes: Sizes) -> list[Step]:
    """Kills first: their memory is watched, and a connector that dies of something later does not disturb that."""
    found = [
        Step(0, "kill", P, detail="under load"),
        Step(0, "kill", P, Moment.MID_COPY),
        Step(0, "kill", D, Moment.BEFORE_CLAIM, detail="(P holds 32 prefills)"),
        Step(0, "late-decode", detail="(after the lease)"),
        Step(0, "stop", P, Moment.MID_COPY, sizes.stop_s),
        Step(0, "stop", D, seconds=sizes.stop_s, detail="under load"),
        Step(0, "abort", detail=f"({sizes.clients} clients, half leave)"),
        Step(0, "exhausted", detail="(D's cache full)"),
        Step(0, "reset", P, detail="under load"),
        *(Step(0, "poison", D, detail=name) for name in POISONS),
    ]
    return [step for step in found if sizes.faults is None or {step.fault, step.title()} & set(sizes.faults)]


def named(titles: Sequence[str]) -> tuple[str, ...]:
    """Titles or names of faults; ValueError for one that there is not."""
    known = {name for step in steps(Sizes()) for name in (step.fault, step.title())}
    for title in titles:
        if title not in known:
            raise ValueError(f"--faults: got {title!r}, expected some of {', '.join(sorted(known))}")
    return tuple(titles)


def specs(sizes: Sizes) -> list[Spec]:
    """P's cache is most of what it has: one that stays mapped shows in the GPU's memory."""
    shared = Spec(
        name="", model="small", cache_bytes=8 * GIB, prefix_caching=False, d_blocks=sizes.fault_d_blocks,
        p_blocks=sizes.fault_blocks, chunk_tokens=2048, has_router=False,
        settings={"claim_timeout": 4.0, "transfer_timeout": 10.0, "lease_s": sizes.lease_s},
        times={"kv_lease_duration": int(sizes.lease_s)},
    )  # fmt: skip
    found = [
        msgspec.structs.replace(shared, name=ALONE, p_blocks=0, d_blocks=0, cache_bytes=4 * GIB),
        msgspec.structs.replace(shared, name=PAIRS["kvbaton"], connector="kvbaton"),
    ]
    nixl = msgspec.structs.replace(shared, name=PAIRS["nixl"], connector="nixl")
    return [*found, nixl] if sizes.nixl else found


@dataclass(slots=True)
class WatchedPair(Pair):
    """A pair whose dead are looked at. Whoever holds `turn` may kill and start engines: a change of memory then has one
    cause."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    memory: machine.Used = lambda: None
    p_bytes: int = 0  # that must come back when P is killed
    within_s: float = 0.0
    level: int | None = None  # bytes in use while all were up
    freed: list[machine.Freed] = field(default_factory=list)
    has_turn: bool = False
    rights: Sequence[Right] = ()
    alone_url: str = ""
    during: str = ""  # the step under way
    crowd: int = CLIENTS  # requests at once in it
    doubts: list[Doubt] = field(default_factory=list)
    more: int = 0  # wrong answers that were not looked into
    opinions: list[asyncio.Task[None]] = field(default_factory=list)  # of this step

    def doubt(self, told: Told, number: int) -> None:
        if len(self.doubts) >= oracle.DOUBTS_MAX:
            self.more += 1
            return
        prompt, right = self.prompts[number], self.rights[number]
        found = oracle.doubted(self.connector, self.during, number, prompt, told, right)
        self.doubts.append(found)
        self.opinions.append(asyncio.create_task(self._again(found, prompt, right)))

    async def _again(self, found: Doubt, prompt: Prompt, right: Right) -> None:
        others = [each for each in self.prompts if each is not prompt][: self.crowd - 1]
        found.again = await oracle.again(self.session, self.alone_url, prompt, right, others, TOKENS)

    async def looked_into(self) -> None:
        """Wait for second opinions; they have deadlines."""
        await asyncio.gather(*self.opinions)
        self.opinions.clear()

    async def restart(self, *names: str) -> None:
        if self.has_turn or not names:
            await Pair.restart(self, *names)
        else:
            async with self.turn:
                await Pair.restart(self, *names)

    async def died(self, *names: str) -> None:
        if names != (P,) or self.level is None or not self.p_bytes:
            return
        found = await machine.freed(self.memory, self.level, self.p_bytes, self.within_s)
        if found is not None:
            self.freed.append(found)
            self.say(
                f"{self.connector}: of a P that was killed {found.fell / GIB:.1f} GiB came back, by {found.after_s} s"
            )


async def run(sizes: Sizes, site: Site, session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    wanted, until = specs(sizes), time.monotonic() + PLAN_S
    say(f"starting {len(wanted)} groups of servers: {', '.join(spec.name for spec in wanted)}")
    async with standing(site, wanted, session, say) as groups:
        alone = groups[ALONE]
        for group in groups.values():
            page.commands(group.commands())
            if not group.is_up:
                page.note(f"{group.name}: {group.problem}")
        page.verdict("one engine alone served", "yes" if alone.is_up else "no", "yes", alone.is_up)
        if not alone.is_up:
            return
        prompts, rights = await _learned(session, alone.alone.url, sizes, page)
        say(f"one engine alone answered; {len(steps(sizes))} steps")
        turn = asyncio.Lock()
        pairs = [
            WatchedPair(
                connector, site.directory, _engines(one), session, prompts, [each.sure for each in rights], [], say,
                blocks={P: _blocks(sizes.fault_blocks), D: _blocks(sizes.fault_d_blocks)}, turn=turn,
                memory=machine.Memory().used if site.device == "cuda" else lambda: None,
                p_bytes=one.spec.cache_bytes, within_s=sizes.lease_s + FREE_GRACE_S,
                rights=rights, alone_url=alone.alone.url,
            )
            for connector, name in PAIRS.items() if (one := groups.get(name)) is not None and one.is_up
        ]  # fmt: skip
        found = await asyncio.gather(*(_carried_out(pair, sizes, until, page, say) for pair in pairs))
    oracle.tell(page, [doubt for pair in pairs for doubt in pair.doubts], sum(pair.more for pair in pairs))
    _told({each.connector: each for each in found}, page)


async def _learned(
    session: aiohttp.ClientSession, url: str, sizes: Sizes, page: Page
) -> tuple[list[Prompt], list[Right]]:
    """The usual prompts, then the long ones, and their answers: those of more that can be compared furthest."""
    prompts: list[Prompt] = []
    rights: list[Right] = []
    for name, wanted, shortest, step in (("usual", USUAL, 150, 7), ("long", LONG, sizes.long_tokens, 1)):
        drawn = [prompt_of(shortest + step * (n % wanted), f"{SEED} {name} {n}") for n in range(int(wanted * SPARE))]
        found = await oracle.learned(session, url, drawn, LEARN_AT_ONCE)
        numbers = oracle.chosen(found, wanted)
        prompts += [drawn[number] for number in numbers]
        rights += (kept := [each for number in numbers if isinstance(each := found[number], Right)])
        dropped = f"{name} prompts, {len(set(numbers))} asked of {len(drawn)} learned"
        page.note(oracle.counted(kept, dropped))
    return prompts, rights


def _engines(group: Group) -> dict[str, Engine]:
    return {P: group.p, D: group.d}


def _blocks(count: int) -> int:
    """For figures that are a share of all blocks; what is not known is many."""
    return count or 1 << 14


async def _carried_out(pair: WatchedPair, sizes: Sizes, until: float, page: Page, say: Say) -> Outcome:
    """The plan, done to one pair."""
    plan = Plan(name="standard", seed=SEED, engine="vllm", connector=pair.connector, prefills=1, decodes=1,
                seconds=0.0, steps=tuple(steps(sizes)))  # fmt: skip
    begun = time.monotonic()
    first = await examined(pair, begun, time.monotonic)
    problems = [] if first.recover_s is not None and not first.left_over else [f"before any fault: {first.note}"]
    rows: list[Row] = []
    kinds: Counter[str] = Counter()
    for step in plan.steps:
        async with pair.turn if step.fault == "kill" else contextlib.nullcontext():
            if time.monotonic() > until:  # by now: others may have had their turn first
                problems.append(f"{step.title()}: not run: no time was left")
                continue
            row = await _step(pair, step, sizes, begun, kinds, problems)
        if row is None:
            break
        rows.append(row)
        say(f"{pair.connector}: {line(row)}")
        page.figure(pair.connector, msgspec.to_builtins(rows))
    return outcome(plan, time.monotonic() - begun, rows, [], problems, kinds)


async def _step(
    pair: WatchedPair, step: Step, sizes: Sizes, begun: float, kinds: Counter[str], problems: list[str]
) -> Row | None:
    def prepare(scene: Scene) -> None:
        scene.late_s, scene.clients, scene.share = sizes.lease_s + 2.0, sizes.clients, SHARE

    kills, already = step.fault == "kill", len(pair.freed)
    pair.has_turn, pair.level = kills, pair.memory() if kills else None
    pair.during = step.title()
    pair.crowd = {"abort": sizes.clients, "late-decode": LATE, "exhausted": LONG}.get(step.fault, CLIENTS)
    try:
        row = await judged(pair, step, SEED, begun, kinds, problems, prepare)
    finally:
        pair.has_turn = False
        await pair.looked_into()
    if row is None or len(pair.freed) == already:
        return row
    freed = pair.freed[-1]
    gib = f"{freed.fell / GIB:.1f} GiB of P's memory"
    note = f"{gib} free again" + (f" after {freed.after_s} s" if freed.after_s is not None else " only: mapped still")
    return msgspec.structs.replace(row, note="; ".join(filter(None, (row.note, note))))


def _told(found: Mapping[str, Outcome], page: Page) -> None:
    """Kvbaton's rows are judged, NIXL's are told; the table is in the form of docs/faults.md."""
    ours = found.get("kvbaton")
    if ours is None:
        page.verdict("kvbaton served", "no", "yes", False)
        return
    for row in ours.rows:
        counts = f"{row.right} right, {row.errors} errors, {row.wrong} wrong, {row.late} late, {row.dead} dead, "
        well = "never well again" if row.recover_s is None else f"well after {row.recover_s:.1f} s"
        bound = "0 wrong, 0 late, 0 dead, 0 left, well again"
        page.verdict(row.title, f"{counts}{row.left_over} left, {well}", bound, row.ok)
        if "mapped still" in row.note or "free again" in row.note:
            held = "mapped still" in row.note
            page.verdict(f"{row.title}: P's GPU memory", row.note, "free in time", not held)
    for problem in ours.problems:
        page.verdict("promises", problem, "none broken, all steps run", False)
    theirs = found.get("nixl")
    table = page.table("Faults, kvbaton and NixlConnector on one GPU", vllm_page.HEAD)
    for cells in vllm_page.lines(ours, theirs):
        page.row(table, *cells)
    for problem in theirs.problems if theirs is not None else ():
        page.note(f"NixlConnector: {problem}")
