"""How many tokens an answer has, and how they follow each other, as far as the router sees it without parsing bodies.

Law: a stream is counted as it passes, in a time that does not grow with it; nothing of it is kept.
"""

from __future__ import annotations

import re
import time

from kvbaton.api import sse
from kvbaton.observe.metrics.histogram import Histogram

_COUNT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*([0-9]{1,9})')


class StreamMeter:
    """One streamed answer. `tokens` are the events that bear one, mostly one each."""

    __slots__ = ("_at", "_between", "tokens")

    def __init__(self, between: Histogram) -> None:
        self._between = between
        self._at: float | None = None
        self.tokens = 0

    def came(self, data: bytes) -> int:
        """How many of these whole events bear a token."""
        chunks = sse.token_chunks(data)
        if chunks:
            now = time.monotonic()
            if self._at is not None:
                self._between.observe(now - self._at)
            self._at = now
            self.tokens += chunks
        return chunks


def answer_size(body: bytes) -> int:
    """Tokens of a whole answer, by the last usage in it; 0 where it has none."""
    found = _COUNT.findall(body, max(0, len(body) - 4096))
    return int(found[-1]) if found else 0
