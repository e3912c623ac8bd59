"""Groups of vLLM servers by specification: one alone, or a P, one D or several and what stands before them. Started all
at once, gone afterwards.

Laws: a server is a plain `python -m vllm.entrypoints.openai.api_server`; P and D differ from one that does all alone in
their `--kv-transfer-config` and in nothing else. Servers that share a GPU are given their cache in bytes: vLLM's own
profiling counts its neighbours. One that does not come up is told with what it logged last, and spares the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from kvbaton.control import keyring
from kvbaton.engines.vllm.launch import launching
from kvbaton.processes.child_process import KVBATON_ARGV, NEWS_S, free_ports
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.rig import fronts
from kvbaton_proof.rig.connectors import CONNECTORS, HOST_WORKER, NOTHING, D, Device, P, Seat
from kvbaton_proof.rig.fronts import Front
from kvbaton_proof.rig.server import Engine, EngineError, end

SERVED = "kv"
GIB = 1 << 30
READY_S = 330.0
LOG_LINES, LOG_CHARS = 6, 1500
SHARE = "0.05"
"""The share of the GPU that vLLM wants free at its start whatever it needs; the cache is given in bytes."""
ALONE, ROUTER, STORE = "alone", "router", "store"
SECOND, OPERATOR = "router-2", "operator"
REGISTRY, SIDE, METRICS = "registry", "side", "metrics"
MISPLACE = "misplace"
TELL_CACHED = "--enable-prompt-tokens-details"  # so that an answer says whether its prompt was handed over
CUDA_VARIABLES: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
}  # fmt: skip
DEVELOPER: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
MODEL_OF = re.compile(r"\{model:([\w.-]+)\}")

Say = Callable[[str], None]


class Variant(msgspec.Struct, frozen=True):
    """How an engine runs its steps."""

    runner: Literal["V2", "V1"]
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.runner} {'graphs' if self.graphs else 'eager'}"

    @property
    def label(self) -> str:
        return self.name.replace(" ", "-").lower()


EAGER, GRAPHS = Variant("V2", False), Variant("V2", True)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A server, or with a connector a P and a D of this kind. Ignored on a CPU: dtype, backend, graphs, cache_bytes."""

    name: str
    model: str  # a kind of `tiny_model`, or a name of `Site.models`
    connector: str = ""  # of `CONNECTORS`
    front: Front = ""  # what stands before a pair, or before several that answer by themselves
    front_args: tuple[str, ...] = ()
    second_front: tuple[str, ...] | None = None  # another router of the same workers, and its words
    prefillers: int = 1  # p0, p1, …
    decoders: int = 1  # d0, d1, …: several of either only behind a front
    store: str = ""  # the size of a store of ours that all of them use
    variant: Variant = EAGER
    dtype: str = "float32"
    backend: str = "TRITON_ATTN"
    cache_bytes: int = 2 * GIB
    max_model_len: int = 4096
    chunk_tokens: int = 2048  # 0: as vLLM chooses; so is `at_once`
    at_once: int = 64
    prefix_caching: bool = True
    p_blocks: int = 0  # 0: as many as there is room for
    d_blocks: int = 0
    has_control: bool = False  # D can be told to misplace blocks; costs every copy a thread's turn: not for timing
    settings: Mapping[str, Mapping[str, Any]] = {}  # kv_connector_extra_config besides who it is, by connector
    own_settings: Mapping[str, Mapping[str, Any]] = {}  # the same of one engine, by its name
    turn_s: float = 0.0  # how long D keeps turns of conversations
    args: tuple[str, ...] = ()  # more words of every engine; MODEL_OF in them is a tiny model's directory
    p_args: tuple[str, ...] = ()  # of P alone
    d_args: tuple[str, ...] = ()  # of D alone
    beside: Mapping[str, Any] = {}  # another connector's configuration, in a MultiConnector with ours
    first: str = P  # whose MultiConnector asks ours before the other
    places: tuple[str, ...] = ()  # values of CUDA_VISIBLE_DEVICES; its engines take them in turn

    def pair(self, name: str, turn_s: float) -> Spec:
        """The same as a P and a D of ours behind our router."""
        return msgspec.structs.replace(self, name=name, connector="kvbaton", front="kvbaton", turn_s=turn_s)

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
    kv_gib: int = 1  # of each engine on a CPU
    grace_s: float = 0.0  # to end in, before they are killed

    def model(self, kind: str) -> Path:
        """Made at its first use; one that a CPU cannot serve is replaced by its like."""
        if self.device == "cpu":
            kind = {"small": "llama", "8b": "llama", "latent": "mla"}.get(kind, kind)
        if kind not in self.models:
            self.models[kind] = launching.tiny_model(self.python, kind, 1)
        return self.models[kind]

    def words(self, spec: Spec, port: int, blocks: int = 0, more: Sequence[str] = ()) -> list[str]:
        """The command of one engine, but for its connector."""
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
        words += ["--max-num-batched-tokens", str(spec.chunk_tokens)] if spec.chunk_tokens else []
        words += ["--max-num-seqs", str(spec.at_once)] if spec.at_once else []
        words += [TELL_CACHED, *([] if spec.prefix_caching else ["--no-enable-prefix-caching"])]
        words += [MODEL_OF.sub(lambda kind: str(self.model(kind[1])), word) for word in (*spec.args, *more)]
        return words if not blocks else [*words, "--num-gpu-blocks-override", str(blocks)]

    def variables(self, spec: Spec) -> dict[str, str]:
        if self.device == "cpu":
            return {**launching.environment(kv_gib=self.kv_gib), **DEVELOPER}
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if spec.variant.runner == "V1" else {}
        return {**CUDA_VARIABLES, **DEVELOPER, **runner}


