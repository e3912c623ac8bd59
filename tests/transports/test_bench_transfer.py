"""The benchmark measures what it says, in processes of their own, and checks the bytes.

How fast is not a test's business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kvbaton_proof.bench.kit.piped_children import ChildFailed, PipedChild
from kvbaton_proof.bench.transfer import idle, machine_ways, peers, transfer_rounds
from kvbaton_proof.bench.transfer.transfer_rounds import Rounds
from kvbaton_proof.bench.transfer.workload import WrongBytes

pytestmark = pytest.mark.slow

OWN = {"memcpy", "shm_1_thread", "shm_2_threads", "tcp", "tcp_encrypted", "raw_sockets"}
NIXL = {"nixl", "nixl_2_threads", "nixl_no_thread", "nixl_tcp", "nixl_tcp_spin", "kvbaton_nixl", "kvbaton_nixl_tcp"}
MOONCAKE = {"mooncake", "kvbaton_mooncake"}


def test_a_small_run_reports_every_way_and_ratio() -> None:
    report = transfer_rounds.measure(repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(4096, 65536))
    assert json.loads(json.dumps(report)) == report
    assert "64 KiB" in transfer_rounds.table(report)
    segments = report["segments"]
    assert isinstance(segments, list) and "checks" not in report
    assert [segment["segment_bytes"] for segment in segments] == [4096, 65536]
    for segment in segments:
        assert set(segment["gb_s"]) == OWN
        assert set(segment["ratio"]) == {"shm_1_thread", "shm_2_threads", "tcp", "tcp_encrypted"}
        assert segment["foreign_cores"] >= 0
        assert all(value > 0 for value in segment["gb_s"].values())


def test_wrong_bytes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_ways.Machine, "_memcpy", lambda self: None)
    with pytest.raises(WrongBytes, match="memcpy delivered wrong bytes"):
        transfer_rounds.measure(repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(4096,))


@pytest.mark.library("nixl", "mooncake")
def test_a_small_run_with_peers_checks_each_way_of_theirs_and_judges_every_claim() -> None:
    report = transfer_rounds.measure(
        repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(16384,), peers=("nixl", "mooncake")
    )
    segments, checks = report["segments"], report["checks"]
    assert isinstance(segments, list) and isinstance(checks, list)
    assert set(segments[0]["gb_s"]) == OWN | NIXL | MOONCAKE
    assert segments[0]["repetitions"] >= 11
    assert [check["name"] for check in checks] == [
        "shm / memcpy at 16 KiB",
        "shm / nixl at 16 KiB",
        "tcp / nixl over tcp at 16 KiB",
        "kvbaton_nixl / nixl at 16 KiB",
        "kvbaton_nixl_tcp / nixl_tcp at 16 KiB",
        "shm / mooncake at 16 KiB",
        "tcp / mooncake over tcp at 16 KiB",
    ]


@pytest.mark.library("nixl", "mooncake")
def test_every_data_plane_is_left_alone_in_processes_of_its_own() -> None:
    found = idle.measure(("shm", "tcp", "nixl", "mooncake"), 0.2)
    assert list(found) == ["shm", "tcp", "nixl", "mooncake"]
    assert all(percent >= 0 for percent in found.values())


# --- repetitions


class Fake:
    """Ways that take as long as they are told, and note who was run."""

    pids = ()

    def __init__(self, **seconds: Sequence[float]) -> None:
        self.names = tuple(seconds)
        self.seconds = {name: list(each) for name, each in seconds.items()}
        self.ran: list[str] = []

    def prepare(self, segment_bytes: int, seed: int) -> None: ...
    def check(self, way: str) -> None: ...
    def close(self) -> None: ...

    def run(self, way: str) -> float:
        self.ran.append(way)
        return self.seconds[way].pop(0)


def test_a_repetition_goes_forwards_and_backwards_and_ratios_are_taken_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = iter([0.0, 5.0, 5.0, 5.0, 5.0, 9.0])  # before and after each: only the second was quiet
    monkeypatch.setattr(transfer_rounds, "foreign_cpu_s", lambda *_: next(busy))
    fake = Fake(a=[9, 9, 1, 3, 9, 9], b=[1, 1, 4, 4, 1, 1])
    rounds = Rounds([fake], 4096, 0)
    rounds.add(3)
    assert fake.ran == ["a", "b", "b", "a"] * 3
    assert next(each.seconds for each in rounds.quiet("a", "b")) == {"a": 2, "b": 4}
    fake.seconds = {"a": [2] * 20, "b": [4] * 20}
    monkeypatch.setattr(transfer_rounds, "foreign_cpu_s", lambda *_: 0.0)
    rounds.add(10)
    assert rounds.ratio("a", "b") == 2
    assert rounds.speed("a", 4_000_000_000) == 2


def test_more_repetitions_of_some_ways_count_for_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rounds, "foreign_cpu_s", lambda *_: 0.0)
    fake = Fake(a=[1] * 20, b=[1] * 2 + [3] * 18, c=[1] * 2)
    rounds = Rounds([fake], 4096, 0)
    rounds.add(1)
    rounds.add(8, {"a", "b"})
    assert fake.seconds["c"] == [] and len(rounds) == 9
    assert rounds.ratio("a", "b") == 3
    assert rounds.ratio("a", "c") == 1


def test_what_noise_could_decide_is_measured_six_times_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = dict.fromkeys(sorted(OWN | NIXL), 1.0)
    ways |= {"shm_2_threads": 0.5, "tcp": 0.9}  # tcp is 1.11 of both ways of nixl over tcp
    fake = Fake(**{name: [seconds] * 100 for name, seconds in ways.items()})
    monkeypatch.setattr(transfer_rounds, "_starts", lambda *_: [("fake", lambda: fake)])
    transfer_rounds.measure(repetitions=2, segments=(16384,), peers=("nixl",))
    ran = {name: fake.ran.count(name) // 2 for name in ways}
    assert ran.pop("nixl_tcp") == 2 + 10 + 10, "of two such claims"
    assert {ran.pop(name) for name in ("kvbaton_nixl", "nixl", "kvbaton_nixl_tcp", "tcp", "nixl_tcp_spin")} == {2 + 10}
    assert set(ran.values()) == {2}


# --- children


def test_a_peer_that_cannot_be_loaded_is_an_error_that_says_how_to_get_it() -> None:
    with pytest.raises(ChildFailed, match=r"no_such: ModuleNotFoundError: .*; make planes-env installs it"):
        peers.Peer("no_such", 1 << 20, 1 << 20)


def test_a_child_that_ends_early_is_told_with_what_it_said_last() -> None:
    with (
        PipedChild("kvbaton_proof.bench.transfer.idle", "read", "pigeon") as child,
        pytest.raises(ChildFailed) as error,
    ):
        child.hear(int)
    assert "ended early: " in str(error.value)
    assert "no transport pigeon: choose from " in str(error.value)


def test_a_child_that_says_nothing_has_a_deadline() -> None:
    silent = PipedChild("kvbaton_proof.bench.transfer.peers", "read", "nixl")
    with silent as child, pytest.raises(ChildFailed, match="said nothing within"):
        child.hear(int, 0.05)
