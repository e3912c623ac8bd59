"""Part `faults`: one plan, applied alike to a pair with kvbaton and to a pair with NixlConnector, on one GPU.

The steps, and how they are judged, are those of `kvbaton chaos --engine vllm` (docs/faults.md); what is added is the
GPU's memory: what a P that was killed had must be free within its lease and 5 s, so that a successor can start in it.

Laws: both pairs go through the plan side by side, but nobody kills or starts one while another's memory is watched:
`watched` sees to that. Answers are tokens in float32, compared with those of an engine without a connector as far as
that one is sure; it lives on, for a second opinion about what is wrong. A step that there was no time for is told as
not run.

A pair whose dead are looked at: what they leave of the GPU's memory, and what was wrong in what they answered.

Laws: nobody kills or starts an engine while another's memory is watched: a change of it then has one cause. So before a
kill all pairs meet, with nobody starting; they kill and watch in turn, and meet again before anybody starts a
successor. Then all start at once: a start costs more than everything else. One who is done for does not keep others
waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.fault_catalogue import Moment
from kvbaton_proof.chaos.outcome import Outcome, Row
from kvbaton_proof.chaos.vllm import fault_table
from kvbaton_proof.chaos.vllm.vllm_judge import LEARN_AT_ONCE, LONG, USUAL, Pair, examined
from kvbaton_proof.chaos.vllm.vllm_run import judged, line, outcome
from kvbaton_proof.chaos.vllm.vllm_steps import CLIENTS, LATE, UNDER_LOAD, Scene
from kvbaton_proof.gpu_test import gpu_machine
from kvbaton_proof.gpu_test.gpu_machine import MemoryWatch
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.rig import oracle
from kvbaton_proof.rig.client import TOKENS, Answer, Prompt, prompt_of
from kvbaton_proof.rig.connectors import D, P
from kvbaton_proof.rig.oracle import Doubts, Right
from kvbaton_proof.rig.record import Page
from kvbaton_proof.rig.servers import GIB, Say, Site, Spec, standing

START_S = 75.0
"""What the start of a server takes on an H200 whose driver and files are warm, as others start beside it."""


class Meeting:
    """Where pairs wait for each other, again and again; what they wait for has deadlines."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._waiting: list[tuple[int, asyncio.Future[float]]] = []

    async def meet(self, rank: int) -> float:
        """Wait for all others; they go on by rank. When that was, the same for all: they decide alike."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.append((rank, mine))
        loop.call_soon(self._look)  # not now: who comes last would go on before the others
        return float(await mine)

    def leave(self) -> None:
        self._parties -= 1
        self._look()

    def _look(self) -> None:
        if len(self._waiting) < self._parties:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda each: each[0]), []
        now = time.monotonic()
        for _, one in waiting:
            if not one.done():
                one.set_result(now)


@dataclass(slots=True)
class WatchedPair(Pair):
    """`turn` and `meeting` are shared by all pairs on this GPU."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    meeting: Meeting = field(default_factory=lambda: Meeting(1))
    rank: int = 0  # who kills first: what an earlier one left mapped must not be counted as a later one's
    until: float = float("inf")  # by when all has to be over
    memory: MemoryWatch = field(default_factory=MemoryWatch)  # of a P that is killed
    has_turn: bool = False
    successor_s: float | None = None  # how long the last one took to serve
    fallen: tuple[str, ...] = ()  # died, and there was no time to start them again
    not_run: list[str] = field(default_factory=list)  # titles
    rights: Sequence[Right] = ()
    during: str = ""  # the step under way
    crowd: int = CLIENTS  # requests at once in it
    doubts: Doubts | None = None  # None: nobody looks into wrong answers
    opinions: list[asyncio.Task[None]] = field(default_factory=list)  # of this step

    async def take_turn(self) -> None:
        """Before a step that kills, after a meeting."""
        await self.turn.acquire()
        self.has_turn, self.memory.level, self.successor_s = True, self.memory.used(), None

    async def end_turn(self) -> None:
        """Nobody is watched any more when this returns. May be called twice."""
        if self.has_turn:
            self.has_turn = False
            self.turn.release()
            await self.meeting.meet(self.rank)

    async def restart(self, *names: str) -> None:
        """Who died of something, and would not be up in time, stays dead."""
        if self.has_turn:
            for name in names:
                self.engines[name].kill()
            await self.died(*names)
            await self.end_turn()
            begun = time.monotonic()
            for name in names:
                self.engines[name].start()
            await self.ready(*names)
            self.successor_s = time.monotonic() - begun
        elif names and time.monotonic() + START_S > self.until:
            self.fallen = names
        else:
            await Pair.restart(self, *names)

    async def died(self, *names: str) -> None:
        found = await self.memory.died() if names == (P,) else None
        if found is not None:
            self.say(
                f"{self.connector}: of a P that was killed {found.fell / GIB:.1f} GiB came back, by {found.after_s} s"
            )

    def doubt(self, answer: Answer, number: int) -> None:
        if self.doubts is not None:
            prompt = self.prompts[number]
            others = [each for each in self.prompts if each is not prompt][: self.crowd - 1]
            opinion = self.doubts.look_into(self.during, number, prompt, answer, self.rights[number], others, TOKENS)
            self.opinions.append(asyncio.create_task(opinion))

    async def looked_into(self) -> None:
        """Wait for second opinions; they have deadlines."""
        await asyncio.gather(*self.opinions)
        self.opinions.clear()


