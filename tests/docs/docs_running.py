"""Runs the commands of a page as a reader would, one after the other, in a folder of its own.

Laws: ports are not the page's but free ones, the same one for the same number throughout a page. What serves
(`router`, `worker`, `store`) runs on until the page is over and is then ended, by its own process id. Nothing waits
without a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from docs_commands import Command
from docs_rules import OPERATORS, DocsError, parsed, split

from kvbaton.processes.child_process import free_ports

BIN = Path(sys.executable).parent
COMMAND_S = 120.0
START_S = 120.0
POLL_S = 0.05
UP = ("kvbaton", "up", "--prefill", "2", "--decode", "2")
"""The cluster of the quick start: pages that say `needs=cluster` are run on this one."""

_PORTS = {"8000": "front", "7700": "registry", "7710": "store"}
_SERVES = {"router", "worker", "store"}
_LONG = {"sim", "bench", "chaos", "conformance"}  # these take minutes, but for what they tell of themselves
_SHORT = {"--list", "--help", "--version"}


def until(what: str, predicate: Callable[[], bool], deadline_s: float = START_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not predicate():
        if time.monotonic() > deadline:
            raise DocsError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(POLL_S)


def answered(url: str) -> str | None:
    """What `url` says, with whatever status; None when nobody is there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: bytes = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    except (OSError, urllib.error.URLError):
        return None
    return text.decode()


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[int]:
    """`kvbaton up` as in the quick start; gives the port for clients."""
    port = free_ports(1)[0]
    with open(folder / "up.log", "wb") as log:
        process = subprocess.Popen(
            [BIN / UP[0], *UP[1:], "--port", str(port)], cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            until("kvbaton up", lambda: process.poll() is not None or _serves(port))
            if process.poll() is not None:
                raise DocsError(f"kvbaton up ended: {(folder / 'up.log').read_text()[-2000:]}")
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait(10)


def _serves(port: int) -> bool:
    said = answered(f"http://127.0.0.1:{port}/health")
    return said is not None and '"ok"' in said.replace(" ", "")


class Reader:
    """Whoever follows one page."""

    def __init__(self, folder: Path, cluster_port: Callable[[], int]) -> None:
        self._folder = folder
        self._cluster_port = cluster_port
        self._ports: dict[str, int] = {}
        self._running: list[subprocess.Popen[bytes]] = []

    def follow(self, command: Command) -> None:
        """Do what the page says; DocsError when it does not come out as the page has it."""
        if command.program == "kvbaton":
            self._kvbaton(command)
        elif command.program == "curl":
            curl, *rest = self._words(command)
            self._run(command, [curl, "-sS", "--fail", *rest])
        else:
            raise DocsError(f"{command.program} is not run here: say what the block needs")

    def close(self) -> None:
        for process in reversed(self._running):
            process.kill()
            process.wait(10)

    def _kvbaton(self, command: Command) -> None:
        words = self._words(command)
        args = parsed(split(words)[0])
        if args.command == "up" and not args.check:
            self._is_the_cluster(command)
        elif args.command in _LONG and command.needs != "cluster" and not _SHORT & set(words):
            return  # checked, as everything is; and not run
        elif args.command in _SERVES and "--help" not in words:
            self._serve(args.command, words)
        else:
            if command.needs == "cluster" and hasattr(args, "router") and "--router" not in words:
                words += ["--router", f"http://127.0.0.1:{self._cluster_port()}"]
            self._run(command, words)

    def _is_the_cluster(self, command: Command) -> None:
        if command.needs != "cluster":
            raise DocsError("a block that starts a cluster is marked needs=cluster")
        wanted, have = vars(parsed(command.words)), vars(parsed(list(UP)))
        if wanted != have:
            raise DocsError(f"the cluster for pages is {' '.join(UP)}; mark this block as what takes minutes")
        self._cluster_port()

    def _serve(self, name: str, words: list[str]) -> None:
        if name == "router":
            words += [] if "--port" in words else ["--port", str(self._port("front", False))]
            words += [] if "--registry-port" in words else ["--registry-port", str(self._port("registry", False))]
        elif name == "store" and "--port" not in words:
            words += ["--port", str(self._port("store", False))]
        with open(self._folder / f"{name}-{len(self._running)}.log", "wb") as log:
            process = subprocess.Popen(
                [BIN / "kvbaton", *words[1:]], cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._running.append(process)
        until(f"kvbaton {name}", lambda: process.poll() is not None or self._is_up(name, words))
        if process.poll() is not None:
            raise DocsError(f"kvbaton {name} ended with {process.returncode}: {Path(log.name).read_text()[-2000:]}")

    def _is_up(self, name: str, words: list[str]) -> bool:
        if name == "store":
            return is_open(self._port("store", False))
        front = f"http://127.0.0.1:{self._port('front', False)}"
        if name == "router":
            return answered(f"{front}/health") is not None
        said = answered(f"{front}/workers")
        return said is not None and f'"{words[words.index("--name") + 1]}"' in said

    def _run(self, command: Command, words: list[str]) -> None:
        line = " ".join(word if word in OPERATORS else shlex.quote(word) for word in words)
        ended = subprocess.run(
            ["bash", "-c", line], cwd=self._folder, capture_output=True, text=True, timeout=COMMAND_S, check=False,
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if (ended.returncode != 0) != command.fails:
            raise DocsError(f"{line} ended with {ended.returncode}:\n{ended.stdout[-1500:]}{ended.stderr[-1500:]}")
        if "--json" in words and words[0] == "kvbaton":
            json.loads(ended.stdout)

    def _words(self, command: Command) -> list[str]:
        """The command's words, with this reader's ports, and programs from the environment of the tests."""
        in_cluster = command.needs == "cluster"

        def ported(found: re.Match[str]) -> str:
            return f"{found[1]}{self._port(_PORTS[found[2]], in_cluster)}"

        words = [re.sub(rf"(127\.0\.0\.1:)({'|'.join(_PORTS)})\b", ported, word) for word in command.words]
        for flag in ("--port", "--registry-port"):
            if flag in words and words[words.index(flag) + 1] in _PORTS:
                at = words.index(flag) + 1
                words[at] = str(self._port(_PORTS[words[at]], in_cluster))
        words[0] = Path(words[0]).name
        return words

    def _port(self, name: str, in_cluster: bool) -> int:
        if in_cluster and name == "front":
            return self._cluster_port()
        if name not in self._ports:
            self._ports[name] = free_ports(1)[0]
        return self._ports[name]
