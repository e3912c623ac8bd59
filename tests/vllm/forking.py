"""Programs of Python, forked from one process that has imported what takes them long: vLLM, ten seconds of a core.

Law: what is forked is what `python -m MODULE …`, `python -c CODE …` or `python FILE …` would be: a session of its own,
with its own arguments, environment and log. Only what Python reads when it starts, or vLLM when it is imported, is the
parent's: who needs another `PYTHONPATH` starts a Python.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

VLLM = ("vllm.entrypoints.openai.api_server",)
LOOK_S = 0.05
READY_S = 300.0
"""Only a hang takes so long."""
FIXED = ("PYTHONPATH", "LD_PRELOAD")
_BEGAN = dict(os.environ)
"""As this process was started: a test that imports vLLM itself has variables of vLLM's in its own later on."""


class Forked:
    """As a `subprocess.Popen`, of a process that is the fork server's child: that one writes down how it ended."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = folder / str(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(FileNotFoundError):
                self.returncode = int(self._ended.read_text())
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(LOOK_S / 2)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that has imported these modules, and the line to it."""

    def __init__(self, surroundings: Mapping[str, str], imported: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvbaton-forked-")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), self._folder.name, *imported],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(surroundings), start_new_session=True,
        )  # fmt: skip
        self._answer(READY_S)

    def start(self, words: Sequence[str], surroundings: Mapping[str, str], log: Path, how: str = "wb") -> Forked:
        """`words` as behind `python`: `-m MODULE ARGUMENTS`, `-c CODE ARGUMENTS` or `FILE ARGUMENTS`."""
        order = {"words": list(words), "surroundings": dict(surroundings), "log": str(log), "append": how == "ab"}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(int(self._answer(READY_S)), Path(self._folder.name))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(READY_S)
        self._folder.cleanup()

    def _answer(self, within_s: float) -> str:
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], within_s)[0] or not (line := pipe.readline()):
            raise AssertionError(f"the process that forks others ended, or said nothing for {within_s:.0f} s")
        return line.decode()


_servers: dict[tuple[str | None, ...], ForkServer] = {}


def forked(
    words: Sequence[str], surroundings: Mapping[str, str], log: Path, how: str = "wb", imported: Sequence[str] = VLLM
) -> Forked:
    """Start a program of this Python, as `ForkServer.start`. There is one server for each way that Python starts."""
    fixed = (*imported, *(surroundings.get(name) for name in FIXED))
    if fixed not in _servers:
        _servers[fixed] = ForkServer(surroundings, imported)
        atexit.register(_servers[fixed].close)
    return _servers[fixed].start(words, surroundings, log, how)


def run_forked(words: Sequence[str], log: Path, within_s: float) -> tuple[int, str]:
    """Its status, and all that it said."""
    status = forked(words, _BEGAN, log).wait(within_s)
    return status, log.read_text(errors="replace")


# --- the fork server's own side


def _serve(folder: Path, imported: Sequence[str]) -> None:
    orders, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in imported:
        __import__(name)
    os.write(answers, b"ready\n")
    waiting = b""
    while True:
        _reap(folder)
        if not select.select([orders], [], [], LOOK_S)[0]:
            continue
        some = os.read(orders, 1 << 16)
        if not some:
            return
        *lines, waiting = (waiting + some).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if not pid:
                os.close(orders)
                os.close(answers)
                _become(order)
            os.write(answers, b"%d\n" % pid)


def _reap(folder: Path) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = folder / str(ended[0])
            found.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(ended[1])))
            found.with_suffix(".new").rename(found)


def _become(order: dict[str, Any]) -> NoReturn:
    """Run the program."""
    os.setsid()
    how = os.O_APPEND if order["append"] else os.O_TRUNC
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | how, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(order["surroundings"])
    random.seed()
    first, *rest = order["words"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
    sys.exit()  # through the loop that forked it, so that whatever Python does at its end is done


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
