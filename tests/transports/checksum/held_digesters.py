"""Digesters that keep what they are given, until a test lets them go on."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.transports.checksum.checksum_memory import Digesters


class HeldDigesters(Digesters):
    """Keeps what it is given, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__("held", 1)
        self.held: list[Callable[[], None]] = []
        self.holds = True

    def add(self, task: Callable[[], None]) -> None:
        if self.holds:
            self.held.append(task)
        else:
            super().add(task)

    def go_on(self) -> None:
        self.holds = False
        for task in self.held:
            super().add(task)
