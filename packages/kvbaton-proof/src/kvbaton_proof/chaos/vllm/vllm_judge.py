"""Whether a P and a D are well again after a fault, and what is left in them.

Laws: well means: both healthy, and four fresh requests answered rightly whose KV was handed over, not computed again.
At rest means that neither holds a block or a pin. Both are waited for, and for so long; then the row says what is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.fault_catalogue import KNOWN
from kvbaton_proof.chaos.outcome import Row
from kvbaton_proof.chaos.vllm.vllm_pair import Pair
from kvbaton_proof.rig.client import Tally, both_legs
from kvbaton_proof.rig.connectors import D, P

RECOVER_S = 45.0
REST_S = 45.0
PROBES = 4
PROBE_DEADLINE_S = 15.0
FIGURES_LAG_S = 3.0  # vLLM's figures follow its steps
GRACE_S = 5.0
LEASE_S = 35.0  # probes that failed leave leases behind, which are not the fault's: NIXL's last 30 s
LOOK_S = 0.2
WORTH_SAYING_S = 3.0


Clock = Callable[[], float]


class Well(msgspec.Struct, frozen=True, kw_only=True):
    """What was found after a fault."""

    dead: tuple[str, ...] = ()
    recover_s: float | None = None
    wrong: int = 0  # of the requests that asked whether all is well
    left_over: int | None = 0
    rest_s: float | None = None  # from the end of the fault; None: never
    note: str = ""


async def examined(pair: Pair, ended_at: float, clock: Clock) -> Well:
    """Wait, bounded, until all is well; `ended_at` is when the fault was over. Who died serves again, in another life;
    EngineError if that cannot be.
    """
    dead = await _dead(pair)
    probed = Tally()
    unhanded = 0
    recover_s = None
    while not dead and clock() < ended_at + RECOVER_S:
        right, handed = await _probe(pair, probed)
        if right == PROBES and handed:
            recover_s = clock() - ended_at
            break
        unhanded += right == PROBES
        dead = await _dead(pair)
        await asyncio.sleep(LOOK_S)
    grace_s = GRACE_S if dead or recover_s is not None else LEASE_S
    restart = asyncio.create_task(pair.restart(*dead))  # meanwhile, since it takes as long as a lease
    try:
        left, rest_s = await _rest(pair, ended_at, max(ended_at + REST_S, clock() + grace_s), clock, dead)
    finally:
        await restart
    if not dead and (dead := await _dead(pair)):
        await pair.restart(*dead)
    note = complaint(probed, unhanded) if recover_s is None and not dead else ""
    return Well(
        dead=tuple(dead), recover_s=None if dead else recover_s, wrong=probed.wrong, left_over=left, rest_s=rest_s,
        note=note,
    )  # fmt: skip


def complaint(probed: Tally, unhanded: int) -> str:
    """Why they never were well again."""
    if unhanded:
        return "answers are right, but nothing is handed over any more: D computes every prompt itself"
    errors = ", ".join(f"{count} x {kind}" for kind, count in probed.errors.items())
    return f"afterwards: {probed.right} right, {probed.wrong} wrong, {probed.late} late, errors: {errors or 'none'}"


async def _probe(pair: Pair, probed: Tally) -> tuple[int, bool]:
    """How many of four fresh requests were right, and whether all were handed over."""
    before = await pair.handed()
    answers = await asyncio.gather(*(
        both_legs(
            pair.session, pair.p.url, pair.d.url, pair.prompts[number], deadline_s=PROBE_DEADLINE_S,
            request_id=request_id(pair),
        ) for number in range(PROBES)
    ))  # fmt: skip
    right = sum(pair.count(probed, each, number) for number, each in enumerate(answers))
    if right < PROBES or before is None:
        return right, False
    return right, await _within(FIGURES_LAG_S, lambda: _handed_since(pair, before))


async def _handed_since(pair: Pair, before: int) -> bool:
    now = await pair.handed()
    return now is not None and now - before >= PROBES


async def _within(seconds: float, condition: Callable[[], Awaitable[bool]]) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        if await condition():
            return True
        if loop.time() > deadline:
            return False
        await asyncio.sleep(LOOK_S)


async def _rest(
    pair: Pair, ended_at: float, deadline: float, clock: Clock, dead: list[str]
) -> tuple[int | None, float | None]:
    """What is held at the end, by those that live, and when nothing was."""
    living = [name for name in (P, D) if name not in dead]
    while True:
        found = [await pair.used(name) for name in living]
        if all(each == 0 for each in found):
            return 0, clock() - ended_at
        if clock() > deadline:
            known = [each for each in found if each is not None]
            return (sum(known) if known else None), None
        await asyncio.sleep(LOOK_S)


async def _dead(pair: Pair) -> list[str]:
    return [name for name, engine in pair.engines.items() if not await engine.is_well(pair.session)]


def request_id(pair: Pair) -> str:
    pair.asked += 1
    return f"chaos-{pair.asked}"


def row_of(step: Step, at_s: float, tally: Tally, well: Well, note: str) -> Row:
    """The row of one step; pure."""
    said = [note, well.note]
    if tally.errors:
        said.append("errors: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(tally.errors.items())))
    if well.dead:
        said.append(f"{' and '.join(well.dead)} died and had to be started again")
    elif well.rest_s is not None and well.rest_s > WORTH_SAYING_S:
        said.append(f"nothing held {well.rest_s:.0f} s after")
    return Row(
        at_s=round(at_s, 1), title=step.title(), fault=step.fault, promises=KNOWN[step.fault].promises,
        requests=tally.requests + well.wrong, right=tally.right, errors=tally.errors.total(),
        wrong=tally.wrong + well.wrong, late=tally.late, dead=len(well.dead), left_over=well.left_over,
        recover_s=None if well.recover_s is None else round(well.recover_s, 2), note="; ".join(filter(None, said)),
    )  # fmt: skip
