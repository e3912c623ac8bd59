"""A cluster that honest clients use while others do what they should not, and what can be measured of it.

Law: honest requests have a salt of their own, so that each is computed and handed over, and is compared with what one
engine answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton_proof.chaos.strangers import Place, family, listening
from tests.e2e.cluster import Up, some_prompts, up

ANSWER_TOKENS = 8
ASKERS = 4
REQUEST_S = 60.0
STATUS_S = 30.0
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""All of it, so that whoever speaks ZMTP answers; to others it is nonsense, and as long as a greeting of theirs."""
_SALTS = itertools.count()
_SCRIPT = Path(__file__).with_name("intruders.py")


@dataclass
class Figures:
    """What honest clients got."""

    seconds: float = 0.0
    slowest_s: float = 0.0
    right: int = 0
    bad: list[str] = field(default_factory=list)  # wrong, refused or late, in words

    @property
    def per_s(self) -> float:
        return self.right / self.seconds


@dataclass
class Use:
    """What a process holds."""

    fds: int
    rss_mib: float
    threads: int


class Siege:
    """A running cluster and honest clients before it."""

    def __init__(self, cluster: Up) -> None:
        self.cluster = cluster
        self.pids = family(cluster.process.pid)
        self.prompts = some_prompts(24, "honest")
        self.answers = reference_answers(self.prompts, ANSWER_TOKENS)

    def places(self) -> list[Place]:
        return listening(self.pids)

    def name(self, pid: int) -> str:
        """router, store, or the worker's name."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return words[words.index("--name") + 1] if "--name" in words else "store" if "store" in words[:5] else "router"

    def uses(self) -> dict[str, Use]:
        return {self.name(pid): use_of(pid) for pid in self.pids}

    def honest(self, seconds: float, modes: Sequence[str] = ("pull", "push")) -> Figures:
        return asyncio.run(honest(self, seconds, modes))

    def stats(self) -> dict[str, dict[str, Any]]:
        return asyncio.run(self.cluster.workers())

    def public_keys(self) -> list[str]:
        """Of all members: who copied public/ knows them."""
        facts = self.cluster.text().split("--keys ", 1)[1].split()[0]
        return [json.loads(path.read_text())["public"] for path in sorted(Path(facts, "public").glob("*.json"))]

    def key_directory(self) -> Path:
        return Path(self.cluster.text().split("--keys ", 1)[1].split()[0])

    def registry(self) -> str:
        return self.cluster.text().split("--registry ", 1)[1].split()[0]


@contextlib.contextmanager
def siege(directory: Path, *flags: str) -> Iterator[Siege]:
    with up(directory, *flags) as cluster:
        made = Siege(cluster)
        warm = made.honest(0.5)
        assert not warm.bad, warm.bad
        yield made


async def honest(made: Siege, seconds: float, modes: Sequence[str]) -> Figures:
    """Ask for so long, from some clients at once, each once at least; every request is seen to its end."""
    told = Figures()
    begun = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    ways = itertools.cycle(modes)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask() -> None:
            while True:
                number = next(_SALTS)
                prompt, right = (each[number % len(made.prompts)] for each in (made.prompts, made.answers))
                body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "cache_salt": f"s{number}"}
                at = time.monotonic()
                try:
                    headers = {"x-kvbaton-mode": next(ways)}
                    async with session.post(
                        f"{made.cluster.url}/v1/completions", json=body, headers=headers
                    ) as response:
                        answer = await response.json()
                    text = answer["choices"][0]["text"] if response.status == 200 else None
                    if text == right:
                        told.right += 1
                    else:
                        told.bad.append(f"{response.status}: {answer}")
                except (aiohttp.ClientError, TimeoutError) as error:
                    told.bad.append(repr(error))
                told.slowest_s = max(told.slowest_s, time.monotonic() - at)
                if time.monotonic() - begun >= seconds:
                    return

        await asyncio.gather(*(ask() for _ in range(ASKERS)))
    told.seconds = time.monotonic() - begun
    return told


def use_of(pid: int) -> Use:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Use(fds, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]))


class Intruders:
    """A process of strangers: a crowd of `each` silent connections per port, and visits for `seconds`."""

    def __init__(self, places: Sequence[Place], seconds: float, *, each: int = 0, keys: Sequence[str] = ()) -> None:
        told = {"ports": places, "seconds": seconds, "seed": 7, "each": each, "keys": list(keys)}
        self.child = subprocess.Popen(
            [sys.executable, str(_SCRIPT), json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> dict[str, int]:
        assert self.child.stdout is not None
        said = self.child.stdout.readline()
        assert said, "the strangers have died"
        return dict(json.loads(said))

    def go(self) -> dict[str, int]:
        """Have them leave; what they counted."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.line()

    def __enter__(self) -> Intruders:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.child.stdin is not None and self.child.stdout is not None
        with contextlib.suppress(OSError):
            self.child.stdin.close()
        try:
            self.child.wait(STATUS_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()


def protocol_of(place: Place) -> str:
    """What a port speaks, by what it says to a stranger that greets it in ZMTP, however late it is."""
    with socket.socket(socket.AF_UNIX if not place[1] else socket.AF_INET) as sock:
        sock.settimeout(STATUS_S)
        sock.connect(place if place[1] else place[0])
        try:
            sock.sendall(ZMTP_GREETING)
            said = sock.recv(64)
        except ConnectionError:
            return "data"
    if len(said) == 32:
        return "line"  # whose first word is 32 bytes of chance
    if said[:1] == b"\xff" and said[9:10] == b"\x7f":
        return "zmtp"
    return "http" if said.startswith(b"HTTP/1.") else "data"
