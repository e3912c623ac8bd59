"""Facts of a run that accompany its figures: date, machine, versions, command.

Law: no machine-specific path is shown to a reader; a command can be typed again elsewhere.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvbaton import __version__

AGGREGATED, SINGLE = "aggregated", "single"
"""Engines that hand nothing over: as many as the others have, or one."""

KVBATON, MOONCAKE = "kvbaton", "mooncake"
BACKENDS = (KVBATON, MOONCAKE)
"""The stores there are."""

PACKAGES = {"nixl": ("nixl_cu13", "nixl_cu12", "nixl"), "mooncake": ("mooncake",)}
"""The transports of others there are, and what they are imported as: one of these is enough."""

DISTRIBUTIONS = {
    "nixl": ("nixl-cu13", "nixl-cu12"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
}
ADVICE = "make planes-env installs it"


QUIET_CORES = 0.1
"""What others may use of a machine that is called quiet."""
_PLACES = ("--out", "--page", "--plot", "--record", "--trace", "--vllm-router", "--vllm-python")
_PATHS = (
    (re.compile(r"(?<![\w/])(?:/[^\s/'\"=]+)+/bin/python[\d.]*"), "python"),
    (re.compile(r"(?:/[^\s/'\"=]+)*/kvbaton-bench-\w+"), "DIR"),
    (re.compile(r"(?:/[^\s/'\"=]+)*/\.cache/"), "~/.cache/"),
)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What every run tells; a benchmark adds its own."""

    date: str
    machine: str
    versions: Mapping[str, str]
    command: str
    seconds: float
    load_before: float = 0.0
    load_after: float = 0.0

    @property
    def load_line(self) -> str:
        return f"load {self.load_before:.2f} before and {self.load_after:.2f} after"

    @property
    def version_line(self) -> str:
        return named(self.versions)


class Stopwatch:
    """Begun with a run; tells its facts at its end."""

    def __init__(self) -> None:
        self._begun, self._load = time.monotonic(), os.getloadavg()[0]

    def facts(self, command: str, versions: Mapping[str, str], *, with_memory: bool = False) -> RunFacts:
        return RunFacts(
            date=today(), machine=machine(with_memory=with_memory), versions=versions, command=command,
            seconds=round(time.monotonic() - self._begun, 1), load_before=self._load, load_after=os.getloadavg()[0],
        )  # fmt: skip


def with_facts(report: msgspec.Struct, facts: RunFacts) -> dict[str, Any]:
    """One object of a report and of its run, for programs."""
    return {**msgspec.structs.asdict(report), "facts": facts}


def named(values: Mapping[str, object]) -> str:
    """`name value, name value`, as a sentence of a page has it."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def machine(*, with_memory: bool = False) -> str:
    memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB, " if with_memory else ""
    return f"{os.cpu_count()} cores ({platform.machine()}), {memory}Linux {platform.release()}"


def own_versions(*packages: str) -> dict[str, str]:
    """Of kvbaton with its commit, of this Python, and of packages beside it; one that is missing is left out."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    told = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    commit = f" ({told.stdout.strip()})" if told.returncode == 0 else ""
    return {"kvbaton": f"{__version__}{commit}", "python": platform.python_version(), **installed(packages)}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed here."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def shown(words: Sequence[str]) -> str:
    """The command that was given, without the places of one machine."""
    told, before = ["kvbaton"], ""
    for word in words:
        flag, equals, value = word.partition("=")
        if before in _PLACES:
            word = Path(word).name
        elif equals and flag in _PLACES:
            word = f"{flag}={Path(value).name}"
        told.append(word)
        before = word
    return shlex.join(told)


def public(command: str) -> str:
    """A command line without the places of one machine."""
    for place, name in _PATHS:
        command = place.sub(name, command)
    return command


def unquiet(others_cores: Sequence[float | None], what: str, so: str) -> list[str]:
    """How far the machine was not this run's alone: `what` was measured so many times, and what follows from it."""
    busy = [each for each in others_cores if (each or 0.0) > QUIET_CORES]
    if not busy:
        return []
    worst = max(each or 0.0 for each in busy)
    return [
        f"The machine was not quiet: in {len(busy)} of {len(others_cores)} {what} others used more than {QUIET_CORES} "
        f"cores (up to {worst:.2f}). {so}"
    ]
