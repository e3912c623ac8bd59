"""Part `sglang`: real SGLang with kvbaton as its transfer backend, and with its own `nixl` beside it.

`answers`: greedy tokens of P and D beside one engine's, float32. Controls: answers of other prompts must not pass, and
those of a D whose pages are misplaced. `times`: time to the first token of one engine and of each backend, in turn, of
the shape of an 8B model, on servers of their own. `faults`: under load clients hang up, P and D are stopped, killed and
replaced at the same address; the same is done to both backends at once.

Law: kvbaton's rows are judged, those of `nixl` are told. After each fault every queue must be empty: SGLang drops its
cache only then, and says itself if a page is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import median

import aiohttp

from kvbaton.engines.sglang.metadata_rows import ROW_BYTES
from kvbaton_proof.gpu_test.sglang_servers import CPU_SIZES, PAGE_TOKENS, TIMED, SglangPair, SglangSizes, servers
from kvbaton_proof.rig import oracle
from kvbaton_proof.rig.client import Answer, Prompt, Tally, encoded, prompt_of, sent
from kvbaton_proof.rig.oracle import SURE_MIN, Right
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.server import Engine, EngineError, end
from kvbaton_proof.rig.servers import Say, Site, last_words, with_news

STEPS = ("answers", "times", "faults")
TOKENS, WARM_UPS = 12, 1
READY_S, DEADLINE_S, REST_S, WELL_S = 300.0, 60.0, 40.0, 60.0
BEFORE_S, AFTER_S = 1.5, 4.0
ABORT, STOP_P, STOP_D, KILL_D, KILL_P = "clients hang up", "P stopped", "D stopped", "D killed", "P killed"
FAULTS = (ABORT, STOP_P, STOP_D, KILL_D, KILL_P)
HEAD = ("backend", "what", "right", "wrong", "late", "errors", "well after s", "not at rest", "dead")
Known = Sequence[tuple[Prompt, Right]]


async def run(site: Site, session: aiohttp.ClientSession, page: Page, say: Say, steps: Sequence[str]) -> None:
    sizes, timed = (CPU_SIZES, CPU_SIZES) if site.device == "cpu" else (SglangSizes(), TIMED)
    if compared := [step for step in steps if step != "times"]:
        async with _serving("answers", site, sizes, session, page, say) as (alone, up):
            if up:
                await _compared(alone, up, sizes, session, page, say, compared)
    if "times" in steps:
        async with _serving("times", site, timed, session, page, say) as (alone, up):
            if up:
                await _times(alone, up, timed, session, page, say)


@contextlib.asynccontextmanager
async def _serving(
    what: str, site: Site, sizes: SglangSizes, session: aiohttp.ClientSession, page: Page, say: Say
) -> AsyncIterator[tuple[Engine, list[SglangPair]]]:
    """The one engine and the pairs, gone afterwards; no pair where the one engine, or ours, does not serve. `what` they
    are for: others of the run may have been there before."""
    home, logs = site.directory / what, site.logs / what
    alone, pairs = await asyncio.to_thread(servers, site.python, home, logs, site.device, sizes)
    every = [alone, *(engine for pair in pairs for engine in pair.engines.values())]
    try:
        for engine in every:
            engine.start()
        begun = time.monotonic()
        up = await _up(alone, pairs, session, page, say)
        page.figure(f"{what}: servers up after", round(time.monotonic() - begun, 1))
        ours = any(pair.backend == "kvbaton" for pair in up)
        page.verdict(f"{what}: one engine and a pair with kvbaton served", "yes" if ours else "no", "yes", ours)
        yield alone, up if ours else []
    finally:
        await asyncio.to_thread(end, every)


async def _compared(
    alone: Engine, up: Sequence[SglangPair], sizes: SglangSizes, session: aiohttp.ClientSession, page: Page, say: Say,
    steps: Sequence[str],
) -> None:  # fmt: skip
    known = await _learned(alone, sizes, session, page, say)
    if "answers" in steps:
        await _can_fail(alone, known, sizes, session, page, say)
        table = page.table("Answers of real SGLang beside one engine's, float32, greedy", HEAD)
        for pair in up:
            await _answers(pair, known, sizes, session, page, table, say)
    if "faults" in steps:
        short = [each for each in known if len(each[0]) <= sizes.fault_longest]
        table = page.table("Faults under load, real SGLang", HEAD)
        await asyncio.gather(*(_faults(pair, short, sizes, page, table, say) for pair in up))


async def _up(
    alone: Engine, pairs: Sequence[SglangPair], session: aiohttp.ClientSession, page: Page, say: Say
) -> list[SglangPair]:
    """The pairs that serve; none where the one engine does not."""

    async def ready(name: str, engines: Sequence[Engine]) -> bool:
        begun = time.monotonic()
        try:
            await asyncio.gather(*(engine.ready(session, READY_S) for engine in engines))
        except EngineError as error:
            told = [f"{engine.name}: {last_words(engine.log)}" for engine in engines]
            page.note(f"{name}: {error}\n" + "\n".join(told))
            say(f"{name} NOT UP: {error}")
            return False
        say(f"{name}: up after {time.monotonic() - begun:.0f} s")
        return True

    named = [("one engine", [alone]), *((pair.backend, list(pair.engines.values())) for pair in pairs)]
    waiting = asyncio.gather(*(ready(name, engines) for name, engines in named))
    await with_news(waiting, lambda seconds: say(f"{seconds:.0f} s: servers are starting"), 10.0)
    first, *found = waiting.result()
    return [pair for pair, is_up in zip(pairs, found, strict=True) if first and is_up]


def prompts_of(sizes: SglangSizes) -> list[Prompt]:
    """From one token to several chunks, around the ends of pages and chunks; some begin as others do."""
    rng = random.Random("gpu_test sglang")
    edges = [1, 2, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, sizes.chunk_tokens - 1, sizes.chunk_tokens,
             sizes.chunk_tokens + 1, 2 * sizes.chunk_tokens, sizes.longest]  # fmt: skip
    lengths = edges + [rng.randrange(2 * PAGE_TOKENS, sizes.longest) for _ in range(sizes.prompts)]
    found = [prompt_of(length, f"sglang {number}") for number, length in enumerate(lengths)]
    shared = [each[: len(each) * 2 // 3] + prompt_of(37, f"sglang shares {number}")
              for number, each in enumerate(found[len(edges)::3])]  # fmt: skip
    return [*found, *shared]


async def _learned(
    alone: Engine, sizes: SglangSizes, session: aiohttp.ClientSession, page: Page, say: Say
) -> list[tuple[Prompt, Right]]:
    prompts = prompts_of(sizes)
    found = await oracle.learned(session, alone.url, prompts, sizes.at_once, TOKENS)
    bad = [each for each in found if isinstance(each, str)]
    known = [
        (prompt, right) for prompt, right in zip(prompts, found, strict=True)
        if isinstance(right, Right) and len(right.sure) >= SURE_MIN
    ]  # fmt: skip
    told = f"{len(prompts) - len(bad)} of {len(prompts)} prompts"
    say(f"one engine answered {told}, {len(known)} can be compared {bad[:1]}")
    page.verdict("prompts that can be compared", f"{len(known)} of {len(prompts)}", f"at least {sizes.prompts}",
                 len(known) >= sizes.prompts)  # fmt: skip
    return known


def unlike_the_next(known: Known) -> int:
    """How many right answers are not taken for those of the next prompt."""
    tally = Tally()
    for (_, right), (_, other) in zip(known, [*known[1:], *known[:1]], strict=True):
        tally.count(Answer(tokens=other.tokens), right.sure)
    return tally.wrong


def controlled(known: Known, sizes: SglangSizes) -> Known:
    """What the control asks: prompts of several pages."""
    return [each for each in known if len(each[0]) > 4 * PAGE_TOKENS][: sizes.at_once]


async def _can_fail(
    alone: Engine, known: Known, sizes: SglangSizes, session: aiohttp.ClientSession, page: Page, say: Say
) -> None:
    """The comparison is itself tried, without any handoff."""
    unlike = unlike_the_next(known)
    page.verdict("control: answers of other prompts do not pass", f"{unlike} of {len(known)} seen", "all",
                 unlike == len(known) > 0)  # fmt: skip
    long, tally = controlled(known, sizes), Tally()
    twice = [[*prompt[:PAGE_TOKENS], *prompt[:PAGE_TOKENS], *prompt[2 * PAGE_TOKENS :]] for prompt, _ in long]
    found = await oracle.learned(session, alone.url, twice, sizes.at_once, TOKENS)
    for each, (_, right) in zip(found, long, strict=True):
        tally.count(Answer(error=each) if isinstance(each, str) else Answer(tokens=each.tokens), right.sure)
    say(f"one engine, a page of the prompt twice in place of another: {tally}")
    page.verdict("control: one engine's answers to prompts with one page twice in place of another",
                 f"{tally.wrong} of {len(long)} seen", "some", tally.wrong > 0, judged=False)  # fmt: skip


async def _asked(
    pair: SglangPair, known: Known, at_once: int, session: aiohttp.ClientSession, deadline_s: float = DEADLINE_S
) -> tuple[Tally, list[Answer]]:
    room, tally = asyncio.Semaphore(at_once), Tally()

    async def one(prompt: Prompt) -> Answer:
        async with room:
            return await pair.ask(session, prompt, deadline_s, TOKENS)

    answers = await asyncio.gather(*(one(prompt) for prompt, _ in known))
    for answer, (_, right) in zip(answers, known, strict=True):
        tally.count(answer, right.sure)
    return tally, answers


async def _answers(
    pair: SglangPair, known: Known, sizes: SglangSizes, session: aiohttp.ClientSession, page: Page, table: Table,
    say: Say,
) -> None:  # fmt: skip
    judged = pair.backend == "kvbaton"
    for what in ("fresh", "again, P has them cached"):
        tally, answers = await _asked(pair, known, sizes.at_once, session)
        detail = next((answer.detail for answer in answers if answer.detail), "")
        page.row(table, pair.backend, what, tally.right, tally.wrong, tally.late, dict(tally.errors), "", "", "")
        say(f"{pair.backend}: {what}: {tally} {detail}")
        page.verdict(f"{pair.backend}: {what}", f"{tally.right} of {len(known)} right {detail}", "all",
                     tally.right == len(known), judged=judged)  # fmt: skip
    busy = await pair.rests(session, REST_S)
    page.verdict(f"{pair.backend}: at rest afterwards", f"not at rest: {busy}", "none", not busy, judged=judged)
    if judged:
        long = controlled(known, sizes)
        pair.flag.write_text(str(ROW_BYTES + 1))  # a row that is damaged is refused: of pages, only answers tell
        tally, _ = await _asked(pair, long, sizes.at_once, session)
        pair.flag.unlink()
        page.row(table, pair.backend, "pages misplaced", tally.right, tally.wrong, tally.late, dict(tally.errors), "",
                 "", "")  # fmt: skip
        say(f"{pair.backend}: control, pages misplaced: {tally}")
        page.verdict("control: misplaced pages are seen", f"{tally.wrong} of {len(long)} seen", "all",
                     tally.wrong == len(long) > 0)  # fmt: skip
        await pair.rests(session, REST_S)  # and what P and D had cached is gone


async def _times(
    alone: Engine, pairs: Sequence[SglangPair], sizes: SglangSizes, session: aiohttp.ClientSession, page: Page, say: Say
) -> None:
    names = ["one engine", *(pair.backend for pair in pairs)]
    ways = [f"{pair.backend}, {'through its router' if pair.is_routed else 'both legs asked'}" for pair in pairs]
    shape = f"shape {sizes.model}, {'bfloat16' if sizes.is_dummy else 'float32'}, without graphs"
    head = ("prompt tokens", names[0], *ways)
    table = page.table(f"Time to the first token, ms, medians, one request at a time, {shape}", head)
    for size in sizes.timed_tokens:
        found: dict[str, list[float]] = {name: [] for name in names}
        errors: list[str] = []
        for number in range(-WARM_UPS, sizes.repetitions):
            prompt = prompt_of(size, f"times {number}")
            answers = {names[0]: await sent(session, alone.url, encoded(prompt, 4))}
            answers |= {pair.backend: await pair.streamed(session, prompt, 4) for pair in pairs}
            errors += [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error]
            for name, answer in answers.items() if number >= 0 else ():
                found[name].append(answer.first_s)
        shown = [f"{median(each) * 1000:.1f}" for each in found.values()]
        page.row(table, f"{size:,}", *shown)
        say(f"{size} tokens: {dict(zip(names, shown, strict=True))} {errors[:1]}")
        page.verdict(f"{size:,} tokens were timed", f"{len(errors)} errors {errors[:1]}", "0", not errors)


# --- faults


async def _faults(pair: SglangPair, known: Known, sizes: SglangSizes, page: Page, table: Table, say: Say) -> None:
    connections = aiohttp.TCPConnector(limit=0, force_close=True)  # none that a fault has broken is used again
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for fault in FAULTS:
            await _fault(pair, fault, known, sizes, session, page, table, say)
            if not all(engine.is_alive for engine in pair.engines.values()):
                say(f"{pair.backend}: an engine is dead, the rest is not run")
                page.verdict(f"{pair.backend}: all faults", f"not after {fault}", "all run", False,
                             judged=pair.backend == "kvbaton")  # fmt: skip
                return


class Load:
    """Clients who ask one prompt after the other; `seen` counts how each ended."""

    def __init__(self, pair: SglangPair, known: Known, session: aiohttp.ClientSession) -> None:
        self.pair, self.known, self.session = pair, known, session
        self.seen, self.left, self.is_over, self.rng = Tally(), 0, False, random.Random(pair.backend)

    async def client(self, number: int, hangs_up: bool) -> None:
        while not self.is_over:
            prompt, right = self.known[number % len(self.known)]
            number += 7
            asking = asyncio.create_task(self.pair.ask(self.session, prompt, DEADLINE_S, TOKENS))
            if hangs_up:
                await asyncio.wait((asking,), timeout=self.rng.uniform(0.0, 0.6))
                if not asking.done():
                    asking.cancel()
                    self.left += 1
                    await asyncio.wait((asking,))
                    continue
            answer = await asking
            self.seen.count(answer, right.sure)
            if answer.error:
                await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def on(self, clients: int, hangs_up: Callable[[int], bool]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.client(number, hangs_up(number))) for number in range(clients)]
        try:
            yield
        finally:
            self.is_over = True
            await asyncio.gather(*tasks)


async def _fault(
    pair: SglangPair, fault: str, known: Known, sizes: SglangSizes, session: aiohttp.ClientSession, page: Page,
    table: Table, say: Say,
) -> None:  # fmt: skip
    load, victim = Load(pair, known, session), pair.p if fault in (STOP_P, KILL_P) else pair.d
    lives = {name: engine.lives for name, engine in pair.engines.items()}
    async with load.on(sizes.clients, lambda number: fault == ABORT and number % 2 == 0):
        await asyncio.sleep(BEFORE_S)
        if fault in (STOP_P, STOP_D):
            victim.send(signal.SIGSTOP)
            await asyncio.sleep(sizes.stop_s)
            victim.send(signal.SIGCONT)
        elif fault in (KILL_P, KILL_D):
            await asyncio.to_thread(victim.kill)
            victim.start()  # its successor, at the same address
            lives[victim.name] += 1
        await asyncio.sleep(AFTER_S)
    begun = time.monotonic()
    well: float | None = None
    with contextlib.suppress(EngineError):
        await victim.ready(session, READY_S)
        begun = begun if fault not in (KILL_P, KILL_D) else time.monotonic()
        well = await _well(pair, known, session, begun)
    busy = await pair.rests(session, REST_S)
    dead = [name for name, engine in pair.engines.items() if not engine.is_alive or engine.lives != lives[name]]
    seen = load.seen
    after = "never" if well is None else f"{well:.1f}"
    cells = (seen.right, seen.wrong, seen.late, dict(seen.errors), after, busy, dead)
    what = f"{fault} ({load.left} left)" if fault == ABORT else fault
    page.row(table, pair.backend, what, *cells)
    say(f"{pair.backend}: {what}: " + ", ".join(f"{name} {cell}" for name, cell in zip(HEAD[2:], cells, strict=True)))
    ok = not (seen.wrong or seen.late or busy or dead) and well is not None and seen.right > 0
    told = f"{seen.right} right, {seen.wrong} wrong, {seen.late} late, not at rest {busy}, dead {dead}, well {cells[4]}"
    page.verdict(f"{pair.backend}: {what}", told, "0 wrong, 0 late, all at rest, none dead, well again", ok,
                 judged=pair.backend == "kvbaton")  # fmt: skip


async def _well(pair: SglangPair, known: Known, session: aiohttp.ClientSession, begun: float) -> float | None:
    """Seconds until four prompts at once are answered rightly."""
    while time.monotonic() < begun + WELL_S:
        tally, _ = await _asked(pair, known[:4], 4, session, 15.0)
        if tally.right == min(4, len(known)):
            return time.monotonic() - begun
        await asyncio.sleep(0.5)
    return None
