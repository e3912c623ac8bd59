"""The benchmark measures what it says, in processes of their own, and checks the bytes.

How fast is not a test's business.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbaton.transports.core.transport import Spans
from kvbaton_proof.bench.kit.piped_children import ChildFailed, PipedChild
from kvbaton_proof.bench.transfer import peers, transfer_rounds
from kvbaton_proof.bench.transfer.peers import Begin, Go, Peer, Prepare, Took
from kvbaton_proof.bench.transfer.transfer_rounds import Rounds
from kvbaton_proof.bench.transfer.workload import WrongBytes, pattern, verify

pytestmark = pytest.mark.slow

OWN = {"memcpy", "shm_1_thread", "shm_2_threads", "tcp", "tcp_encrypted", "raw_sockets"}
NIXL = {"nixl", "nixl_2_threads", "nixl_no_thread", "nixl_tcp", "nixl_tcp_spin", "kvbaton_nixl", "kvbaton_nixl_tcp"}
MOONCAKE = {"mooncake", "kvbaton_mooncake"}


class Fake:
    """Ways that take as long as they are told, and note who was run."""

    pids = ()

    def __init__(self, **seconds: Sequence[float]) -> None:
        self.names = tuple(seconds)
        self.seconds = {name: list(each) for name, each in seconds.items()}
        self.ran: list[str] = []

    def prepare(self, moved_bytes: int, segment_bytes: int, seed: int) -> None: ...
    def check(self, way: str) -> None: ...
    def close(self) -> None: ...

    def run(self, way: str) -> Took:
        self.ran.append(way)
        return Took(self.seconds[way].pop(0))


def test_a_small_run_reports_every_way_and_ratio() -> None:
    report = transfer_rounds.measure(repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(4096, 65536))
    assert not report.checks and [each.segment_bytes for each in report.segments] == [4096, 65536]
    assert all(each.foreign_cores >= 0 for each in report.segments)
    for segment in report.segments:
        assert set(segment.gb_s) == OWN and all(value > 0 for value in segment.gb_s.values())
        assert set(segment.ratio) == {"shm_1_thread", "shm_2_threads", "tcp", "tcp_encrypted"}


def test_a_way_that_does_not_deliver_is_not_measured() -> None:
    """D's library is asked for a copy before it knows of which segments: nothing arrives, and the child says so."""
    with contextlib.closing(Peer("own", 1 << 20)) as peer, pytest.raises(ChildFailed):
        peer.check("memcpy")


class Blank(Fake):
    """A library whose copies move nothing."""

    def check(self, way: str) -> None:
        raise WrongBytes(f"{way} delivered wrong bytes at 0")


def test_wrong_bytes_end_the_run_before_anything_is_measured() -> None:
    fake = Blank(a=[1.0])
    with pytest.raises(WrongBytes):
        Rounds([fake], 1 << 20, 4096, 0)
    assert fake.ran == []


def test_bytes_that_are_not_the_sources_are_told_by_their_way() -> None:
    memory, spans = memoryview(bytearray(4096)), array("q", (0, 0, 4096))
    with pytest.raises(WrongBytes, match="memcpy delivered wrong bytes at 0"):
        verify("memcpy", memory, pattern(4096), spans)
    memory[:] = pattern(4096).data
    verify("memcpy", memory, pattern(4096), spans)


@pytest.mark.library("nixl", "mooncake")
def test_a_small_run_with_peers_checks_each_way_of_theirs_and_judges_every_claim() -> None:
    report = transfer_rounds.measure(
        repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(16384,), peers=("nixl", "mooncake")
    )
    assert set(report.segments[0].gb_s) == OWN | NIXL | MOONCAKE
    assert report.segments[0].repetitions >= 11
    assert [check.name for check in report.checks] == [
        "shm / memcpy at 16 KiB",
        "shm / nixl at 16 KiB",
        "tcp / nixl over tcp at 16 KiB",
        "kvbaton_nixl / nixl at 16 KiB",
        "kvbaton_nixl_tcp / nixl_tcp at 16 KiB",
        "shm / mooncake at 16 KiB",
        "tcp / mooncake over tcp at 16 KiB",
    ]


def test_a_data_plane_is_left_alone_in_processes_of_its_own() -> None:
    """That each one is idle then is a case of the transports' contract."""
    found = transfer_rounds.idle_percent(("shm", "tcp"), 0.2)
    assert list(found) == ["shm", "tcp"] and all(percent >= 0 for percent in found.values())


