"""One question over HTTP: in time, within bounds, past no proxy, and with errors that can be shown."""

from __future__ import annotations

import http.client
import http.server
import socket
import threading
import urllib.error

import pytest

from kvbaton.processes.http_question import SAID_CHARS_MAX, HttpAnswer, Way, asked
from tests.cli.talker import dripping, talker, whole

EVIL = b"\x1b]0;owned\x07"


def test_an_answer_comes_with_its_headers() -> None:
    with talker(lambda path: whole(path.encode(), headers=b"Date: today\r\n")) as url:
        answer = asked(f"{url}/a?b=c", 10.0, 100)
    assert (answer.body, answer.headers["Date"]) == (b"/a?b=c", "today")


def test_a_host_that_drips_ends_at_the_time_out() -> None:
    with talker(lambda _: dripping(b"late")) as url, pytest.raises(TimeoutError):
        asked(url, 0.3, 1000)


def test_a_refusal_that_drips_ends_at_the_time_out_too() -> None:
    with talker(lambda _: dripping(b"late", b"403 Forbidden")) as url, pytest.raises(TimeoutError):
        asked(url, 0.3, 1000)


def test_a_host_that_says_nothing_ends_at_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        asked(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2, 1000)


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
def test_no_more_is_read_than_asked_for(status: bytes) -> None:
    with talker(lambda _: whole(b"x" * 100_000, status)) as url:
        try:
            body = asked(url, 10.0, 1000).body
        except urllib.error.HTTPError as error:
            body = error.read()
    assert body == b"x" * 1000


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_no_proxy_of_the_environment_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    with talker(lambda _: whole(b"proxy")) as proxy, talker(lambda _: whole(b"here")) as url:
        monkeypatch.setenv(name, proxy)
        assert asked(url, 10.0, 100).body == b"here"


def test_a_refusal_is_an_http_error_whose_body_is_there_afterwards() -> None:
    with talker(lambda _: whole(b"why", b"403 Not" + EVIL)) as url, pytest.raises(urllib.error.HTTPError) as refused:
        asked(url, 10.0, 100)
    assert (refused.value.code, refused.value.read()) == (403, b"why")
    assert str(refused.value).isprintable() and "owned" in str(refused.value)


def test_nobody_there_is_an_os_error_with_its_reason() -> None:
    with talker(lambda _: ()) as url:
        pass
    with pytest.raises(urllib.error.URLError) as refused:
        asked(url, 10.0, 100)
    assert isinstance(refused.value.reason, ConnectionRefusedError)


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-x\r\n", EVIL + b"\r\n", b"HTTP/1.1 two hundred\r\n\r\n", b"x" * 5000 + b"\r\n"]
)
def test_what_is_no_http_is_an_error_that_can_be_shown(said: bytes) -> None:
    with talker(lambda _: [said]) as url, pytest.raises(http.client.HTTPException) as odd:
        asked(url, 10.0, 100)
    assert str(odd.value).isprintable() and len(str(odd.value)) <= SAID_CHARS_MAX


@pytest.mark.parametrize("url", ["nothing", "http://[::1", "http://127.0.0.1:port/"])
def test_what_is_no_address_is_told_as_such(url: str) -> None:
    with pytest.raises((ValueError, http.client.HTTPException)):
        asked(url, 10.0, 100)


def test_a_key_goes_to_its_place_and_nowhere_else() -> None:
    seen: list[tuple[str, str | None]] = []

    class Place(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Place) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        port = server.server_address[1]
        way = Way(key="a-key-of-an-operator", key_for=f"http://127.0.0.1:{port}")

        def ask(place: str) -> HttpAnswer:
            return asked(f"http://{place}", 20.0, 100, way)

        for place in (f"127.0.0.1:{port}/a", f"localhost:{port}/b", f"127.0.0.1:{port}/moved"):
            ask(place)
        server.shutdown()
    shown = "Bearer a-key-of-an-operator"
    assert seen == [("/a", shown), ("/b", None), ("/moved", shown), ("/elsewhere", None)]
    assert way.key not in repr(way)
    near = Way(key=way.key, key_for="http://127.0.0.1:80").request(f"http://127.0.0.1:{port}/a")
    assert not near.has_header("Authorization")
