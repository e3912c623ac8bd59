"""SGLang's servers of the part `sglang`: one alone, and of each transfer backend a P and a D. Started all at once.

Laws: P and D differ from the one that does all alone in the words of their disaggregation, and in nothing else. Each is
given its pool in tokens: SGLang's own profiling counts its neighbours. No kernel of SGLang's that only some machines
have is asked for: attention is Triton's (on a CPU PyTorch's), sampling PyTorch's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.api.params import CONTROL_AFTER_BOOTSTRAP
from kvbaton.control import keyring
from kvbaton.engines.sglang.manager import CONFIG_ENV
from kvbaton.engines.vllm.launch import launching
from kvbaton.engines.vllm.launch.launching import HOST
from kvbaton.processes.child_process import free_ports, is_free
from kvbaton_proof.rig import fronts
from kvbaton_proof.rig.client import Answer, Prompt, Streamed, ask, encoded, sent
from kvbaton_proof.rig.connectors import NIXL_BEST, D, Device, P
from kvbaton_proof.rig.server import Engine
from kvbaton_proof.rig.servers import ALONE, MISPLACE, ROUTER

MODULE = "sglang.launch_server"
PAGE_TOKENS = 16
BACKENDS = ("kvbaton", "nixl")
LEAKED = "leak detected"
LOG_MAX = 64 << 20


class SglangSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    model: str = "small"
    chunk_tokens: int = 1024
    pool_tokens: int = 120_000
    longest: int = 4050  # with its answer, and with what a prompt that shares its beginning has besides, in the context
    prompts: int = 48
    at_once: int = 16
    timed_tokens: tuple[int, ...] = (512, 4096, 16384)
    repetitions: int = 5
    clients: int = 16
    fault_longest: int = 3000
    stop_s: float = 6.0
    backends: tuple[str, ...] = BACKENDS

    @property
    def is_dummy(self) -> bool:
        """A shape without weights: its answers say nothing."""
        return self.model == "8b"


TIMED = SglangSizes(model="8b", chunk_tokens=8192, pool_tokens=40_000)
CPU_SIZES = SglangSizes(
    model="llama", chunk_tokens=128, pool_tokens=12_000, longest=700, prompts=14, at_once=4, timed_tokens=(64, 512),
    repetitions=2, clients=4, fault_longest=400, stop_s=4.0, backends=("kvbaton",),
)  # fmt: skip


@dataclass(slots=True)
class SglangPair:
    """A P and a D of one transfer backend; ours behind our router, another's asked by the client's own hand."""

    backend: str
    engines: dict[str, Engine] = field(default_factory=dict)
    bootstrap_port: int = 0
    flag: Path = Path()

    @property
    def p(self) -> Engine:
        return self.engines[P]

    @property
    def d(self) -> Engine:
        return self.engines[D]

    @property
    def is_routed(self) -> bool:
        return ROUTER in self.engines

    def room(self) -> dict[str, Any]:
        """What a router of SGLang's puts into both legs."""
        return {
            "bootstrap_host": HOST, "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": secrets.randbelow(1 << 62) + 1,
        }  # fmt: skip

    async def ask(self, session: aiohttp.ClientSession, prompt: Prompt, deadline_s: float, tokens: int) -> Answer:
        if self.is_routed:
            url = self.engines[ROUTER].url
            return await ask(session, url, prompt, deadline_s=deadline_s, tokens=tokens, likely=2)
        more = self.room()

        async def leg(engine: Engine) -> Answer:
            return await ask(session, engine.url, prompt, deadline_s=deadline_s, tokens=tokens, likely=2, more=more)

        prefill = asyncio.create_task(leg(self.p))
        try:
            return await leg(self.d)
        finally:
            prefill.cancel()  # it has ended; or D has failed, and nobody waits for it

    async def streamed(self, session: aiohttp.ClientSession, prompt: Prompt, tokens: int) -> Streamed:
        if self.is_routed:
            return await sent(session, self.engines[ROUTER].url, encoded(prompt, tokens))
        more = self.room()
        data = msgspec.json.encode(msgspec.json.decode(encoded(prompt, tokens)) | more)
        prefill = asyncio.create_task(ask(session, self.p.url, prompt, deadline_s=60.0, tokens=tokens, more=more))
        try:
            return await sent(session, self.d.url, data)
        finally:
            prefill.cancel()

    async def rests(self, session: aiohttp.ClientSession, within_s: float) -> list[str]:
        """Whose queues are not empty, or who counts tokens as used that nobody uses, when the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while busy := [engine.name for engine in (self.p, self.d) if not await is_idle(session, engine)]:
            if loop.time() > until:
                return busy
            await asyncio.sleep(0.5)
        return [engine.name for engine in (self.p, self.d) if leaked(engine)]


async def is_idle(session: aiohttp.ClientSession, engine: Engine) -> bool:
    """SGLang drops its cache when no request is anywhere in its queues, and only then."""
    try:
        async with asyncio.timeout(10.0), session.post(f"{engine.url}/flush_cache") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def leaked(engine: Engine) -> bool:
    """SGLang counts its pages when it is idle, and says which are missing."""
    with contextlib.suppress(OSError), engine.log.open("rb") as log:
        return LEAKED in log.read(LOG_MAX).decode(errors="replace")
    return False


def words(python: str, model: Path, port: int, device: Device, sizes: SglangSizes) -> list[str]:
    """The command of one engine, but for its disaggregation."""
    share = "0.85" if sizes.is_dummy else "0.5"
    own = ["torch_native", "--device", "cpu"] if device == "cpu" else ["triton", "--mem-fraction-static", share]
    dtype = ["bfloat16", "--load-format", "dummy"] if sizes.is_dummy else ["float32"]
    return [
        python, "-m", MODULE, "--model-path", str(model), "--host", HOST, "--port", str(port), "--dtype", *dtype,
        "--attention-backend", *own, "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--page-size", str(PAGE_TOKENS), "--chunked-prefill-size", str(sizes.chunk_tokens),
        "--max-total-tokens", str(sizes.pool_tokens), "--max-running-requests", "32", "--random-seed", "1",
        "--disable-cuda-graph", "--skip-server-warmup", *(["--disable-overlap-schedule"] if device == "cpu" else []),
    ]  # fmt: skip


def servers(python: str, home: Path, logs: Path, device: Device, sizes: SglangSizes) -> tuple[Engine, list[SglangPair]]:
    """The one alone and the pairs, not started yet."""
    logs.mkdir(parents=True, exist_ok=True)
    model = launching.tiny_model(python, sizes.model, 1)
    around = {"HF_HUB_OFFLINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
    around |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}

    def engine(name: str, backend: str, port: int, more: Sequence[str], variables: Mapping[str, str]) -> Engine:
        command = [*words(python, model, port, device, sizes), *more]
        return Engine(name, port, command, {**around, **variables}, logs / f"sglang-{backend}-{name}.log")

    (port,) = free_ports(1)
    alone = engine(ALONE, "one", port, [], {})
    return alone, [_pair(backend, home / backend, logs, sizes, engine) for backend in sizes.backends]


def _pair(backend: str, home: Path, logs: Path, sizes: SglangSizes, engine: Any) -> SglangPair:
    home.mkdir(parents=True, exist_ok=True)
    pair = SglangPair(backend, flag=home / MISPLACE)
    ports = free_ports(5)
    pair.bootstrap_port = _two_free()
    if backend == "kvbaton":
        keys = home / "keys"
        keyring.mint(keys, [ROUTER, f"{P}:prefill", f"{D}:decode"])
        known = ["--keys", str(keys), "--registry-port", str(ports[3])]
        argv = fronts.kvbaton_router(ports[2], known, 0.0)
        pair.engines[ROUTER] = Engine(ROUTER, ports[2], argv, {}, logs / "sglang-kvbaton-router.log")
    for name, port in ((P, ports[0]), (D, ports[1])):
        mode = "prefill" if name == P else "decode"
        more = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", backend]
        more += ["--disaggregation-bootstrap-port", str(pair.bootstrap_port)]
        variables = dict(NIXL_BEST) if backend == "nixl" else {}
        if backend == "kvbaton":
            told: dict[str, Any] = {
                "name": name, "keys": str(home / "keys"), "registry": f"tcp://{HOST}:{ports[3]}",
                "http_address": f"{HOST}:{port}", "control_host": HOST,
            }  # fmt: skip
            told |= {"model_id": "8b-dummy"} if sizes.is_dummy else {}
            told |= {"fault_misplace_while": str(pair.flag)} if name == D and not sizes.is_dummy else {}
            (home / f"{name}.json").write_bytes(msgspec.json.encode(told))
            variables[CONFIG_ENV] = str(home / f"{name}.json")
        pair.engines[name] = engine(name, backend, port, more, variables)
    return pair


def _two_free() -> int:
    """A port whose next one is free too: P's control socket."""
    return next(port for port in free_ports(32) if is_free(HOST, port + CONTROL_AFTER_BOOTSTRAP))