def test_a_repetition_goes_forwards_and_backwards_and_ratios_are_taken_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = iter([0.0, 5.0, 5.0, 5.0, 5.0, 9.0])  # before and after each: only the second was quiet
    monkeypatch.setattr(transfer_rounds, "foreign_cpu_s", lambda *_: next(busy))
    fake = Fake(a=[9, 9, 1, 3, 9, 9], b=[1, 1, 4, 4, 1, 1])
    rounds = Rounds([fake], 4_000_000_000, 4096, 0)
    rounds.add(3)
    assert fake.ran == ["a", "b", "b", "a"] * 3
    assert next(each.seconds for each in rounds.quiet("a", "b")) == {"a": 2, "b": 4}
    fake.seconds = {"a": [2] * 20, "b": [4] * 20}
    monkeypatch.setattr(transfer_rounds, "foreign_cpu_s", lambda *_: 0.0)
    rounds.add(10)
    assert rounds.ratio("a", "b") == 2
    assert rounds.speed("a") == 2


def test_more_repetitions_of_some_ways_count_for_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rounds, "foreign_cpu_s", lambda *_: 0.0)
    fake = Fake(a=[1] * 20, b=[1] * 2 + [3] * 18, c=[1] * 2)
    rounds = Rounds([fake], 4_000_000_000, 4096, 0)
    rounds.add(1)
    rounds.add(8, {"a", "b"})
    assert fake.seconds["c"] == [] and len(rounds) == 9
    assert rounds.ratio("a", "b") == 3
    assert rounds.ratio("a", "c") == 1


def test_what_noise_could_decide_is_measured_six_times_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = dict.fromkeys(sorted(OWN | NIXL), 1.0)
    ways |= {"shm_2_threads": 0.5, "tcp": 0.9}  # tcp is 1.11 of both ways of nixl over tcp
    fake = Fake(**{name: [seconds] * 100 for name, seconds in ways.items()})
    monkeypatch.setattr(transfer_rounds, "Peer", lambda name, _: fake if name == "own" else Fake())
    transfer_rounds.measure(repetitions=2, segments=(16384,), peers=("nixl",))
    ran = {name: fake.ran.count(name) // 2 for name in ways}
    assert ran.pop("nixl_tcp") == 2 + 10 + 10, "of two such claims"
    assert {ran.pop(name) for name in ("kvbaton_nixl", "nixl", "kvbaton_nixl_tcp", "tcp", "nixl_tcp_spin")} == {2 + 10}
    assert set(ran.values()) == {2}


# --- children


def test_a_library_that_cannot_be_loaded_is_an_error_by_its_name() -> None:
    with pytest.raises(ChildFailed, match=r"no_such: ModuleNotFoundError: "):
        peers.Peer("no_such", 1 << 20)


def test_a_child_that_ends_early_is_told_with_what_it_said_last() -> None:
    with (
        PipedChild("kvbaton_proof.bench.transfer.peers", "juggle", "nixl") as child,
        pytest.raises(ChildFailed) as error,
    ):
        child.hear(int)
    assert "juggle" in str(error.value)


def test_a_child_that_says_nothing_has_a_deadline() -> None:
    silent = PipedChild("kvbaton_proof.bench.transfer.peers", "read", "nixl")
    with silent as child, pytest.raises(ChildFailed, match="said nothing within"):
        child.hear(int, 0.05)


# --- D's process


class Lazy:
    """A library's two sides whose copies move nothing, but for those of the way `right`."""

    ways, spins = ("lazy", "right"), frozenset[str]()

    def __init__(self, memory: memoryview, _offer: object) -> None:
        self._memory = memory

    def prepare(self, _segment_bytes: int, spans: Spans) -> None:
        self._spans = spans

    def moved(self, _way: str) -> Spans:
        return self._spans

    def run(self, way: str) -> None:
        if way == "right":
            self._memory[:] = pattern(len(self._memory)).data

    def close(self) -> None: ...


class Piped:
    """A parent and a source in one, that ask what they are told to."""

    def __init__(self, *questions: object) -> None:
        self._questions, self.answers, self.pid = questions, list[Any](), os.getpid()

    def questions(self, _types: object) -> Iterator[Any]:
        return iter(self._questions)

    def answer(self, value: object) -> None:
        self.answers.append(value)

    def ask(self, _question: object, _answer: object) -> dict[str, bytes]:
        return {}

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_d_tells_of_wrong_bytes_by_their_way_and_of_right_ones_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Piped(Begin(4096), Prepare(4096, 4096, 0), Go("right", check=True), Go("lazy", check=True), Go("lazy"))
    monkeypatch.setattr(peers, "_sides", lambda _: (None, Lazy))
    monkeypatch.setattr(peers, "PipedChild", lambda *_: parent)
    peers.read("any", cast(Any, parent))
    assert [each.wrong for each in parent.answers[2:]] == ["", "lazy delivered wrong bytes at 0", ""]
    peer = object.__new__(Peer)
    peer._child = cast(Any, SimpleNamespace(ask=lambda *_: parent.answers[3]))
    with pytest.raises(WrongBytes, match="lazy delivered"):
        peer.check("lazy")
