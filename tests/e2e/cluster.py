"""A whole cluster as its users start it: `kvbaton up` in a process of its own, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.waiting import until

START_S = 60.0
STOP_S = 40.0
REQUEST_S = 150.0


@dataclass
class Up:
    """A running `kvbaton up`."""

    process: subprocess.Popen[str]
    log: Path
    url: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def text(self) -> str:
        return self.log.read_text()

    async def workers(self) -> dict[str, dict[str, object]]:
        """What each registered worker says of itself, by name."""
        async with aiohttp.ClientSession() as session:
            listed = await get_json(session, f"{self.url}/workers")
            entries = listed["workers"] if isinstance(listed, dict) else listed
            addresses = [entry.get("http_address") or entry["url"] for entry in entries]
            found = []
            for address in addresses:
                with contextlib.suppress(aiohttp.ClientError):  # killed, and not yet struck off the list
                    found.append(await get_json(session, f"http://{address.removeprefix('http://')}/stats"))
        return {stats["worker"]: stats for stats in found}

    def pid(self, worker: str) -> int:
        """The process of a worker that `up` started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"--name" in words and words[words.index(b"--name") + 1] == worker.encode():
                return int(child)
        raise AssertionError(f"{worker} is not among the children of kvbaton up")

    def restart(self, worker: str) -> None:
        """Start a worker by the very command that `up` printed."""
        command = re.search(rf"^  {worker}  (.+)$", self.text(), re.MULTILINE)
        assert command is not None, self.text()
        words = shlex.split(command[1])
        self.started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True))


@contextlib.contextmanager
def up(tmp_path: Path, *flags: str) -> Iterator[Up]:
    """Start, wait until it serves, and stop it as Ctrl-C would; AssertionError when it does not end cleanly."""
    log = tmp_path / "up.log"
    command = [sys.executable, "-m", "kvbaton.cli.main", "up", "--port", "0", *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env={**os.environ})
    cluster = Up(process, log, "")
    try:
        match = wait_for(lambda: re.search(r"up at (http://[^/]+)/v1", log.read_text()), START_S, log)
        cluster.url = match[1]
        yield cluster
    finally:
        for each in cluster.started:
            each.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        for each in [*cluster.started, process]:
            try:
                each.wait(STOP_S)
            except subprocess.TimeoutExpired:
                each.kill()
                raise AssertionError(f"it did not end within {STOP_S} s:\n{log.read_text()}") from None


def wait_for(look: Callable[[], object], seconds: float, log: Path | None = None):
    """What `look` gives, once that is something."""
    return until(look, seconds, lambda: f":\n{log.read_text()}" if log else "")


@contextlib.contextmanager
def pauses() -> Iterator[list[float]]:
    """The longest time that any core stood still, as the list's one number: those of a busy machine do for seconds.

    One thread looks at each core: when one of them is taken away, only those stand still who are on it.
    """
    longest, over, lock = [0.0], threading.Event(), threading.Lock()

    def watch(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        before = time.monotonic()
        while not over.wait(0.02):
            now = time.monotonic()
            with lock:
                longest[0] = max(longest[0], now - before)
            before = now

    threads = [threading.Thread(target=watch, args=(core,), daemon=True) for core in os.sched_getaffinity(0)]
    for thread in threads:
        thread.start()
    try:
        yield longest
    finally:
        over.set()
        for thread in threads:
            thread.join()


async def eventually(look, seconds: float):
    """The same for a coroutine function."""
    deadline = time.monotonic() + seconds
    while True:
        found = await look()
        if found or time.monotonic() > deadline:
            assert found, f"not within {seconds} s"
            return found
        await asyncio.sleep(0.1)


async def get_json(session: aiohttp.ClientSession, url: str):
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
        return await response.json()


def some_prompts(count: int, tag: str) -> list[str]:
    """Different from the first character on, of 10 to 200 characters."""
    rng = random.Random(tag)
    return [f"{n} {tag} " + "".join(rng.choices("abcdefgh ", k=rng.randint(5, 190))) for n in range(count)]


@dataclass
class Answer:
    status: int
    text: str
    seconds: float


async def ask_all(url: str, prompts: Sequence[str], mode: str, max_tokens: int = 16) -> list[Answer]:
    """All at once."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(prompt: str) -> Answer:
            body = {"model": "kvbaton-tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            begun = time.monotonic()
            async with session.post(f"{url}/v1/completions", json=body, headers={"x-kvbaton-mode": mode}) as response:
                told = await response.json()
                text = told["choices"][0]["text"] if response.status == 200 else str(told["error"])
                return Answer(response.status, text, time.monotonic() - begun)

        return list(await asyncio.gather(*map(ask, prompts)))


async def all_at_rest(cluster: Up, names: set[str]) -> dict[str, dict[str, object]]:
    """Wait until these workers hold nothing for anybody."""

    async def look():
        stats = await cluster.workers()
        held = ("pins", "leases", "intakes", "running", "waiting", "loading")
        still = set(stats) >= names and all(stats[name][key] == 0 for name in names for key in held)
        return stats if still else None

    return await eventually(look, 60.0)
