"""Device events are waited for in order, on a thread of their own, and their failures are told."""

from __future__ import annotations

import threading

from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.shell import DeviceEventWait


class Event:
    def __init__(self, error: Exception | None = None) -> None:
        self.done = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        self.done.wait(20)
        if self._error:
            raise self._error


def test_a_gate_waits_for_devices_in_order_and_reports_what_went_wrong() -> None:
    gate = DeviceEventWait("gate")
    said: list[tuple[int, str]] = []
    events = [Event(), Event(RuntimeError("device lost"))]
    for index, event in enumerate(events):
        gate.wait(event, lambda problem, index=index: said.append((index, problem)))  # type: ignore[misc]
    assert said == []
    for event in events:
        event.done.set()
    assert poll(lambda: len(said) == 2, 20)
    assert said[0] == (0, "") and "device lost" in said[1][1]
    gate.close(5)


def test_a_gate_that_waits_for_a_hanging_device_closes_all_the_same() -> None:
    gate = DeviceEventWait("gate")
    event = Event()
    gate.wait(event, lambda problem: None)
    gate.close(0.01)
    event.done.set()
