"""vLLM servers as processes, for tests: start, wait, ask, read numbers, hurt, stop.

Laws: an engine is its whole process tree, and everything here acts on all of it. Whatever waits has a deadline, and an
error that says what the engine logged last. Standard library alone, besides the keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.control import keyring
from kvbaton.local_cluster import vllm_engine
from kvbaton.local_cluster.vllm_child import mapped
from tests.vllm.forking import Forked, forked

READY_S = 480.0
"""Only a hang takes so long: an engine that dies is noticed at once."""
STOP_S = 20.0
ASK_S = 120.0
TAIL_LINES = 40
SERVED_NAME = "tiny"
_HOST = "127.0.0.1"
_given: set[int] = set()  # ports, to whoever may not have bound them yet
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


class EngineError(AssertionError):
    """An engine did not do what a test needs of it; the message ends with its log."""


class Answer(msgspec.Struct, frozen=True):
    """A greedy completion. `tokens` are texts, as the OpenAI API tells them; `logprobs` are of these tokens."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish: str | None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class Engine:
    """One vLLM server and all its processes."""

    process: subprocess.Popen[bytes] | Forked
    port: int
    log: Path
    command: Sequence[str]
    surroundings: Mapping[str, str]
    stopped: bool = field(default=False)
    segments: set[str] = field(default_factory=set)  # of /dev/shm

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> list[int]:
        """Every process of it that lives, the server first: it leads a session that none of them leaves."""
        return sorted(pid for pid in _all_pids() if _session(pid) == self.process.pid)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def wait_ready(self, within_s: float = READY_S) -> Engine:
        deadline = time.monotonic() + within_s
        while not self.is_healthy():
            if not self.is_alive:
                raise self._error(f"ended with status {self.process.returncode} before it could serve")
            if time.monotonic() > deadline:
                raise self._error(f"not ready within {within_s:.0f} s")
            time.sleep(0.2)
        return self

    def ask(self, prompt: str | Sequence[int], max_tokens: int = 16, **more: Any) -> Answer:
        return ask(self.url, prompt, max_tokens, **more)

    def metrics(self) -> dict[str, float]:
        return metrics(self.url)

    def tail(self, lines: int = TAIL_LINES) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def stop(self, within_s: float = STOP_S) -> None:
        """Ask the server, wait, then end what is left."""
        if self.stopped:
            return
        self.sigcont()
        self.segments |= set(mapped(self.process.pid))  # vLLM kills what would remove them
        if self.is_alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
        self.kill9()

    def kill9(self) -> None:
        """End everything at once."""
        self.segments |= set(mapped(self.process.pid))
        self._signal(signal.SIGKILL)
        self.process.wait(STOP_S)
        until(lambda: not self.pids(), STOP_S, "killed processes are gone")
        for name in self.segments:
            Path("/dev/shm", name).unlink(missing_ok=True)
        self.stopped = True

    def start_again(self) -> Engine:
        """Another life of it, on the same ports; its log goes on."""
        assert self.stopped
        return _launched(self.command, self.surroundings, self.port, self.log, "ab")

    def sigstop(self) -> None:
        self._signal(signal.SIGSTOP)

    def sigcont(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _error(self, said: str) -> EngineError:
        return EngineError(f"engine on port {self.port} {said}; {self.log} ends with:\n{self.tail()}")


IN_THE_CORE = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""The model runs in the engine core's process, as with one GPU; vLLM for CPUs gives it one of its own where not told.
A server then is two processes instead of three, each of which imports vLLM for ten seconds of a core."""


def start_engine(
    python: str | Path,
    model: str | Path,
    port: int,
    *,
    kv_transfer_config: Mapping[str, Any] | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log: Path,
) -> Engine:
    """Start a server; `Engine.wait_ready` waits for it. `env` goes on top of what a small machine needs; what is set to
    nothing is left out."""
    command = vllm_engine.server_argv(str(python), str(model), SERVED_NAME, port)
    if kv_transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
    told = {**os.environ, **vllm_engine.environment(kv_gib=1), **(env or {})}
    surroundings = {name: value for name, value in told.items() if value}
    log.parent.mkdir(parents=True, exist_ok=True)
    return _launched([*command, *extra_args], surroundings, port, log, "wb")


def _launched(command: Sequence[str], surroundings: Mapping[str, str], port: int, log: Path, how: str) -> Engine:
    python, *words = command
    if python == sys.executable:
        return Engine(forked(words, surroundings, log, how), port, log, command, surroundings)
    with log.open(how) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=surroundings, start_new_session=True,
        )  # fmt: skip
    return Engine(process, port, log, command, surroundings)


def connector_config(
    role: str, name: str, key_directory: Path, port: int, *, policy: str = "recompute", **extra: Any
) -> dict[str, Any]:
    """`--kv-transfer-config` of a worker; `role` is vLLM's word: kv_producer, kv_consumer, kv_both."""
    own = {"name": name, "keys": str(key_directory), "http_address": f"{_HOST}:{port}", **extra}
    return vllm_engine.kv_transfer_config(role, policy, own)


def free_port() -> int:
    """A port that is free now, below those that the kernel gives to whoever asks for any: it stays free for a while.

    Another one each time: an engine binds its own half a minute later.
    """
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            if port not in _given:
                _given.add(port)
                return port


def make_cluster_keys(directory: Path, names: Sequence[str]) -> Path:
    """Keys of a router and of workers, in `directory`."""
    keyring.mint(directory, ["router", *names])
    return directory


def ask(url: str, prompt: str | Sequence[int], max_tokens: int = 16, **more: Any) -> Answer:
    """A greedy completion with logprobs, from an engine or a router."""
    headers = more.pop("headers", {})
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, **more}
    return answer_of(post(f"{url}/v1/completions", body, headers))


def answer_of(told: Mapping[str, Any]) -> Answer:
    choice = told["choices"][0]
    likely = choice.get("logprobs") or {}
    tokens, logprobs = likely.get("tokens") or (), likely.get("token_logprobs") or ()
    params = told.get("kv_transfer_params")
    return Answer(choice["text"], tuple(tokens), tuple(logprobs), choice.get("finish_reason"), params)


def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> dict[str, Any]:
    """An answer's JSON; a status other than 200 is an EngineError with the body."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=ASK_S) as response:
            told: dict[str, Any] = json.loads(response.read())
            return told
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}: status {error.code}: {error.read().decode(errors='replace')[:500]}") from None


def metrics(url: str) -> dict[str, float]:
    """`/metrics` by name, and by name{labels} where there are labels; a name's value is the sum over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample[1], sample[2], float(sample[3])
        found[name] = found.get(name, 0.0) + value
        if labels:
            found[f"{name}{{{labels}}}"] = value
    return found


def until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """Poll until `condition` gives something true."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise EngineError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.05)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int | None:
    """The session that a living process belongs to."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, _parent, _group, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        return None if state == "Z" else int(session)
    return None
