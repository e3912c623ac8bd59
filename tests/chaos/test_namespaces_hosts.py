"""What hosts of namespaces have that members of a relay have not; where there are none, `tmpfs` is not pretended."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbaton_proof.chaos.network import networks
from kvbaton_proof.chaos.network.networks import Network, NetworkError

BEST, _ = networks.available()
HERE = BEST == "namespaces"
WAIT_S = 30.0
OWN_USER = [False, True]


def start(own_user: bool = False, tmpfs: dict[str, int] | None = None) -> Network:
    return networks.start(BEST, ["p0", "d0"], tmpfs=tmpfs, own_user=own_user)


def run(network: Network, name: str, program: str, *words: str) -> str:
    ran = subprocess.run(
        network.command(name, [sys.executable, "-c", program, *words]),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("own_user", OWN_USER)
def test_the_hosts_share_small_tmpfs_that_the_machine_does_not_see(own_user: bool, tmp_path: Path) -> None:
    (tmp_path / "machine").touch()
    with start(own_user, {"/dev/shm": 3, str(tmp_path): 2}) as network:
        if not HERE:
            assert network.private == ()
            assert run(network, "p0", "import os, sys; print(os.listdir(sys.argv[1]))", str(tmp_path)) == "['machine']"
            return
        assert network.private == ("/dev/shm", str(tmp_path))
        fill = """
import errno, os, sys
fd = os.open(sys.argv[1] + "/filler", os.O_CREAT | os.O_WRONLY)
written = 0
try:
    while True:
        written += os.write(fd, bytes(65536))
except OSError as error:
    print(written, errno.errorcode[error.errno])
"""
        assert run(network, "p0", fill, str(tmp_path)) == f"{2 << 20} ENOSPC"
        assert run(network, "d0", "import os, sys; print(os.listdir(sys.argv[1]))", str(tmp_path)) == "['filler']"
        assert run(network, "d0", "import os; s = os.statvfs('/dev/shm'); print(s.f_frsize * s.f_blocks)") == str(
            3 << 20
        )
        assert os.listdir(tmp_path) == ["machine"]
    assert os.listdir(tmp_path) == ["machine"]


def test_a_tmpfs_where_there_is_no_folder_is_refused_by_name(tmp_path: Path) -> None:
    if HERE:
        with pytest.raises(NetworkError, match=str(tmp_path / "nowhere")):
            start(tmpfs={str(tmp_path / "nowhere"): 2})
    else:
        start(tmpfs={str(tmp_path / "nowhere"): 2}).close()


@pytest.mark.parametrize("own_user", OWN_USER)
def test_each_host_has_its_own_ports_and_loopback(own_user: bool) -> None:
    listen = """
import socket, sys
at = [socket.create_server((address, 20123)) for address in sys.argv[1:]]
print("up", flush=True)
sys.stdin.read()
"""
    with start(own_user) as network:
        there = []
        for name in ("p0", "d0"):
            places = [network.address(name), "127.0.0.1"] if HERE else [network.address(name)]
            words = network.command(name, [sys.executable, "-c", listen, *places])
            there.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in there:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.communicate("", timeout=WAIT_S)


@pytest.mark.parametrize("own_user", OWN_USER)
def test_whoever_is_at_the_door_when_the_network_closes_does_not_come_in(own_user: bool) -> None:
    """It holds the host open already, so the kernel would let it in, and the network's last look did not find it."""
    late = """
import os, sys
from kvbaton_proof.chaos.network import enter

class Libc:
    def __init__(self, *arguments, **options):
        self.real = real(*arguments, **options)
    def setns(self, fd, kind):
        if "said" not in vars(self):
            self.said = print("at the door", flush=True)
            sys.stdin.readline()
        return self.real.setns(fd, kind)

real, enter.ctypes.CDLL = enter.ctypes.CDLL, Libc
sys.exit(enter.main(*sys.argv[1:]))
"""
    network = start(own_user)
    words = network.command("p0", ["echo", "inside"])
    if HERE:
        words = [sys.executable, "-c", late, *words[4:]]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    network.close()
    out, error = process.communicate("\n", timeout=WAIT_S)
    if HERE:
        assert (said, out, process.returncode) == ("at the door\n", "", 126)
        assert "was not started" in error


def test_networks_leave_no_descriptors_and_no_children() -> None:
    start().close()
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with start() as network:
            pid = network.pid
            assert Path(f"/proc/{pid}").exists()
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(ValueError, match="names"):
            networks.start(BEST, [f"h{number}" for number in range(300)])
    deadline = time.monotonic() + WAIT_S
    while len(os.listdir("/proc/self/fd")) > before:  # threads that earlier tests left may open some for a moment
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_network_whose_process_was_killed_says_so() -> None:
    network = start()
    os.kill(network.pid, signal.SIGKILL)
    with pytest.raises(NetworkError, match="does not answer"):
        network.heal()
    network.close()


def test_beyond_the_network_there_is_nothing() -> None:
    dial = """
import errno, socket
sock = socket.socket()
print(errno.errorcode[sock.connect_ex(("192.0.2.1", 80))])
"""
    with start() as network:
        if HERE:
            assert run(network, "p0", dial) == errno.errorcode[errno.ENETUNREACH]
        assert network.counts() == {}


def test_a_command_that_is_not_there_is_told_by_its_name() -> None:
    with start() as network:
        ran = subprocess.run(network.command("p0", ["no-such-command"]), capture_output=True, text=True, check=False)
    assert ran.returncode == 126
    assert "no-such-command" in ran.stderr
