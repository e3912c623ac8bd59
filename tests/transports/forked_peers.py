"""Peer processes, forked from one process that has imported what they need: imports are nearly all that a start costs.

Law: what is forked is what `python SCRIPT ARGUMENTS` would be in that environment, and a process of its own, which can
be stopped and killed. No transport is made before the fork, and so no data plane's own library is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

SCRIPTS = ("peer_process", "device.device_peer")
READY_S = 60.0
"""Only a hang takes so long."""
LOOK_S = 0.001
ORDER_BYTES_MAX = 1 << 20


class ForkedPeer:
    """As a `subprocess.Popen` with pipes, of a process that is the fork server's child."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self._life = os.pidfd_open(pid)

    def alive(self) -> bool:
        return self._life >= 0 and not select.select([self._life], [], [], 0)[0]

    def signal(self, number: int) -> None:
        if self._life >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._life, number)

    def stop(self) -> None:
        """SIGSTOP, which takes effect a moment after it was sent."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + READY_S
        while self.alive() and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            time.sleep(LOOK_S)

    def end(self) -> None:
        """SIGKILL, and nothing of it is left: not even its sockets."""
        if self._life < 0:
            return
        self.signal(signal.SIGKILL)
        assert select.select([self._life], [], [], READY_S)[0], f"process {self.pid} does not end"
        os.close(self._life)
        self._life = -1
        self.stdin.close()
        self.stdout.close()


class ForkServer:
    """The process that has imported it all, and the line to it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(READY_S)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.transports.forked_peers", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )

    def start(self, words: Sequence[str], surroundings: Mapping[str, str]) -> ForkedPeer:
        """`words` as behind `python`."""
        (their_input, stdin), (stdout, their_output) = os.pipe(), os.pipe()
        try:
            order = json.dumps({"words": list(words), "surroundings": dict(surroundings)}).encode()
            socket.send_fds(self._line, [order], [their_input, their_output])
            return ForkedPeer(int(self._line.recv(64)), stdin, stdout)
        finally:
            os.close(their_input)
            os.close(their_output)

    def close(self) -> None:
        self._line.close()
        self._process.wait(READY_S)


@functools.cache
def fork_server() -> ForkServer:
    """One for all tests of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def forked(script: str, *arguments: str, **more: str) -> ForkedPeer:
    """`main` of a module below this folder, with this process's environment and `more`."""
    return fork_server().start([script, *arguments], {**os.environ, **more})


def _module_of(script: str) -> Any:
    return importlib.import_module(f"tests.transports.{script}")


def _become(words: list[str], surroundings: dict[str, str], ends: list[int], line: socket.socket) -> NoReturn:
    line.close()
    for number, fd in enumerate(ends):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(surroundings)
    sys.argv = words
    status = 1
    try:
        _module_of(words[0]).main()
        status = 0
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    except BaseException:  # noqa: BLE001 - as a Python that ends with it
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    for name in SCRIPTS:
        _module_of(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        order, ends, _, _ = socket.recv_fds(line, ORDER_BYTES_MAX, 2)
        if not order:
            return
        pid = os.fork()
        if not pid:
            _become(**json.loads(order), ends=ends, line=line)
        for fd in ends:
            os.close(fd)
        line.send(b"%d" % pid)


if __name__ == "__main__":
    main()
