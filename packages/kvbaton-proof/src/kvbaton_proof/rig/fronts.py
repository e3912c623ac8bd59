"""What stands before engines: kvbaton's router, vllm-router, or a toy proxy; how each is started.

Law: a front is a program of its own. Whatever it is, it is told the same engines, and clients ask it the same way.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvbaton.engines.vllm.launch.launching import HOST
from kvbaton.processes.child_process import KVBATON_ARGV
from kvbaton.processes.operator_errors import CommandError

Front = Literal["", "kvbaton", "vllm-router", "toy"]
FRONTS: tuple[Front, ...] = ("kvbaton", "vllm-router", "toy")
NO_ROUTER = "vllm-router is not installed; run: make bench-router"


def find_vllm_router(given: str | None, start: Path, search: str | None) -> str | None:
    """As given, else of the environment that `make .venv-router/.ready` makes in or above `start`, else on the path."""
    if given is not None:
        found = shutil.which(given)
        return None if found is None else os.path.abspath(found)
    for directory in (start, *start.parents):
        place = directory / ".venv-router" / "bin" / "vllm-router"
        if os.access(place, os.X_OK):
            return str(place)
    return shutil.which("vllm-router", path=search)


def kvbaton_router(port: int, known: Sequence[str], turn_s: float) -> list[str]:
    """`known`: words that say where its workers are, and any others."""
    words = [*KVBATON_ARGV, "router", "--port", str(port), *known]
    words += [] if "--fallback" in known else ["--fallback", "strict"]
    return [*words, *(["--turn-s", str(turn_s)] if turn_s else [])]


def by_url(front: Front, port: int, metrics: int, prefills: Sequence[str], decodes: Sequence[str]) -> list[str]:
    """The words of a front that is told its engines by URL; `prefills`: none of engines that answer by themselves.
    CommandError if it cannot be had, or cannot serve these."""
    if front == "kvbaton":
        return [
            *(word for url in prefills for word in ("--prefill-url", url)),
            *(word for url in decodes for word in ("--decode-url", url)),
        ]
    if front == "toy":
        if (len(prefills), len(decodes)) != (1, 1):
            raise CommandError("the toy proxy knows one P and one D; choose another front")
        return [sys.executable, "-m", "kvbaton_proof.bench.router.router_toy", str(port), *prefills, *decodes]
    program = find_vllm_router(None, Path.cwd(), os.environ.get("PATH"))
    if program is None:
        raise CommandError(NO_ROUTER)
    words = [program, "--host", HOST, "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
    words += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
    if not prefills:
        return [*words, "--worker-urls", *decodes]
    words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    words += [word for url in prefills for word in ("--prefill", url)]
    return [*words, *(word for url in decodes for word in ("--decode", url))]
