"""Runs workers of an old release beside workers of this tree, behind this tree's router, and compares every answer.

    git archive <commit> | tar -x -C /tmp/release
    cp src/kvbaton/transports/core/_mover*.so /tmp/release/src/kvbaton/transports/core/
    .venv/bin/python tools/mixed_releases.py --old /tmp/release

Real processes and sockets. The exit status is 0 if every answer is a single engine's, every prompt that is long enough
was handed over, nothing is left pinned, and each pair talked in the version that it should.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.local_cluster.answer_check import MAX_TOKENS, CheckPrompt, prompts
from kvbaton.router.openai_api import MODE_HEADER

HERE = Path(__file__).resolve().parents[1]
START_S = 90.0
MODES = ("pull", "stream", "push")


@contextmanager
def process(tree: Path, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`kvbaton <words>` of that tree, until the end of the block."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    code = "import sys; from kvbaton.cli.main import main; sys.exit(main())"
    with log.open("wb") as out:
        started = subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stdout=out, stderr=out)
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(40)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def stats(session: aiohttp.ClientSession, port: int) -> dict[str, Any]:
    async with session.get(f"http://127.0.0.1:{port}/stats") as answer:
        found: dict[str, Any] = await answer.json(content_type=None)
        return found


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, mode: str, salt: str) -> str:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "cache_salt": salt}
    async with session.post(url + "/v1/completions", json=body, headers={MODE_HEADER: mode}) as answer:
        data = await answer.json(content_type=None)
    return str(data["choices"][0]["text"]) if answer.status == 200 else f"\nstatus {answer.status}: {data}"


async def until_ready(session: aiohttp.ClientSession, url: str, ports: list[int]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            peers = [(await stats(session, port)).get("peers", 1) for port in ports]
            if all(peers) and (await ask(session, url, "a", "pull", "first"))[0:1] != "\n":
                return
        except (aiohttp.ClientError, OSError):
            pass
        if time.monotonic() > deadline:
            raise SystemExit("the workers did not find each other in time; see the logs")
        await asyncio.sleep(0.2)


async def at_rest(session: aiohttp.ClientSession, ports: list[int]) -> int:
    deadline = time.monotonic() + 20
    while pins := sum([(await stats(session, port))["pins"] for port in ports]):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return pins


async def pair(old: Path, p: str, d: str, transport: str, asked: list[CheckPrompt], expected: list[str]) -> bool:
    trees, good = {"old": old, "new": HERE}, True
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys, logs = str(Path(folder, "keys")), Path(folder)
        with process(HERE, logs / "keys.log", "keys", "new", keys, "p", "d") as made:
            made.wait(60)
        front, registry, *ports = (free_port() for _ in range(4))
        ports_of = ("--registry-port", str(registry), "--port", str(front))
        router = ("router", "--fallback", "strict", "--keys", keys, *ports_of)  # D alone would hide a failed handoff
        stack.enter_context(process(HERE, logs / "router.log", *router))
        for name, role, tree, port in (("p", "prefill", p, ports[0]), ("d", "decode", d, ports[1])):
            words = ("worker", "--name", name, "--role", role, "--keys", keys, "--transport", transport)
            words += ("--registry", f"tcp://127.0.0.1:{registry}", "--http-port", str(port), "--policy", "fail")
            stack.enter_context(process(trees[tree], logs / f"{name}.log", *words))
        url = f"http://127.0.0.1:{front}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
            try:
                await until_ready(session, url, ports)
            except SystemExit:
                for log in logs.glob("*.log"):
                    print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
                raise
            for mode in MODES:
                before = await stats(session, ports[1])
                calls = [ask(session, url, each.text, mode, f"{transport}-{mode}") for each in asked]
                answers = await asyncio.gather(*calls)
                pins, after = await at_rest(session, ports), await stats(session, ports[1])
                same = sum(got == right for got, right in zip(answers, expected, strict=True))
                delivered = after["delivered_total"] - before["delivered_total"]
                needed = sum(each.moves for each in asked)
                ok = same == len(asked) and delivered >= needed and pins == 0
                good = good and ok
                wrong = next((got for got, right in zip(answers, expected, strict=True) if got != right), "")[:200]
                told = f"{same} of {len(asked)} answers the same, {delivered} handoffs ({needed} needed), {pins} pins"
                print(f"P {p}, D {d}, {transport}, {mode}: {told} {'ok' if ok else 'NOT OK ' + wrong}", flush=True)
            told = (
                (await stats(session, ports[0])).get("sessions_total"),
                (await stats(session, ports[1])).get("versions"),
            )
            print(f"  P's sessions by version: {told[0] or 'not told'}; D's link: {told[1] or 'not told'}", flush=True)
            version = 2 if p == d == "new" else 1
            good = good and told[0] in (None, {str(version): 1}) and told[1] in (None, {"p": version})
    return good


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True, help="tree of the old release")
    parser.add_argument("--transport", default="shm,tcp", help="each of these alone (default: shm,tcp)")
    options = parser.parse_args()
    asked = prompts(16)
    expected = reference_answers([each.text for each in asked], MAX_TOKENS, seed=7)
    good = True
    for transport in options.transport.split(","):
        for p, d in (("old", "new"), ("new", "old"), ("new", "new")):
            good = await pair(options.old.resolve(), p, d, transport, asked, expected) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
