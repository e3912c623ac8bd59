"""Clients of the application: each asks one prompt after the other and keeps what came of it.

Law: every request has a deadline and leaves a record; an answer is right only if it is the plain engine's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.ray.ray_cluster import MODEL
from tests.ray.reference_answers import TOKENS

ASK_S = 120.0
MODES = ("pull", "stream", "push")


@dataclass(frozen=True)
class Asked:
    begun: float
    ended: float
    mode: str
    right: bool
    error: str = ""  # empty: answered


@dataclass
class Clients:
    """Of one application; `prompts` and what a plain engine answers them.

    The first `fresh` of them are asked once each, so that no D has their KV; load is made of the others, in circles.
    """

    url: str
    prompts: Sequence[list[int]]
    answers: Sequence[str]
    fresh: int
    records: list[Asked] = field(default_factory=list)
    _next: Iterator[int] = field(default_factory=itertools.count)
    _next_fresh: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, index: int, mode: str, *, stream: bool = False) -> Asked:
        body = {"model": MODEL, "prompt": self.prompts[index], "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-kvbaton-mode": mode},
        )
        begun, error, text = time.monotonic(), "", ""
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as answer:
                text = _streamed(answer) if stream else json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as refused:
            error = f"{refused.code}: {refused.read(300).decode(errors='replace')}"
        except (OSError, ValueError, KeyError) as broken:
            error = f"{type(broken).__name__}: {broken}"
        asked = Asked(begun, time.monotonic(), mode, not error and text == self.answers[index], error)
        with self._lock:
            self.records.append(asked)
        return asked

    def ask_all(self, count: int, mode: str, at_once: int = 4) -> list[Asked]:
        """So many fresh prompts, a few at a time; every fourth answer as a stream."""
        found: list[Asked] = []
        turns = iter(range(count))

        def run() -> None:
            while True:
                with self._lock:
                    turn = next(turns, None)
                    index = next(self._next_fresh) if turn is not None else 0
                if turn is None:
                    return
                assert index < self.fresh, "all fresh prompts were asked"
                found.append(self.ask(index, mode, stream=turn % 4 == 3))

        threads = [threading.Thread(target=run, daemon=True) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    @contextlib.contextmanager
    def under_load(self, at_once: int = 3) -> Iterator[None]:
        """Clients that ask in all modes, until the block ends."""
        over = threading.Event()

        def run(first: int) -> None:
            for turn in itertools.count(first):
                if over.is_set():
                    return
                with self._lock:
                    index = self.fresh + next(self._next) % (len(self.prompts) - self.fresh)
                self.ask(index, MODES[turn % 3], stream=turn % 4 == 3)

        threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(at_once)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(ASK_S + 10)


def _streamed(answer: Iterator[bytes]) -> str:
    text, ended = "", False
    for line in answer:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            ended = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"in the stream: {event['error']}")
            text += "".join(choice["text"] for choice in event["choices"])
    if not ended:
        raise ValueError("the stream ended early")
    return text
