"""The only prefill worker is killed: what clients get, and what `/health` and doctor say of it.

What they get by `--fallback strict`: tests/router/flow/test_degraded.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli.main import main
from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.e2e.cluster import ask_all, some_prompts, up, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
EVICTED_S = 60.0


def health(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_doctor_finds_it_and_health_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = some_prompts(3, "degraded")
    with up(tmp_path) as cluster:
        assert main(["doctor", "--router", cluster.url]) == 0, capsys.readouterr().out
        capsys.readouterr()
        os.kill(cluster.pid("p0"), signal.SIGKILL)
        wait_for(lambda: health(cluster.url)[1]["status"] not in ("ok", ""), EVICTED_S, cluster.log)
        answered, told = health(cluster.url)
        assert (answered, told["status"]) == (200, "degraded")
        assert "no prefill worker is registered" in told["reason"]
        answers = asyncio.run(ask_all(cluster.url, prompts, "pull"))
        assert [(answer.status, answer.text) for answer in answers] == [
            (200, text) for text in reference_answers(prompts, 16)
        ]
        assert main(["doctor", "--json", "--router", cluster.url]) == 1
        found = json.loads(capsys.readouterr().out)
        codes = {each["code"]: f"{each['where']} {each['found']} {each['fix']}" for each in found["findings"]}
        assert found["well"] is False and found["router"]["status"] == "degraded"
        assert "role prefill" in codes["role-missing"] and "start p0 again" in codes["role-missing"]
        assert "worker p0" in codes["worker-lost"] and "KvbatonNoPair" in codes["alert-critical"]
        cluster.restart("p0")
        wait_for(lambda: health(cluster.url)[1]["status"] == "ok", EVICTED_S, cluster.log)
        main(["doctor", "--json", "--router", cluster.url])
        found = json.loads(capsys.readouterr().out)
        assert not {"role-missing", "worker-lost", "alert-critical"} & {each["code"] for each in found["findings"]}
