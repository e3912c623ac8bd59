"""`kvbaton doctor --router` against whoever answers there: a finding if it is no router; no worker holds up others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from kvbaton.cli.main import main
from kvbaton.doctor import cluster_checks
from kvbaton.doctor.cluster_checks import AT_ONCE, ROUNDS, findings, router, workers
from kvbaton.doctor.router_checks import JudgedWorker
from kvbaton.processes.http_question import HttpAnswer
from tests.cli.talker import dripping, talker, whole

EVIL = "\x1b]0;owned\x07\x9b2J\u202e"
DEEP = "[" * 100_000


def refused(capsys: pytest.CaptureFixture[str], answer: Callable[[str], Iterable[bytes]], *more: str) -> str:
    """The one finding about a router that could not be asked."""
    with talker(answer) as url:
        assert main(["doctor", "--json", "--router", url, *more]) == 1
    out, error = capsys.readouterr()
    told = json.loads(out)
    (silent,) = (each for each in told["findings"] if each["code"] == "router-silent")
    assert (told["well"], told["workers"], error) == (False, [], "")
    assert silent["found"].isprintable() and len(silent["found"]) < 1000 and silent["fix"]
    assert (silent["severity"], silent["where"]) == ("error", f"router {url}")
    return str(silent["found"])


@pytest.mark.parametrize(
    "body",
    [
        "", "<html>", "[]", "null", "7", "{}", '{"workers": {}}', '{"workers": ["p0"]}', '{"workers": [{"name": 1}]}',
        '{"workers": [{"name": "p0"}]}', '{"workers": [{"name": "p0", "url": "http://x", "transports": {"a": 1}}]}',
        EVIL, json.dumps({EVIL: EVIL}), json.dumps({"workers": [EVIL]}), DEEP, f'{{"workers": [], "more": {DEEP}',
    ],
    ids=range(16),
)  # fmt: skip
def test_what_is_no_router_is_a_finding_and_status_1(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a kvbaton router" in refused(capsys, lambda _: whole(body.encode()))


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH\r\n", EVIL.encode() + b"\r\n", b"\xff\xfe\r\n", b""])
def test_what_is_no_http_is_a_finding_and_status_1(said: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no HTTP response from" in refused(capsys, lambda _: [said])


def test_a_refusal_is_a_finding_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, lambda _: whole(EVIL.encode(), b"404 " + EVIL.encode()))
    assert "HTTP 404; is it a kvbaton router?" in said


def test_a_router_that_drips_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, lambda _: dripping(b'{"workers": []}'), "--timeout-s", "0.3")
    assert "timed out" in said


def test_nor_one_that_answers_half_of_what_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    well = whole(b'{"status": "ok"}')
    assert "is not a kvbaton router" in refused(capsys, lambda path: well if path == "/health" else whole(b"<html>"))


def test_where_nobody_listens_that_is_the_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with talker(lambda _: []) as url:
        pass
    assert main(["doctor", "--router", url]) == 1
    out, _ = capsys.readouterr()
    assert f"error [router-silent] router {url}: no HTTP response" in out and "errors found" in out


# --- its workers


def cluster(count: int, worker: Callable[[str], Iterable[bytes]]) -> Callable[[str], Iterable[bytes]]:
    """A router with so many workers; `worker` answers for them by their path."""

    def answer(path: str) -> Iterable[bytes]:
        if path in ("/health", "/metrics"):
            return whole(b'{"status": "ok"}')
        return whole(json.dumps({"workers": listed}).encode()) if path == "/workers" else worker(path)

    listed: list[dict[str, object]] = [{"name": f"d{n}", "url": f"HERE/d{n}"} for n in range(count)]
    answer.listed = listed  # type: ignore[attr-defined]
    return answer


def states(
    count: int, worker: Callable[[str], Iterable[bytes]], timeout_s: float = 20.0
) -> tuple[cluster_checks.SeenWorkerState, ...]:
    answer = cluster(count, worker)
    with talker(answer) as url:
        for each in answer.listed:  # type: ignore[attr-defined]
            each["url"] = each["url"].replace("HERE", url)
        return tuple(workers(router(url, timeout_s).listed, timeout_s))


@pytest.mark.parametrize(
    "said",
    [
        whole(b"[]"), whole(b"{"), whole(b'{"links": []}'), whole(b'{"links_total": {"tcp": "many"}}'),
        [b"SSH-2.0\r\n"], whole(b'{"more": ' + DEEP.encode()), [EVIL.encode() + b"\r\n"], whole(b"\xff"), [],
        whole(json.dumps({"links": {EVIL: 1}}).encode()),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_worker_that_answers_nonsense_is_named_and_the_others_are_told(said: list[bytes]) -> None:
    found = states(2, lambda path: said if path.startswith("/d0") else whole(b"{}"))
    assert found[0].problem.startswith("does not respond") and found[0].problem.isprintable()
    assert found[1].problem == ""
    assert [each.where for each in findings(found)] == ["worker d0"]


@pytest.mark.parametrize("value", ["1e999", "nan", "many", "1"])
def test_metrics_of_a_worker_may_hold_anything(value: str) -> None:
    text = f'kvbaton_links_total{{transport="{EVIL}"}} {value}\n'.encode()
    (found,) = states(1, lambda path: whole(text) if path.endswith("/metrics") else whole(b"", b"404 Not Found"))
    assert bool(found.problem) == (value != "1")
    assert all(name.isprintable() for name in (found.problem, *found.links_total))


def test_texts_of_workers_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    stats = json.dumps({"links": {EVIL: EVIL}, "links_total": {EVIL: 1}}).encode()
    answer = cluster(1, lambda _: whole(stats))
    with talker(answer) as url:
        (listed,) = answer.listed  # type: ignore[attr-defined]
        listed.update(name=EVIL, url=url, transports=[EVIL])
        main(["doctor", "--router", url])
        listed.update(url=EVIL)
        main(["doctor", "--router", url])
    out, error = capsys.readouterr()
    assert "owned" in out and out.replace("\n", "").isprintable() and error == ""
    assert "is listed with an unusable address" in out


def test_an_odd_date_says_nothing_of_a_clock() -> None:
    dates = (b"Mon, 01 Jan 99999999999999999999 00:00:00 GMT", b"\x1b[2J", b"today")
    found = states(len(dates), lambda path: whole(b"{}", headers=b"Date: " + dates[int(path[2])] + b"\r\n"))
    assert [(each.clock_off_s, each.problem) for each in found] == [(0.0, "")] * len(dates)


def test_workers_are_asked_sixteen_at_a_time() -> None:
    together = threading.Barrier(AT_ONCE, timeout=15)
    lock, asking, most = threading.Lock(), 0, 0

    def worker(_: str) -> Iterable[bytes]:
        nonlocal asking, most
        with lock:
            asking += 1
            most = max(most, asking)
        together.wait()
        with lock:
            asking -= 1
        return whole(b"{}")

    found = states(2 * AT_ONCE, worker)
    assert [each.problem for each in found] == [""] * 2 * AT_ONCE
    assert most == AT_ONCE


def test_they_are_told_of_as_listed_whoever_answers_first() -> None:
    last_is_done = threading.Event()

    def worker(path: str) -> Iterable[bytes]:
        if path.startswith("/d4/"):
            last_is_done.set()
        assert last_is_done.wait(15)
        return whole(b"[]" if path.startswith("/d1/") else b"{}")

    found = states(5, worker)
    assert [each.worker for each in found] == ["d0", "d1", "d2", "d3", "d4"]
    assert [bool(each.problem) for each in found] == [False, True, False, False, False]


def test_all_of_them_together_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, now, questions = threading.Lock(), 100.0, 0

    def hangs(url: str, timeout_s: float, *_: object) -> HttpAnswer:
        nonlocal now, questions
        with lock:
            now += timeout_s
            questions += 1
        raise TimeoutError("timed out")

    monkeypatch.setattr(cluster_checks, "asked", hangs)
    monkeypatch.setattr(cluster_checks, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    found = tuple(workers([JudgedWorker(f"d{n}", "http://x") for n in range(500)], 5.0))
    assert len(found) == 500 and all(each.problem for each in found)
    assert ROUNDS <= questions <= ROUNDS + AT_ONCE
    assert "shorter --timeout-s" in found[-1].problem
