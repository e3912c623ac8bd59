"""In which order a device does what it was given: a step's work, and the copies of another connector among the steps.

Laws: a copy begins when the steps that were issued before it have been run, as one on a CUDA stream of its own that
waits for the stream of the model. Whoever waits for a copy has the device catch up first, as a host that blocks does.
A device is known by the memory that it works on: vLLM gives nothing else to a connector's worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary


class DeviceOrder:
    """Of one rank's device: how many steps it was given, and how many it has run."""

    def __init__(self) -> None:
        self.issued = 0
        self.run = 0
        self.catch_up: Callable[[], None] = lambda: None

    def works_on(self, tensors: Any) -> None:
        for tensor in tensors:
            _BY_MEMORY[tensor.untyped_storage().data_ptr()] = self


_BY_MEMORY: WeakValueDictionary[int, DeviceOrder] = WeakValueDictionary()


def device_of(tensor: Any) -> DeviceOrder:
    return _BY_MEMORY[tensor.untyped_storage().data_ptr()]


class OrderedCopies:
    """Copies between and behind the steps of a device, one after the other; they end when somebody looks."""

    def __init__(self, device: DeviceOrder) -> None:
        self._device = device
        self._waiting: deque[tuple[int, int, Callable[[], None]]] = deque()  # job, steps before it, what it does

    def begin(self, job: int, copy: Callable[[], None]) -> None:
        self._waiting.append((job, self._device.issued, copy))

    def ended(self) -> list[int]:
        """Jobs that have come to their end since the last look."""
        found = []
        while self._waiting and self._waiting[0][1] <= self._device.run:
            job, _, copy = self._waiting.popleft()
            copy()
            found.append(job)
        return found

    def wait(self, jobs: set[int]) -> list[int]:
        """The same, after all of these."""
        if any(job in jobs for job, _, _ in self._waiting):
            self._device.catch_up()
        return self.ended()
