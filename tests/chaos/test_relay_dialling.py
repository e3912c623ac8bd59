"""The members' side of the relay, and what only a relay does."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvbaton_proof.chaos.network import enter, networks
from kvbaton_proof.chaos.network.networks import Network

SITE = Path(enter.__file__).parent / "relay_site" / "sitecustomize.py"
WAIT_S = 30.0


@pytest.fixture
def network() -> Iterator[Network]:
    with networks.start("relay", ["p0", "d0"]) as made:
        yield made


def site() -> ModuleType:
    """As a module of another name, it changes nothing in this process."""
    spec = importlib.util.spec_from_file_location("relay_dialling", SITE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_only_other_members_are_dialled_through_the_relay(network: Network) -> None:
    words = network.command("p0", [])
    door, prefix, name, own = words[5:9]
    dialling = site().Dialling(" ".join((door, prefix, name, own)))
    other = network.address("d0")
    host, port = dialling.turned((other, 5000))
    assert (host, port) != (other, 5000)
    assert dialling.turned((other, 5000)) == (host, port)
    assert dialling.turned((other, 5001)) != (host, port)
    assert dialling.turned_endpoint(f"tcp://{other}:5000") == f"tcp://{host}:{port}"
    assert dialling.turned_endpoint(f"tcp://{other}:5000".encode()) == f"tcp://{host}:{port}"
    for address in ((own, 5000), ("127.0.0.1", 5000), ("10.0.0.1", 80), ("::1", 80, 0, 0), "/a/path", b"\0name"):
        assert dialling.turned(address) == address
    for endpoint in ("ipc:///tmp/x", "tcp://127.0.0.1:5000", "inproc://a", f"tcp://{own}:5000", "tcp://*:1"):
        assert dialling.turned_endpoint(endpoint) == endpoint
    with pytest.raises(ConnectionRefusedError, match="no way"):
        dialling.turned((f"{prefix}77", 5000))


def test_zmq_and_asyncio_go_through_the_relay_whatever_loop_was_asked_for(network: Network) -> None:
    serve = """
import socket, sys, threading, zmq
context = zmq.Context()
pull = context.socket(zmq.REP)
port = pull.bind_to_random_port(f"tcp://{sys.argv[1]}", 12000, 32000)
plain = socket.create_server((sys.argv[1], 0))
print(port, plain.getsockname()[1], flush=True)
def accept():
    while True:
        sock, place = plain.accept()
        sock.sendall(place[0].encode()); sock.close()
threading.Thread(target=accept, daemon=True).start()
while True:
    pull.send(pull.recv()[::-1])
"""
    member = subprocess.Popen(
        network.command("d0", [sys.executable, "-c", serve, network.address("d0")]), stdout=subprocess.PIPE, text=True
    )
    assert member.stdout is not None
    by_zmq, by_tcp = member.stdout.readline().split()
    ask = """
import sys, zmq
address = f"tcp://{sys.argv[1]}:{sys.argv[2]}"
with zmq.Context() as context, context.socket(zmq.REQ) as sock:
    sock.linger, sock.rcvtimeo = 0, 20000
    sock.connect(address)
    sock.send(b"abc")
    print(sock.recv().decode())
    sock.disconnect(address)
"""
    assert run(network, "p0", ask, network.address("d0"), by_zmq) == "cba"
    after_zmq = network.counts()["p0-d0"].packets
    assert after_zmq > 0
    ask = """
import asyncio, sys, uvloop
async def main():
    reader, writer = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    print((await reader.read()).decode())
    writer.close()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
    back = network.counts()["d0-p0"].packets
    # The peer sees it come from the member, as over a real wire.
    assert run(network, "p0", ask, network.address("d0"), by_tcp) == network.address("p0")
    assert network.counts()["d0-p0"].packets > back
    member.kill()
    member.communicate()


def test_where_nobody_listens_a_dialler_is_reset(network: Network) -> None:
    dial = """
import socket, sys
try:  # the reset may come before the connection is known to stand
    print(socket.create_connection((sys.argv[1], 9), 20).recv(1))
except ConnectionResetError:
    print("reset")
"""
    assert run(network, "p0", dial, network.address("d0")) == "reset"


def test_a_member_that_is_not_yet_its_command_ends_with_the_network(network: Network) -> None:
    """It has said who it is, and what would tell it from others, its environment, is not changed yet."""
    arrive = """
import os, socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
sock.sendall(b'{"pid": %d}\\n' % os.getpid())
print(sock.recv(1), flush=True)
time.sleep(600)
"""
    door = network.command("p0", [])[5]
    process = subprocess.Popen([sys.executable, "-c", arrive, door], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "b'\\n'\n"
        network.close()
        assert process.wait(WAIT_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_is_no_member_is_left_alone() -> None:
    show = "import socket, _socket; print(socket.socket.connect is _socket.socket.connect)"
    ran = subprocess.run(
        [sys.executable, "-c", show],
        env={"PYTHONPATH": str(SITE.parent)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.stdout.strip() == "True", ran.stderr


def test_a_sitecustomize_that_was_there_before_still_runs(network: Network, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.coloured = 'red'\n")
    ran = subprocess.run(
        network.command("p0", [sys.executable, "-c", "import sys, socket; print(sys.coloured, socket.socket.connect)"]),
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.stdout.startswith("red") and "turned" in ran.stdout, ran.stderr
