"""This machine: interpreter, transports, limits, memory; what an engine needs before it can start.

Law: read-only; every probe of another program has a deadline.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbaton.doctor.config_checks import ANYWHERE, ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.engines.vllm.config.vllm_versions import SUPPORTED, vllm_version
from kvbaton.engines.vllm.launch import launching
from kvbaton.security.sealing import MISSING, can_seal
from kvbaton.transports import catalogue

MACHINE = "this machine"
PYTHON_MIN = (3, 11)
FILES_WANTED = 4096
SHM_BYTES = 64 << 20  # a container's default; vLLM's processes and torch put small things there
SHM_TP_BYTES = 256 << 20  # vLLM's rings between the processes of one engine: 10 chunks of 24 MiB
VERSION_S = 60.0
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_VERSION = "import kvbaton.engines.vllm.config.vllm_versions as v; print(v.vllm_version())"


def examine(choice: str, device: str, shm: str, engines: Sequence[ConfiguredEngine]) -> list[Finding]:
    here = [engine for engine in engines if engine.is_here]
    return [
        *python(sys.version_info[:2]), *(_planes(choice, device) if has_numpy() else ()), *_limits(),
        *_shm(shm, here), *_memory(here),
        *(each for engine in engines for each in _planes_of(engine, device)),
    ]  # fmt: skip


def has_numpy() -> bool:
    """Transports need it: they cannot even be looked at without."""
    return importlib.util.find_spec("numpy") is not None


def python(version: tuple[int, ...]) -> Iterator[Finding]:
    if version < PYTHON_MIN:
        found = f"Python {'.'.join(map(str, version))}; kvbaton requires {'.'.join(map(str, PYTHON_MIN))} or later"
        yield finding("python-version", MACHINE, found, "create an environment with a newer Python")


# --- vLLM


def vllm(named: str | None, wanted: bool) -> list[Finding]:
    """The vLLM that engines would use; looked for outside this interpreter only if one is named or configured."""
    if named is None and not wanted:
        version = vllm_version()
        return list(vllm_findings(version)) if version != "unknown" else []
    try:
        return list(vllm_findings(_version_of(launching.find_python(named))))
    except launching.LaunchError as error:
        if named is None:
            return []  # the engines may run elsewhere
        found, _, fix = str(error).rpartition("; ")
        return [finding("vllm-python", "--vllm-python", found or str(error), fix)]


def vllm_findings(version: str) -> Iterator[Finding]:
    """Compares with the range that the connector was tested with; at startup `versions.check` looks for what it
    needs."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    low, high = (tuple(map(int, each.split("."))) for each in SUPPORTED.split(" to "))
    if numbers is None:
        return
    have = (int(numbers[1]), int(numbers[2]))
    found = f"vLLM {version}; supported are {SUPPORTED}"
    fix = f"pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}'"
    if have < low:
        yield finding("vllm-old", MACHINE, found, fix)
    elif have > high:
        yield finding("vllm-untested", MACHINE, found, fix)


def _version_of(python: str) -> str:
    try:
        done = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise launching.LaunchError(f"cannot run {python}: {error}; name vLLM's python") from None
    return done.stdout.strip()


# --- data planes


def _planes(choice: str, device: str) -> Iterator[Finding]:
    try:
        offered = catalogue.offered(choice, device)
    except OSError as error:
        yield finding("no-plane", "--transport", str(error), _fix_of(choice))
        offered = ()
    else:
        if not offered:
            found = f"no transport can be used for {device} memory"
            yield finding("no-plane", MACHINE, found, _fix_of(",".join(catalogue.ORDER)))
    for name in offered:
        exposed = catalogue.exposed(name, ANYWHERE[1])
        if exposed:
            yield finding(
                "plane-open", MACHINE, f"beyond loopback: {exposed}", "use tcp between hosts, or a private network"
            )
    if not can_seal():
        yield finding("seal-missing", MACHINE, "no tcp beyond loopback", MISSING.rpartition(": ")[2])


