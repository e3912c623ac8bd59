"""The share of the product's lines that simulated worlds reach, and for each line that they do not, why.

`proof/sim/unreached.txt` has one line per function with something unreached: its name and the reason. A reason whose
function has gone, or is reached whole, is stale, and said to be so; so is what is unreached without a reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec

from kvbaton_proof.sim.campaign import Told, pool
from kvbaton_proof.sim.mutants.mutating import SOCKETS
from kvbaton_proof.sim.reach import Lines, functions, reached_by, statements, together

FILE, BAR = "unreached.txt", " || "
BATCH = 20
SHARE_MIN = 0.97


class Missed(msgspec.Struct, frozen=True):
    """A function that no world went through whole."""

    function: str
    lines: list[int]
    reason: str


class Module(msgspec.Struct, frozen=True):
    """One module's figures."""

    module: str
    lines: int
    reached: int
    share: float
    in_functions: int
    in_functions_reached: int


class Coverage(msgspec.Struct):
    """What a range of seeds reaches."""

    seeds: int
    lines: int
    reached: int
    share: float
    share_in_functions: float
    wall_s: float
    modules: list[Module]
    missed: list[Missed]
    stale_reasons: list[str]
    left_out: dict[str, str] = msgspec.field(default_factory=lambda: dict(SOCKETS))  # whole modules, with the reason

    @property
    def unexplained(self) -> list[Missed]:
        return [each for each in self.missed if not each.reason]

    @property
    def holds(self) -> bool:
        return self.share >= SHARE_MIN and not self.unexplained


def reasons(text: str | None = None) -> dict[str, str]:
    """Why a function is not reached, by `module:function`."""
    whole = resources.files("kvbaton_proof.sim").joinpath(FILE).read_text() if text is None else text
    lines = [line for line in whole.splitlines() if line.strip() and not line.startswith("#")]
    bad = [line for line in lines if len(line.split(BAR)) != 2]
    if bad:
        raise ValueError(f"{FILE}: {bad[0]!r} is not `module:function || reason`")
    return {name.strip(): why.strip() for name, why in (line.split(BAR) for line in lines)}


def run_coverage(modules: Sequence[str], seeds: range, jobs: int, tell: Told) -> Coverage:
    """Run the worlds and sum up what they reached."""
    started = time.monotonic()
    with pool(jobs) as processes:
        batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
        waiting = [processes.submit(reached_by, modules, batch) for batch in batches]
        parts = []
        for future in waiting:
            parts.append(future.result())
            tell(f"{min(len(parts) * BATCH, len(seeds))} of {len(seeds)} seeds")
    found = summed(modules, together(parts), reasons())
    found.seeds, found.wall_s = len(seeds), round(time.monotonic() - started, 2)
    return found


def summed(modules: Sequence[str], reached: Lines, why: Mapping[str, str]) -> Coverage:
    """The figures of what was reached."""
    told: list[Module] = []
    missed: list[Missed] = []
    for module in modules:
        counted, hit = statements(module), set(reached.get(module, {}))
        inside: set[int] = set()
        for function in functions(module):
            inside |= function.statements
            name, lines = f"{module}:{function.name}", sorted(function.statements - hit)
            if lines:
                missed.append(Missed(name, lines, why.get(name, "")))
        unseen = len(inside - hit)
        share = _share(len(counted) - unseen, len(counted))
        told.append(Module(module, len(counted), len(counted) - unseen, share, len(inside), len(inside) - unseen))
    lines_in_all, reached_in_all = sum(each.lines for each in told), sum(each.reached for each in told)
    inner, inner_reached = sum(each.in_functions for each in told), sum(each.in_functions_reached for each in told)
    stale = sorted(set(why) - {each.function for each in missed})
    return Coverage(
        seeds=0,
        lines=lines_in_all,
        reached=reached_in_all,
        share=_share(reached_in_all, lines_in_all),
        share_in_functions=_share(inner_reached, inner),
        wall_s=0.0,
        modules=told,
        missed=missed,
        stale_reasons=stale,
    )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0
