"""vLLM's own load generator, `vllm bench serve`, as a process: its words, its deadline, its result.

Laws: it runs in a session of its own and is ended by its id, with all it started, when its time is up or nobody waits
any longer. What is measured begins when it says that it begins, after its warm-up, and ends when it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from kvbaton.processes.child_process import Program, end, start
from kvbaton_proof.bench.vllm.vllm_rows import BadResultError, Level, Told

DRIVER: Sequence[str] = ("-m", "kvbaton.engines.vllm.launch.load_generator")
WARMUPS = 4
START_S = 240.0  # importing vLLM takes 10 s alone, a minute on a busy machine
END_S = 10.0
LINES_KEPT = 20
_BEGINS = "Starting main benchmark run"
_ENDS = "Serving Benchmark Result"

Reading = TypeVar("Reading")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load on one URL."""

    url: str
    model: str
    served_name: str
    level: Level
    input_tokens: int
    output_tokens: int
    seed: int
    headers: Mapping[str, str] = {}

    def words(self, result: Path) -> list[str]:
        """What `vllm bench serve` is told."""
        words = ["--backend", "openai", "--base-url", self.url, "--model", self.model]
        words += ["--served-model-name", self.served_name, "--dataset-name", "random"]
        words += ["--random-input-len", str(self.input_tokens), "--random-output-len", str(self.output_tokens)]
        words += ["--num-prompts", str(self.level.requests), "--max-concurrency", str(self.level.concurrency)]
        words += ["--seed", str(self.seed), "--temperature", "0", "--num-warmups", str(WARMUPS), "--disable-tqdm"]
        words += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"]
        words += ["--save-result", "--save-detailed", "--result-dir", str(result.parent)]
        words += ["--result-filename", result.name]
        headers = [f"{name}={value}" for name, value in self.headers.items()]
        return [*words, "--header", *headers] if headers else words


class Outcome(msgspec.Struct, Generic[Reading], frozen=True, kw_only=True):
    """How a load ended; readings were taken as it began and as it ended."""

    told: Told | None = None
    began: Reading | None = None
    ended: Reading | None = None
    hung: bool = False
    said: str = ""  # what it said last, where there is no result


async def run(
    load: Load,
    python: Sequence[str],
    directory: Path,
    read: Callable[[int], Reading],
    *,
    deadline_s: float,
    start_s: float = START_S,
) -> Outcome[Reading]:
    """Carry a load out with `python`; `read` is called with the generator's id as it begins and as it ends."""
    result = directory / "load.json"
    result.unlink(missing_ok=True)
    variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [*python, *DRIVER, *load.words(result)]
    program = Program("load", "client", argv, env=variables, stop=signal.SIGKILL)
    child = await start(program, None, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    process = child.process
    watch: _Watch[Reading] = _Watch(process, read)
    try:
        hung = not await watch.until_over(start_s, deadline_s)
    finally:
        await end([child], END_S)
    said = " | ".join(watch.lines[-3:])
    told = None if hung or process.returncode else _result(result)
    return Outcome(told=told, began=watch.began, ended=watch.ended, hung=hung, said=said)


class _Watch(Generic[Reading]):
    """Follows what the generator says."""

    def __init__(self, process: asyncio.subprocess.Process, read: Callable[[int], Reading]) -> None:
        self.lines: list[str] = []
        self.began: Reading | None = None
        self.ended: Reading | None = None
        self._process = process
        self._read = read
        self._begun = asyncio.Event()

    async def until_over(self, start_s: float, deadline_s: float) -> bool:
        """False if it did not begin, or did not end, in time."""
        following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(start_s):
                await self._begun.wait()
            async with asyncio.timeout(deadline_s):
                await following
                await self._process.wait()
        except TimeoutError:
            return False
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        return True

    async def _follow(self) -> None:
        assert self._process.stdout is not None
        async for data in self._process.stdout:
            line = data.decode(errors="replace").strip()
            if _BEGINS in line:
                self.began = self._read(self._process.pid)
                self._begun.set()
            elif _ENDS in line:
                self.ended = self._read(self._process.pid)
            if line:
                self.lines = [*self.lines[1 - LINES_KEPT :], line]
        self._begun.set()  # it ended before it began: nothing to wait for


def _result(path: Path) -> Told | None:
    try:
        return Told.parse(json.loads(path.read_text()))  # not msgspec: a level without successes has NaNs
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise BadResultError(f"{path.name} of vllm bench serve is not JSON: {error}") from None
