"""The vLLM servers of a part: their words and surroundings, started all at once, gone afterwards.

Laws: a server is a plain `python -m vllm.entrypoints.openai.api_server`; P and D differ from one that does all alone in
their `--kv-transfer-config` and in nothing else. Servers that share a GPU are given their cache in bytes: vLLM's own
profiling counts its neighbours. One that does not come up is told with what it logged last, and spares the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from kvbaton.control import keyring
from kvbaton.engines.vllm import launching
from kvbaton.processes.child_process import KVBATON_ARGV, with_news
from kvbaton.processes.free_ports import free_ports
from kvbaton_proof.chaos.vllm.vllm_process import Engine, EngineError
from kvbaton_proof.gpu_test.sizes import Device, Variant

SERVED = "kv"
GIB = 1 << 30
READY_S = 330.0
LOG_LINES, LOG_CHARS = 6, 1500
SHARE = "0.05"
"""Of the GPU, which vLLM wants free at its start whatever it needs; the cache is given in bytes."""
P, D, ROUTER = "p0", "d0", "router"
MISPLACE = "misplace"
TELL_CACHED = "--enable-prompt-tokens-details"  # so that an answer says whether its prompt was handed over
EAGER, GRAPHS = Variant("V2", False), Variant("V2", True)
CUDA_VARIABLES: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
}  # fmt: skip
DEVELOPER: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
NIXL_BEST: Mapping[str, str] = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_TLS": "cuda_ipc,cuda_copy,sm,self,tcp"}
"""The best settings that were found for vLLM's own connector between processes on one GPU, with 8 threads."""
NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12")
ALIAS = """\
import importlib, sys
for part in ("_bindings", "_api", "logging", "_utils"):
    try:
        sys.modules["nixl." + part] = importlib.import_module("{package}." + part)
    except ModuleNotFoundError:
        pass
"""

MODEL_OF = re.compile(r"\{model:([\w.-]+)\}")
HOST_WORKER: Mapping[str, Any] = {
    "spec_name": "HostOffloadingSpec", "spec_module_path": "kvbaton_proof.conformance.offloading_host",
}  # fmt: skip
"""Of OffloadingConnector on a CPU, where vLLM has no worker of its own."""

