"""`kvbaton up --engine vllm` with real processes in which a stand-in plays vLLM: an embedded worker, told the same."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.local_cluster import vllm_engine
from tests.waiting import until

pytestmark = pytest.mark.slow

SEGMENTS = Path("/dev/shm")
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
if words[0] == "-c":
    sys.exit(0)
if words[1] == "kvbaton.engines.vllm.models.tiny_model":
    print("some noise")
    print("made:", here / "tiny-llama-7-v1")
    sys.exit(0)
if (here / "broken").exists():
    sys.exit("RuntimeError: no such dtype")
told = json.loads(words[words.index("--kv-transfer-config") + 1])
own = told["kv_connector_extra_config"]
segment = "import time; from multiprocessing.shared_memory import SharedMemory as Segment; "
segment += "kept = Segment(create=True, size=4096); print(kept.name, flush=True); time.sleep(300)"
part = subprocess.Popen([sys.executable, "-c", segment], stdout=subprocess.PIPE, text=True)
shm = part.stdout.readline().strip()
said = {{"part": part.pid, "segment": shm, "words": words, "told": told, "calm": os.environ["KVBATON_CALM"]}}
(here / (own["name"] + ".json")).write_text(json.dumps(said))
role = {{"kv_producer": "prefill", "kv_consumer": "decode"}}[told["kv_role"]]
options = {{"name": own["name"], "role": role, "keys": own["keys"], "registry": own["registry"],
    "http-port": words[words.index("--port") + 1], "transport": own["transport"], "lease-s": own["lease_s"]}}
flags = [word for name, value in options.items() for word in ("--" + name, str(value))]
os.execv(sys.executable, [sys.executable, "-m", "kvbaton.cli.main", "worker", *flags])
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


def is_alive(pid: int) -> bool:
    """Not ended, nor waiting to be buried by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ask(url: str) -> str:
    body = json.dumps({"prompt": "hello there", "max_tokens": 5, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(json.loads(response.read())["choices"][0]["text"])


def words_of(stand_in: Path, *more: str) -> list[str]:
    words = ["up", "--engine", "vllm", "--vllm-python", str(stand_in), "--port", "0", "--json", *more]
    return [sys.executable, "-m", "kvbaton.cli.main", *words]


@contextlib.contextmanager
def up(stand_in: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], Path]]:
    said = stand_in.parent / "stderr"
    with said.open("w") as stderr:
        process = subprocess.Popen(words_of(stand_in, *more), stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline() or "{}")
        assert facts, said.read_text()
        yield process, facts, said
    finally:
        process.terminate()
        process.wait(60)


def told(stand_in: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stand_in.parent / f"{name}.json").read_text())
    return found


def segment(of: dict[str, Any]) -> Path:
    return SEGMENTS / str(of["segment"])


def test_it_serves_with_engines_that_were_told_their_place_and_leaves_nothing(stand_in: Path) -> None:
    with up(stand_in, "--lease-s", "9", "--policy", "fail") as (process, facts, said):
        assert len(ask(facts["url"])) > 0
        p0, d0 = told(stand_in, "p0"), told(stand_in, "d0")
        assert (p0["told"]["kv_role"], d0["told"]["kv_role"]) == ("kv_producer", "kv_consumer")
        assert d0["told"]["kv_load_failure_policy"] == "fail"
        own = d0["told"]["kv_connector_extra_config"]
        assert own["http_address"].endswith(d0["words"][d0["words"].index("--port") + 1])
        assert (own["name"], own["lease_s"], own["mode"], p0["calm"]) == ("d0", 9.0, "pull", "1")
        assert "serving a tiny llama with random weights" in said.read_text()
        pids = [worker["pid"] for worker in facts["workers"]] + [p0["part"], d0["part"]]
        foreign = SharedMemory(create=True, size=4096)  # made meanwhile, by no engine
        try:
            assert segment(p0).exists() and segment(d0).exists()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            until(lambda: not any(map(is_alive, pids)))
            assert not Path(facts["dir"]).exists()
            assert not segment(p0).exists() and not segment(d0).exists()
            assert (SEGMENTS / foreign.name).exists()
        finally:
            foreign.close()
            foreign.unlink()


def test_a_killed_engine_takes_its_parts_with_it_and_its_command_starts_it_again(stand_in: Path) -> None:
    with up(stand_in) as (_, facts, said):
        first = ask(facts["url"])
        part, victim = told(stand_in, "d0")["part"], facts["workers"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: f"worker d0 (pid {victim['pid']}) was killed by SIGKILL" in said.read_text())
        until(lambda: not is_alive(part))
        assert not segment(told(stand_in, "d0")).exists()
        assert victim["command"].startswith("env VLLM_CPU_KVCACHE_SPACE=1 ")
        again = subprocess.Popen(shlex.split(victim["command"]), stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            until(lambda: said.read_text().count("[worker-joined] decode worker d0") == 2)
            assert ask(facts["url"]) == first
        finally:
            os.killpg(again.pid, signal.SIGKILL)
            again.wait(60)
            segment(told(stand_in, "d0")).unlink()  # nobody watched this one


def test_engines_end_with_a_parent_that_was_killed(stand_in: Path) -> None:
    with up(stand_in) as (process, facts, _):
        pids = [worker["pid"] for worker in facts["workers"]] + [told(stand_in, name)["part"] for name in ("p0", "d0")]
        process.kill()
        process.wait(60)
        until(lambda: not any(map(is_alive, pids)))
        assert not any(segment(told(stand_in, name)).exists() for name in ("p0", "d0"))


def test_an_engine_that_cannot_start_costs_one_line_with_its_last_words(stand_in: Path) -> None:
    (stand_in.parent / "broken").touch()
    done = subprocess.run(words_of(stand_in), capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 2
    assert "exited with status 1 before it could serve: RuntimeError: no such dtype" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "vllm", "--blocks", "9"], "--blocks: not an option of the vllm engine; --kv-gib"),
        (["--kv-gib", "2"], "--kv-gib: not an option of the embedded engine; add: --engine vllm"),
        (["--tiny", "mla"], "--tiny: not an option of the embedded engine"),
        (["--engine", "vllm", "--model", "/nowhere", "--seed", "3"], "remove --tiny and --seed"),
        (["--engine", "vllm", "--vllm-python", "/nowhere/python"], "'/nowhere/python' is not a program"),
        (["--engine", "vllm", "--vllm-python", sys.executable], "has no vllm; make vllm"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "has no vllm" in said and importlib.util.find_spec("vllm"):
        pytest.skip("this Python has vLLM")
    assert cli.main(["up", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_a_vllm_the_next_step_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(vllm_engine.PYTHON_VARIABLE, raising=False)
    assert cli.main(["up", "--engine", "vllm"]) == 2
    assert "no vLLM found; install it beside this program: make vllm" in capsys.readouterr().err


def test_the_environment_names_a_python(monkeypatch: pytest.MonkeyPatch, stand_in: Path) -> None:
    monkeypatch.setenv(vllm_engine.PYTHON_VARIABLE, str(stand_in))
    assert vllm_engine.find_python(None) == str(stand_in)


@pytest.mark.parametrize(("config", "extra"), [('{"kv_lora_rank": 512}', True), ("{}", False), ("nonsense", False)])
def test_a_latent_cache_gets_the_norm_that_reads_slices_right(tmp_path: Path, config: str, extra: bool) -> None:
    (tmp_path / "config.json").write_text(config)
    assert ("--compilation-config" in vllm_engine.server_argv("python", str(tmp_path), "name", 1)) is extra
