"""`kvbaton inspect`: a picture, a list or JSON, from a router or from files; its exit status is the verdict."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from kvbaton.cli import inspect
from kvbaton.cli.main import main
from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment
from kvbaton.observe.flight.journey import Journey, join
from tests.cli.talker import dripping, talker

HANDOFF = f"{'ab' * 16}.0"
NOW = 1_700_000_000.0


def flight(seat: FlightSeat, worker: str, *steps: str, number: int = 0, **more: object) -> Flight:
    moments = tuple(Moment(step, NOW + number + 0.01 * at) for at, step in enumerate(steps))
    given = {"handoff": HANDOFF, "request": f"mine-{number}", "end": "delivered"}
    return Flight(seat, worker, moments=moments, **(given | more))  # type: ignore[arg-type]


ROUTER = flight(
    FlightSeat.ROUTER, "router", "received", "prefill_sent", "prefill_answered", "decode_sent", "first_byte", "ended",
    peers=("p0", "d0"), mode="pull", end="ok",
)  # fmt: skip
P = flight(FlightSeat.PREFILL, "p0", "noted", "begun", "complete", "seated", "committed", "closed")
D = flight(
    FlightSeat.DECODE, "d0", "noted", "noted", "noted", "asked", "granted", "ended", end="lease_expired", detail="gone"
)


class Handler(http.server.BaseHTTPRequestHandler):
    status = 200
    body = b"{}"
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def router(body: object, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Something that answers as a router would; with the paths that it was asked for."""
    asked: list[str] = []
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    handler = type("_", (Handler,), {"status": status, "body": data, "asked": asked})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def journeys(count: int = 1) -> dict[str, list[Journey]]:
    return {"journeys": [join([msgspec.structs.replace(ROUTER, request=f"mine-{n}"), P, D]) for n in range(count)]}


def test_one_request_is_drawn_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    with router(journeys()) as (url, asked):
        assert main(["inspect", "mine-0", "--router", url]) == 0
    out = capsys.readouterr().out
    assert "request mine-0" in out
    assert "next: kvbaton explain lease_expired" in out
    assert "\x1b" not in out
    assert asked == ["/flights?last=200&id=mine-0"]


def test_without_an_id_the_last_one_is_drawn_and_flags_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with router(journeys()) as (url, asked):
        assert main(["inspect", "--router", url]) == 0
        assert main(["inspect", "--router", url, "--last", "7", "--failed", "--json"]) == 0
    assert asked == ["/flights?last=1", "/flights?last=7&failed=1"]


def test_many_are_a_list_unless_one_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    with router(journeys(5)) as (url, _):
        assert main(["inspect", "--last", "5", "--router", url]) == 0
        listed = capsys.readouterr().out
        assert main(["inspect", "mine", "--router", url]) == 0
        drawn = capsys.readouterr().out
        assert main(["inspect", "mine", "--list", "--router", url]) == 0
    assert listed.count("mine-") == 5
    assert "5 shown" in listed
    assert drawn.count("request mine-") == 5
    assert capsys.readouterr().out == listed


