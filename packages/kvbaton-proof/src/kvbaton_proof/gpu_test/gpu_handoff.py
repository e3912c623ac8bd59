"""Part `handoff`: what needs no engine. Each program has its own verdict; here it is run, bounded, and kept.

Law: a program that is not there, or ends late, is a verdict that does not hold.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence

from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.rig.record import Page
from kvbaton_proof.rig.servers import Say

BENCH_S, CHECK_S = 420.0, 180.0  # NIXL as installed takes 5 s for a read of 1,000 blocks
LINES = 12
CHECK = "tests.transports.device.cuda_check"


async def run(sizes: Sizes, page: Page, say: Say) -> None:
    await benched(sizes, page, say)
    await checked(page, say)


async def benched(sizes: Sizes, page: Page, say: Say) -> None:
    words = ["-m", "kvbaton.cli.main", "bench", "transfer", "--device", "cuda", "--json"]
    words += ["--repetitions", str(sizes.handoff_repetitions)]
    page.commands([" ".join(["python", *words])])
    status, output = await _called(words, BENCH_S)
    try:
        found = json.loads(output.strip().splitlines()[-1])
        verdicts = found["verdicts"]
    except (ValueError, LookupError, TypeError):
        page.verdict("bench transfer --device cuda", f"status {status}", "verdicts", False)
        page.note(_tail(output))
        say(f"bench transfer: status {status}: {_tail(output)}")
        return
    page.figure("bench transfer", found)
    for each in verdicts:
        name, ok = str(each.get("name") or each.get("what")), bool(each.get("ok"))
        reached, bound = each.get("reached", each.get("value", "")), each.get("bound", "")
        page.verdict(name, reached, str(bound), ok)
        say(f"{name}: {reached} (bound {bound}): {'holds' if ok else 'missed'}")


async def checked(page: Page, say: Say) -> None:
    """The contract of the device's data planes, which is among the tests: only where they are."""
    try:
        there = importlib.util.find_spec(CHECK) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        page.note(f"{CHECK} is not here: call this from the root of the repository to run the contract too")
        return
    page.commands([f"python -m {CHECK}"])
    status, output = await _called(["-m", CHECK], CHECK_S)
    page.verdict("contract of the device's data planes", _tail(output, 1), "status 0", status == 0)
    page.note(_tail(output))
    say(f"{CHECK}: status {status}: {_tail(output)}")


async def _called(words: Sequence[str], within_s: float) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), within_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 124, f"not over after {within_s:.0f} s"
    return process.returncode or 0, output.decode(errors="replace")


def _tail(text: str, lines: int = LINES) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])[-2000:]
