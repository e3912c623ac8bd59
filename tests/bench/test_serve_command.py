"""`kvbaton bench serve` as an operator calls it: on a server that runs, on a cluster of its own, and on mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.cli.main import main
from kvbaton_proof.bench.serve.serve_report import Report

COMMAND = [sys.executable, "-m", "kvbaton.cli.main", "bench", "serve"]
MODE = "x-kvbaton-mode"
TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


class Server:
    """An OpenAI-compatible server in a thread, that does as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, dict[str, Any]]] = []  # mode and body, without warm-ups
        self.short_from = self.silent_from = 1 << 30  # requests from this one on are answered so
        self.is_silent = threading.Event()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 100}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_warmup = body["max_tokens"] == 2
        if not is_warmup:
            self.asked.append((request.headers.get(MODE), body))
        number = len(self.asked)
        if number >= self.silent_from:
            self.is_silent.set()
            await asyncio.Event().wait()
        tokens = body["max_tokens"] - (number >= self.short_from)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(TOKEN * tokens + b"data: [DONE]\n\n")
        await response.write_eof()
        return response


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


SMALL = ("--requests", "3", "--concurrency", "2", "--input-len", "20:30", "--output-len", "5", "--rounds", "2")


def run(*words: str) -> tuple[int, Report]:
    """Within this process: to start one costs a second."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["bench", "serve", *words, "--json"])
    assert out.getvalue().count("\n") == 1, out.getvalue()
    return status, msgspec.json.decode(out.getvalue(), type=Report)


def run_alone(*words: str) -> tuple[int, Report]:
    done = subprocess.run([*COMMAND, *words, "--json"], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, msgspec.json.decode(done.stdout, type=Report)


def test_targets_take_turns_with_one_plan_and_caches_of_their_own(server: Server) -> None:
    status, report = run("--target", f"a={server.url}#push", "--target", f"b={server.url}", *SMALL)
    assert status == 0 and report.ok and not report.wrong and report.engine == ""
    assert report.order == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert [mode for mode, _ in server.asked] == (["push"] * 3 + [None] * 3) * 2, "in rounds, part by part"
    bodies = [body for _, body in server.asked]
    parts = [bodies[at : at + 3] for at in range(0, 12, 3)]
    prompts = [sorted(body["prompt"] for body in part) for part in parts]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3], "the same requests for all"
    salts = [{body["cache_salt"] for body in part} for part in parts]
    assert all(len(each) == 1 for each in salts) and len(set.union(*salts)) == 4
    assert {body["model"] for body in bodies} == {"tiny"}
    assert [(each.target, each.right, each.same_answers) for each in report.targets] == [("a", 6, None), ("b", 6, 6)]
    assert report.ratios[0].base == "a" and report.parts[0].used.handed_over is None


def test_answers_that_are_not_whole_are_the_verdict(server: Server) -> None:
    server.short_from = 6
    status, report = run("--url", server.url, "--no-salt", *SMALL)
    assert status == 1 and not report.ok
    assert [dict(each.errors) for each in report.parts] == [{}, {"short answer": 1}]
    assert report.wrong == ["url, round 2: 1 of 3 requests failed: 1 × short answer"]
    assert all("cache_salt" not in body for _, body in server.asked)
    assert len({tuple(body["prompt"]) for _, body in server.asked}) == 6, "marked: no part finds another's beginnings"


def test_what_was_recorded_is_sent_again(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "sent.jsonl"
    words = ("--prefix-len", "10", "--prefixes", "2", "--record", str(trace), *SMALL)
    assert run("--url", server.url, *words)[0] == 0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == 3, "the first part is the record"
    sent_lengths = sorted(len(body["prompt"]) for _, body in server.asked[:3])  # two are under way at once
    assert sorted(line["input_length"] for line in lines) == sent_lengths
    status, report = run("--url", server.url, "--trace", str(trace), "--trace-speed", "10", "--rounds", "1")
    assert status == 0 and report.options["trace"] == "sent.jsonl"
    first, again = server.asked[:3], server.asked[6:]
    sent = [Counter(tuple(body["prompt"]) for _, body in part) for part in (first, again)]
    assert sent[0] == sent[1] and len(again) == 3
    assert report.parts[0].held_back_p99_ms is not None


def test_ctrl_c_prints_what_was_measured(server: Server, tmp_path: Path) -> None:
    server.silent_from = 5
    words = ["--url", server.url, "--requests", "3", "--concurrency", "1", "--output-len", "5", "--input-len", "20"]
    with open(tmp_path / "out", "w+") as out, open(tmp_path / "err", "w") as err:
        process = subprocess.Popen([*COMMAND, *words, "--rounds", "9", "--json"], stdout=out, stderr=err)
        try:
            assert server.is_silent.wait(60), (tmp_path / "err").read_text()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait(10)
    report = msgspec.json.decode((tmp_path / "out").read_text(), type=Report)
    assert report.stopped and not report.ok and not report.wrong
    assert [(each.round, each.right, each.unfinished) for each in report.parts] == [(1, 3, 0), (2, 1, 1)]


def test_a_cluster_of_its_own_is_measured_in_turns_and_gone_afterwards(tmp_path: Path) -> None:
    words = [
        "--compare", "aggregated,push", "--requests", "6", "--rounds", "2", "--concurrency", "3", "--input-len", "40",
        "--output-len", "4", "--warmup", "2", "--slo", "e2e=60", "--out", str(tmp_path), "--name", "small",
        "--transport", "shm",
    ]  # fmt: skip
    status, report = run_alone(*words)
    assert status == 0 and report.ok, report.wrong
    assert report.order == [(1, "aggregated"), (1, "push"), (2, "aggregated"), (2, "push")]
    alone, pushed = report.targets
    assert (alone.right, alone.good, alone.used.handed_over) == (12, 12, None)
    assert (pushed.right, pushed.good, pushed.used.handed_over) == (12, 12, 12)
    assert (pushed.same_answers, pushed.compared_answers) == (12, 12)
    assert pushed.used.held == () and pushed.used.engine_cpu_s is not None
    assert set(report.commands) == {
        "aggregated router", "aggregated d0", "aggregated d1", "disaggregated router", "disaggregated p0",
        "disaggregated d0",
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.json", "small.md", "small.svg"]
    assert msgspec.json.decode((tmp_path / "small.json").read_bytes(), type=Report).order == report.order
    for path in tmp_path.iterdir():
        for place in (str(tmp_path), "/kvbaton-bench-", sys.executable):
            assert place not in path.read_text(), f"{path.name} tells a place of this machine"
    port = report.commands["disaggregated router"].split("--port ")[1].split()[0]
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    assert f":{int(port):04X} 00000000:0000 0A" not in listening, "nothing is left of it"


BAD = [
    (["--rate", "0"], "argument --rate: got '0', expected requests/s above 0, or inf"),
    (["--rate", "x"], "argument --rate"),
    (["--concurrency", "0"], "argument --concurrency: got 0"),
    (["--requests", "0"], "argument --requests: got 0"),
    (["--seconds", "0"], "argument --seconds"),
    (["--input-len", "9:3"], "argument --input-len: got 9:3"),
    (["--slo", "p99=1"], "argument --slo: got 'p99=1'"),
    (["--url", "localhost:8000"], "argument --url: got 'localhost:8000', expected http://host:port"),
    (["--target", "http://h:1"], "argument --target"),
    (["--target", "a=http://h:1#pusch"], "argument --target: got the mode 'pusch'"),
    (["--target", "a=http://h:1", "--target", "a=http://h:2"], "argument --target: two are named a"),
    (["--compare", "pull,pusch"], "argument --compare: got 'pusch'"),
    (["--url", "http://h:1", "--prefill", "2"], "argument --prefill: running servers are not started"),
    (["--blocks", "9", "--engine", "vllm"], "argument --blocks: not an option of the vllm engine"),
    (["--kv-gib", "1"], "argument --kv-gib: not an option of the embedded engine; add: --engine vllm"),
    (["--no-salt"], "argument --no-salt"),
    (["--trace", "x", "--rate", "3"], "argument --rate: a trace has its own times"),
    (["--trace", "no-such-file"], "argument --trace: no-such-file: No such file"),
    (["--trace", "/dev/null"], "argument --trace: /dev/null: it is empty"),
    (["--trace-speed", "0"], "argument --trace-speed"),
    (["--trace-speed", "2"], "argument --trace-speed: it changes a trace; give --trace FILE too"),
    (["--trace", "x", "--input-len", "3"], "argument --input-len: a trace has its own prompts"),
    (["--prefixes", "2"], "argument --prefixes: --prefix-len is missing"),
    (["--out", "no-such-directory"], "argument --out: no-such-directory is not a directory"),
    (["--record", "no-such-directory/x"], "argument --record"),
    (["--name", "x"], "argument --name: it names the files of --out"),
    (["--name", "a/b", "--out", "."], "argument --name: got 'a/b'"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_what_cannot_be_meant_costs_one_line_and_starts_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status: int | str | None = 0
    try:
        status = main(["bench", "serve", *words])
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1 and said in err, err


def test_a_line_of_a_trace_that_cannot_be_meant_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0}\n')
    assert main(["bench", "serve", "--trace", str(trace)]) == 2
    assert "t.jsonl: line 2: fields: object missing required field `input_length`" in capsys.readouterr().err


def test_results_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.svg").touch()
    assert main(["bench", "serve", "--out", str(tmp_path), "--name", "x"]) == 2
    assert "x.svg exists already" in capsys.readouterr().err


def test_whoever_is_not_there_or_takes_less_is_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", server.url, "--input-len", "96", "--output-len", "5"]) == 2
    assert (
        "argument --input-len: prompt and answer have up to 101 tokens together, url accepts 100"
        in capsys.readouterr().err
    )
    with contextlib.ExitStack() as stack:
        gone = stack.enter_context(Server()).url
    assert main(["bench", "serve", "--target", f"pd={gone}"]) == 2
    err = capsys.readouterr().err
    assert f"target pd: {gone} cannot be reached (Connection refused)" in err and "kvbaton up" in err
