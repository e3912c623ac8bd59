"""Where spans go, by flag and by environment; and what an operator is told who cannot have them."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvbaton.cli import router as router_command
from kvbaton.cli import up, worker
from kvbaton.cli.flags import traces
from kvbaton.cli.main import main
from kvbaton.engines.embedded.worker_options import argv_of
from kvbaton.observe.flight.collector import Gathering
from kvbaton.processes.operator_errors import CommandError
from tests.observe.tracing.collector import Collector, collecting
from tests.observe.tracing.flights import router

URL = "http://127.0.0.1:4318"
FULL = f"{URL}/v1/traces"
GRPC_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def parsed(command, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("flag", "environ", "endpoint"),
    [
        ("", {}, ""),
        (URL, {}, FULL),
        (URL, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:1", "OTEL_SDK_DISABLED": "true"}, FULL),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, FULL),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{URL}/"}, FULL),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{URL}/tenant"}, f"{URL}/tenant/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{URL}/own", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"}, f"{URL}/own"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_SDK_DISABLED": "True"}, ""),
    ],
)
def test_the_flag_goes_before_the_environment(flag, environ, endpoint):
    assert traces.endpoint_of(flag, environ) == endpoint


def test_an_endpoint_of_the_environment_that_cannot_be_used_stops_nobody(caplog):
    assert traces.endpoint_of("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317"}) == ""
    assert "[spans-off]" in caplog.text
    assert "expected http://host:4318" in caplog.text


def test_a_missing_library_is_one_line_for_the_flag_and_a_warning_for_the_environment(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "kvbaton.observe.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(CommandError, match=r"argument --otlp-endpoint: .*pip install 'kvbaton\[otel\]'"):
        traces.endpoint_of(URL, {})
    assert traces.endpoint_of("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}) == ""
    assert "pip install 'kvbaton[otel]'" in caplog.text


@pytest.mark.parametrize(
    ("flag", "environ", "endpoint"),
    [
        ("grpc://127.0.0.1", {}, "grpc://127.0.0.1:4317"),
        ("grpcs://collector:443/", {}, "grpcs://collector:443"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc://c:4317"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpcs://c:4317"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:1", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc://c:1"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, FULL),
    ],
)
def test_grpc_is_chosen_by_scheme_or_by_the_standard_variable(flag, environ, endpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, GRPC_EXPORTER, SimpleNamespace())
    assert traces.endpoint_of(flag, environ) == endpoint


def test_grpc_without_its_package_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, GRPC_EXPORTER, None)
    with pytest.raises(CommandError, match=r"over gRPC requires .*pip install 'kvbaton\[otel-grpc\]'"):
        traces.endpoint_of("grpc://127.0.0.1:4317", {})
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert traces.endpoint_of("", environ) == "" and "kvbaton[otel-grpc]" in caplog.text


@pytest.mark.parametrize("text", ["-0.1", "1.1", "nan", "all", ""])
def test_a_share_is_from_0_to_1(text, capsys):
    with pytest.raises(SystemExit):
        parsed(router_command, "--trace-sample", text)
    assert "expected a number from 0 to 1" in capsys.readouterr().err


COMMANDS = {
    "router": ("--prefill-url", "http://127.0.0.1:1", "--decode-url", "http://127.0.0.1:2"),
    "worker": ("--role", "decode", "--name", "d0", "--keys", "-", "--registry", "tcp://127.0.0.1:1"),
    "up": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_endpoint_is_refused_in_one_line_before_anything_is_started(command, capsys):
    assert main([command, *COMMANDS[command], "--otlp-endpoint", "127.0.0.1:4317"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "argument --otlp-endpoint: got '127.0.0.1:4317', expected http://host:4318" in said


def test_up_refuses_spans_where_it_sends_none(capsys):
    assert main(["up", "--check", "--otlp-endpoint", URL]) == 2
    assert "argument --otlp-endpoint: --check sends no spans" in capsys.readouterr().err


def test_the_flags_reach_the_router_and_the_workers():
    args = parsed(up, "--otlp-endpoint", URL, "--trace-sample", "0.25")
    plan = up.plan_of(args, "auto", http_port=0, mode=up.Mode.PULL)
    assert (plan.settings.trace, plan.settings.trace_sample) == (True, 0.25)
    for member in plan.members("-", "tcp://127.0.0.1:1"):
        assert member.argv[member.argv.index("--otlp-endpoint") + 1] == URL
    settings = router_command.settings_of(parsed(router_command, "--otlp-endpoint", URL, "--trace-sample", "0"))
    assert (settings.trace, settings.trace_sample) == (True, 0.0)
    assert not router_command.settings_of(parsed(router_command)).trace
    options = worker.options_of(parsed(worker, *COMMANDS["worker"], "--otlp-endpoint", URL))
    assert argv_of(options)[-2:] == ["--otlp-endpoint", URL]


def test_a_routers_flights_are_exported_while_the_context_lasts():
    gathering = Gathering()

    async def scenario(collector: Collector) -> None:
        async with traces.exported(collector.url, "r1", gathering):
            gathering.note(router())
            await asyncio.to_thread(collector.wait, bool)  # the end of the context waits for two seconds at most
        gathering.note(router())

    with collecting() as collector:
        asyncio.run(scenario(collector))
        assert [span.name for span in collector.spans].count("kvbaton.request") == 1
        assert {span.resource["service.instance.id"] for span in collector.spans} == {"r1"}
        assert {span.service for span in collector.spans} == {"kvbaton-router"}
    assert gathering.on_flight == []


async def test_nothing_is_started_without_an_endpoint():
    telling = SimpleNamespace(on_flight=[])
    async with traces.exported("", "r1", telling) as export:
        assert export is None
        assert telling.on_flight == []


def test_the_operators_names_go_before_ours():
    """Read by the library, in a process of its own: it reads the environment once."""
    code = (
        "import sys, time\n"
        "from kvbaton.observe.tracing.export import of_worker\n"
        "from tests.observe.tracing.flights import decode\n"
        "export = of_worker(sys.argv[1], 'decode', 'd0'); export.take(decode())\n"
        "while not export.counts['exported']: time.sleep(0.01)  # a close waits for two seconds at most\n"
        "export.close()"
    )
    names = {"OTEL_SERVICE_NAME": "chat", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=lab"}
    with collecting() as collector:
        environ = {**os.environ, **names, "OTEL_EXPORTER_OTLP_HEADERS": "x-token=secret"}
        subprocess.run([sys.executable, "-c", code, collector.url], env=environ, timeout=60, check=True)
        resource = collector.spans[0].resource
    assert (resource["service.name"], resource["service.instance.id"]) == ("chat", "d0")
    assert resource["deployment.environment"] == "lab"
    assert collector.headers[0]["x-token"] == "secret"
