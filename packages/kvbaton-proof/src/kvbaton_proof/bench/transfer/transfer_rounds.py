"""Throughput of scattered segments over transports, compared with the machine and with other libraries, in one run.

Each repetition measures every way, forwards and then backwards, and ratios are taken within it; medians over the
quieter half of the repetitions are reported, and how much of the machine others used even then. Every way runs in two
processes, and its bytes are checked before it is measured. Where noise could decide whether a figure keeps the bound
that it is held to, many more repetitions of its ways alone do. With other libraries there are claims: judged on ratios
within the repetitions, where a library is represented by its fastest way.

The figures of `kvbaton bench transfer` for reading.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbaton.transports.core.mover import choose_mover
from kvbaton_proof.bench.kit.lab_pages import Check, Findings, Relation, Table, check, line_plot
from kvbaton_proof.bench.kit.run_facts import QUIET_CORES, RunFacts, named
from kvbaton_proof.bench.transfer import ways_own, whole_handoff
from kvbaton_proof.bench.transfer.peers import IDLE, Peer, Took
from kvbaton_proof.bench.transfer.whole_handoff import HandoffResult
from kvbaton_proof.rig.proc_stat import cpu_s, foreign_cpu_s

SEGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
PEER_SEGMENT_BYTES = SEGMENT_BYTES[1:]
REGION_BYTES = 256 << 20
MOVED_BYTES = 128 << 20
MORE = 5  # times as many repetitions besides, of what noise could decide
OWN_TRANSPORTS = ("shm", "tcp")
IDLE_S = 10.0
IDLE_BYTES = 1 << 20

BASES = {
    **dict.fromkeys(ways_own.SHM, ways_own.MEMCPY),
    ways_own.TCP: ways_own.RAW,
    ways_own.ENCRYPTED: ways_own.TCP,
    "kvbaton_nixl": "nixl",
    "kvbaton_nixl_tcp": "nixl_tcp",
    "kvbaton_mooncake": "mooncake",
}
"""What a way is held against in the table."""


SHM_OF_MEMCPY_MIN = 0.9
DRIVING_MIN = 0.95
IDLE_PERCENT_MAX = 2.0
NEAR = 0.15  # of the bound: on a busy machine noise alone is as much

SAME_HOST = {"nixl": ("nixl", "nixl_2_threads", "nixl_no_thread"), "mooncake": ("mooncake",)}
"""By peer, its ways on one host; it is as fast as the fastest."""

OVER_TCP = {"nixl": ("nixl_tcp", "nixl_tcp_spin"), "mooncake": ("mooncake",)}
DRIVEN = {"nixl": (("kvbaton_nixl", "nixl"), ("kvbaton_nixl_tcp", "nixl_tcp"))}
"""What driving a library through kvbaton costs: both in the same configuration."""


class Round(msgspec.Struct, frozen=True):
    """One repetition: what each way cost, and how many cores others kept busy."""

    seconds: dict[str, float]
    cpu_s: dict[str, float]
    foreign_cores: float


class Result(msgspec.Struct, frozen=True):
    """One segment size: GB/s of everything, and how the transports compare within the repetitions."""

    segment_bytes: int
    gb_s: dict[str, float]
    ratio: dict[str, float]
    foreign_cores: float  # that others kept busy in the repetitions that count
    repetitions: int


class TransferReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The object that `--json` prints."""

    moved_bytes: int
    repetitions: int
    native_mover: bool
    segments: Sequence[Result]
    handoffs: Sequence[HandoffResult] = ()
    checks: Sequence[Check] = ()  # with peers
    idle_percent: dict[str, float] = {}


