"""`kvbaton bench transfer` as an operator meets it; what takes minutes is faked, the bench's own tests run it."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton_proof.bench.kit.lab_pages import Check
from kvbaton_proof.bench.kit.piped_children import ChildFailed
from kvbaton_proof.bench.transfer import transfer_rounds, whole_handoff
from kvbaton_proof.bench.transfer.transfer_rounds import Result, TransferReport
from kvbaton_proof.bench.transfer.whole_handoff import HandoffResult

SPEEDS = {"memcpy": 10.0, "shm_2_threads": 15.0, "tcp": 4.0, "raw_sockets": 4.5}
RATIOS = {"shm_2_threads": 1.5, "tcp": 0.9}


class Faked:
    """Stands in for all that measures."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.idle_of: tuple[str, ...] = ()
        self.holds, self.idle_percent, self.delivered, self.foreign_cores = True, 0.1, 10, 0.0
        patch.setattr(transfer_rounds, "measure", self._measure)
        patch.setattr(transfer_rounds, "idle_percent", self._idle)
        patch.setattr(
            whole_handoff, "measure", lambda name: HandoffResult(name, 1.0, 2.0, 100.0, 64, 10, self.delivered)
        )

    def _measure(self, *, say: object, **asked: Any) -> TransferReport:
        self.asked = asked
        results = [Result(size, SPEEDS, RATIOS, self.foreign_cores, 11) for size in asked["segments"]]
        checks = [Check("shm / memcpy at 16 KiB", 1.5, ">=", 0.9, self.holds)] if asked["peers"] else []
        return TransferReport(1 << 27, asked["repetitions"], True, results, checks=checks)

    def _idle(self, names: tuple[str, ...]) -> dict[str, float]:
        self.idle_of = names
        return dict.fromkeys(names, self.idle_percent)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    return Faked(monkeypatch)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = cli.main(["bench", "transfer", *words])
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "ucx"], "got 'ucx', expected some of nixl, mooncake"),
        (["--peers", ""], "got ''"),
        (["--repetitions", "0"], "--repetitions: got 0"),
        (["--out", "/nowhere/page.md"], "--out: /nowhere/page.md: no such folder"),
        (["--plot", "/nowhere/plot.svg"], "--plot: /nowhere/plot.svg: no such folder"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    words: list[str], said: str, faked: Faked, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "") and said in err
    assert not faked.asked


def test_a_peer_that_is_not_installed_is_named_with_the_target_that_installs_it(
    faked: Faked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mooncake" else object())
    status, _, err = run(capsys, "--peers", "nixl,mooncake")
    assert status == 2 and "mooncake is not installed here; make planes-env installs it" in err
    assert not faked.asked


def test_a_peer_that_fails_is_one_line(
    faked: Faked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise ChildFailed("nixl: NixlError: no device; make planes-env installs it")

    monkeypatch.setattr(transfer_rounds, "measure", fails)
    status, out, err = run(capsys, "--peers", "nixl")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "no device" in err


def test_without_peers_four_sizes_are_measured_and_nothing_is_claimed(
    faked: Faked, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys)
    assert status == 0 and not faked.idle_of
    assert faked.asked == {"repetitions": 11, "segments": transfer_rounds.SEGMENT_BYTES, "peers": ()}
    assert "256 KiB" in out and "10 of 10" in out and "holds" not in out


def test_with_peers_one_object_has_figures_checks_and_idle_and_the_status_is_the_verdict(
    faked: Faked, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "--peers", "nixl,mooncake", "--json", "--repetitions", "3")
    report = json.loads(out)
    assert status == 0
    assert faked.asked == {
        "repetitions": 3,
        "segments": transfer_rounds.PEER_SEGMENT_BYTES,
        "peers": ("nixl", "mooncake"),
    }
    assert faked.idle_of == ("shm", "tcp", "nixl", "mooncake")
    assert report["idle_percent"] == dict.fromkeys(faked.idle_of, 0.1)
    names = ["shm / memcpy at 16 KiB", *(f"idle {name}, % of a core" for name in faked.idle_of)]
    assert [check["name"] for check in report["checks"]] == names
    assert all(check["ok"] and check.keys() >= {"value", "bound"} for check in report["checks"])
    assert "nixl-cu13" in report["facts"]["versions"]
    assert not err, "no progress beside --json"


@pytest.mark.parametrize("wrong", ["holds", "idle_percent", "delivered"])
def test_one_claim_that_does_not_hold_is_status_1(wrong: str, faked: Faked, capsys: pytest.CaptureFixture[str]) -> None:
    setattr(faked, wrong, {"holds": False, "idle_percent": 3.0, "delivered": 9}[wrong])
    status, out, _ = run(capsys, "--peers", "nixl")
    assert status == 1
    assert ("DOES NOT HOLD" in out) == (wrong != "delivered") and ("9 of 10 handoffs" in out) == (wrong == "delivered")


def test_a_page_and_a_plot_are_written(faked: Faked, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, plot = tmp_path / "page.md", tmp_path / "page.svg"
    assert run(capsys, "--peers", "nixl", "--out", str(page))[0] == 0
    text = page.read_text()
    assert "](page.svg)" in text
    assert "| shm_2_threads | memcpy | 15.00 (1.50) | 15.00 (1.50) | 15.00 (1.50) |" in text
    assert "holds: shm / memcpy at 16 KiB: 1.5 (>= 0.9)" in text and "nixl 0.1 %" in text
    assert str(tmp_path) not in text
    root = ET.fromstring(plot.read_text())
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [len(transfer_rounds.PEER_SEGMENT_BYTES)] * 4


def test_a_plot_can_be_had_alone(faked: Faked, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "--plot", str(tmp_path / "figures.svg"))[0] == 0
    assert [each.name for each in tmp_path.iterdir()] == ["figures.svg"]


def test_a_page_of_a_busy_machine_says_so(faked: Faked, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for cores, said in ((0.05, False), (0.5, True)):
        faked.foreign_cores = cores
        assert run(capsys, "--out", str(page))[0] == 0
        assert ("not quiet: others used up to 0.50 cores" in page.read_text()) == said