def _planes_of(engine: ConfiguredEngine, device: str) -> Iterator[Finding]:
    """The transports that a configuration names, if it is for this host. The embedded engine has its caches in host
    memory."""
    told = engine.told
    if told is None:
        return
    try:
        where = device if engine.options is None else "cpu"
        names = catalogue.offered(told.transport, where, told.checksum, told.require_enforcement)
    except OSError as error:
        if engine.is_here:
            yield finding("no-plane", engine.where, str(error), _fix_of(told.transport))
        return
    for name in names:
        exposed = catalogue.exposed(name, told.control_host, told.encrypt)
        if exposed:
            yield finding("plane-unencrypted", engine.where, exposed, "use tcp with encrypt auto, or a private network")


def _fix_of(choice: str) -> str:
    chosen = [catalogue.PLANES[name] for name in catalogue.parse(choice) if name in catalogue.PLANES]
    needed = [f"{plane.name}: {plane.needs}" for plane in chosen if plane.usable()]
    return f"it requires: {'; '.join(needed)}; or choose another: transport auto" if needed else "choose transport auto"


# --- limits and memory


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_WANTED:
        found = f"at most {hard} open files are allowed ({soft} now)"
        yield finding("files-few", MACHINE, found, f"ulimit -n {FILES_WANTED} as root, or LimitNOFILE= of the unit")
    if not has_numpy():
        found = "NumPy is missing: no engine, store or transport runs here; a router or registry needs none"
        yield finding("numpy-missing", MACHINE, found, "pip install 'kvbaton[serve]'")
    elif not importlib.import_module("kvbaton.transports.core.mover").choose_mover().native:
        found = "the C mover was not built: copies run in Python, at 0.6–0.9× its speed"
        yield finding(
            "mover-missing", MACHINE, found, "install a C compiler, then: pip install --force-reinstall kvbaton"
        )
    if HUGE.exists() and "[never]" in HUGE.read_text():
        found = "shared memory has no huge pages (shmem_enabled=never): copies of 16 KiB lose about a fifth"
        yield finding("huge-pages", MACHINE, found, f"echo advise > {HUGE}")


def _shm(path: str, engines: Sequence[ConfiguredEngine]) -> Iterator[Finding]:
    """KV itself is in anonymous shared memory (memfd), which this mount does not limit."""
    wanted = SHM_BYTES + SHM_TP_BYTES * sum(engine.options is None and engine.tp > 1 for engine in engines)
    try:
        told = os.statvfs(path)
    except OSError as error:
        yield finding("shm-small", path, f"{path}: {error.strerror}", f"mount -t tmpfs -o size=1G tmpfs {path}")
        return
    free = told.f_bavail * told.f_frsize
    if free < wanted:
        found = f"{path} has {_mib(free)} free, but the engines need {_mib(wanted)}"
        fix = f"mount -o remount,size=1G {path}; in a container: --shm-size=1g, or an emptyDir of medium Memory"
        yield finding("shm-small", path, found, fix)


def _memory(engines: Sequence[ConfiguredEngine]) -> Iterator[Finding]:
    """Only what was configured: vLLM's own default depends on the available memory."""
    sizes = [engine.launch.variables.get(KV_SPACE, "") for engine in engines]
    wanted = sum(int(size) * engine.tp for size, engine in zip(sizes, engines, strict=True) if size.isdigit()) << 30
    free = available_bytes()
    if free is not None and wanted > free:
        found = f"{KV_SPACE}: the engines need {_mib(wanted)} for KV, but only {_mib(free)} of memory is free"
        yield finding("memory-small", MACHINE, found, f"lower {KV_SPACE}, or start fewer engines here")


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Available memory by the kernel and by this container's limit; None where neither is known."""
    found = []
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", proc.read_text(), re.MULTILINE)
        found += [int(match[1]) << 10] if match else []
    except OSError:
        pass
    try:
        bound = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
        found += [int(bound) - int(used)] if bound.isdigit() and used.isdigit() else []
    except OSError:
        pass
    return min(found, default=None)


def _mib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def packages(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
