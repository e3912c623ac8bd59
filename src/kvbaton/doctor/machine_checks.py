"""This machine: interpreter, transports, limits, memory; what an engine needs before it can start.

Law: read-only; every probe of another program has a deadline.

The GPUs of this machine: whether they exist, and whether processes and GPUs can read each other's memory.

Law: read-only, and no GPU is used: it queries the driver about devices and the kernel about namespaces.

Ports: whether they can be bound now, and whether two parts of a configuration use the same one.

Law: a port is tried by binding it for an instant, without listening; a process that already has it is not disturbed.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvbaton.doctor.config_checks import ANYWHERE, ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.engines.vllm.config.vllm_versions import SUPPORTED, vllm_version
from kvbaton.engines.vllm.launch import launching
from kvbaton.security.sealing import MISSING, can_seal
from kvbaton.transports import catalogue
from kvbaton.transports.cuda.cuda_driver import CudaError, CudaHost

PORT_MAX = 65535
DEFAULT_PORT = "8000"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Use(msgspec.Struct, frozen=True):
    """A port that something will listen on."""

    where: str
    what: str
    host: str
    port: int


def uses(engine: ConfiguredEngine) -> Iterator[Use]:
    """The fixed ports of an engine; 0 takes a free one and needs no check."""
    if engine.options is not None:
        yield from _fixed(engine.where, "http_port", engine.options.http_host, engine.options.http_port)
    elif engine.launch.options is not None:
        text = engine.launch.option("port") or DEFAULT_PORT
        if text.lstrip("-").isdigit():
            yield Use(engine.where, "--port", engine.launch.option("host"), int(text))
    elif engine.settings is not None and engine.settings.http_address:
        host, _, text = engine.settings.http_address.rpartition(":")
        yield Use(engine.where, "http_address", host.strip("[]"), int(text))
    if engine.told is not None:
        yield from _fixed(engine.where, "control_port", engine.told.control_host, engine.told.control_port)


def examine_ports(wanted: Iterable[Use]) -> list[Finding]:
    """Checks every port against the machine and against the others."""
    listed = list(wanted)
    found: list[Finding] = []
    for index, use in enumerate(listed):
        if not 1 <= use.port <= PORT_MAX:
            text = f"{use.what}: {use.port} is not a valid port"
            found.append(finding("port-range", use.where, text, f"choose 1 to {PORT_MAX}"))
            continue
        twin = next((other for other in listed[:index] if _clash(use, other)), None)
        if twin is not None:
            text = f"{use.what} and {twin.what} of {twin.where} are both {_told(use)}"
            found.append(finding("port-twice", use.where, text, f"give {use.what} another port"))
        else:
            found += _try(use)
    return found


def _fixed(where: str, what: str, host: str, port: int) -> Iterator[Use]:
    if port:
        yield Use(where, what, host, port)


def _clash(one: Use, other: Use) -> bool:
    wide = one.host in ANYWHERE or other.host in ANYWHERE
    return one.port == other.port and (wide or _numeric(one.host) == _numeric(other.host))


def _try(use: Use) -> Iterator[Finding]:
    family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not matter
        try:
            probe.bind((_numeric(use.host), use.port))
        except (OSError, TypeError, ValueError) as error:
            yield _refused(use, error)
            return
    low, high = _ephemeral()
    if low <= use.port <= high:
        text = f"{use.what}: {use.port} is in {low}..{high}, the range for outgoing connections"
        fix = f"choose one below {low}, or: sysctl -w net.ipv4.ip_local_reserved_ports={use.port}"
        yield finding("port-ephemeral", use.where, text, fix)


def _refused(use: Use, error: Exception) -> Finding:
    if not isinstance(error, OSError) or error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        text = f"{use.what}: {use.host} is not an address of this machine"
        return finding("host-foreign", use.where, text, "run doctor on that host too")
    text = f"{use.what}: {_told(use)} cannot be bound: {error.strerror}"
    fix = f"find the process: ss -ltnp 'sport = :{use.port}'; stop it, or choose another port"
    return finding("port-taken", use.where, text, fix)


def _numeric(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _told(use: Use) -> str:
    host = f"[{use.host}]" if ":" in use.host else use.host
    return f"{host or '*'}:{use.port}"


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return PORT_MAX + 1, PORT_MAX + 1
    return low, high


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


NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""Inode numbers of the host's own namespaces; a container has others."""
PAIRS_SHOWN = 8


class Host(Protocol):
    """See `cuda_driver.CudaHost`."""

    count: int

    def name(self, device: int) -> str: ...
    def shares(self, device: int) -> bool: ...
    def reaches(self, device: int, other: int) -> bool: ...


def look() -> tuple[Host | None, str]:
    """The driver, or the reason why it cannot be queried."""
    try:
        host = CudaHost()
    except (ImportError, CudaError) as error:
        return None, str(error)
    return (host, "") if host.count else (None, "the driver shows no GPU (CUDA_VISIBLE_DEVICES?)")


def names(host: Host | None) -> tuple[str, ...]:
    return tuple(host.name(device) for device in range(host.count)) if host is not None else ()


def examine_gpus(host: Host | None, problem: str, device: str) -> list[Finding]:
    """`device`: where the KV caches are."""
    if device != "cuda":
        return []
    if host is None:
        fix = "check nvidia-smi; in a container: --gpus all; or check for host memory: --device cpu"
        return [finding("gpu-missing", MACHINE, f"no GPU can be used: {problem}", fix)]
    return [*_sharing(host), *_peers(host), *_container(), *_locking(catalogue.rdma_devices())]


def _sharing(host: Host) -> Iterator[Finding]:
    for device in range(host.count):
        if not host.shares(device):
            found = f"GPU {device} ({host.name(device)}): the driver offers no CUDA IPC, so transport cuda is not used"
            yield finding("gpu-ipc", MACHINE, found, "nothing, if staged-shm is fast enough; otherwise another GPU")


def _peers(host: Host) -> Iterator[Finding]:
    apart = [
        f"{one} and {other}"
        for one, other in itertools.combinations(range(host.count), 2)
        if not (host.reaches(one, other) and host.reaches(other, one))
    ]
    if apart:
        shown = ", ".join(apart[:PAIRS_SHOWN]) + (
            f" and {len(apart) - PAIRS_SHOWN} more" if apart[PAIRS_SHOWN:] else ""
        )
        found = f"no peer access between GPUs {shown}: KV between them uses staged-shm, through host memory"
        fix = "put P and D of a pair on GPUs with peer access: nvidia-smi topo -p2p r"
        yield finding("gpu-peer", MACHINE, found, fix)


def _container(proc: Path = Path("/proc/self/ns")) -> Iterator[Finding]:
    own = [name for name, number in NAMESPACES.items() if _inode(proc / name) not in {0, number}]
    if own:
        found = f"this is a container with its own {' and '.join(own)} namespace: transport cuda works only inside it"
        fix = "run P and D in one container, or give both --ipc=host --pid=host; otherwise KV uses staged-tcp"
        yield finding("gpu-container", MACHINE, found, fix)


def _locking(rdma: Sequence[str]) -> Iterator[Finding]:
    """The driver pins staging memory whatever the limit is; RDMA does not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if rdma and soft != resource.RLIM_INFINITY:
        found = f"at most {soft >> 10} KiB of memory may be locked; nixl over {rdma[0]} locks all that it registers"
        yield finding("memlock-small", MACHINE, found, "ulimit -l unlimited, or LimitMEMLOCK=infinity of the unit")


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