@dataclass(slots=True)
class Group:
    """One server alone, or a P, a D and perhaps a router before them."""

    spec: Spec
    engines: dict[str, Engine]
    flag: Path  # while it is there, D's blocks land misplaced
    registry: str = ""  # in the router
    store: str = ""
    problem: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alone(self) -> Engine:
        return self.engines[ALONE]

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

    @property
    def url(self) -> str:
        """Where clients go: to the router, or to the one engine."""
        return next(iter(self.engines.values())).url

    @property
    def workers(self) -> dict[str, Engine]:
        """Those that compute."""
        others = (ROUTER, SECOND, STORE)
        return {name: engine for name, engine in self.engines.items() if name not in others}

    @property
    def keys(self) -> Path:
        return self.flag.parent / "keys"

    def commands(self) -> list[str]:
        """As they can be typed elsewhere: where this machine keeps things is left out."""
        shown = (launching.shown(engine.command, engine.variables) for engine in self.engines.values())
        return [anywhere(line, self) for line in shown]


def anywhere(line: str, group: Group) -> str:
    """A command without the paths of this machine; pure."""
    line = line.replace(str(group.flag.parent), "DIR")
    line = re.sub(r"(?<=[ =])/\S*/python[\d.]*(?= -m )", "python", line)
    line = re.sub(r" PYTHONPATH=\S+", "", line)
    line = re.sub(r"(?<= )/\S*/(vllm-router)(?= )", r"\1", line)
    line = re.sub(r"/[^\s\"'=]*/tiny-([\w.-]+)-\d+-v\d+", lambda kind: kind[1].upper(), line)
    return re.sub(r"(--model )\S+", rf"\g<1>{group.spec.model.upper()}", line)