SEED = 1
PLAN_S = 520.0
"""No step begins that would not end by then, the start of servers included, or would leave no time for kills: a part
has to end within nine minutes. On an H200 all steps take some 445 s (docs/gpu-test.md has them one by one)."""
TAKES_S = {"poison": 3.0, "abort": 13.0, "exhausted": 8.0, "reset": 9.0, "late-decode": 14.0, "stop": 8.0}
FREE_GRACE_S = 5.0
SHARE = 0.5  # of the clients that hang up
SPARE = 1.5  # times as many prompts are learned as are asked
ALONE = "faults-alone"
PAIRS = {"kvbaton": "faults-kvbaton", "nixl": "faults-nixl"}
POISONS = ("unknown source", "only the flag", "no blocks", "half the blocks", "a number of 2**62")
APART = (Step(0, "kill", P, Moment.MID_COPY), Step(0, "kill", P, detail=UNDER_LOAD))
FREE, MAPPED = "free again", "mapped still"


def steps(sizes: Sizes) -> list[Step]:
    """Cheap ones first, since many fit; kills last, since each costs a start. P is killed once, at both moments that
    matter: while D reads, and while others are served. The two apart are done if they are named.
    """
    found = [
        *(Step(0, "poison", D, detail=name) for name in POISONS),
        Step(0, "abort", detail=f"({sizes.clients} clients, half leave)"),
        Step(0, "exhausted", detail="(D's cache full)"),
        Step(0, "reset", P, detail=UNDER_LOAD),
        Step(0, "late-decode", detail="(after the lease)"),
        Step(0, "stop", P, Moment.MID_COPY, sizes.stop_s),
        Step(0, "stop", D, seconds=sizes.stop_s, detail=UNDER_LOAD),
        Step(0, "kill", P, Moment.MID_COPY, detail=UNDER_LOAD),
        Step(0, "kill", D, Moment.BEFORE_CLAIM, detail="(P holds 32 prefills)"),
    ]
    if sizes.faults is None:
        return found
    return [step for step in found if {step.fault, step.title()} & set(sizes.faults)] + [
        step for step in APART if step.title() in sizes.faults
    ]


def order(connector: str, found: Sequence[Step]) -> list[Step]:
    """NixlConnector's engines die of malformed parameters, which costs a start each time: that comes last."""
    return sorted(found, key=lambda step: connector == "nixl" and step.fault == "poison")


def takes(step: Step, sizes: Sizes) -> float:
    """Seconds, by what was seen on an H200, the wait until all is well again included."""
    if step.fault == "kill":
        return START_S + (30.0 if step.target == P else 5.0)  # two scenes and two watches, then both start
    return TAKES_S.get(step.fault, 0.0) + step.seconds


def named(titles: Sequence[str]) -> tuple[str, ...]:
    """Titles or names of faults; ValueError for one that there is not."""
    known = {name for step in (*steps(Sizes()), *APART) for name in (step.fault, step.title())}
    for title in titles:
        if title not in known:
            raise ValueError(f"--faults: got {title!r}, expected some of {', '.join(sorted(known))}")
    return tuple(titles)


def specs(sizes: Sizes) -> list[Spec]:
    """P's cache is most of what it has: one that stays mapped shows in the GPU's memory."""
    shared = Spec(
        name="", model="small", cache_bytes=8 * GIB, prefix_caching=False, d_blocks=sizes.fault_d_blocks,
        p_blocks=sizes.fault_blocks, chunk_tokens=2048,
        settings={
            "kvbaton": {"claim_timeout": 4.0, "transfer_timeout": 10.0, "lease_s": sizes.lease_s},
            "nixl": {"kv_lease_duration": int(sizes.lease_s)},
        },
    )  # fmt: skip
    found = [
        msgspec.structs.replace(shared, name=ALONE, p_blocks=0, d_blocks=0, cache_bytes=4 * GIB),
        msgspec.structs.replace(shared, name=PAIRS["kvbaton"], connector="kvbaton"),
    ]
    nixl = msgspec.structs.replace(shared, name=PAIRS["nixl"], connector="nixl")
    return [*found, nixl] if sizes.nixl else found


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
        up = [connector for connector, name in PAIRS.items() if name in groups and groups[name].is_up]
        turn, meeting = asyncio.Lock(), Meeting(len(up))
        pairs = [
            WatchedPair(
                connector, site.directory, one.engines, session, prompts, [each.sure for each in rights], [], say,
                blocks={P: _blocks(sizes.fault_blocks), D: _blocks(sizes.fault_d_blocks)}, turn=turn,
                meeting=meeting, rank=rank, until=until,
                memory=MemoryWatch(
                    gpu_machine.Memory().used if site.device == "cuda" else lambda: None,
                    one.spec.cache_bytes, sizes.lease_s + FREE_GRACE_S,
                ),
                rights=rights, doubts=Doubts(connector, session, alone.alone.url),
            )
            for rank, connector in enumerate(up) if (one := groups[PAIRS[connector]])
        ]  # fmt: skip
        found = await asyncio.gather(*(_carried_out(pair, sizes, page, say) for pair in pairs))
    oracle.tell(page, [pair.doubts for pair in pairs if pair.doubts is not None])
    _told({each.connector: each for each in found}, {pair.connector: pair.not_run for pair in pairs}, page)


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


