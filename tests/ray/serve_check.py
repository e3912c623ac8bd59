"""`make ray-test`: 2 prefill and up to 3 decode replicas under Ray Serve; answers, scaling, and replicas killed.

    python -m tests.ray.serve_check

Law: the exit status is 0 only if every answer is a plain engine's, every prompt was handed over while nothing was
broken, and no request failed later than `GRACE_S` after a kill. What is asserted is printed with its number.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvbaton.engines.vllm.launch.launching import environment, tiny_model
from tests.ray.ray_cluster import DECODE, PREFILL, RayApp, children_of, engine_of, llm_config, ray_app, until
from tests.ray.ray_load import MODES, Asked, Clients
from tests.ray.ray_membership import membership

GRACE_S = 5.0
AFTER_KILL_S = 20.0
REFERENCE_S = 900.0
A_MODE = 16
FRESH = 6 + 3 * A_MODE + 12 + 3 * A_MODE
PROMPTS = FRESH + 200


def main() -> int:
    begun = time.monotonic()
    model = tiny_model(sys.executable, "llama", 7)
    prompts = _prompts(PROMPTS)
    say(f"asking one plain engine for {PROMPTS} answers", begun)
    answers = _reference(model, prompts)
    with tempfile.TemporaryDirectory() as place, membership(Path(place)) as extra:
        say("starting 2 prefill and 1 decode replicas", begun)
        with ray_app(llm_config(model, extra, 2), llm_config(model, extra, 1), {}) as app:
            app.wait_for(PREFILL, 2)
            app.wait_for(DECODE, 1)
            say("up", begun)
            clients = Clients(app.url, prompts, answers, FRESH)
            clients.ask_all(6, "pull")  # kernels are compiled, pairs made
            _all_modes(app, clients, begun)
            _scaled(app, clients, begun)
            killed = [_killed(app, clients, PREFILL, begun), _killed(app, clients, DECODE, begun, engine=True)]
            app.wait_for(PREFILL, 2)
            app.wait_for(DECODE, 3)
            say("both were replaced", begun)
            clients.ask_all(12, "pull")
            _all_modes(app, clients, begun)
            ends = app.ends()
            family = [each for deployment in (PREFILL, DECODE) for each in _family(app, deployment)]
    until(lambda: not any(map(_lives, family)), 30, "all processes of all replicas have ended")
    wrong = [each for each in clients.records if not each.error and not each.right]
    failed = [each for each in clients.records if each.error]
    assert not wrong, f"{len(wrong)} wrong answers, of {sorted({each.mode for each in wrong})}"
    say(f"ok: {len(clients.records) - len(failed)} answers compared, 0 wrong; handoffs by their ends, of the decode "
        f"replicas that live: {dict(ends)}; "
        f"{len(killed)} replicas killed ({', '.join(killed)}); {len(failed)} requests failed, none later than "
        f"{GRACE_S:.0f} s after a kill", begun)  # fmt: skip
    return 0


def _all_modes(app: RayApp, clients: Clients, begun: float) -> None:
    """Every mode, nothing broken: all answers right, all prompts handed over."""
    for mode in MODES:
        before = _settled(app)
        asked = clients.ask_all(A_MODE, mode)
        _all_right(asked, mode)
        until(lambda seen=before: app.ends()["delivered"] - seen >= A_MODE, 15, f"{A_MODE} handoffs by {mode}")
        say(
            f"{mode}: {len(asked)} answers equal to the plain engine's, {app.ends()['delivered'] - before} handoffs",
            begun,
        )


def _scaled(app: RayApp, clients: Clients, begun: float) -> None:
    """Decode from 1 to 3 under load; then all three have taken handoffs."""
    first = len(clients.records)
    with clients.under_load():
        app.scale(DECODE, 3)
        app.wait_for(DECODE, 3)
        time.sleep(AFTER_KILL_S / 2)
    _all_right(clients.records[first:], "while decode was scaled")
    say(f"decode scaled from 1 to 3 under load: {len(clients.records) - first} answers, all right", begun)


def _killed(app: RayApp, clients: Clients, deployment: str, begun: float, *, engine: bool = False) -> str:
    """SIGKILL of a replica's process, or of its engine's, under load."""
    replica, process = sorted(app.replicas(deployment).items())[0]
    target = engine_of(process) if engine else process
    family = [process, *children_of(process)]
    first = len(clients.records)
    with clients.under_load():
        time.sleep(3)
        os.kill(target, signal.SIGKILL)
        at = time.monotonic()
        time.sleep(AFTER_KILL_S)
    records = clients.records[first:]
    failed = [each for each in records if each.error]
    late = [each for each in failed if each.ended > at + GRACE_S]
    longest = max(each.ended - each.begun for each in records)
    what = f"{deployment.partition(':')[0].lower()} {'engine' if engine else 'replica'}"
    last = max((each.ended - at for each in failed), default=0.0)
    say(f"{what} killed: {len(records)} requests, {len(failed)} failed (the last {last:.1f} s after), "
        f"slowest {longest:.1f} s; ends {dict(app.ends())}", begun)  # fmt: skip
    assert not late, f"{len(late)} requests failed later than {GRACE_S} s: {late[:3]}"
    _all_right([each for each in records if not each.error], what)
    until(lambda: not any(map(_lives, family)), 15, f"all processes of {replica} have ended")
    return what


def _family(app: RayApp, deployment: str) -> list[int]:
    """The processes of all replicas, and of their engines."""
    return [each for process in app.replicas(deployment).values() for each in (process, engine_of(process))]


def _all_right(asked: Sequence[Asked], what: str) -> None:
    bad = [each for each in asked if each.error or not each.right]
    assert not bad, f"{what}: {len(bad)} of {len(asked)} were not answered as by one engine: {bad[:3]}"


def _settled(app: RayApp) -> int:
    """Handoffs delivered, once Ray tells the same twice."""
    seen = -1
    while (now := app.ends()["delivered"]) != seen:
        seen = now
        time.sleep(2.5)
    return seen


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _prompts(count: int) -> list[list[int]]:
    """Of 130 to 520 tokens: one to four blocks, no two with a common beginning."""
    rng = random.Random(18)
    return [[rng.randrange(10, 500) for _ in range(rng.randrange(130, 520))] for _ in range(count)]


def _reference(model: Path, prompts: list[list[int]]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.reference_answers", str(model)],
        input=json.dumps(prompts), capture_output=True, text=True, timeout=REFERENCE_S, check=False,
        env={**os.environ, **environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[str] = json.loads(done.stdout)
    return found


def say(text: str, begun: float) -> None:
    print(f"ray-test: {time.monotonic() - begun:4.0f} s: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