def made(site: Site, spec: Spec) -> Group:
    """The group of a spec, not started yet; its keys are made. CommandError if its front cannot be had."""
    home = site.directory / spec.name
    home.mkdir(parents=True, exist_ok=True)
    group = Group(spec, {}, home / MISPLACE)
    connector, keys = CONNECTORS[spec.connector] if spec.connector else NOTHING, ["--keys", str(group.keys)]
    prefillers = [] if connector.is_alone else [f"{P[0]}{number}" for number in range(spec.prefillers)]
    decoders = [f"{D[0]}{number}" for number in range(spec.decoders)] if prefillers or spec.front else [ALONE]
    workers = [*prefillers, *decoders]
    names = [*workers, ROUTER, SECOND, REGISTRY, STORE, METRICS, *(f"{name} {SIDE}" for name in workers)]
    ports = dict(zip(names, free_ports(len(names)), strict=True))

    def engine(name: str, words: Sequence[str], more: Mapping[str, str] = {}, side_port: int = 0) -> None:
        log = site.logs / (f"{spec.name}.log" if name == ALONE else f"{spec.name}-{name}.log")
        group.engines[name] = Engine(name, ports[name], words, more, log, side_port)

    if connector.registers:
        # Of keys: turns go the other way as well, and a store takes nothing that a decode key wrote.
        roles = ("both", "both") if spec.turn_s or spec.store else ("prefill", "decode")
        members = [f"{name}:{roles[name in decoders]}" for name in workers]
        keyring.mint(group.keys, [ROUTER, f"{SECOND}:{ROUTER}", OPERATOR, STORE, *members])
        group.registry = f"tcp://{launching.HOST}:{ports[REGISTRY]}" if spec.front == "kvbaton" else ""
    if connector.registers and not group.registry and len(workers) > 2:
        raise CommandError(f"{spec.name}: without a registry kvbaton's engines know one peer; give one P and one D")
    if spec.front:
        urls = {name: f"http://{launching.HOST}:{ports[name]}" for name in workers}
        asked = [[urls[name] for name in each] for each in (prefillers, decoders)]
        words = [*keys, "--registry-port", str(ports[REGISTRY])]
        if not group.registry:
            words = fronts.by_url(spec.front, ports[ROUTER], ports[METRICS], *asked)
        if spec.front == "kvbaton":
            words = fronts.kvbaton_router(ports[ROUTER], [*words, *spec.front_args], spec.turn_s)
        engine(ROUTER, words)
    if spec.second_front is not None:
        known = [*keys, "--name", SECOND, "--registry", group.registry, *spec.second_front]
        engine(SECOND, fronts.kvbaton_router(ports[SECOND], known, spec.turn_s))
    if spec.store:
        words = ["store", *keys, "--port", str(ports[STORE]), "--bytes", spec.store]
        engine(STORE, [*KVBATON_ARGV, *words])
        group.store = f"tcp://{launching.HOST}:{ports[STORE]}"
    for name in workers:
        other = f"{D if name in prefillers else P} {SIDE}"
        seat = Seat(
            name=name, home=home, device=site.device, port=ports[name], side_port=ports[f"{name} {SIDE}"],
            other_side_port=ports.get(other, 0), registry=group.registry,
            settings=_settings(site, spec, name, group), turn_s=spec.turn_s,
        )  # fmt: skip
        config, more = connector.parts(seat)
        if spec.beside:
            config = together(site, spec, name, config)
        blocks, own = (spec.p_blocks, spec.p_args) if name in prefillers else (spec.d_blocks, spec.d_args)
        own = () if name == ALONE else own
        if spec.places:
            more = {**more, "CUDA_VISIBLE_DEVICES": spec.places[workers.index(name) % len(spec.places)]}
        words = site.words(spec, ports[name], blocks, own)
        words += ["--kv-transfer-config", msgspec.json.encode(config).decode()] if config else []
        engine(name, words, {**site.variables(spec), **more}, seat.side_port if config else 0)
    return group


def _settings(site: Site, spec: Spec, name: str, group: Group) -> dict[str, Any]:
    """The settings of one engine's connector."""
    own = {**spec.settings.get(spec.connector, {}), **spec.own_settings.get(name, {})}
    if group.store:
        own["store"] = group.store
    if name == D and spec.has_control:
        own["fault_misplace_while"] = str(group.flag)
    if spec.is_dummy and site.device != "cpu" and spec.connector == "kvbaton":
        own["model_id"] = "8b-dummy"
    return own


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
        end([engine for group in groups.values() for engine in group.engines.values()], site.grace_s)


async def _all_up(groups: Mapping[str, Group], session: aiohttp.ClientSession, say: Say, ready_s: float) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def up(group: Group) -> None:
        try:
            await asyncio.gather(*(engine.ready(session, ready_s) for engine in group.workers.values()))
            for name in (ROUTER, SECOND):
                if name in group.engines:  # it says 200 once both have registered
                    await group.engines[name].ready(session, 30.0)
        except EngineError as error:
            group.problem = str(error).split(":", 1)[0]
            for name, engine in group.engines.items():
                if lines := last_words(engine.log):
                    group.problem += f"\n{name}: {lines}"
            end(group.engines.values())
        state = "up" if group.is_up else f"NOT UP: {group.problem}"
        say(f"{group.name}: {state} after {loop.time() - begun:.0f} s")

    waiting = asyncio.gather(*map(up, groups.values()))
    await with_news(waiting, lambda seconds: say(f"{seconds:.0f} s: servers are starting"))


async def with_news(work: Awaitable[Any], tell: Callable[[float], None], every_s: float = NEWS_S) -> None:
    """Await `work`, which has its own deadline, and now and then `tell` how many seconds it has taken."""
    loop = asyncio.get_running_loop()
    begun, working = loop.time(), asyncio.ensure_future(work)
    try:
        while not working.done():
            await asyncio.wait((working,), timeout=every_s)
            if not working.done():
                tell(loop.time() - begun)
        working.result()
    finally:
        working.cancel()


def last_words(log: Path) -> str:
    """The lines of a log that say why a server is not there: errors, else the last ones. Bounded."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    bad = [line for line in lines if re.search(r"Error|ERROR|refused|not supported|Killed", line)]
    causes = [line for line in bad if re.search(r"\w(Error|Exception): ", line)]
    return " | ".join((causes or bad or lines)[-LOG_LINES:])[-LOG_CHARS:]