Connector = Literal["", "kvbaton", "nixl"]
Say = Callable[[str], None]


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A server, or with a connector a P and a D of this kind. Ignored on a CPU: dtype, backend, graphs, cache_bytes."""

    name: str
    model: str  # kind of tiny_model
    connector: Connector = ""
    variant: Variant = EAGER
    dtype: str = "float32"
    backend: str = "TRITON_ATTN"
    cache_bytes: int = 2 * GIB
    max_model_len: int = 4096
    chunk_tokens: int = 2048
    at_once: int = 64
    prefix_caching: bool = True
    p_blocks: int = 0  # 0: as many as there is room for
    d_blocks: int = 0
    has_router: bool = True
    has_control: bool = False  # D can be told to misplace blocks; costs every copy a thread's turn: not for timing
    settings: Mapping[str, Any] = {}  # kv_connector_extra_config besides who it is
    times: Mapping[str, Any] = {}  # the same of NIXL's
    turn_s: float = 0.0  # how long D keeps turns of conversations
    args: tuple[str, ...] = ()  # more words of every engine; MODEL_OF in them is a tiny model's directory
    p_args: tuple[str, ...] = ()  # of P alone
    d_args: tuple[str, ...] = ()  # of D alone
    beside: Mapping[str, Any] = {}  # another connector's configuration, in a MultiConnector with ours
    first: str = P  # whose MultiConnector asks ours before the other

    def pair(self, name: str, turn_s: float) -> Spec:
        """The same as a P and a D of ours."""
        return msgspec.structs.replace(self, name=name, connector="kvbaton", turn_s=turn_s)

    @property
    def is_dummy(self) -> bool:
        return self.model == "8b"

    @property
    def models(self) -> set[str]:
        """Every tiny model that its engines read."""
        return {self.model, *MODEL_OF.findall(" ".join((*self.args, *self.p_args, *self.d_args)))}


@dataclass(slots=True)
class Site:
    """Where servers of a run live."""

    device: Device
    python: str
    directory: Path  # keys, flags
    logs: Path
    models: dict[str, Path] = field(default_factory=dict)

    def model(self, kind: str) -> Path:
        """Made at its first use; one that a CPU cannot serve is replaced by its like."""
        if self.device == "cpu":
            kind = {"small": "llama", "8b": "llama", "latent": "mla"}.get(kind, kind)
        if kind not in self.models:
            self.models[kind] = launching.tiny_model(self.python, kind, 1)
        return self.models[kind]

    def words(self, spec: Spec, port: int, blocks: int = 0, more: Sequence[str] = ()) -> list[str]:
        model = str(self.model(spec.model))
        if self.device == "cpu":
            words = launching.server_argv(self.python, model, SERVED, port, max_model_len=min(2048, spec.max_model_len))
        else:
            words = [self.python, "-m", launching.MODULE, "--model", model, "--served-model-name", SERVED]
            words += ["--host", launching.HOST, "--port", str(port), "--dtype", spec.dtype]
            words += ["--max-model-len", str(spec.max_model_len), "--gpu-memory-utilization", SHARE]
            words += ["--kv-cache-memory-bytes", str(spec.cache_bytes)]
            words += ["--attention-backend", spec.backend] if spec.backend else []
            words += [] if spec.variant.graphs else ["--enforce-eager"]
            words += ["--load-format", "dummy"] if spec.is_dummy else []
        words += ["--max-num-batched-tokens", str(spec.chunk_tokens), "--max-num-seqs", str(spec.at_once)]
        words += [TELL_CACHED, *([] if spec.prefix_caching else ["--no-enable-prefix-caching"])]
        words += [MODEL_OF.sub(lambda found: str(self.model(found[1])), each) for each in (*spec.args, *more)]
        return words if not blocks else [*words, "--num-gpu-blocks-override", str(blocks)]

    def variables(self, spec: Spec) -> dict[str, str]:
        if self.device == "cpu":
            return {**launching.environment(), **DEVELOPER}
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if spec.variant.runner == "V1" else {}
        best = dict(NIXL_BEST) if spec.connector == "nixl" else {}
        return {**CUDA_VARIABLES, **DEVELOPER, **runner, **best}


@dataclass(slots=True)
class Group:
    """One server alone, or a P, a D and perhaps a router before them."""

    spec: Spec
    engines: dict[str, Engine]
    flag: Path  # while it is there, D's blocks land misplaced
    problem: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alone(self) -> Engine:
        return self.engines["alone"]

    @property
    def p(self) -> Engine:
        return self.engines[P]

    @property
    def d(self) -> Engine:
        return self.engines[D]

    @property
    def router(self) -> Engine:
        return self.engines[ROUTER]

    @property
    def is_up(self) -> bool:
        return not self.problem

    def commands(self) -> list[str]:
        """As they can be typed elsewhere: where this machine keeps things is left out."""
        return [anywhere(launching.shown(each.command, each.variables), self) for each in self.engines.values()]


def anywhere(line: str, group: Group) -> str:
    """A command without the paths of this machine; pure."""
    line = line.replace(str(group.flag.parent), "DIR")
    line = re.sub(r"(?<=[ =])/\S*/python[\d.]*(?= -m )", "python", line)
    line = re.sub(r" PYTHONPATH=\S+", "", line)
    line = re.sub(r"/[^\s\"'=]*/tiny-([\w.-]+)-\d+-v\d+", lambda found: found[1].upper(), line)
    return re.sub(r"(--model )\S+", rf"\g<1>{group.spec.model.upper()}", line)


def made(site: Site, spec: Spec) -> Group:
    """The group of a spec, not started yet; its keys are made."""
    home = site.directory / spec.name
    home.mkdir(parents=True, exist_ok=True)
    group = Group(spec, {}, home / MISPLACE)
    ports = free_ports(6)
    if not spec.connector:
        words = site.words(spec, ports[0], spec.d_blocks)
        group.engines["alone"] = Engine("alone", ports[0], words, site.variables(spec), site.logs / f"{spec.name}.log")
        return group
    if spec.connector == "kvbaton":
        roles = ("both", "both") if spec.turn_s else ("prefill", "decode")  # of keys: turns go the other way as well
        keyring.mint(home / "keys", [ROUTER, f"{P}:{roles[0]}", f"{D}:{roles[1]}"])
        if spec.has_router:
            words = [*KVBATON_ARGV, "router", "--keys", str(home / "keys"), "--port"]
            words += [str(ports[4]), "--registry-port", str(ports[5]), "--fallback", "strict"]
            words += ["--turn-s", str(spec.turn_s)] if spec.turn_s else []
            group.engines[ROUTER] = Engine(ROUTER, ports[4], words, {}, site.logs / f"{spec.name}-router.log")
    for name, port, side, blocks, own in (
        (P, ports[0], ports[2], spec.p_blocks, spec.p_args), (D, ports[1], ports[3], spec.d_blocks, spec.d_args),
    ):  # fmt: skip
        config, more = transfer_config(site, spec, name, ports, group.flag)
        words = [*site.words(spec, port, blocks, own), "--kv-transfer-config", msgspec.json.encode(config).decode()]
        variables = {**site.variables(spec), **more}
        group.engines[name] = Engine(name, port, words, variables, site.logs / f"{spec.name}-{name}.log", side)
    return group


def transfer_config(
    site: Site, spec: Spec, name: str, ports: list[int], flag: Path
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """What --kv-transfer-config gets, and variables. `ports`: HTTP of P and D, what they speak on, the router's two."""
    side = ports[2] if name == P else ports[3]
    if spec.connector == "nixl":
        if site.device == "cpu":
            return launching.NIXL, launching.nixl_environment(site.directory, side) | _nixl_path(
                site.directory / "site"
            )
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        own = {"num_threads": 8, **spec.times}
        where = {"VLLM_NIXL_SIDE_CHANNEL_HOST": launching.HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
        return {**config, "kv_connector_extra_config": own}, {**where, **_nixl_path(site.directory / "nixl")}
    extra = {"name": name, "keys": str(flag.parent / "keys"), "control_port": side, **spec.settings}
    if spec.has_router:
        extra["registry"] = f"tcp://{launching.HOST}:{ports[5]}"
        extra["http_address"] = f"{launching.HOST}:{ports[0] if name == P else ports[1]}"
    else:
        other, at = (D, ports[3]) if name == P else (P, ports[2])
        extra["peers"] = {other: f"tcp://{launching.HOST}:{at}"}
    if name == D and spec.has_control:
        extra["fault_misplace_while"] = str(flag)
    if spec.is_dummy and site.device != "cpu":
        extra["model_id"] = "8b-dummy"
    role = "kv_producer" if name == P else "kv_consumer"
    if spec.turn_s:
        extra["turn_s"] = spec.turn_s
        if name == P:  # it loads too, and vLLM must know
            role, extra["role"] = "kv_both", "prefill"
    ours = launching.kv_transfer_config(role, "recompute", extra)
    return (together(site, spec, name, ours) if spec.beside else ours), {}


def together(site: Site, spec: Spec, name: str, ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """A MultiConnector with ours and the other: in this order on one side, in the other order on the other side."""
    other = {**spec.beside, "kv_connector_extra_config": {**spec.beside["kv_connector_extra_config"]}}
    if site.device == "cpu":
        other["kv_connector_extra_config"] |= HOST_WORKER
    outer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    children = [ours, other] if name == spec.first else [other, ours]
    return {**outer, "kv_connector_extra_config": {"connectors": children}}


@contextlib.asynccontextmanager
async def standing(
    site: Site, specs: Sequence[Spec], session: aiohttp.ClientSession, say: Say, ready_s: float = READY_S
) -> AsyncIterator[dict[str, Group]]:
    """Groups by name, all up or with a problem; gone afterwards."""
    kinds = sorted({kind for spec in specs for kind in spec.models})
    await asyncio.gather(*(asyncio.to_thread(site.model, kind) for kind in kinds))
    groups = {spec.name: made(site, spec) for spec in specs}
    try:
        for group in groups.values():
            for engine in group.engines.values():
                engine.start()
        await _all_up(groups, session, say, ready_s)
        yield groups
    finally:
        for group in groups.values():
            end(group)


def end(group: Group) -> None:
    for engine in group.engines.values():
        engine.kill()


async def _all_up(groups: Mapping[str, Group], session: aiohttp.ClientSession, say: Say, ready_s: float) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def up(group: Group) -> None:
        try:
            engines = [each for name, each in group.engines.items() if name != ROUTER]
            await asyncio.gather(*(each.ready(session, ready_s) for each in engines))
            if ROUTER in group.engines:  # it says 200 once both have registered
                await group.router.ready(session, 30.0)
        except EngineError as error:
            group.problem = str(error).split(":", 1)[0]
            for name, engine in group.engines.items():
                if said := last_words(engine.log):
                    group.problem += f"\n{name}: {said}"
            end(group)
        state = "up" if group.is_up else f"NOT UP: {group.problem}"
        say(f"{group.name}: {state} after {loop.time() - begun:.0f} s")

    waiting = asyncio.gather(*map(up, groups.values()))
    await with_news(waiting, lambda seconds: say(f"{seconds:.0f} s: servers are starting"))


def last_words(log: Path) -> str:
    """The lines of a log that say why a server is not there: errors, else the last ones. Bounded."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    bad = [line for line in lines if re.search(r"Error|ERROR|refused|not supported|Killed", line)]
    causes = [line for line in bad if re.search(r"\w(Error|Exception): ", line)]
    return " | ".join((causes or bad or lines)[-LOG_LINES:])[-LOG_CHARS:]


def _nixl_path(directory: Path) -> dict[str, str]:
    """vLLM imports `nixl`; where only the package that it stands for is installed, an alias is put on the path."""
    if importlib.util.find_spec("nixl") is not None:
        return {}
    package = next((name for name in NIXL_PACKAGES if importlib.util.find_spec(name) is not None), "nixl_cu13")
    (directory / "nixl").mkdir(parents=True, exist_ok=True)
    (directory / "nixl" / "__init__.py").write_text(ALIAS.format(package=package))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))}


def has_nixl() -> bool:
    """Whether vLLM's own connector can be run here."""
    return any(importlib.util.find_spec(name) is not None for name in ("nixl", *NIXL_PACKAGES))
