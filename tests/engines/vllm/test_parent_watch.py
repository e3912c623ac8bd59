"""A child of a server that asked for it ends with it; one of another server does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVER = """
import os, subprocess, sys, time
from kvbaton.engines.vllm.launch import parent_watch
os.environ[parent_watch.VARIABLE] = sys.argv[1] or str(os.getpid())
parent_watch.watch_parent()  # vLLM loads its plugins in the server too: nothing to do with its own parent
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""

ENGINE = """
import time
from kvbaton.engines.vllm.launch import parent_watch
parent_watch.watch_parent()
parent_watch.watch_parent()
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("asked", "ends"), [("", True), ("1", False), ("no number", False)])
def test_an_engine_ends_with_its_server(asked: str, ends: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER, asked, ENGINE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        server.kill()
        server.wait()
    try:
        until = time.monotonic() + (60.0 if ends else 1.5)
        while _lives(engine) and time.monotonic() < until:
            time.sleep(0.02)
        assert _lives(engine) is not ends
    finally:
        if _lives(engine):
            os.kill(engine, signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