def test_json_is_what_the_router_said(capsys: pytest.CaptureFixture[str]) -> None:
    told = journeys(2)
    with router(told) as (url, _):
        assert main(["inspect", "--last", "2", "--json", "--router", url]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(msgspec.json.encode(told))


def test_the_share_of_prompts_that_d_computed_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = {"tokens": 1000, "alone": 500, "reasons": {"unasked": 400, "bad\x1b[2Jword": 60}}
    prompts |= {"resets": 2, "reset_blocks": 480}
    with router({**journeys(1), "prompts": prompts}) as (url, _):
        assert main(["inspect", "--router", url]) == 0
        shown = capsys.readouterr().out
        assert main(["inspect", "--json", "--router", url]) == 0
    assert "in the cluster: prompt tokens computed by D although a P should have: 50.0% of 1000" in shown
    assert "prefix caches reset since a member was removed: 2 times, 480 cached blocks dropped" in shown
    assert "unasked 40.0%" in shown and "other 4.0%" in shown and "\x1b" not in shown
    assert json.loads(capsys.readouterr().out)["prompts"]["alone"] == 500


@pytest.mark.parametrize("more", [[], ["--json"], ["--failed"]])
def test_nothing_found_is_status_1(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with router({"journeys": []}) as (url, _):
        assert main(["inspect", "nobody", "--router", url, *more]) == 1
    out = capsys.readouterr().out
    assert out == '{"journeys":[]}\n' if "--json" in more else "nobody" in out and out.count("\n") == 1


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        status = main(["inspect", *words])
    except SystemExit as exit:
        status = int(exit.code or 0)
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (2, "", 1)
    return captured.err


def test_a_router_that_is_not_there_is_status_2_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    with router({}) as (url, _):
        pass
    assert "--router" in refused(capsys, "--router", url)


def test_a_router_that_refuses_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    with router({"error": {"message": "only here; --operator-pages open"}}, 403) as (url, _):
        assert "403: only here; --operator-pages open" in refused(capsys, "--router", url)
    with router(b"<html>", 404) as (url, _):
        assert "is that a kvbaton router?" in refused(capsys, "--router", url)


def test_certificates_and_keys_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd"
    odd.write_text("short")
    for flag in ("--cacert", "--operator-key-file"):
        for file in (odd, tmp_path / "none"):
            assert f"argument {flag}: {file}: " in refused(capsys, flag, str(file))
    monkeypatch.setenv("KVBATON_OPERATOR_KEY", "short")
    said = refused(capsys)
    assert "KVBATON_OPERATOR_KEY: key 1" in said and "short" not in said


@pytest.mark.parametrize("status", [b"200 OK", b"403 Forbidden"])
def test_a_router_that_drips_is_not_waited_for(
    status: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "ANSWER_S", 0.3)
    with talker(lambda _: dripping(b'{"journeys":[]}', status)) as url:
        said = refused(capsys, "--router", url)
    assert "(timed out)" in said and "--router" in said


@pytest.mark.parametrize("said", [b"\x1b]0;owned\x07\r\n", b"HTTP/1.1 404 \x1b]0;owned\x07\r\n\r\n"])
def test_nothing_that_answers_can_move_the_cursor(said: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with talker(lambda _: [said]) as url:
        shown = refused(capsys, "--router", url)
    assert "owned" in shown and shown[:-1].isprintable()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"journeys":[{"began":"x"}]}', b"\xff", b'{"x":' + b"[" * 100_000]
)
def test_what_is_no_router_is_status_2(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with router(body) as (url, _):
        assert "not a kvbaton router" in refused(capsys, "--router", url)


@pytest.mark.parametrize(
    "words", [("--last", "0"), ("--last", "201"), ("--router", "ftp://x"), ("--files", "/no/file")]
)
def test_bad_usage_is_status_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in refused(capsys, *words)


def dumped(path: Path, *flights: Flight) -> str:
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in flights))
    return str(path)


def test_dumps_of_several_processes_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = msgspec.structs.replace(D, end="", moments=D.moments[:4])
    other = msgspec.structs.replace(ROUTER, handoff=f"{'cd' * 16}.0", request="another")
    files = [
        dumped(tmp_path / "router", ROUTER, other),
        dumped(tmp_path / "p0", P),
        dumped(tmp_path / "d0", D, early),
    ]
    (tmp_path / "list").write_bytes(msgspec.json.encode([D]))
    assert main(["inspect", HANDOFF[:8], "--json", "--files", *files, str(tmp_path / "list")]) == 0
    (found,) = msgspec.json.decode(capsys.readouterr().out, type=dict[str, list[Journey]])["journeys"]
    assert [lane.seat for lane in found.lanes] == list(FlightSeat)
    assert found.lanes[2].end == "lease_expired"
    assert main(["inspect", "--last", "9", "--json", "--files", *files]) == 0
    assert len(json.loads(capsys.readouterr().out)["journeys"]) == 2
    assert main(["inspect", "--failed", "--last", "9", "--json", "--files", *files]) == 0
    assert len(json.loads(capsys.readouterr().out)["journeys"]) == 1
    assert main(["inspect", "--files", files[1]]) == 0
    assert "no dump given" in capsys.readouterr().out
    assert main(["inspect", "nobody", "--files", files[1]]) == 1


def test_a_file_that_holds_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd").write_text('{"seat": "router", "worker": "r"}\nhello\n')
    assert "line 2" in refused(capsys, "--files", str(tmp_path / "odd"))


def test_nothing_in_a_file_can_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x9b2J"
    bent = msgspec.structs.replace(D, request=evil, worker=evil, detail=evil, end=evil, transport=evil, mode=evil)
    path = dumped(tmp_path / "d0", bent)
    for more in ([], ["--list"], ["--json"]):
        assert main(["inspect", *more, "--files", path]) == 0
        out = capsys.readouterr().out
        assert all(char.isprintable() for char in out.replace("\n", ""))
