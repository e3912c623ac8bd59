"""`kvbaton up` with real processes: it serves, tells of deaths, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.local_cluster import answer_check as checking

UP = [sys.executable, "-m", "kvbaton.cli.main", "up", "--port", "0", "--json"]
pytestmark = pytest.mark.slow


def until(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    """Poll until `condition` gives something true."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            found = condition()
            if found:
                return found
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.loads(response.read())


def ask(url: str, prompt: str = "hello there") -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 5, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(json.loads(response.read())["choices"][0]["text"])


def is_alive(pid: int) -> bool:
    """Not ended, nor waiting to be buried by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def up(tmp_path: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], Path]]:
    """A cluster that serves: its process, what it said as JSON, and the file of what it says on stderr."""
    said = tmp_path / "stderr"
    with said.open("w") as stderr:
        process = subprocess.Popen([*UP, *words], stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline() or "{}")
        assert facts, said.read_text()
        yield process, facts, said
    finally:
        process.terminate()
        process.wait(60)


def lines(log: Path) -> list[dict[str, Any]]:
    """A log in JSON; the line that says that a worker serves is a result, for who started it."""
    return [json.loads(line) for line in log.read_text().splitlines() if " serves http" not in line or "{" in line]


def test_it_serves_until_it_is_told_to_stop_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("up:\n  decode: 2\n")
    config = ("--config", str(tmp_path / "cluster.yaml"))
    with up(tmp_path, *config, "--log-format", "json") as (process, facts, said):
        pids = [worker["pid"] for worker in facts["workers"]]
        assert [worker["name"] for worker in facts["workers"]] == ["p0", "d0", "d1"]
        assert len(ask(facts["url"])) > 0
        assert get(f"{facts['url']}/health")["pairs"]["push"] == 2
        assert all(map(is_alive, pids))
        at_p0 = lines(Path(facts["dir"]) / "p0.log")  # as the command that started it
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not any(map(is_alive, pids))
        assert not Path(facts["dir"]).exists()
    told = lines(said)
    (request,) = {line["request"] for line in told if line.get("path") == "/v1/completions"}
    assert request in {line["request"] for line in at_p0 if line.get("path") == "/v1/completions" and line["ms"] > 0}
    stopping = [line["message"] for line in told if line.get("code") == "stopping"]
    assert stopping == ["[stopping] SIGINT: stopping", "[stopping] drained: every request was answered"]
    assert {line["level"] for line in (*told, *at_p0)} == {"INFO"}


def test_a_death_is_told_with_the_command_that_starts_the_worker_again(tmp_path: Path) -> None:
    with up(tmp_path) as (_, facts, said):
        first = ask(facts["url"])
        victim = facts["workers"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: f"worker d0 (pid {victim['pid']}) was killed by SIGKILL" in said.read_text())
        assert victim["command"] in said.read_text()
        again = subprocess.Popen(shlex.split(victim["command"]), stdout=subprocess.DEVNULL)
        try:
            until(lambda: said.read_text().count("[worker-joined] decode worker d0") == 2)
            assert ask(facts["url"]) == first
        finally:
            again.terminate()
            assert again.wait(60) == 0


def test_workers_end_and_keys_are_gone_when_their_parent_is_killed(tmp_path: Path) -> None:
    with up(tmp_path) as (process, facts, _):
        secret = Path(facts["dir"]) / "keys" / "secret" / "p0.json"
        assert secret.exists()
        process.kill()
        process.wait(60)
        until(lambda: not any(is_alive(worker["pid"]) for worker in facts["workers"]))
        until(lambda: not secret.exists() and not (Path(facts["dir"]) / "keys").exists())


def test_a_router_of_its_own_serves_workers_that_register(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    assert cli.main(["keys", "new", keys, "p0", "d0"]) == 0
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"router:\n  keys: {keys}\n  port: 0\n  registry_port: 1\nworker:\n  keys: {keys}\n")
    program = [sys.executable, "-m", "kvbaton.cli.main"]
    words = [*program, "router", "--config", str(settings)]
    ports = {"KVBATON_ROUTER__REGISTRY_PORT": "0"}
    router = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **ports})
    started = [router]
    try:
        assert router.stdout is not None
        url, registry = re.findall(r"\S+://[^/,\s]+", router.stdout.readline())
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            words = ["worker", "--config", str(settings), "--registry", registry, "--role", role]
            named = {**os.environ, "KVBATON_WORKER__NAME": name}
            started.append(subprocess.Popen([*program, *words], stdout=subprocess.DEVNULL, text=True, env=named))
        until(lambda: get(f"{url}/health")["status"] == "ok")
        assert len(ask(url)) > 0
    finally:
        for process in reversed(started):
            process.terminate()
            assert process.wait(60) == 0


def test_the_check_passes_and_says_so_in_one_object() -> None:
    words = [*UP, "--check", "--mode", "push", "--transport", "tcp", "--tp-prefill", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["ok"], verdict["pins"], len(verdict["rows"])) == (True, 0, 1)
    assert verdict["identical"] == verdict["requests"] > 20
    assert verdict["streams"]["whole"] == verdict["streams"]["streams"] > 1
    assert verdict["streams"]["moved"] > 0, "a D was killed under them"


def test_the_check_fails_when_one_answer_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = checking._reference

    def almost_right(texts: list[str], *given: int) -> list[str]:
        first, *rest = right(texts, *given)
        return [f"{first[:-1]}\x7f", *rest]

    monkeypatch.setattr(checking, "_reference", almost_right)
    assert cli.main(["up", "--check", "--mode", "pull", "--transport", "shm", "--port", "0"]) == 1
    out = capsys.readouterr().out
    assert "differs: " in out
    assert out.splitlines()[-1] == "verdict: NOT ok"


def test_a_worker_that_cannot_start_ends_the_command_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--port", "0", "--block-tokens", "7"]) == 2
    _, err = capsys.readouterr()
    assert "exited with status" in err
    assert "block_tokens" in err.splitlines()[-1]


def stream_of(url: str, max_tokens: int) -> Any:
    """An answer that comes token by token; its head and first event are here."""
    body = {"prompt": "count", "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    response = urllib.request.urlopen(request, timeout=60)
    assert response.readline().startswith(b"data: ")
    return response


def test_requests_in_flight_are_finished_at_ctrl_c(tmp_path: Path) -> None:
    with up(tmp_path) as (process, facts, said):
        with stream_of(facts["url"], 1500) as response:
            process.send_signal(signal.SIGINT)
            until(lambda: "requests in flight have 30 s" in said.read_text())
            rest = response.read()
        assert rest.rstrip().endswith(b"data: [DONE]") and b'"error"' not in rest
        assert process.wait(60) == 0
    assert "drained: every request was answered" in said.read_text()


def test_a_second_ctrl_c_ends_them_at_once(tmp_path: Path) -> None:
    with up(tmp_path, "--drain-s", "600") as (process, facts, said):
        os.kill(facts["workers"][1]["pid"], signal.SIGSTOP)  # so that its request does not end by itself
        waiting = threading.Thread(target=lambda: ended(facts["url"]))
        waiting.start()
        until(lambda: get(f"{facts['url']}/stats")["in_flight"] == 1)
        process.send_signal(signal.SIGINT)
        until(lambda: "requests in flight have 600 s" in said.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        waiting.join(60)
    assert "requests are broken off" in said.read_text()


def ended(url: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(url)


def test_a_worker_is_restarted_by_its_name_and_a_worker_of_nobody_is_not(tmp_path: Path) -> None:
    kvbaton = [sys.executable, "-m", "kvbaton.cli.main"]
    with up(tmp_path, "--prefill", "2") as (_, facts, said):
        where = ["--keys", f"{facts['dir']}/keys", "--registry", facts["registry"]]

        def restart(*words: str) -> subprocess.CompletedProcess[str]:
            words = ("restart", *words, *where, "--json")
            return subprocess.run([*kvbaton, *words], capture_output=True, text=True, timeout=300, check=False)

        first, before = ask(facts["url"]), lives(facts["url"])
        done = restart("p1")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["successor"] == "p1"
        after = lives(facts["url"])
        assert {name for name in after if after[name] != before[name]} == {"p1"}
        assert "starting p1 again, as ordered" in said.read_text()
        assert not is_alive(facts["workers"][1]["pid"])

        last = restart("d0")
        assert (last.returncode, json.loads(last.stdout)["outcome"]) == (1, "last")
        assert "d0 is the last ready decode worker" in last.stderr and lives(facts["url"]) == after
        assert restart("d0", "--force").returncode == 0
        assert lives(facts["url"])["d0"] != after["d0"] and ask(facts["url"]) == first

        foreign = restart("p7")
        assert foreign.returncode == 2 and "kvbaton drain p7 --keys" in foreign.stderr


def lives(url: str) -> dict[str, str]:
    return {each["name"]: each["incarnation"] for each in get(f"{url}/workers")["workers"]}
