"""A cluster that serves, and what can be read of it and done to it, whatever its engines are.

Laws: an engine is named by its name; what it is killed by, it is started again by. What cannot be known is None.
"""

from __future__ import annotations

import abc
import asyncio
import os
import signal

from kvbaton.processes.child_process import Say
from kvbaton_proof.bench.kit import cpu_meter
from kvbaton_proof.bench.kit.cpu_meter import Cpu
from kvbaton_proof.bench.serve.serve_parts import Used

REST_S = 30.0


class Site(abc.ABC):
    """One cluster. `engines`: their names, those of P's with p first."""

    def __init__(self, name: str, url: str, engines: tuple[str, ...]) -> None:
        self.name = name
        self.url = url
        self.engines = engines

    @property
    @abc.abstractmethod
    def hands_over(self) -> bool:
        """Whether there are P's."""

    @abc.abstractmethod
    def _pids(self) -> dict[str, list[int]]:
        """Processes of `engines` and `router`, now."""

    @abc.abstractmethod
    async def kill(self, name: str) -> None:
        """`kill -9` of an engine and of what it started; it is started again at once."""

    @abc.abstractmethod
    def signal(self, name: str, number: signal.Signals) -> None:
        """To an engine and all that it started."""

    @abc.abstractmethod
    async def reset(self, name: str) -> bool:
        """Have an engine forget its prefix cache; whether it did."""

    @abc.abstractmethod
    async def revive(self) -> list[str]:
        """Start again who ended by itself, and tell with its last words."""

    @abc.abstractmethod
    async def whole(self, within_s: float, say: Say, stop: asyncio.Event) -> None:
        """Wait until every engine serves."""

    @abc.abstractmethod
    def commands(self) -> dict[str, str]:
        """How each process was started."""

    @abc.abstractmethod
    def dead(self) -> list[str]:
        """Processes that ended and were not started again."""

    @abc.abstractmethod
    async def handed_over(self) -> int | None:
        """Handoffs delivered so far, as the engines count them."""

    @abc.abstractmethod
    async def come_to_rest(self, within_s: float = REST_S) -> tuple[str, ...]:
        """What engines still hold after this long; nothing if all is free."""

    def cpu(self) -> Cpu:
        return cpu_meter.read({**{name: tuple(pids) for name, pids in self._pids().items()}, "client": (os.getpid(),)})

    async def used(self, before: Cpu, handed_over: int | None, *, rest_s: float = REST_S) -> Used:
        """What was used since then. Waits for the engines to come to rest, which is not counted."""
        spent = before.until(self.cpu())
        held = await self.come_to_rest(rest_s)
        after = await self.handed_over()
        known = self.hands_over and after is not None and handed_over is not None
        return Used(
            handed_over=(after or 0) - (handed_over or 0) if known else None,
            engine_cpu_s=round(spent.used["engines"], 3), router_cpu_s=round(spent.used["router"], 3),
            others_cores=round(spent.others_cores, 3), held=held,
        )  # fmt: skip
