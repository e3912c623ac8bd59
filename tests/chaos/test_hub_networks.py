"""What every kind of network must do, tried with real processes and real TCP on each kind that this machine allows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton_proof.chaos.network import networks
from kvbaton_proof.chaos.network.networks import Network, NetworkError
from tests.waiting import until

AGENT = Path(__file__).with_name("chaos_agent.py")
BEST, _ = networks.available()
KINDS = sorted({BEST, "relay"})  # the relay needs nothing, so it is tried everywhere
WAIT_S = 30.0


class Member:
    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.address = network.address(name)
        words = network.command(name, [sys.executable, str(AGENT), self.address])
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = self.ask("port")

    def ask(self, *words: Any) -> Any:
        answer = self._say(*words)
        assert "error" not in answer, answer
        return answer["ok"]

    def fails(self, *words: Any) -> str:
        return str(self._say(*words)["error"])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _say(self, *words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextlib.contextmanager
def members(network: Network, *names: str) -> Iterator[list[Member]]:
    with contextlib.ExitStack() as undo:
        there = []
        for name in names:
            member = Member(network, name)
            undo.callback(member.end)
            there.append(member)
        yield there


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with networks.start(request.param, ["p0", "d0", "d1"], seed=7) as made:
        assert made.kind == request.param
        yield made


def lost(network: Network, way: str) -> int:
    count = network.counts().get(way)
    return 0 if count is None else count.lost


def test_members_and_the_client_reach_each_other(network: Network) -> None:
    with members(network, "client", "p0", "d0") as there:
        for source in there:
            for target in there:
                if source is not target:
                    source.ask("exchange", target.address, target.port, 100_000, WAIT_S)
        counts = network.counts()
        assert counts["client-p0"].payload_bytes >= 100_000
        assert counts["p0-d0"].payload_bytes >= 100_000
        assert "p0-d1" not in counts


def test_a_cut_way_is_silent_while_the_other_passes_and_both_do_when_healed(network: Network) -> None:
    with members(network, "p0", "d0", "d1") as (p0, d0, d1):
        link = p0.ask("dial", d0.address, d0.port, WAIT_S)
        p0.ask("send", link, 10)
        until(lambda: d0.ask("served") == 10)
        network.cut("p0", "d0")
        d0.ask("reply", 100)  # this way passes, though its acknowledgements do not
        until(lambda: p0.ask("got", link) == 100)
        before = lost(network, "p0-d0")
        p0.ask("send", link, 1000)
        until(lambda: lost(network, "p0-d0") > before)
        p0.ask("exchange", d1.address, d1.port, 1000, WAIT_S)  # others are not concerned
        assert d0.ask("served") == 10
        network.heal()
        until(lambda: d0.ask("served") == 1010)


def test_new_connections_over_a_cut_get_no_answer(network: Network) -> None:
    with members(network, "p0", "d0") as (p0, d0):
        network.cut("d0", "p0")
        assert "TimeoutError" in p0.fails("exchange", d0.address, d0.port, 10, 0.5)
        network.mend("d0", "p0")
        p0.ask("exchange", d0.address, d0.port, 10, WAIT_S)


def test_a_slow_way_is_late_by_at_least_its_delay(network: Network) -> None:
    with members(network, "p0", "d0") as (p0, d0):
        network.slow("p0", "d0", 0.15, 0.0)
        network.slow("d0", "p0", 0.15, 0.0)
        # The first byte's round, and before it the connection's own.
        assert p0.ask("exchange", d0.address, d0.port, 50_000, WAIT_S) >= 0.6
        network.slow("p0", "d0", 0.0, 0.0)
        network.slow("d0", "p0", 0.0, 0.0)
        until(lambda: p0.ask("exchange", d0.address, d0.port, 50_000, WAIT_S) < 0.6)


def test_over_a_lossy_way_a_transfer_still_comes_whole(network: Network) -> None:
    with members(network, "p0", "d0") as (p0, d0):
        network.slow("p0", "d0", 0.001, 0.05)
        network.slow("d0", "p0", 0.001, 0.05)
        for _ in range(10):
            p0.ask("exchange", d0.address, d0.port, 1 << 20, WAIT_S)
            if lost(network, "p0-d0") and lost(network, "d0-p0"):
                break
        assert lost(network, "p0-d0") and lost(network, "d0-p0")


def test_the_next_life_of_a_member_has_the_same_address(network: Network) -> None:
    with members(network, "p0") as (p0,):
        with members(network, "d0") as (first,):
            p0.ask("exchange", first.address, first.port, 1000, WAIT_S)
        assert "Error" in p0.fails("exchange", first.address, first.port, 1000, WAIT_S)
        with members(network, "d0") as (second,):
            assert second.address == first.address
            p0.ask("exchange", second.address, second.port, 1000, WAIT_S)


def test_a_command_is_the_process_that_was_started(network: Network, tmp_path: Path) -> None:
    show = "import os; print(os.getpid(), os.getcwd(), os.environ['COLOUR'])"
    words = network.command("p0", [sys.executable, "-c", show])
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "COLOUR": "red"}
    )
    out, _ = process.communicate(timeout=WAIT_S)
    assert out.split() == [str(process.pid), str(tmp_path), "red"]


def test_closing_ends_the_members_and_their_children(network: Network) -> None:
    sleep = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen(network.command("p0", [sys.executable, "-c", sleep]), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    network.close()
    assert parent.wait(WAIT_S) == -signal.SIGKILL
    parent.stdout.close()
    until(lambda: not alive(child))
    network.close()
    with pytest.raises(NetworkError, match="closed"):
        network.heal()
    assert subprocess.run(network.command("p0", ["true"]), check=False, capture_output=True).returncode == 126


def alive(pid: int) -> bool:
    """A zombie is not: whoever adopts it may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_goes_with_a_conductor_that_is_killed(kind: str) -> None:
    conduct = f"""
import subprocess, time
from kvbaton_proof.chaos.network import networks
network = networks.start({kind!r}, ["p0"])
member = subprocess.Popen(network.command("p0", ["sh", "-c", "echo up; exec sleep 600"]), stdout=subprocess.PIPE)
member.stdout.readline()
print(network.pid, member.pid, flush=True)
time.sleep(600)
"""
    conductor = subprocess.Popen([sys.executable, "-c", conduct], stdout=subprocess.PIPE, text=True)
    assert conductor.stdout is not None
    pids = [int(word) for word in conductor.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    conductor.kill()
    conductor.communicate()
    until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_networks_do_not_disturb_each_other(kind: str) -> None:
    names = ["p0", "d0"]
    with (
        networks.start(kind, names) as one,
        networks.start(kind, names) as other,
        members(one, *names) as (p0, d0),
        members(other, *names) as (q0, e0),
    ):
        one.cut("p0", "d0")
        one.cut("d0", "p0")
        q0.ask("exchange", e0.address, e0.port, 10_000, WAIT_S)
        assert "TimeoutError" in p0.fails("exchange", d0.address, d0.port, 10, 0.3)
        one.close()
        q0.ask("exchange", e0.address, e0.port, 10_000, WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_becomes_the_client_and_stays_itself(kind: str) -> None:
    """With threads running, as a program that has imported numpy has them."""
    program = f"""
import os, subprocess, sys, threading, time, urllib.request
from kvbaton_proof.chaos.network import networks
print(os.getpid(), flush=True)
network = networks.adopt(os.environ)
if network is None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    network = networks.start({kind!r}, ["p0"], own_user={kind!r} == "namespaces")
    network.become_client([sys.executable, "-c", sys.argv[1], sys.argv[1]], os.environ)
assert networks.STATE not in os.environ
serve = "import http.server as h,sys; s=h.HTTPServer((sys.argv[1],0),h.SimpleHTTPRequestHandler);"
serve += "print(s.server_port, flush=True); s.serve_forever()"
words = network.command("p0", [sys.executable, "-c", serve, network.address("p0")])
member = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/proc/self")
port = int(member.stdout.readline())
urllib.request.urlopen(f"http://{{network.address('p0')}}:{{port}}/", timeout=30).read()
print(network.counts()["client-p0"].packets > 0)
network.close()
print(member.wait(30))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, program], capture_output=True, text=True, timeout=60, check=False
    )
    first, second, *rest = ran.stdout.split()
    assert (rest, ran.returncode) == (["True", "-9"], 0), ran.stderr
    assert first == second


def test_make_gives_the_best_that_is_here_and_says_so() -> None:
    said: list[str] = []
    with networks.make(["p0"], said.append) as network:
        assert network.kind == BEST
        assert network.names == ("client", "p0")
    assert len(said) == 1 and BEST.rstrip("s") in said[0]


def test_without_namespaces_it_is_a_relay_and_why_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = networks.start

    def refused(kind: str, *args: Any, **kwargs: Any) -> Network:
        if kind == "namespaces":
            raise NetworkError("unshare: Operation not permitted")
        return real(kind, *args, **kwargs)

    monkeypatch.setattr(networks, "start", refused)
    said: list[str] = []
    with networks.make(["p0"], said.append, tmpfs={"/dev/shm": 1}) as network:
        assert (network.kind, network.private) == ("relay", ())
    assert "not permitted" in said[0]
    assert networks.available() == ("relay", "unshare: Operation not permitted")


def test_wrong_names_are_refused(network: Network) -> None:
    with pytest.raises(ValueError, match="nobody"):
        network.cut("p0", "nobody")
    with pytest.raises(ValueError, match="loss"):
        network.slow("p0", "d0", 0.0, 2.0)
    for name in ("", "p-0", "P0", "a b", "x" * 40):
        with pytest.raises(ValueError, match="names"):
            networks.start(BEST, [name])
