"""Conversations of several turns with three clusters at once: D keeps turns, D keeps none, one aggregated engine.

Laws: every cluster is asked the same, turn by turn, in an order that rotates; the time to the first token is the
client's. Answers are compared: greedy, they must be the same. Figures are medians over conversations.
"""

from __future__ import annotations

import contextlib
import random
import statistics

import aiohttp
import msgspec

from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.local_cluster.embedded_cluster import ClusterPlan, Startable, places, running
from kvbaton.local_cluster.vllm_engine import (
    TINY_KINDS,
    TINY_SEED,
    ServerOptions,
    VllmHandoff,
    VllmPlan,
    fetch,
    find_python,
    tiny_model,
)
from kvbaton.processes.child_process import Say
from kvbaton.processes.operator_control import told_to_stop
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton_proof.bench.kit.lab_pages import Findings, Table
from kvbaton_proof.bench.load.open_loop import request_body, streamed

TARGETS = ("turns", "plain", "aggregated")
KEEP_S = 300.0
REQUEST_S = 300.0
_WORKER = WorkerOptions(name="p0", role="prefill", keys="-", registry="tcp://127.0.0.1:1", blocks=4096)
_WORDS = (
    "a", "baton", "is", "handed", "over", "by", "the", "runner", "who", "has", "it", "to", "the", "runner", "who",
    "will", "have", "it", "next",
)  # fmt: skip


class TalkShape(msgspec.Struct, frozen=True):
    """How conversations go, in words or tokens."""

    turns: int = 5
    first: int = 1200  # of the first prompt
    answer: int = 128
    more: int = 64  # that the client adds at each turn
    conversations: int = 5


class TalkReport(msgspec.Struct, kw_only=True):
    """What came of it."""

    engine: str
    shape: TalkShape
    ttft_ms: dict[str, list[float]]  # by target: the median of each turn
    taken_tokens: float | None  # that P did not compute, because D had them
    turns: dict[str, int]  # the router's, of the cluster that keeps them
    wrong: int  # answers that differ from the aggregated engine's

    @property
    def is_right(self) -> bool:
        return self.wrong == 0


def server_of(python: str | None, shape: TalkShape) -> ServerOptions:
    """vLLM with a tiny model, made now if need be, and room for a whole conversation."""
    python = find_python(python)
    context = shape.first + shape.turns * (shape.answer + shape.more)
    model = tiny_model(python, TINY_KINDS[0], TINY_SEED)
    return ServerOptions(python=python, model=str(model), served_name="tiny", max_model_len=max(2048, context + 64))


def plans(server: ServerOptions | None) -> dict[str, Startable]:
    """The three clusters; without `server` of embedded engines."""
    made: dict[str, Startable] = {}
    for name in TARGETS:
        alone, turn_s = name == "aggregated", KEEP_S if name == "turns" else 0.0
        settings = RouterSettings(turn_s=turn_s, fallback=Fallback.LOCAL if alone else Fallback.STRICT)
        if server is not None:
            handoff = VllmHandoff(name="-", keys="-", registry="-", http_address="-", turn_s=turn_s)
            where = tuple(places(0 if alone else 1, 1, 1, 1))
            made[name] = VllmPlan(places=where, server=server, handoff=handoff, settings=settings)
        else:
            worker = msgspec.structs.replace(_WORKER, turn_s=turn_s)
            made[name] = ClusterPlan(
                prefills=0 if alone else 1, decodes=1, tp_prefill=1, tp_decode=1, worker=worker, settings=settings
            )
    return made


async def measured(engine: str, server: ServerOptions | None, shape: TalkShape, say: Say) -> TalkReport:
    """All conversations. RuntimeError if a turn is not answered in full."""
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(told_to_stop())
        limit = aiohttp.ClientTimeout(total=REQUEST_S)
        urls, session = {}, await stack.enter_async_context(aiohttp.ClientSession(timeout=limit))
        for name, plan in plans(server).items():
            say(f"starting {name}")
            cluster = await stack.enter_async_context(running(plan, say, stop))
            urls[name] = cluster.front.url
        times: dict[str, list[list[float]]] = {name: [[] for _ in range(shape.turns)] for name in TARGETS}
        wrong = 0
        model = server.served_name if server is not None else "kvbaton-tiny"
        for number in range(shape.conversations + 1):  # the first warms all of them up
            talk = _Talk(random.Random(number), shape, server is not None)
            for turn in range(shape.turns):
                answers = {}
                for name in (*TARGETS[number % 3 :], *TARGETS[: number % 3]):
                    answer, seconds = await streamed_turn(session, urls[name], model, talk.prompt, shape.answer)
                    answers[name] = answer
                    if number:
                        times[name][turn].append(seconds)
                wrong += sum(answer != answers["aggregated"] for answer in answers.values())
                talk.go_on(answers["aggregated"])
            say(f"{number} of {shape.conversations} conversations")
        stats = dict(msgspec.json.decode(await fetch(f"{urls['turns']}/stats"))["turns_total"])
        taken = None if server is not None else await _taken(urls["turns"])
    medians = {name: [round(1e3 * statistics.median(each), 2) for each in of] for name, of in times.items()}
    return TalkReport(engine=engine, shape=shape, ttft_ms=medians, taken_tokens=taken, turns=stats, wrong=wrong)


def findings(report: TalkReport) -> Findings:
    head = ("target", *(f"turn {turn + 1}" for turn in range(report.shape.turns)))
    rows = [[name, *(f"{ms:.1f}" for ms in report.ttft_ms[name])] for name in TARGETS]
    title = f"time to first token, ms, median of {report.shape.conversations} conversations ({report.engine} engines)"
    return Findings(
        title="turns of conversations", about="", command="kvbaton bench turns", tables=[Table(head, rows, title)],
        lines=[f"turns {report.turns}, tokens taken from D {report.taken_tokens}"],
        wrong=[f"wrong answers: {report.wrong}"] * (not report.is_right),
    )  # fmt: skip


class _Talk:
    def __init__(self, rng: random.Random, shape: TalkShape, tokens: bool) -> None:
        self._rng = rng
        self._shape = shape
        self._tokens = tokens
        self.prompt: str | list[int] = self._words(shape.first)

    def go_on(self, answer: str | list[int]) -> None:
        self.prompt = self.prompt + answer + self._words(self._shape.more)  # type: ignore[operator]

    def _words(self, count: int) -> str | list[int]:
        if self._tokens:
            return [self._rng.randrange(5, 95) for _ in range(count)]
        words = ""
        while len(words) < count:
            words += self._rng.choice(_WORDS)
        return words[:count]


async def streamed_turn(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str | list[int], answer: int
) -> tuple[str | list[int], float]:
    """The answer, in the kind of the prompt, and the seconds to its first token. RuntimeError if it is not whole."""
    is_tokens = not isinstance(prompt, str)
    more = {"return_token_ids": True} if is_tokens else {}
    stream = await streamed(session, url, request_body(prompt, answer, model=model, **more))
    whole = stream if isinstance(stream, str) else stream.answer(answer)
    if isinstance(stream, str) or isinstance(whole, str):
        raise RuntimeError(f"a turn was not answered: {whole}")
    return (stream.ids if is_tokens else "".join(stream.text)), whole.ttft_s


async def _taken(url: str) -> float:
    """Tokens that P did not compute, because D had them."""
    workers = msgspec.json.decode(await fetch(f"{url}/workers"))["workers"]
    stats = [msgspec.json.decode(await fetch(f"{each['url']}/stats")) for each in workers]
    return float(sum(each["turn_tokens_total"] for each in stats))
