"""A draining vLLM server is idle when vLLM and the ledger both say so, for a while, and the router knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvbaton.control.registry.registry_messages import NOTHING
from kvbaton.control.registry.statements import HeldReport
from kvbaton.engines.shared import presence
from kvbaton.engines.shared.presence import QUIET_S, DrainWatch, requests_in

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_running{{engine="1",model_name="tiny"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny",reason="capacity"}} 9.0
"""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    text = ""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Client:
    """Of `RegistryGroup`, what a watch uses."""

    def __init__(self) -> None:
        self.is_known_to_drain = True
        self.told: list[str] = []
        self.heard = threading.Event()

    def tell_held(self, held: str) -> None:
        self.told.append(held)
        self.heard.set()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def address(server: Server) -> str:
    return f"127.0.0.1:{server.server_port}"


def watching(server: Server, client: Client, *held: HeldReport) -> DrainWatch:
    left = list(held) or [HeldReport()]
    take = lambda: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
    return DrainWatch(client, address(server), take, threading.Event())  # type: ignore[arg-type]


def test_of_one_data_parallel_rank_its_own_requests_count() -> None:
    text = METRICS.format(running="2.0", waiting="1.0")
    assert [requests_in(text, rank) for rank in (None, 0, 1, 2)] == [3, 3, 0, None]


def test_requests_are_counted_over_all_engines_once() -> None:
    assert requests_in(METRICS.format(running="2.0", waiting="1.0")) == 3
    assert requests_in(METRICS.format(running="0.0", waiting="1e+01")) == 10
    assert requests_in("python_info 1.0") is None


def test_those_of_sglang_wait_in_queues_of_their_own() -> None:
    queues = "sglang:num_queue_reqs 4\nsglang:num_decode_transfer_queue_reqs 1.0\n"
    assert requests_in(queues + 'sglang:num_running_reqs{tp_rank="0"} 2.0') == 7


def test_nothing_is_said_only_after_a_quiet_while(server: Server) -> None:
    server.text = METRICS.format(running="1.0", waiting="0.0")
    watch = watching(server, Client(), HeldReport(leases=2), HeldReport(leases=2), HeldReport())
    assert watch.told(1000.0) == "1 request, 2 leases"
    server.text = METRICS.format(running="0.0", waiting="0.0")
    assert watch.told(1001.0) == "2 leases"
    assert watch.told(1001.0 + QUIET_S / 2) == "the end of its last request"
    assert watch.told(1001.0 + QUIET_S) == NOTHING


def test_a_router_that_may_still_send_keeps_it_from_being_idle(server: Server) -> None:
    server.text = METRICS.format(running="0.0", waiting="0.0")
    client = Client()
    client.is_known_to_drain = False
    watch = watching(server, client)
    assert watch.told(1000.0) != NOTHING and watch.told(1100.0) != NOTHING
    client.is_known_to_drain = True
    assert watch.told(1100.0 + QUIET_S) == NOTHING


def test_a_server_that_cannot_be_asked_is_never_idle(server: Server) -> None:
    watch = watching(server, Client())
    assert "/metrics does not say" in watch.told(1000.0) and "/metrics does not say" in watch.told(2000.0)
    server.shutdown()
    server.server_close()
    assert "/metrics does not say" in watch.told(3000.0)


def test_the_registry_is_told_until_the_engine_closes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "POLL_S", 0.01)
    server.text = METRICS.format(running="1.0", waiting="0.0")
    client, closing = Client(), threading.Event()
    watch = DrainWatch(client, address(server), HeldReport, closing)  # type: ignore[arg-type]
    watch.start()
    assert client.heard.wait(10) and client.told[0] == "1 request"
    closing.set()
    watch._thread.join(10)
    assert not watch._thread.is_alive()


def test_where_a_router_hears_announcements_it_is_not_idle_before_that_one_forgets(server: Server) -> None:
    server.text = METRICS.format(running="0.0", waiting="0.0")
    before = time.monotonic()
    watch = DrainWatch(Client(), f"127.0.0.1:{server.server_port}", HeldReport, threading.Event(), 60.0)  # type: ignore[arg-type]
    made = time.monotonic()
    assert watch.told(before + 30) != NOTHING
    assert watch.told(before + 59) != NOTHING
    assert watch.told(made + 61) == NOTHING


def test_an_engine_without_a_server_is_idle_by_its_ledger_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("there is nothing to ask"))
    held = [HeldReport(leases=1), HeldReport(), HeldReport()]
    watch = DrainWatch(Client(), "", lambda: held.pop(0), threading.Event())  # type: ignore[arg-type]
    assert watch.told(10.0) == "1 lease"
    assert watch.told(10.1) == "the end of its last request"
    assert watch.told(10.1 + QUIET_S) == "nothing"
