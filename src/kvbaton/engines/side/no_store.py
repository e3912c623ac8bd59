"""What the scheduler side does about a shared store when it has none: nothing.

Law: `StoreSide` has the same methods, so no hook asks whether there is a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvbaton.engines.side.grouping import Tables
from kvbaton.engines.side.instructions import NOTHING, LoadVerdict


class NoStore:
    """An engine without a store."""

    __slots__ = ()

    def promised(self, request_id: str) -> None:
        """A request came whose KV somebody else has: the store is its second source."""

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        return NOTHING

    def offers(self, request_id: str) -> bool:
        return False

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        pass

    def reports(self, request_id: str) -> bool:
        return False

    def take(self) -> None:
        pass

    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        return ()

    def passed_over(self, request_id: str) -> None:
        pass

    def brought(self, request: Any) -> None:
        pass

    def preempted(self, request_id: str) -> None:
        pass

    def ends_prompts(self, step: int, chunks: Mapping[str, int], tables_of: Callable[[str], Tables]) -> bool:
        return False

    def computed(self, step: int) -> None:
        pass

    def finished(self, request: Any, tables: Tables, *, well: bool) -> None:
        pass

    def reset(self) -> bool:
        return True

    def let_go(self) -> None:
        pass

    def let_loads_go(self) -> None:
        pass

    @property
    def holders(self) -> Iterable[Sequence[int]]:
        """The blocks of each load."""
        return ()

    @property
    def held_blocks(self) -> int:
        return 0

    @property
    def busy(self) -> bool:
        return False

    def figures(self) -> dict[str, int]:
        """Counts for the metrics, by name."""
        return {}
