"""The wires between the members of a cluster, and what can be done to them.

Law: a network belongs to the run that made it and is gone with it; nothing here touches another network of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Network(Protocol):
    """Each member is a host of its own with one address. Faults are between hosts; "client" is the conductor."""

    @property
    def kind(self) -> str:
        """namespaces or relay, as the report says it."""

    def address(self, name: str) -> str:
        """Where `name` binds and is dialled; the same in every life of it."""

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """`argv`, so that it runs as host `name`. The process that is started is the member itself: same pid."""

    def cut(self, source: str, target: str) -> None:
        """From now on nothing passes from `source` to `target`; the other way it does."""

    def slow(self, source: str, target: str, delay_s: float, loss: float) -> None:
        """From now on packets of this way are late by `delay_s`, and this share of them is lost."""

    def heal(self) -> None:
        """All wires are good again."""

    def close(self) -> None:
        """Everything that this network made is gone. Bounded; may be called twice."""
