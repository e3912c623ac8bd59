"""Throughput of scattered segments over transports, compared with the machine and with other libraries, in one run.

Each repetition measures every way, forwards and then backwards, and ratios are taken within it; medians over the
quieter half of the repetitions are reported, and how much of the machine others used even then. P is a process of its
own, other libraries are two, and every way's bytes are checked before it is measured. Where noise could decide whether
a figure keeps the bound that it is held to, many more repetitions of its ways alone do.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbaton.processes.proc_stat import foreign_cpu_s
from kvbaton.transports.core.mover import choose_mover
from kvbaton_proof.bench.transfer import machine_ways, transfer_checks
from kvbaton_proof.bench.transfer.machine_ways import Machine
from kvbaton_proof.bench.transfer.peers import Peer
from kvbaton_proof.bench.transfer.transfer_checks import Check

__all__ = ["Result", "Rounds", "measure", "table"]

SEGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
PEER_SEGMENT_BYTES = SEGMENT_BYTES[1:]
REGION_BYTES = 256 << 20
MOVED_BYTES = 128 << 20
MORE = 5  # times as many repetitions besides, of what noise could decide

BASES = {
    **dict.fromkeys(machine_ways.SHM, machine_ways.MEMCPY),
    machine_ways.TCP: machine_ways.RAW,
    machine_ways.ENCRYPTED: machine_ways.TCP,
    "kvbaton_nixl": "nixl",
    "kvbaton_nixl_tcp": "nixl_tcp",
    "kvbaton_mooncake": "mooncake",
}
"""What a way is held against in the table."""


class Round(msgspec.Struct, frozen=True):
    """One repetition: how long each way took, and how many cores others kept busy."""

    seconds: dict[str, float]
    foreign_cores: float


class Result(msgspec.Struct, frozen=True):
    """One segment size: GB/s of everything, and how the transports compare within the repetitions."""

    segment_bytes: int
    gb_s: dict[str, float]
    ratio: dict[str, float]
    foreign_cores: float  # that others kept busy in the repetitions that count
    repetitions: int


class Ways(Protocol):
    """Some ways to move the same segments."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def pids(self) -> tuple[int, ...]: ...
    def prepare(self, segment_bytes: int, seed: int) -> None: ...
    def check(self, way: str) -> None: ...
    def run(self, way: str) -> float: ...
    def close(self) -> None: ...


class Rounds:
    """The repetitions of one segment size, as far as they have been made."""

    def __init__(self, found: Sequence[Ways], segment_bytes: int, seed: int) -> None:
        self._ways = {name: ways for ways in found for name in ways.names}
        self._pids = [pid for ways in found for pid in ways.pids]
        self._rounds: list[Round] = []
        for ways in found:
            ways.prepare(segment_bytes, seed)
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

    def quiet(self, *names: str) -> list[Round]:
        """The quieter half of those with these ways."""
        found = [each for each in self._rounds if each.seconds.keys() >= set(names)]
        return sorted(found, key=lambda each: each.foreign_cores)[: -(-len(found) // 2)]

    def ratio(self, name: str, base: str) -> float:
        """How much faster than `base`, within the repetitions."""
        return statistics.median(each.seconds[base] / each.seconds[name] for each in self.quiet(name, base))

    def speed(self, name: str, moved_bytes: int) -> float:
        return moved_bytes / 1e9 / statistics.median(each.seconds[name] for each in self.quiet(name))

    def _round(self, ways: Sequence[str]) -> Round:
        """Each way twice, so that a drift of the machine hits all alike; and what others did meanwhile."""
        seconds = dict.fromkeys(ways, 0.0)
        begun, before_s = time.perf_counter(), foreign_cpu_s(*self._pids)
        for name in (*ways, *reversed(ways)):
            seconds[name] += self._ways[name].run(name) / 2
        return Round(seconds, max(0.0, foreign_cpu_s(*self._pids) - before_s) / (time.perf_counter() - begun))


def result_of(rounds: Rounds, segment_bytes: int, moved_bytes: int) -> Result:
    """Medians over the quieter half."""
    return Result(
        segment_bytes,
        {name: round(rounds.speed(name, moved_bytes), 2) for name in rounds.names},
        {name: round(rounds.ratio(name, base), 3) for name, base in BASES.items() if name in rounds.names},
        round(statistics.median(each.foreign_cores for each in rounds.quiet()), 2),
        len(rounds),
    )


def measure(
    repetitions: int = 20,
    region_bytes: int = REGION_BYTES,
    moved_bytes: int = MOVED_BYTES,
    segments: tuple[int, ...] = SEGMENT_BYTES,
    peers: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, object]:
    """Everything, as plain values; `say` hears of progress. With peers, `checks` says what holds."""
    results: list[Result] = []
    checks: list[Check] = []
    with contextlib.ExitStack() as stack:
        found: list[Ways] = []
        for name, start in _starts(region_bytes, moved_bytes, peers):
            say(f"starting {name}")
            found.append(start())
            stack.callback(found[-1].close)
        for seed, segment_bytes in enumerate(segments):
            said = f"{segment_bytes >> 10} KiB segments"
            say(f"{said}: checking {', '.join(name for ways in found for name in ways.names)}")
            rounds = Rounds(found, segment_bytes, seed)
            say(f"{seed + 1} of {len(segments)}, {said}: {repetitions} repetitions")
            rounds.add(repetitions)
            judged = transfer_checks.judge(rounds.ratio, peers, segment_bytes)
            for check in judged:
                if check.is_delicate:  # alone: short repetitions find quiet moments
                    say(f"{said}: {MORE * repetitions} more of {', '.join(check.ways)}")
                    rounds.add(MORE * repetitions, check.ways)
            checks += transfer_checks.judge(rounds.ratio, peers, segment_bytes)
            results.append(result_of(rounds, segment_bytes, moved_bytes))
    return {
        "moved_bytes": moved_bytes,
        "repetitions": repetitions,
        "native_mover": choose_mover().native,
        "segments": msgspec.to_builtins(results),
        **({"checks": msgspec.to_builtins(checks)} if peers else {}),
    }


def _starts(region_bytes: int, moved_bytes: int, peers: Sequence[str]) -> Iterator[tuple[str, Callable[[], Ways]]]:
    yield "memcpy, shm, tcp plain and encrypted, and raw sockets", lambda: Machine(region_bytes, moved_bytes)
    for peer in peers:
        yield peer, lambda peer=peer: Peer(peer, region_bytes, moved_bytes)  # type: ignore[misc]


def table(report: Mapping[str, object]) -> str:
    """The same for reading."""
    return _table(msgspec.convert(report["segments"], list[Result]))


def _table(results: list[Result]) -> str:
    """A line per way: there may be many."""
    head = ["GB/s, and how fast beside", *(f"{result.segment_bytes >> 10} KiB" for result in results)]
    lines = [head]
    for name in results[0].gb_s:
        cells = [f"{name} / {BASES[name]}" if name in BASES else name]
        for result in results:
            ratio = f" ({result.ratio[name]:.2f})" if name in result.ratio else ""
            cells.append(f"{result.gb_s[name]:.2f}{ratio}")
        lines.append(cells)
    lines.append(["cores of others", *(f"{result.foreign_cores:.2f}" for result in results)])
    return "\n".join("".join([f"{line[0]:34}", *(f"{cell:>15}" for cell in line[1:])]) for line in lines)
