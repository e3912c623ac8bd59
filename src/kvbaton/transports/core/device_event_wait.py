"""Waits for the device to finish with the memory of a copy.

Law: only this thread ever waits for a device, neither a caller nor a thread that moves bytes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kvbaton.transports.core.transport import DeviceEvent


class DeviceEventWait:
    """Waits for device events on its own thread, started by the first, so that no mover ever waits for one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[DeviceEvent, Callable[[str], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, event: DeviceEvent, then: Callable[[str], None]) -> None:
        """Call `then` with "" once the device is done, or with the error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((event, then))

    def close(self, join_s: float) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(join_s)  # bounded: a device that hangs keeps a daemon thread, nothing else

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, then = item
            try:
                event.synchronize()
            except Exception as error:  # noqa: BLE001 - a device library's own errors; they fail one copy
                then(f"the device event failed: {error!r}")
            else:
                then("")
