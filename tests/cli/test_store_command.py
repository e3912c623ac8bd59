"""`kvbaton store` as a process: it serves its cluster and nobody else, tells its figures, and ends when told to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.control import key_room, keyring
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.metric_names import Where
from kvbaton.protocol.machines.context import mark_of
from kvbaton.ranks.store_trust import bytes_of, opener, store_place, trust_of
from kvbaton.store.interface import Backend
from kvbaton.store.tcp_backend import ServerSilent
from kvbaton.store.value_header import FRAME_BYTES, seal_all
from kvbaton.testing.transport_harness import poll

WORDS = [sys.executable, "-m", "kvbaton.cli.main", "store", "--port", "0", "--json"]


class Served:
    def __init__(self, directory: Path, *flags: str) -> None:
        self.said = directory.parent / "stderr"
        with self.said.open("w") as said:
            self.child = subprocess.Popen(
                [*WORDS, "--keys", str(directory), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )
        first = self.line()
        self.url, self.health = str(first["endpoint"]), str(first["health"])

    def line(self) -> Any:
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def figures(self) -> Any:
        os.kill(self.child.pid, signal.SIGUSR1)
        return self.line()

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(60)
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "keys", ["store", "p0"])
    return tmp_path / "keys"


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    found = Served(directory, "--health", "127.0.0.1:0", "--log-format", "json")
    yield found
    found.close()


def client(directory: Path, url: str, name: str = "p0", timeout_s: float = 10.0) -> Backend:
    make, owned = opener(store_place(url), keyring.load(directory, name), timeout_s=timeout_s)
    assert not owned
    return make()


def test_it_keeps_values_tells_figures_and_ends_on_sigterm(directory: Path, served: Served) -> None:
    backend = client(directory, served.url)
    assert backend.put(["a", "b"], [memoryview(b"12"), memoryview(b"345")]) == ["", ""]
    into = [memoryview(bytearray(3)), memoryview(bytearray(3))]
    assert backend.get(["b", "c"], into) == [3, 0]
    figures = served.figures()
    assert (figures["values"], figures["hits"], figures["misses"]) == (2, 1, 1)
    with urllib.request.urlopen(served.health, timeout=20) as answer:
        assert json.load(answer) == {"status": "ok", **figures}
    with urllib.request.urlopen(served.health.replace("/health", "/metrics"), timeout=20) as answer:
        page = answer.read().decode().splitlines()
    for line in (
        'kvbaton_store_server_values{tier="memory"} 2',
        "kvbaton_store_server_hits_total 1",
        "kvbaton_store_server_misses_total 1",
        'kvbaton_store_server_moved_bytes_total{direction="in"} 5',
        'kvbaton_store_server_moved_bytes_total{direction="out"} 3',
        'kvbaton_store_server_refused_total{reason="forbidden"} 0',
        "kvbaton_connections_refused_total 0",
    ):
        assert line in page
    shown = {line.partition("{")[0].partition(" ")[0] for line in page if not line.startswith("#")}
    assert shown == {metric.name for metric in metric_names.of(Where.STORE)}
    backend.close()
    served.child.send_signal(signal.SIGTERM)
    assert served.line()["values"] == 2
    assert served.child.wait(60) == 0
    lines = [json.loads(line) for line in served.said.read_text().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "[stopping] SIGTERM"), ("INFO", "[stopping] stopped"),
    ]  # fmt: skip


def test_what_a_removed_member_wrote_or_gave_is_dropped_from_memory_and_disk(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    keyring.mint(directory, ["store", "p0", "p1"])
    written = {name: trust_of(keyring.load(directory, name)).trust for name in ("p0", "p1")}
    served = Served(directory, "--bytes", "16KiB", "--disk", str(tmp_path / "disk"), "--disk-bytes", "1MiB")
    with contextlib.closing(served), contextlib.closing(client(directory, served.url, "p1")) as backend:
        names = [f"{kind}{number}" for number in range(8) for kind in ("false", "derived", "honest")]
        for name in names:
            frame = memoryview(bytearray(FRAME_BYTES + 1000))
            origins = (mark_of("p0"),) if name.startswith("derived") else ()
            seal_all([frame], [name], origins, written["p0" if name.startswith("false") else "p1"])
            assert backend.put([name], [frame]) == [""]
        figures = served.figures()
        assert figures["values"] and figures["disk_values"], "some are in memory, some on disk"
        assert backend.exists(names) == [True] * 24
        key_room.remove(directory, "p0")
        poll(lambda: sum(backend.exists(names)) == 8, 30.0)
        assert backend.exists(names) == [name.startswith("honest") for name in names]
    assert "[store-swept] dropped 16 values" in served.said.read_text()


def test_a_worker_of_another_cluster_gets_no_answer(tmp_path: Path, directory: Path, served: Served) -> None:
    keyring.mint(tmp_path / "others", ["p0"])
    (tmp_path / "others" / "public" / "store.json").write_bytes((directory / "public" / "store.json").read_bytes())
    stranger = client(tmp_path / "others", served.url, timeout_s=1.0)
    for call in (lambda: stranger.exists(["a"]), lambda: stranger.put(["a"], [memoryview(b"1")])):
        with pytest.raises(ServerSilent):
            call()
    stranger.close()
    assert served.figures()["values"] == 0


def test_it_ends_with_the_process_that_started_it(directory: Path) -> None:
    served = Served(directory, "--stop-on-eof")
    assert served.child.stdin is not None
    served.child.stdin.close()
    assert served.child.wait(60) == 0
    served.close()


def test_the_least_recently_used_go_to_disk_and_come_back(tmp_path: Path, directory: Path) -> None:
    served = Served(directory, "--bytes", "4KiB", "--disk", str(tmp_path / "disk"), "--disk-bytes", "1MiB")
    backend = client(directory, served.url)
    values = [memoryview(bytes([number]) * 1000) for number in range(8)]
    assert backend.put([f"k{number}" for number in range(8)], values) == [""] * 8
    into = memoryview(bytearray(1000))
    assert backend.get(["k0"], [into]) == [1000] and into == values[0]
    figures = served.figures()
    assert figures["bytes"] <= 4096 and figures["disk_values"] >= 6
    backend.close()
    status = subprocess.run(
        [*WORDS, "--keys", str(directory), "--disk", str(tmp_path / "disk")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert status.returncode == 2 and "another process serves it" in status.stderr
    served.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["store"], "required: --keys"),
        (["store", "--keys", "/nowhere", "--bytes", "much"], "'much' is not a size"),
        (["store", "--keys", "/nowhere", "--bytes", "0"], "a size above 0"),
        (["store", "--keys", "/nowhere"], "/nowhere: no key directory"),
        (["up", "--store", "cupboard"], "'cupboard' is not tcp://host:port of a kvbaton store"),
        (["up", "--store", "memory", "--engine", "vllm"], "argument --store"),
    ],
)
def test_a_bad_command_line_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(words)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("5", 5), ("1KiB", 1024), ("3GiB", 3 << 30)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert bytes_of(text) == size
