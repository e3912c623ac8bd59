"""Work that is too long for a hook: no question waits, and every one has an answer in time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvbaton.engines.side import guard
from kvbaton.engines.vllm.content import request_content
from kvbaton.engines.vllm.content.request_content import WAIT_S, Looker
from tests.waiting import until


def test_the_question_begins_the_work_and_a_later_one_finds_it() -> None:
    looker: Looker[int] = Looker("test")
    go, times = threading.Event(), []

    def work() -> int:
        times.append(threading.current_thread())
        go.wait()
        return 7

    assert not looker.ask("r", work) and looker.found("r") is None
    assert not looker.ask("r", work)
    go.set()
    until(lambda: looker.ask("r", work))
    assert looker.found("r") == 7 and len(times) == 1 and times[0] is not threading.current_thread()
    looker.forget("r")
    assert looker.found("r") is None


def test_what_is_not_found_in_time_stays_unknown() -> None:
    now = [0.0]
    looker: Looker[int] = Looker("test", lambda: now[0])
    go, ended = threading.Event(), threading.Event()
    assert not looker.ask("r", lambda: go.wait() and 7)
    now[0] = WAIT_S
    assert looker.ask("r", lambda: 8) and looker.found("r") is None
    go.set()
    looker.ask("after", lambda: ended.set() or 9)
    ended.wait(60)
    assert looker.found("r") is None, "a request is of one content from beginning to end"


def test_so_many_wait_and_a_further_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_content, "WAITING_MAX", 2)
    looker: Looker[int] = Looker("test")
    go, begun = threading.Event(), threading.Event()
    assert not looker.ask("first", lambda: begun.set() or (go.wait() and 1))
    assert begun.wait(60)
    assert [looker.ask(name, lambda: 2) for name in "abc"] == [False, False, True] and looker.found("c") is None
    looker.forget("a")
    assert not looker.ask("d", lambda: 4), "one that is over makes room"
    go.set()
    until(lambda: looker.ask("d", lambda: 4))
    assert looker.found("d") == 4 and looker.found("c") is None


def test_work_that_raises_answers_nothing_and_stops_nobody() -> None:
    looker: Looker[int] = Looker("test")
    before = guard.faults["content"]
    until(lambda: looker.ask("r", lambda: 1 // 0))
    until(lambda: looker.ask("s", lambda: 5))
    assert looker.found("r") is None and looker.found("s") == 5 and guard.faults["content"] == before + 1


def test_no_hook_reads_an_adapter_s_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 4: 300 MB took 844 ms of the engine's thread. Until it is known the KV is nobody else's."""
    go, readers = threading.Event(), []

    def read(number: int, path: str) -> str:
        readers.append(threading.current_thread())
        go.wait()
        return "files"

    monkeypatch.setattr(request_content, "looker", Looker("test"))
    monkeypatch.setattr(request_content, "adapter_text", read)
    lora = SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path="/adapters/sql")
    asked = SimpleNamespace(request_id="r", prompt_token_ids=[1, 2], cache_salt=None, lora_request=lora)
    assert not request_content.is_known(asked)
    unknown = request_content.content_of(asked, 2)
    go.set()
    until(lambda: request_content.is_known(asked))
    assert request_content.content_of(asked, 2).lora == "sql:files" != unknown.lora
    assert threading.current_thread() not in readers and len(readers) == 1
    request_content.forget(asked)
    plain = SimpleNamespace(request_id="p", prompt_token_ids=[1, 2], cache_salt=None)
    assert request_content.is_known(plain) and request_content.content_of(plain, 2).lora == "", (
        "most requests wait for nothing"
    )
