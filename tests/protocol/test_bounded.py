"""What is remembered is bounded, and what has to be forgotten is told (style 12)."""

from __future__ import annotations

from kvbaton.protocol.bounded import Remembered


def test_the_oldest_is_forgotten_and_returned() -> None:
    memory: Remembered[str, int] = Remembered(2)
    assert memory.put("a", 1) is None
    assert memory.put("b", 2) is None
    assert memory.put("c", 3) == ("a", 1)
    assert "a" not in memory and "b" in memory and len(memory) == 2
    assert (memory.get("a"), memory.get("b")) == (None, 2)


def test_putting_again_renews_and_replaces() -> None:
    memory: Remembered[str, int] = Remembered(2)
    memory.put("a", 1)
    memory.put("b", 2)
    assert memory.put("a", 3) is None
    assert memory.put("c", 4) == ("b", 2)
    assert memory.get("a") == 3
