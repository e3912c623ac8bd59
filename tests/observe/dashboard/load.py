"""Clients that go on asking, each with one request at a time, while a test looks on."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

REQUEST_S = 60.0
END_S = 70.0


@dataclass
class Load:
    """How it goes so far."""

    answered: int = 0
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@contextlib.contextmanager
def load(
    url: str, modes: Sequence[str], requests: int = sys.maxsize, words: int = 12, pause_s: float = 0.0
) -> Iterator[Load]:
    """One client for each mode named, until the context ends or each has asked so often; prompts have so many words.
    A client pauses so long before it asks again."""
    found = Load()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(url, mode, n, requests, words, pause_s, found, stop))
        for n, mode in enumerate(modes)
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join(END_S)
        assert not any(thread.is_alive() for thread in threads), "a client still waits for its answer"
    assert found.broken == []


def _ask(
    url: str, mode: str, client: int, requests: int, words: int, pause_s: float, found: Load, stop: threading.Event
) -> None:
    place = urlsplit(url)
    for number in range(requests):
        if stop.wait(pause_s if number else 0.0):
            return
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=REQUEST_S)
        body = {"prompt": f"{client} {number} of many " + "abcdefgh " * words, "max_tokens": 8, "stream": True}
        try:
            headers = {"Content-Type": "application/json", "x-kvbaton-mode": mode}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status == 200 and b"[DONE]" in said:
                found.answered += 1
            else:
                found.refused.append(f"{answer.status} {said[-200:]!r}")
        except OSError as error:
            found.broken.append(f"{mode}: {error!r}")
        finally:
            connection.close()