def _blocks(count: int) -> int:
    """For figures that are a share of all blocks; what is not known is many."""
    return count or 1 << 14


async def _carried_out(pair: WatchedPair, sizes: Sizes, page: Page, say: Say) -> Outcome:
    """The plan, done to one pair."""
    ordered = order(pair.connector, steps(sizes))
    plan = Plan(name="standard", seed=SEED, engine="vllm", connector=pair.connector, prefills=1, decodes=1,
                seconds=0.0, steps=tuple(ordered))  # fmt: skip
    begun = time.monotonic()
    rows: list[Row] = []
    kinds: Counter[str] = Counter()
    try:
        first = await examined(pair, begun, time.monotonic)
        problems = [] if first.recover_s is not None and not first.left_over else [f"before any fault: {first.note}"]
        for number, step in enumerate(ordered):
            if pair.fallen:
                pair.not_run += [each.title() for each in ordered[number:]]
                break
            at = await pair.meeting.meet(pair.rank) if step.fault == "kill" else time.monotonic()
            kills_ahead = sum(takes(each, sizes) for each in ordered[number + 1 :] if each.fault == "kill")
            if at + takes(step, sizes) + kills_ahead > pair.until:
                pair.not_run.append(step.title())
                continue
            row = await _step(pair, step, sizes, begun, kinds, problems)
            if pair.doubts is not None:
                oracle.keep(page, pair.doubts)
            if row is None:
                pair.not_run += [each.title() for each in ordered[number + 1 :]]
                break
            rows.append(row)
            say(f"{pair.connector}: {line(row)}")
            page.figure(pair.connector, msgspec.to_builtins(rows))
    finally:
        pair.meeting.leave()
    return outcome(plan, time.monotonic() - begun, rows, [], problems, kinds)


async def _step(
    pair: WatchedPair, step: Step, sizes: Sizes, begun: float, kinds: Counter[str], problems: list[str]
) -> Row | None:
    def prepare(scene: Scene) -> None:
        scene.late_s, scene.clients, scene.share = sizes.lease_s + 2.0, sizes.clients, SHARE

    already = len(pair.memory.freed)
    pair.during = step.title()
    pair.crowd = {"abort": sizes.clients, "late-decode": LATE, "exhausted": LONG}.get(step.fault, CLIENTS)
    if step.fault == "kill":
        await pair.take_turn()
    try:
        row = await judged(pair, step, SEED, begun, kinds, problems, prepare)
    finally:
        await pair.end_turn()
        await pair.looked_into()
    if row is None or step.fault != "kill":
        return row
    said = [row.note, freed_text(pair.memory.freed[-1]) if len(pair.memory.freed) > already else ""]
    said += [f"its successor served after {pair.successor_s:.0f} s"] if pair.successor_s is not None else []
    return msgspec.structs.replace(row, note="; ".join(filter(None, said)))


def freed_text(freed: gpu_machine.Freed) -> str:
    gib = f"{freed.fell / GIB:.1f} GiB of P's memory"
    return f"{gib} {FREE} after {freed.after_s} s" if freed.after_s is not None else f"{gib} {FREE} only: {MAPPED}"


def _told(found: Mapping[str, Outcome], not_run: Mapping[str, Sequence[str]], page: Page) -> None:
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
        if FREE in row.note:
            held = MAPPED in row.note
            page.verdict(f"{row.title}: P's GPU memory", row.note, "free in time", not held)
    for problem in ours.problems:
        page.verdict("promises", problem, "none broken", False)
    if missing := not_run.get("kvbaton"):
        page.verdict("steps", f"not run: {'; '.join(missing)}", "all run", False)
    theirs = found.get("nixl")
    table = page.table("Faults, kvbaton and NixlConnector on one GPU", fault_table.HEAD)
    for cells in fault_table.lines(ours, theirs):
        page.row(table, *cells)
    for problem in theirs.problems if theirs is not None else ():
        page.note(f"NixlConnector: {problem}")
    if missing := not_run.get("nixl"):
        page.note(f"NixlConnector: not run, for lack of time or because an engine was dead: {'; '.join(missing)}")
