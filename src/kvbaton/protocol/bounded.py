"""Bounded memories: what happens at the bound is the caller's decision, based on the return value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """The last `limit` things put in; the oldest is forgotten first."""

    __slots__ = ("_items", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> tuple[K, V] | None:
        """Remember; returns what had to be forgotten for it."""
        self._items[key] = value
        self._items.move_to_end(key)
        return self._items.popitem(last=False) if len(self._items) > self.limit else None

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)
