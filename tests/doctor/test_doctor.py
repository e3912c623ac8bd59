"""`kvbaton doctor`: what this machine has, and what a cluster took."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvbaton.cli.main import main
from kvbaton.doctor import cluster_checks
from kvbaton.transports import catalogue

Pages = dict[str, tuple[int, str]]
WORKERS, HEALTH = "/workers", "/health"
WELL = 200, '{"status": "ok", "pairs": {"pull": 1}}'


@pytest.fixture
def dates() -> list[float]:
    """What those who serve say that the time is, if there is something; else what it is."""
    return []


@pytest.fixture
def serve(dates: list[float]) -> Iterator[Callable[[Pages], str]]:
    """Serves fixed pages; stands in for routers and workers, which other tests run for real."""
    running: list[http.server.HTTPServer] = []

    def start(pages: Pages) -> str:
        if WORKERS in pages:
            pages = {HEALTH: WELL, **pages}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = pages.get(self.path, (404, ""))
                self.send_response_only(status)
                self.send_header("Date", self.date_time_string(dates[0] if dates else time.time()))
                self.end_headers()
                self.wfile.write(text.replace("HERE", f"127.0.0.1:{server.server_port}").encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def listed(*names: str) -> tuple[int, str]:
    told = {"transports": ["shm", "tcp"], "role": "both", "state": "serving"}
    entries = [{"name": name, "url": f"http://HERE/{name}", **told} for name in names]
    return 200, json.dumps({"workers": entries})


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_this_machine_as_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = found(capsys)
    assert status == 0 and told["well"] is True
    assert [each["name"] for each in told["planes"]] == list(catalogue.ORDER)
    assert told["offered"] == list(catalogue.offered("auto"))
    assert "tcp" in told["offered"]


def test_this_machine_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no errors found" and any(line.split()[:2] == ["tcp", "offered"] for line in lines)


def test_a_choice_that_this_machine_cannot_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = catalogue.PLANES["nixl"]
    gone = msgspec.structs.replace(told, usable=lambda: "gone", in_auto=lambda: True)
    monkeypatch.setitem(catalogue.PLANES, "nixl", gone)
    assert main(["doctor", "--transport", "nixl"]) == 1
    text = capsys.readouterr().out
    assert "error [no-plane] --transport: transport nixl cannot be used here: gone\n" in text
    assert "\n  fix: it requires: nixl: pip install nixl" in text
    assert text.endswith("errors found: see above; kvbaton explain CODE says more\n")


def test_which_planes_a_cluster_took(capsys: pytest.CaptureFixture[str], serve: Callable[[Pages], str]) -> None:
    stats = {"planes": ["shm", "tcp"], "links": {"p0": "tcp"}, "links_total": {"shm": 1, "tcp": 2},
             "planes_given_up_total": {"shm": 1}}  # fmt: skip
    url = serve({WORKERS: listed("d0"), "/d0/stats": (200, json.dumps(stats))})
    status, told = found(capsys, "--router", url)
    (worker,) = told["workers"]
    assert status == 0 and worker["links"] == {"p0": "tcp"} and worker["given_up_total"] == {"shm": 1}
    assert main(["doctor", "--router", url]) == 0
    text = capsys.readouterr().out
    assert "worker d0: offers shm, tcp; reads from p0 over tcp" in text
    assert "pairings so far: shm 1, tcp 2; given up: shm 1" in text


def test_vllm_tells_it_by_its_metrics(capsys: pytest.CaptureFixture[str], serve: Callable[[Pages], str]) -> None:
    line = 'kvbaton_links_total{{engine="{0}",transport="nixl"}} {1}.0\n'
    metrics = line.format(0, 2) + line.format(1, 1)
    url = serve({WORKERS: listed("d0"), "/d0/metrics": (200, metrics)})
    status, told = found(capsys, "--router", url)
    assert status == 0 and told["workers"][0]["links_total"] == {"nixl": 3}


def test_a_worker_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], serve: Callable[[Pages], str]
) -> None:
    url = serve({WORKERS: listed("d0"), "/d0/stats": (200, "no json")})
    status, told = found(capsys, "--router", url)
    assert status == 1 and told["workers"][0]["problem"].startswith("does not respond")
    (silent,) = (each for each in told["findings"] if each["code"] == "worker-silent")
    assert silent["where"] == "worker d0" and silent["fix"].startswith("curl http://")


@pytest.mark.parametrize(("off_s", "said"), [(-60.0, "60 s behind"), (61.0, "61 s ahead of"), (2.0, None)])
def test_a_clock_that_is_far_off_is_a_warning(
    capsys: pytest.CaptureFixture[str],
    serve: Callable[[Pages], str],
    dates: list[float],
    monkeypatch: pytest.MonkeyPatch,
    off_s: float,
    said: str | None,
) -> None:
    now = 1_700_000_000.0  # and it stands still, however long an answer takes
    monkeypatch.setattr(cluster_checks, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: now))
    url = serve({WORKERS: listed("d0"), "/d0/stats": (200, "{}")})
    dates.append(now + off_s)
    status, told = found(capsys, "--router", url)
    clocks = [each["found"] for each in told["findings"] if each["code"] == "clock-off"]
    assert status == 0 and len(clocks) == (said is not None)
    assert said is None or said in clocks[0]


@pytest.mark.parametrize("url", ["ftp://somewhere", "somewhere:8000"])
def test_what_is_no_address_of_a_router(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["doctor", "--router", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbaton doctor: argument --router: ") and error.count("\n") == 1