class Ways(Protocol):
    """Some ways to move the same segments."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def pids(self) -> tuple[int, ...]: ...
    def prepare(self, moved_bytes: int, segment_bytes: int, seed: int) -> None: ...
    def check(self, way: str) -> None: ...
    def run(self, way: str) -> Took: ...
    def close(self) -> None: ...


class Rounds:
    """The repetitions of one segment size, as far as they have been made."""

    def __init__(self, libraries: Sequence[Ways], moved_bytes: int, segment_bytes: int, seed: int) -> None:
        self._ways = {name: ways for ways in libraries for name in ways.names}
        self._pids = [pid for ways in libraries for pid in ways.pids]
        self._moved_bytes = moved_bytes
        self._rounds: list[Round] = []
        for ways in libraries:
            ways.prepare(moved_bytes, segment_bytes, seed)
        for name, ways in self._ways.items():
            ways.check(name)

    def add(self, count: int, only: Collection[str] = ()) -> None:
        """Repetitions of all ways, or of some."""
        ways = [name for name in self._ways if not only or name in only]
        self._rounds += [self._round(ways) for _ in range(count)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._ways)

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def foreign_cores(self) -> float:
        return round(statistics.median(each.foreign_cores for each in self.quiet()), 2)

    def quiet(self, *names: str) -> list[Round]:
        """The quieter half of those with these ways."""
        able = [each for each in self._rounds if each.seconds.keys() >= set(names)]
        return sorted(able, key=lambda each: each.foreign_cores)[: -(-len(able) // 2)]

    def ratio(self, name: str, base: str) -> float:
        """How much faster than `base`, within the repetitions."""
        return statistics.median(each.seconds[base] / each.seconds[name] for each in self.quiet(name, base))

    def speed(self, name: str) -> float:
        """GB/s."""
        return self._moved_bytes / 1e9 / statistics.median(each.seconds[name] for each in self.quiet(name))

    def result(self, segment_bytes: int) -> Result:
        """Medians over the quieter half."""
        return Result(
            segment_bytes,
            {name: round(self.speed(name), 2) for name in self.names},
            {name: round(self.ratio(name, base), 3) for name, base in BASES.items() if name in self.names},
            self.foreign_cores,
            len(self),
        )

    def _round(self, ways: Sequence[str]) -> Round:
        """Each way twice, so that a drift of the machine hits all alike; and what others did meanwhile."""
        seconds, used = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
        begun, before_s = time.perf_counter(), foreign_cpu_s(*self._pids)
        for name in (*ways, *reversed(ways)):
            took = self._ways[name].run(name)
            seconds[name] += took.seconds / 2
            used[name] += took.cpu_s / 2
        others = max(0.0, foreign_cpu_s(*self._pids) - before_s) / (time.perf_counter() - begun)
        return Round(seconds, used, others)


def is_delicate(claim: Check) -> bool:
    """Whether noise could decide it: near its bound, or about a cost of a few percent."""
    near = claim.value is not None and abs(claim.value - claim.bound) <= NEAR * claim.bound
    return near or claim.bound == DRIVING_MIN


def judge(ratio: Callable[[str, str], float], peers: Sequence[str], segment_bytes: int) -> list[Check]:
    """The claims about one segment size; `ratio(way, base)` is how much faster `way` is."""
    if not peers:
        return []
    at = f"at {segment_bytes >> 10} KiB"

    def ahead(what: str, way: str, others: Sequence[str], relation: Relation, bound: float) -> Check:
        return check(f"{what} {at}", min(ratio(way, other) for other in others), relation, bound, (way, *others))

    found = [ahead("shm / memcpy", ways_own.AS_INSTALLED, (ways_own.MEMCPY,), ">=", SHM_OF_MEMCPY_MIN)]
    for peer in peers:
        found.append(ahead(f"shm / {peer}", ways_own.AS_INSTALLED, SAME_HOST[peer], ">", 1.0))
        found.append(ahead(f"tcp / {peer} over tcp", ways_own.TCP, OVER_TCP[peer], ">", 1.0))
        for driven, direct in DRIVEN.get(peer, ()):
            found.append(ahead(f"{driven} / {direct}", driven, (direct,), ">=", DRIVING_MIN))
    return found


def judge_idle(percent: Mapping[str, float]) -> list[Check]:
    """`percent` of a core, by transport."""
    return [check(f"idle {name}, % of a core", used, "<", IDLE_PERCENT_MAX) for name, used in percent.items()]


def measure(
    repetitions: int = 20,
    region_bytes: int = REGION_BYTES,
    moved_bytes: int = MOVED_BYTES,
    segments: tuple[int, ...] = SEGMENT_BYTES,
    peers: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> TransferReport:
    """Copies of every segment size; `say` hears of progress. With peers, `checks` says what holds."""
    results: list[Result] = []
    checks: list[Check] = []
    with contextlib.ExitStack() as stack:
        libraries: list[Ways] = []
        for name in ("own", *peers):
            say(f"starting {name}")
            libraries.append(stack.enter_context(contextlib.closing(_library(name, region_bytes))))
        for seed, segment_bytes in enumerate(segments):
            size = f"{segment_bytes >> 10} KiB segments"
            say(f"{size}: checking {', '.join(name for ways in libraries for name in ways.names)}")
            rounds = Rounds(libraries, moved_bytes, segment_bytes, seed)
            say(f"{seed + 1} of {len(segments)}, {size}: {repetitions} repetitions")
            rounds.add(repetitions)
            for claim in judge(rounds.ratio, peers, segment_bytes):
                if is_delicate(claim):  # alone: short repetitions find quiet moments
                    say(f"{size}: {MORE * repetitions} more of {', '.join(claim.ways)}")
                    rounds.add(MORE * repetitions, claim.ways)
            checks += judge(rounds.ratio, peers, segment_bytes)
            results.append(rounds.result(segment_bytes))
    return TransferReport(moved_bytes, repetitions, choose_mover().native, results, checks=checks)


def measure_all(repetitions: int, peers: Sequence[str], say: Callable[[str], None]) -> TransferReport:
    """Copies; with peers, what idle transports cost; then whole handoffs."""
    segments = PEER_SEGMENT_BYTES if peers else SEGMENT_BYTES
    report = measure(repetitions=repetitions, segments=segments, peers=peers, say=say)
    if peers:
        transports = (*OWN_TRANSPORTS, *peers)
        say(f"idle for {IDLE_S:.0f} s: {', '.join(transports)}")
        percent = idle_percent(transports)
        checks = [*report.checks, *judge_idle(percent)]
        report = msgspec.structs.replace(report, idle_percent=percent, checks=checks)
    handoffs = []
    for name in OWN_TRANSPORTS:
        say(f"handoffs over {name}")
        handoffs.append(whole_handoff.measure(name))
    return msgspec.structs.replace(report, handoffs=handoffs)


def _library(name: str, region_bytes: int) -> Ways:
    return Peer(name, region_bytes)


def idle_percent(names: Sequence[str], idle_s: float = IDLE_S) -> dict[str, float]:
    """Percent of a core by transport, connected and left alone, of the busier of its two processes: all of them at the
    same time and over the same seconds.
    """
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(contextlib.closing(Peer(f"{IDLE}{name}", IDLE_BYTES))) for name in names]
        for pair, name in zip(pairs, names, strict=True):
            pair.prepare(IDLE_BYTES, IDLE_BYTES, 0)
            pair.check(name)
        before = [[cpu_s(pid) for pid in pair.pids] for pair in pairs]
        begun = time.monotonic()
        time.sleep(idle_s)  # the measurement itself
        elapsed_s = time.monotonic() - begun
        used = [
            max(cpu_s(pid) - spent for pid, spent in zip(pair.pids, at, strict=True))
            for pair, at in zip(pairs, before, strict=True)
        ]
    return {name: round(100 * each / elapsed_s, 2) for name, each in zip(names, used, strict=True)}


WAYS = {
    "memcpy": "C memcpy of the same segments inside one process, one thread",
    "shm_1_thread": "kvbaton, shared memory, one thread copies",
    "shm_2_threads": "kvbaton, shared memory, two threads copy (as installed)",
    "tcp": "kvbaton, two TCP streams over loopback",
    "tcp_encrypted": "the same, encrypted (AES-128-GCM) as it is between hosts",
    "raw_sockets": "as many bytes, contiguous, over two plain sockets",
    "nixl": "NIXL as it chooses on one host (UCX: process_vm_readv), progress thread driven by events",
    "nixl_2_threads": "the same, `num_threads=2`",
    "nixl_no_thread": "the same, without a progress thread: the reader polls",
    "nixl_tcp": "NIXL, `TLS=tcp` with 256 KiB segments, progress threads driven by events, looked at every 0.2 ms",
    "nixl_tcp_spin": "the same without progress threads: both sides poll without a pause, a core each",
    "kvbaton_nixl": "kvbaton driving NIXL, configured as `nixl`",
    "kvbaton_nixl_tcp": "kvbaton driving NIXL, configured as `nixl_tcp`",
    "mooncake": "Mooncake's transfer engine over TCP, connection pool on, batches of 1,024 slices",
    "kvbaton_mooncake": "kvbaton driving Mooncake's transfer engine, configured alike",
}
FEW = 5
LIMITS = (
    "Loopback and one machine: nothing here speaks of a network card or of RDMA, which is what NIXL is for.",
    "Ratios are taken within a repetition, between ways measured right after each other, and only then the median.",
)


def findings(facts: RunFacts, report: TransferReport, picture: str = "") -> Findings:
    taken = sorted({each.repetitions for each in report.segments})
    return Findings(
        title=f"{facts.date}: data planes side by side",
        about=f"{facts.machine}; {facts.load_line}. {facts.version_line}. "
        f"{report.moved_bytes >> 20} MiB a copy, scattered in segments over a region twice as large on both sides; "
        f"{' to '.join(map(str, taken))} interleaved repetitions, medians over the quieter half; "
        f"{facts.seconds:.0f} s in all. Every way's bytes were compared before it was measured.",
        command=facts.command,
        tables=[_copies(report.segments), *([_handoffs(report.handoffs)] if report.handoffs else [])],
        lines=[*(f"`{name}`: {what}" for name, what in WAYS.items() if name in report.segments[0].gb_s),
               *_idle(report.idle_percent)],
        checks=report.checks,
        wrong=[f"{each.transport}: {each.delivered} of {each.handoffs} handoffs were delivered"
               for each in report.handoffs if each.delivered != each.handoffs],
        doubts=_doubts(report),
        limits=LIMITS,
        picture=picture,
    )  # fmt: skip


def plot(results: Sequence[Result]) -> str:
    lines = {name: [(each.segment_bytes / 1024, each.gb_s[name]) for each in results] for name in results[0].gb_s}
    return line_plot(lines, "GB/s of every way", "segments of KiB", "GB/s", log_x=True)


def _copies(results: Sequence[Result]) -> Table:
    rows = []
    for name in results[0].gb_s:
        cells = [name, BASES.get(name, "")]
        for each in results:
            beside = f" ({each.ratio[name]:.2f})" if name in each.ratio else ""
            cells.append(f"{each.gb_s[name]:.2f}{beside}")
        rows.append(cells)
    rows.append(["cores of others", "", *(f"{each.foreign_cores:.2f}" for each in results)])
    return Table(
        ("way", "beside", *(f"{each.segment_bytes >> 10} KiB" for each in results)), rows, "Copies",
        "GB/s; in brackets how fast beside what the second column names, within the same repetition.",
    )  # fmt: skip


def _handoffs(results: Sequence[HandoffResult]) -> Table:
    rows = [
        [each.transport, f"{each.p50_ms:.2f} ms", f"{each.p99_ms:.2f} ms", f"{each.handoffs_per_s:.0f}/s",
         f"{each.delivered} of {each.handoffs}"]
        for each in results
    ]  # fmt: skip
    head = ("way", "p50 alone", "p99 alone", "64 at once", "delivered, bytes compared")
    return Table(head, rows, "One-block handoffs through the whole stack")


def _idle(percent: dict[str, float]) -> list[str]:
    used = named({name: f"{each:g} %" for name, each in percent.items()})
    return [f"connected and left alone for {IDLE_S:.0f} s, of a core, the busier of two processes: {used}"] * bool(used)


def _doubts(report: TransferReport) -> list[str]:
    doubts = []
    if min(each.repetitions for each in report.segments) < FEW:
        doubts.append("Few repetitions: differences of a few percent mean nothing here.")
    busiest = max(each.foreign_cores for each in report.segments)
    if busiest > QUIET_CORES:
        doubts.append(f"The machine was not quiet: others used up to {busiest:.2f} cores even in the quieter half.")
    return doubts
