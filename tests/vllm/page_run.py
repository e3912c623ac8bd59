"""Follows a page of the documentation by hand, as its reader would: each command in the order of the page.

Laws: what serves (an engine, a router, a store) is "another terminal": it runs on, in a session of its own, until the
page is over, and is then ended with all its processes. Before the next command that does not serve, all that serves is
ready. Of a command only ports and the places of programs are changed: each port of the page is a free one, the same
throughout. Nothing waits without a deadline.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.vllm.engines import Engine, free_port, until

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))  # its modules are no package
from docs_commands import Command, commands_of  # noqa: E402

NEEDS = "vllm-page"
PORTS = re.compile(r"\b(8000|8100|8200|7700|7710)\b")
COMMAND_S = 600.0
START_S = 480.0
_ENGINE = "vllm.entrypoints.openai.api_server"


class PageError(AssertionError):
    """A command of the page did not do what the page says."""


class PageRun:
    """One reader of one page."""

    def __init__(self, page: str, folder: Path, python: str) -> None:
        self._folder = folder
        self._python = python
        self._environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._ports: dict[str, int] = {}
        self._left = self._commands(page)
        self.engines: dict[str, Engine] = {}  # by the port that the page has
        self.serving: dict[str, Engine] = {}  # routers and stores, likewise
        self.said: list[str] = []  # what each command that ended has said

    def until_ready(self) -> None:
        """Follow the page up to the first command after the engines."""
        for command in self._left:
            if self.engines and not self._serves(command):
                self._left = _again(command, self._left)
                break
            self._follow(command)
        self._ready()

    def to_the_end(self) -> None:
        for command in self._left:
            self._follow(command)

    def close(self) -> None:
        for each in (*self.engines.values(), *self.serving.values()):
            each.stop()

    def _commands(self, page: str) -> Iterator[Command]:
        found = [each for each in commands_of(page, (ROOT / page).read_text()) if each.needs == NEEDS]
        assert found, f"{page} has no block that is marked needs={NEEDS}"
        return iter(found)

    def _follow(self, command: Command) -> None:
        if command.program == "export":
            self._environ.update(word.split("=", 1) for word in command.words[1:])
        elif self._serves(command):
            self._start(command)
        else:
            self._ready()
            self._run(command)

    def _serves(self, command: Command) -> bool:
        return _ENGINE in command.words or (
            command.program == "kvbaton" and command.words[1] in ("router", "store", "registry", "worker")
        )

    def _start(self, command: Command) -> None:
        theirs = command.words[command.words.index("--port") + 1]
        log = self._folder / f"{theirs}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self._line(command)}"], cwd=self._folder, env=self._environ,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        started = Engine(process, self._port(theirs), log, command.words, self._environ)
        (self.engines if _ENGINE in command.words else self.serving)[theirs] = started

    def _ready(self) -> None:
        for engine in self.engines.values():
            engine.wait_ready(START_S)
        for each in self.serving.values():
            until(lambda each=each: not each.is_alive or bool(each.tail()), START_S, "it says that it serves")  # type: ignore[misc]
            if not each.is_alive:
                raise PageError(f"{' '.join(each.command)} ended: {each.tail()}")

    def _run(self, command: Command) -> None:
        line = self._line(command)
        if line.startswith("curl "):
            line = f"curl -sS --fail {line.removeprefix('curl ')}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=self._folder, env=self._environ, capture_output=True, text=True,
            timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            raise PageError(
                f"{command}: {line}\nended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            )
        self.said.append(done.stdout)

    def _line(self, command: Command) -> str:
        program = ROOT / ".venv" / "bin" / "kvbaton"
        kvbaton = program if program.exists() else Path(sys.executable).with_name("kvbaton")
        text = PORTS.sub(lambda found: str(self._port(found[1])), command.text)
        text = text.replace(".venv-vllm/bin/python", shlex.quote(self._python))
        return text.replace(".venv/bin/kvbaton", shlex.quote(str(kvbaton)))

    def _port(self, theirs: str) -> int:
        if theirs not in self._ports:
            self._ports[theirs] = free_port()
        return self._ports[theirs]


def figures(store: Engine) -> dict[str, int]:
    """What `kvbaton store` prints when it is asked to."""

    def told() -> list[str]:
        return [line for line in store.log.read_text().splitlines() if line.startswith("values ")]

    before = len(told())
    os.kill(store.process.pid, signal.SIGUSR1)
    until(lambda: len(told()) > before, 40, "the store tells its figures")
    last = told()[before]
    return {name: int(value) for name, value in (part.rsplit(" ", 1) for part in last.split(", "))}


def _again(first: Command, rest: Iterator[Command]) -> Iterator[Command]:
    yield first
    yield from rest
