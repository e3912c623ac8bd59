"""Stop texts: an answer ends before the first of them, and what may be the beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Cuts one answer's text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.met = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be told now, and whether a stop text was met (then all that follows is to be dropped)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.met = min(found)
            self._held = ""
            return text[:at], True
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _open_end(self, text: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
